"""Stands for Ray where it is not installed: actors are objects here, called at once.

It has what tools.on_ray uses and no more; tests/test_on_ray.py runs the same on a real cluster.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

STRATEGIES = "ray.util.scheduling_strategies"


class RayError(Exception):
    """Ray's base class."""


class RayTaskError(RayError):
    """A call raised `cause`."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"a traceback\n{cause}")
        self.cause = cause


@dataclass
class Ref:
    """What a call gave, or raised."""

    value: Any = None
    error: RayError | None = None


class Actor:
    """An object whose methods are called by `.remote`, until it is killed."""

    def __init__(self, made: Any) -> None:
        self.made = made
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        return Method(self, name)


@dataclass
class Method:
    """One method of an actor."""

    actor: Actor
    name: str

    def remote(self, *arguments: Any) -> Ref:
        if self.actor.dead:
            return Ref(error=RayError("The actor died unexpectedly.\nmore"))
        try:
            return Ref(getattr(self.actor.made, self.name)(*arguments))
        except OSError as error:
            return Ref(error=RayTaskError(error))


class Group:
    """A placement group; ready where the cluster has room."""

    def __init__(self, bundles: list[dict[str, float]], room: bool) -> None:
        self.bundle_specs = bundles
        self._room = room

    def wait(self, _timeout_s: float) -> bool:
        return self._room


@dataclass
class FakeRay:
    """A cluster. host: the node that Ray places the next actor on."""

    host: str = "127.0.0.1"
    cpus: float = 4.0
    gpus: float = 0.0
    groups: list[Group] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)

    def remote(self, kind: type) -> Any:
        outer = self

        class Options:
            def options(self, **options: Any) -> Options:
                outer.options.append(options)
                return self

            def remote(self) -> Actor:
                return Actor(kind())

        return Options()

    def placement_group(self, bundles: list[dict[str, float]], strategy: str) -> Group:
        assert strategy in ("SPREAD", "PACK")
        room = sum(bundle.get("CPU", 0) for bundle in bundles) <= self.cpus
        self.groups.append(Group(bundles, room))
        return self.groups[-1]

    def wait(self, refs: list[Ref], timeout: float) -> tuple[list[Ref], list[Ref]]:
        assert timeout > 0
        return refs, []

    def get(self, ref: Ref) -> Any:
        if ref.error is not None:
            raise ref.error
        return ref.value

    def kill(self, actor: Actor) -> None:
        actor.dead = True
        process = actor.made._process
        if process is not None:  # its standard input would end
            process.kill()
            process.wait()
        actor.made.clear()

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.cpus, "GPU": self.gpus}

    available_resources = cluster_resources

    def nodes(self) -> list[dict[str, bool]]:
        return [{"Alive": True}, {"Alive": True}, {"Alive": False}]


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    """`import ray` finds a fake, and so do modules of tools.on_ray."""
    fake = FakeRay()
    parts: dict[str, dict[str, Any]] = {
        "ray": {
            name: getattr(fake, name)
            for name in ("remote", "wait", "get", "kill", "nodes", "cluster_resources")
        }
        | {"available_resources": fake.available_resources},
        "ray.exceptions": {"RayError": RayError, "RayTaskError": RayTaskError},
        "ray.util": {"get_node_ip_address": lambda: fake.host},
        "ray.util.placement_group": {
            "placement_group": fake.placement_group,
            "remove_placement_group": fake.groups.remove,
        },
        STRATEGIES: {"PlacementGroupSchedulingStrategy": lambda group, index: (group, index)},
    }
    for name, members in parts.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("cluster", "seat"):
        monkeypatch.delitem(sys.modules, f"tools.on_ray.{name}", raising=False)
    yield fake
    for name in ("cluster", "seat"):
        sys.modules.pop(f"tools.on_ray.{name}", None)

"""Owns where a ring's stages are on a Ray cluster, its keys, and its addresses as they change.

`kvring up` runs the coordinator where it is started; this says where the stages are. Ray starts
processes and tells when one is gone. It carries no frame.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tools.errors import ToolError
from tools.on_ray.node import StageHost, Taken, address_of, hold_port, installed
from tools.on_ray.seat import POLL_S, Seat, port_of
from transport.config import Config, Ring, Stage, dumps
from transport.keys import write_key
from transport.link import make_keys

COORDINATOR = "coordinator"
END_S = 5.0  # for a seat's thread to see that its actor was killed


@dataclass(frozen=True, slots=True)
class Wish:
    """What the stages ask of the cluster. gpus None: one each where the cluster has so many."""

    spread: bool
    gpus: int | None
    cpus: float
    wait_s: float


class Cluster:
    """The stages of one ring.toml on the cluster that this process is connected to."""

    def __init__(self, wish: Wish) -> None:
        self._wish = wish
        self.wait_s = wish.wait_s
        self.asked = ""
        self._group: Any = None
        self._seats: dict[str, Seat] = {}
        self._secrets: dict[str, str] = {}
        self._holders: list[socket.socket] = []  # of the coordinator's ports
        self._lock = threading.Lock()  # one address changes at a time
        self._config: Config | None = None
        self._file = Path()
        self._extra: list[str] = []
        self._coordinator: subprocess.Popen[bytes] | None = None

    # ---- for `kvring up` ----

    def place(self, config: Config, folder: Path) -> Config:
        """The same ring with addresses on the cluster, and keys. Raises ToolError.

        folder: gets the coordinator's secret key.
        """
        stages = [stage for ring in config.rings for stage in ring.stages]
        bundle = self._bundle(len(stages))
        self._reserve([bundle] * len(stages))
        for stage in stages:
            self._seats[stage.name] = Seat(stage.name, self)
        self._config = config
        refs = {}
        for name, seat in self._seats.items():
            seat.actor = self.hire(seat)
            refs[name] = self.take(seat.actor, None)
        for name, ref in refs.items():
            taken = self._taken(name, ref)
            self._seats[name].taken = taken
            self._seats[name].port = port_of(taken.address)
        where = ", ".join(f"{name} on {self._host(name)}" for name in self._seats)
        print(f"placed by Ray: {where}", file=sys.stderr, flush=True)
        self._config = self._keyed(self._addressed(config, bundle), folder)
        return self._config

    def start(
        self, file: Path, extra: list[str], coordinator: subprocess.Popen[bytes]
    ) -> Mapping[str, Seat]:
        """Start the stages; file: the ring.toml that the coordinator reads."""
        self._file, self._extra, self._coordinator = file, extra, coordinator
        for seat in self._seats.values():
            seat.begin(file.parent / f"{seat.name}.log")
        return self._seats

    def close(self) -> None:
        """End every actor, and give the place back."""
        for seat in self._seats.values():
            seat.kill()
        for seat in self._seats.values():
            seat.wait(END_S)
        if self._group is not None:
            with suppress(RayError):
                remove_placement_group(self._group)
        for holder in self._holders:
            holder.close()

    # ---- for seats ----

    def hire(self, seat: Seat) -> Any:
        """A new actor in the seat's place; the one it had is ended."""
        if seat.actor is not None:
            ray.kill(seat.actor)
        index = list(self._seats).index(seat.name)
        bundle = self._group.bundle_specs[index]
        return (
            ray.remote(StageHost)
            .options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            )
            .remote()
        )

    def take(self, actor: Any, port: int | None) -> Any:
        """A reference to the actor's Taken."""
        assert self._config is not None
        return actor.take.remote(port, self._config.model.path, installed())

    def settle(self, seat: Seat, taken: Taken) -> Any:
        """Everybody hears where the stage is now, then it starts there; a reference to that."""
        with self._lock:
            assert self._config is not None
            before = dumps(self._config)
            self._config = _at(self._config, seat.name, taken.address)
            text = dumps(self._config)
            if text != before:
                self._tell(seat, text)
            secret = self._secrets[seat.name]
            return seat.actor.start.remote(seat.name, text, secret, self._extra)

    def _tell(self, moved: Seat, text: str) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(text)
        new.replace(self._file)
        if self._coordinator is not None and self._coordinator.poll() is None:
            self._coordinator.send_signal(signal.SIGUSR1)
        for seat in self._seats.values():
            if seat is not moved and seat.actor is not None:
                seat.actor.moved.remote(text)

    # ---- placing ----

    def _bundle(self, count: int) -> dict[str, float]:
        """What one of `count` stages asks for."""
        gpus = self._wish.gpus
        if gpus is None:
            gpus = 1 if ray.cluster_resources().get("GPU", 0) >= count else 0
        bundle = {"CPU": self._wish.cpus, "GPU": float(gpus)}
        bundle = {kind: amount for kind, amount in bundle.items() if amount}
        self.asked = f"asked for {_words(bundle)} on one node; {_has()}"
        return bundle

    def _reserve(self, bundles: list[dict[str, float]]) -> None:
        strategy = "SPREAD" if self._wish.spread else "PACK"
        self._group = placement_group(bundles, strategy=strategy)
        deadline = time.monotonic() + self.wait_s
        while not self._group.wait(POLL_S):
            if time.monotonic() > deadline:
                raise ToolError(
                    f"Ray had no room for {len(bundles)} stages within {self.wait_s:g} s: asked "
                    f"for {len(bundles)} x {_words(bundles[0])}, each on one node; {_has()}"
                )

    def _taken(self, name: str, ref: Any) -> Taken:
        deadline = time.monotonic() + self.wait_s
        while not ray.wait([ref], timeout=POLL_S)[0]:
            if time.monotonic() > deadline:
                raise ToolError(f"stage {name}: its actor did not start within {self.wait_s:g} s")
        try:
            taken: Taken = ray.get(ref)
        except RayError as error:
            why = str(error).strip()
            if "No module named" in why:
                why = "kvring is not installed where Ray placed it: every node's Python needs it"
            raise ToolError(f"stage {name}: {why}") from None
        if taken.flaw:
            raise ToolError(f"stage {name} on node {taken.host}: {taken.flaw}")
        return taken

    def _host(self, name: str) -> str:
        taken = self._seats[name].taken
        assert taken is not None
        return taken.host

    def _addressed(self, config: Config, bundle: dict[str, float]) -> Config:
        here = get_node_ip_address()
        device = "cuda:0" if bundle.get("GPU") else "cpu"  # Ray shows a stage its own GPU alone
        threads = max(1, int(self._wish.cpus))

        def stage(before: Stage) -> Stage:
            taken = self._seats[before.name].taken
            assert taken is not None
            return replace(before, address=taken.address, device=device, threads=threads)

        rings = []
        for ring in config.rings:
            self._holders.append(hold_port(here, None))
            verdicts = address_of(self._holders[-1])
            rings.append(replace(ring, verdicts=verdicts, stages=tuple(map(stage, ring.stages))))
        return replace(config, rings=tuple(rings))

    def _keyed(self, config: Config, folder: Path) -> Config:
        """With keys of this run; a secret leaves this process for its own stage alone."""
        public = {}
        for name in (COORDINATOR, *self._seats):
            public[name], self._secrets[name] = make_keys()
        write_key(_secret_of(folder, COORDINATOR), self._secrets[COORDINATOR], 0o600, force=True)

        def keyed(ring: Ring) -> Ring:
            stages = (
                replace(s, public_key=public[s.name], secret_key_file=f"{s.name}.secret")
                for s in ring.stages
            )
            return replace(ring, stages=tuple(stages))

        coordinator = replace(
            config.coordinator,
            public_key=public[COORDINATOR],
            secret_key_file=_secret_of(Path(), COORDINATOR).name,
        )
        rings = tuple(keyed(ring) for ring in config.rings)
        return replace(config, rings=rings, coordinator=coordinator)


def _secret_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.secret"


def _at(config: Config, name: str, address: str) -> Config:
    """The same with a stage at that address."""
    rings = tuple(
        replace(
            ring,
            stages=tuple(
                replace(stage, address=address) if stage.name == name else stage
                for stage in ring.stages
            ),
        )
        for ring in config.rings
    )
    return replace(config, rings=rings)


def _words(resources: dict[str, float]) -> str:
    return " + ".join(f"{amount:g} {kind}" for kind, amount in resources.items()) or "nothing"


def _has() -> str:
    """What the cluster has and has free."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    has, free = ray.cluster_resources(), ray.available_resources()
    parts = [f"{has.get(kind, 0):g} {kind} ({free.get(kind, 0):g} free)" for kind in ("CPU", "GPU")]
    return f"the cluster has {', '.join(parts)} on {len(alive)} node{'s' * (len(alive) != 1)}"

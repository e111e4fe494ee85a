"""Stages on a cluster that stands for Ray's: keys, addresses, losses, what ends a run.

Coordinator and stages are real processes. Truth is plain serial decoding.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import fakeray, processes
from tests.fakeray import FakeRay
from tests.processes import Fleet, RingFile, get, until, write_ring
from tests.test_processes import LONG, prompt_of
from tests.toyclient import streaming, truth
from tools.errors import ToolError
from transport.config import Config, Model, dumps


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with processes.fleet(tmp_path / "processes") as made:
        yield made


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as `kvring up --on ray` does
    with fakeray.installed(monkeypatch) as made:
        yield made
    signal.signal(signal.SIGUSR1, before)


@contextmanager
def placed(config: Config, folder: Path, **wish: Any) -> Iterator[tuple[Any, RingFile]]:
    from tools.on_ray.cluster import Cluster, Wish

    cluster = Cluster(Wish(**{"spread": True, "gpus": None, "cpus": 1.0, "wait_s": 0.5, **wish}))
    try:
        ring = RingFile(folder / "ring.toml", cluster.place(config, folder))
        ring.path.write_text(dumps(ring.config))
        yield cluster, ring
    finally:
        cluster.close()


def test_a_stage_that_is_lost_comes_back_on_another_node(
    ray: FakeRay, fleet: Fleet, tmp_path: Path
) -> None:
    """The head's actor is killed, and its next one is elsewhere; then the tail's process dies."""
    config = write_ring(tmp_path / "ring.toml").config
    with placed(config, tmp_path) as (cluster, ring):
        keys = {stage.public_key for stage in ring.config.rings[0].stages}
        assert len(keys) == 3, "of its own each"
        coord = fleet.coord(ring)
        seats = cluster.start(ring.path, [], coord.popen)
        fleet.ready(ring.url)
        folders = [seat.actor.made._folder for seat in seats.values()]
        assert not [file for each in folders for file in each.glob("*.secret")], "it was read"
        prompt = prompt_of(99, 60)
        with streaming(ring.url, prompt, LONG) as reading:
            reading.read(10)
            ray.host = "127.0.0.2"
            ray_kill(seats["s0"])
            until("the head is elsewhere", lambda: "127.0.0.2" in get(f"{ring.url}/ring").text)
            fleet.ready(ring.url)
            seats["s2"].actor.made._process.kill()
            assert len(reading.tokens) < LONG
            assert reading.rest().tokens == truth(prompt, LONG)
        stages = get(f"{ring.url}/ring").json()["rings"][0]["stages"]
        hosts = [stage["address"].split(":")[1].strip("/") for stage in stages]
        assert hosts == ["127.0.0.2", "127.0.0.1", "127.0.0.1"], "the tail: where it was"
        for seat in seats.values():
            seat.terminate()
        until("they end", lambda: all(seat.poll() is not None for seat in seats.values()))
        assert [seat.wait() for seat in seats.values()] == [0, 0, 0]
        assert not any(folder.exists() for folder in folders[1:])
        logs = [path.read_text() for path in tmp_path.glob("*.log")]
        assert all('"event": "loaded"' in log for log in logs)
        said = "".join([*logs, ring.path.read_text(), coord.errors, coord.output])
        secrets = cluster._secrets.values()
        assert len(secrets) == 4
        assert not [secret for secret in secrets if secret in said]
    assert ray.groups == []


def ray_kill(seat: Any) -> None:
    import ray

    ray.kill(seat.actor)


def test_a_stage_that_cannot_start_ends_the_run_with_its_words(
    ray: FakeRay, fleet: Fleet, tmp_path: Path
) -> None:
    config = write_ring(tmp_path / "ring.toml", stages=1).config
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no model")
    config = replace(config, model=Model(str(broken), "m"))
    with placed(config, tmp_path) as (cluster, ring):
        coord = fleet.coord(ring)
        coord.expected.append(1)  # no tokenizer there either
        seats = cluster.start(ring.path, [], coord.popen)
        until("one has ended", seats["s0"].poll)
        assert seats["s0"].poll() == 1
    assert "kvring: stage s0: " in (tmp_path / "s0.log").read_text()


def test_no_room_and_no_model_are_said(ray: FakeRay, tmp_path: Path) -> None:
    config = write_ring(tmp_path / "ring.toml").config
    began = time.monotonic()
    with pytest.raises(ToolError) as caught, placed(config, tmp_path, cpus=2.0, gpus=1):
        pass
    assert time.monotonic() > began + 0.5
    assert caught.value.message == (
        "Ray had no room for 3 stages within 0.5 s: asked for 3 x 2 CPU + 1 GPU, each on one node; "
        "the cluster has 4 CPU (4 free), 0 GPU (0 free) on 2 nodes"
    )
    gone = replace(config, model=Model(str(tmp_path / "gone.gguf"), "m"))
    with pytest.raises(ToolError) as caught, placed(gone, tmp_path):
        pass
    assert caught.value.message.startswith(
        f"stage s0 on node 127.0.0.1: no model at {tmp_path}/gone.gguf: every node needs it"
    )
    assert ray.groups == []


def test_each_stage_has_a_gpu_where_the_cluster_has_enough(ray: FakeRay, tmp_path: Path) -> None:
    config = write_ring(tmp_path / "ring.toml").config
    ray.gpus = 3
    with placed(config, tmp_path) as (_, ring):
        assert {stage.device for stage in ring.config.rings[0].stages} == {"cuda:0"}
        assert [options["num_gpus"] for options in ray.options] == [1, 1, 1]
    with placed(config, tmp_path, gpus=0) as (_, ring):
        assert {stage.device for stage in ring.config.rings[0].stages} == {"cpu"}
    ray.gpus = 2
    with placed(config, tmp_path) as (_, ring):
        assert {stage.device for stage in ring.config.rings[0].stages} == {"cpu"}

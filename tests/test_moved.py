"""SIGUSR1: a stage that comes back at another address is taken in while everybody else runs on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests import processes
from tests.processes import Fleet, RingFile, free_ports, get, until, with_keys, write_ring
from tests.test_processes import LONG, prompt_of
from tests.toyclient import streaming, truth
from transport.config import dumps


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with processes.fleet(tmp_path / "processes") as made:
        yield made


def moved(ring: RingFile, name: str) -> RingFile:
    """The same ring, its file rewritten: the stage is at a new port."""
    (one,) = ring.config.rings
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    stages = tuple(replace(s, address=address) if s.name == name else s for s in one.stages)
    config = replace(ring.config, rings=(replace(one, stages=stages),))
    ring.path.write_text(dumps(config))
    return RingFile(ring.path, config)


def test_a_stream_goes_on_when_head_and_tail_come_back_elsewhere(
    fleet: Fleet, tmp_path: Path
) -> None:
    ring = with_keys(write_ring(tmp_path / "ring.toml"))
    running = fleet.whole(ring)
    prompt = prompt_of(95, 60)
    with streaming(ring.url, prompt, LONG) as reading:
        reading.read(10)
        for name, before in (("s0", "coord"), ("s2", "s1")):
            running[name].kill()
            fleet.not_ready(ring.url, name)
            ring = moved(ring, name)
            running[name] = fleet.stage(ring, name)
            running[before].send(signal.SIGUSR1)
            fleet.ready(ring.url)
            assert len(reading.tokens) < LONG
            reading.read(len(reading.tokens) + 10)
        answer = reading.rest()
    assert answer.tokens == truth(prompt, LONG)
    addresses = [stage["address"] for stage in get(f"{ring.url}/ring").json()["rings"][0]["stages"]]
    wanted = [stage.address for stage in ring.config.rings[0].stages]
    assert addresses[0] == wanted[0], "the coordinator has read where its head is"
    running["coord"].send(signal.SIGUSR1)
    until("it has read the rest", lambda: wanted[2] in get(f"{ring.url}/ring").text)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("[0, 2]", "[0, 3]", "are held twice"),
        ('name = "s0"', 'name = "s9"', "that needs a restart"),
    ],
)
def test_another_ring_is_not_taken(
    old: str, new: str, why: str, fleet: Fleet, tmp_path: Path
) -> None:
    ring = write_ring(tmp_path / "ring.toml")
    coord = fleet.coord(ring)
    until("it runs", lambda: '"event": "listening"' in coord.errors)
    text = ring.path.read_text()
    assert old in text
    ring.path.write_text(text.replace(old, new))
    coord.send(signal.SIGUSR1)
    until("it says why", lambda: '"event": "ring_not_read"' in coord.errors)
    assert coord.popen.poll() is None
    assert why in coord.errors

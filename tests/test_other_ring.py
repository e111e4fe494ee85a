"""Turns whose ring is lost go on at another one; a spare ring serves only then.

CASES 22, 28, 29, 32: no token lost or repeated, the same total, no hit for a turn's own work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from coord.ring import Phase
from tests import processes
from tests.memoryring import VOCABULARY, MemoryRing, limits
from tests.memoryworld import MemoryWorld
from tests.processes import TOY_LAYERS, Fleet, RingFile, free_ports, get
from tests.test_processes import LONG, prompt_of
from tests.toyclient import complete, streaming, truth
from tools.sim.oracle import Oracle
from transport.config import TOY, Config, Coordinator, Model, Ring, Stage, dumps
from transport.frame import Heartbeat, StageState

ORACLE = Oracle(2, VOCABULARY)
PROMPT = list(range(1, 41))


def world(spares: Sequence[int] = (), slots: int = 2) -> MemoryWorld:
    bounds = limits(slots=slots, lost_after_s=1e5, frame_timeout_s=1e5, resume_s=30.0)
    made = MemoryWorld(ORACLE, bounds, stages=[2, 2], slots=slots, spares=spares, codec=True)
    return made.form()


def beat(made: MemoryWorld, ring: MemoryRing, state: StageState) -> None:
    name, incarnation = ring.names[0], ring.incarnations[0]
    made.tell(Heartbeat(ring.name, name, incarnation, state, 0.0, "gone", 1, 1))


def lose(made: MemoryWorld, name: str) -> None:
    """A stage is loading again, and stays so; what was under way on the ring reaches nobody."""
    ring = made.by_name[name]
    for link in ring.links:
        link.clear()
    ring.forwards = [None] * len(ring.forwards)
    beat(made, ring, StageState.LOADING)
    assert made.scheduler.rings[name].phase is Phase.WAITING


def under_way(made: MemoryWorld, tokens: int) -> int:
    """A turn of which so many tokens have come."""
    turn = made.submit(PROMPT, 12)
    while len(made.replies[turn].tokens) < tokens:
        made.happen(*made.choices()[0])
    return turn


@pytest.mark.parametrize("tokens", [0, 1, 5], ids=["prefill", "first", "decode"])
def test_a_turn_goes_on_at_the_other_ring(tokens: int) -> None:
    made = world()
    turn = under_way(made, tokens)
    reply = made.replies[turn]
    home = reply.admitted[0].ring
    lose(made, home)
    made.pump()
    assert reply.tokens == made.truth[turn]
    assert reply.finished == "length"
    assert len(reply.admitted) == 2
    again = reply.admitted[1]
    assert (again.ring == home, again.matched) == (False, 0)
    assert made.scheduler.totals.prefix_cache_hits == 0


def test_a_turn_that_waited_for_the_lost_ring_goes_to_the_other_one() -> None:
    made = world(slots=1)
    turns = [made.submit([number, *PROMPT], 4) for number in range(4)]
    lose(made, "r0")
    made.pump()
    assert all(made.replies[turn].tokens == made.truth[turn] for turn in turns)


def test_a_spare_serves_only_while_another_ring_is_lost() -> None:
    made = world(spares=[1], slots=1)
    turns = [made.submit([number, *PROMPT], 3) for number in range(3)]
    made.pump()
    assert [made.replies[turn].admitted[0].ring for turn in turns] == ["r0"] * 3, "it waits rather"
    turn = under_way(made, 2)
    lose(made, "r0")
    made.pump()
    reply = made.replies[turn]
    assert [each.ring for each in reply.admitted] == ["r0", "r1"]
    assert reply.tokens == made.truth[turn]
    assert made.ask([9, *PROMPT], 3).admitted[0].ring == "r1"
    beat(made, made.by_name["r0"], StageState.READY)
    made.wait(1.1)
    made.pump()
    assert made.ask([9, *PROMPT], 3).admitted[0].ring == "r0"


# ---- real processes ------------------------------------------------------------------------------


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with processes.fleet(tmp_path / "processes") as made:
        yield made


def two_rings(path: Path) -> RingFile:
    """One of two stages, and a spare of one."""
    http, *ports = free_ports(6)
    at = [f"tcp://127.0.0.1:{port}" for port in ports]
    half = TOY_LAYERS // 2
    stages = Stage("s0", at[1], (0, half)), Stage("s1", at[2], (half, TOY_LAYERS))
    whole = (Stage("t0", at[4], (0, TOY_LAYERS)),)
    rings = Ring("main", at[0], stages), Ring("other", at[3], whole, spare=True)
    coordinator = Coordinator(f"127.0.0.1:{http}")
    config = Config(Model(TOY, "m", "float32"), rings, coordinator, processes.QUICK)
    path.write_text(dumps(config))
    return RingFile(path, config)


def test_a_killed_ring_s_stream_goes_on_at_the_spare(fleet: Fleet, tmp_path: Path) -> None:
    ring = two_rings(tmp_path / "ring.toml")
    fleet.coord(ring)
    running = {name: fleet.stage(ring, name) for name in ("s0", "s1", "t0")}
    fleet.ready(ring.url)

    def phases() -> list[str]:
        return [each["state"] for each in get(f"{ring.url}/ring").json()["rings"]]

    processes.until("both are ready", lambda: phases() == ["ready", "ready"])
    prompt = prompt_of(20, 80)
    with streaming(ring.url, prompt, LONG) as reading:
        reading.read(10)
        running["s1"].kill()
        answer = reading.rest()
    assert answer.tokens == truth(prompt, LONG)
    assert (answer.kvring["ring"], answer.cached) == ("other", 0)
    after = prompt_of(21, 30)
    served = complete(ring.url, after, 20)
    assert (served.tokens, served.kvring["ring"]) == (truth(after, 20), "other")
    fleet.stage(ring, "s1")
    processes.until("the ring is back", lambda: phases() == ["ready", "ready"])
    assert complete(ring.url, prompt_of(22, 30), 5).kvring["ring"] == "main"

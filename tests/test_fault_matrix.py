"""Every stage lost in every phase: equal streams or one error event, and the next request works.

A selection of the matrix; all of it: `python -m tests.faults` (docs/reliability.md). CASES 22, 28
to 32, 41.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests import processes
from tests.faultcases import COORDINATOR, PHASES, RETURNS, STAGES, STAYS, Case, selection
from tests.faults import REPLY, Stand, Stands
from tests.processes import until
from tests.toyclient import complete, streaming, truth


@pytest.fixture(scope="module")
def stands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stands]:
    folder = tmp_path_factory.mktemp("faults")
    with processes.fleet(folder / "processes") as fleet:
        yield Stands(fleet, folder)


def test_the_selection_meets_every_stage_phase_and_fault() -> None:
    chosen = selection()
    stages = [case for case in chosen if case.victim in STAGES]
    assert {(case.victim, case.phase) for case in stages} == {
        (victim, phase) for victim in STAGES for phase in PHASES
    }
    assert {(case.victim, case.fault) for case in stages} == {
        (victim, fault) for victim in STAGES for fault in (*RETURNS, *STAYS)
    }
    assert [case.phase for case in chosen if case.victim == COORDINATOR] == list(PHASES)


@pytest.mark.parametrize("case", selection(), ids=str)
def test_a_fault(case: Case, stands: Stands) -> None:
    stands.play(case)


# ---- several at once -----------------------------------------------------------------------------

DECODE = Case("s1", "decode", "restart")


@pytest.fixture
def stand(stands: Stands) -> Iterator[Stand]:
    """A whole ring; the test leaves it whole."""
    found = stands.stand(returns=True)
    found.broken = True
    yield found
    found.fleet.ready(found.ring.url)
    prompt = found.prompt()
    assert complete(found.ring.url, prompt, REPLY).tokens == truth(prompt, REPLY)
    found.broken = False


@pytest.mark.parametrize("pair", [("s0", "s1"), ("s1", "s2"), ("s0", "s2")], ids="-".join)
def test_two_stages_are_lost_at_once(pair: tuple[str, str], stand: Stand) -> None:
    scene = stand.scene(DECODE)
    for name in pair:
        stand.running[name].kill()
    stand.release()
    for name in pair:
        stand.running[name] = stand.start(name)
    assert [each.verdict() for each in scene.streams] == ["equal", "equal"]


def test_a_stage_is_lost_while_the_server_drains(stand: Stand) -> None:
    """Turns that run may end first, and do."""
    scene = stand.scene(DECODE)
    coordinator = stand.running[COORDINATOR]
    coordinator.expected.append(0)
    coordinator.send(signal.SIGTERM)
    until("it drains", lambda: '"event": "draining"' in coordinator.errors)
    stand.running["s1"].kill()
    stand.release()
    stand.running["s1"] = stand.start("s1")
    assert [each.verdict() for each in scene.streams] == ["equal", "equal"]
    assert coordinator.wait() == 0
    stand.running[COORDINATOR] = stand.start(COORDINATOR)


def test_a_client_goes_while_its_turn_waits_for_the_ring(stand: Stand) -> None:
    stand.clear()
    with streaming(stand.ring.url, stand.prompt(), 400) as reading:
        reading.read(3)
        struck = time.time()
        stand.running["s1"].kill()
        stand.lost(struck)
        assert stand.turns() == 1
    until("nobody waits", lambda: stand.turns() == 0)
    stand.running["s1"] = stand.start("s1")


@pytest.mark.parametrize("victim", STAGES)
def test_a_stage_is_lost_while_a_new_coordinator_proves_what_it_remembers(
    victim: str, stand: Stand
) -> None:
    scene = stand.scene(replace(DECODE, victim=COORDINATOR, phase="idle"))
    stand.running[COORDINATOR].kill()
    stand.running[COORDINATOR] = stand.start(COORDINATOR)
    until("it listens", lambda: '"listening"' in stand.running[COORDINATOR].errors)
    stand.running[victim].kill()
    stand.running[victim] = stand.start(victim)
    since = time.time()
    stand.loaded(victim, since - 1.0)
    stand.ready(since)
    again = [*scene.warm, 7]
    answer = complete(stand.ring.url, again, REPLY)
    assert (answer.tokens, answer.cached) == (truth(again, REPLY), 0)


@pytest.mark.parametrize("victim", STAGES)
def test_a_stage_is_lost_while_the_ring_checks_itself(victim: str, stand: Stand) -> None:
    """The self-check stands in the middle; what it is lost with is noticed as ever."""
    stand.clear()
    held = stand.hold / "s1.held"
    held.unlink(missing_ok=True)
    (stand.hold / "s1").write_text("probe 0")
    stand.running["s2"].kill()
    stand.running["s2"] = stand.start("s2")
    until("the self-check is held", held.exists)
    struck = time.time()
    stand.running[victim].kill()
    stand.release()
    stand.running[victim] = stand.start(victim)
    assert stand.ready(struck) > stand.loaded(victim, struck), "not by the check that was lost"

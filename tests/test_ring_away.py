"""A ring that is away: its turns and new ones wait for it, within resume_s of its loss."""

from __future__ import annotations

from coord.actions import Failed, Finished, Tokens
from coord.ring import RETRY_S, Phase
from tests.desk import LIMITS, Desk, runs
from transport.frame import StageLost


def test_a_ring_that_stays_away_fails_its_turns() -> None:
    """CASES 28: within resume_s, those that never ran as well."""
    desk = Desk().form()
    for turn in (1, 2, 3):
        desk.submit(turn, (turn,))
    desk.tick(RETRY_S)
    desk.tell(StageLost("r", "s1", "killed"))
    desk.now += LIMITS.resume_s - RETRY_S
    assert [a for a in desk.tick() if isinstance(a, Failed)] == []
    assert desk.ring.phase is Phase.WAITING
    due = desk.core.deadline()
    assert due is not None
    assert due <= desk.now + RETRY_S
    assert desk.tick(RETRY_S) == [
        Failed(turn, 503, "ring_lost", "no ring was ready for 60 s") for turn in (1, 2, 3)
    ]
    assert desk.core.turns == {}


def test_a_ring_that_never_gets_ready_again_fails_its_turns_too() -> None:
    """CASES 28: it forms and breaks in its self-check, again and again; the bound still holds."""
    desk = Desk().form()
    desk.submit(1, (1, 2))
    desk.tick(RETRY_S)
    desk.tell(StageLost("r", "s1", "killed"))
    lost_at, failed = desk.now, list[Failed]()
    while not failed and desk.now < lost_at + 3 * LIMITS.resume_s:
        actions = desk.wait(2.0)
        if desk.ring.phase is Phase.FORMING:
            actions += desk.answer()
            actions += desk.tell(StageLost("r", "s1", "again"))
        failed = [a for a in actions if isinstance(a, Failed)]
    assert failed == [Failed(1, 503, "ring_lost", "no ring was ready for 60 s")]
    assert desk.now <= lost_at + LIMITS.resume_s + 2.0


def test_a_ring_in_time_takes_the_turns_back() -> None:
    desk = Desk().form()
    desk.submit(1, (1, 2), budget=1)
    desk.tick(RETRY_S)
    desk.tell(StageLost("r", "s1", "killed"))
    desk.wait(LIMITS.resume_s / 2)
    (run,) = runs(desk.reform())
    assert desk.verdict(run, 21) == [Tokens(1, (21,)), Finished(1, "length")]


def test_a_new_turn_waits_for_the_ring_behind_those_that_resume() -> None:
    """CASES 28: a loss that is over within resume_s costs nobody a refusal."""
    desk = Desk().form()
    desk.submit(1, (1, 2), budget=1)
    desk.tick(RETRY_S)
    desk.tell(StageLost("r", "s1", "killed"))
    assert desk.submit(2, (3, 4), budget=1) == []
    desk.wait(LIMITS.resume_s / 2)
    assert desk.core.waiting() == 2
    (run,) = runs(desk.reform())
    assert [segment.turn for segment in run.segments] == [1, 2]
    assert desk.verdict(run, 21, 22) == [
        Tokens(1, (21,)),
        Finished(1, "length"),
        Tokens(2, (22,)),
        Finished(2, "length"),
    ]


def test_a_new_turn_waits_no_longer_than_those_that_ran() -> None:
    """The time counts from the loss; behind it a turn is refused at once, with what is missing."""
    desk = Desk().form()
    desk.submit(1, (1, 2))
    desk.tick(RETRY_S)
    desk.tell(StageLost("r", "s1", "killed"))
    desk.now += LIMITS.resume_s - RETRY_S
    assert [a for a in desk.submit(2, (3, 4)) if isinstance(a, Failed)] == []
    due = desk.core.deadline()
    assert due is not None
    assert due <= desk.now + RETRY_S
    assert desk.tick(RETRY_S) == [
        Failed(turn, 503, "ring_lost", "no ring was ready for 60 s") for turn in (1, 2)
    ]
    (failed,) = desk.submit(3, (5, 6))
    assert isinstance(failed, Failed)
    assert (failed.status, failed.code) == (503, "not_ready")
    assert "stage s0 was last heard of over 5 s ago" in failed.message
    assert desk.core.turns == {}


def test_a_ring_that_forms_in_vain_keeps_no_new_turn_longer() -> None:
    desk = Desk().form()
    desk.tell(StageLost("r", "s1", "killed"))
    lost_at = desk.now
    while desk.now < lost_at + LIMITS.resume_s + 2.0:
        desk.wait(1.0)
        if desk.ring.phase is Phase.FORMING:
            desk.answer()
            desk.tell(StageLost("r", "s1", "again"))
    (failed,) = [a for a in desk.submit(1, (1, 2)) if isinstance(a, Failed)]
    assert (failed.status, failed.code) == (503, "not_ready")


def test_the_queue_has_its_limit_while_a_ring_is_away() -> None:
    """And a turn whose client goes makes room."""
    desk = Desk().form()
    desk.tell(StageLost("r", "s1", "killed"))
    assert desk.submit(1, (1,), budget=1) == desk.submit(2, (2,)) == []
    (failed,) = desk.submit(3, (3,))
    assert isinstance(failed, Failed)
    assert (failed.status, failed.code) == (429, "queue_full")
    assert desk.cancel(2) == [Finished(2, "cancelled")]
    assert desk.submit(4, (4,), budget=1) == []
    (run,) = runs(desk.reform())
    assert [segment.turn for segment in run.segments] == [1, 4]


def test_a_coordinator_that_never_had_a_ring_keeps_nobody_waiting() -> None:
    """Loading takes minutes, and what is missing is worth more than a wait."""
    desk = Desk()
    desk.beats()
    desk.tell(StageLost("r", "s1", "killed"))
    (failed,) = [a for a in desk.submit(1, (1, 2)) if isinstance(a, Failed)]
    assert (failed.status, failed.code) == (503, "not_ready")

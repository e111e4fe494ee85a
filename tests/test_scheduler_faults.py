"""Scheduler.handle when stages refuse, rings are lost, and answers make no sense; exact actions.

CASES 8, 22, 25, 28 to 32: a turn goes on where it was, or fails within a stated bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from coord.actions import Action, Admitted, Failed, Finished, Send, Tokens
from coord.ring import RETRY_S
from coord.scheduler import MAX_REFUSALS
from tests.desk import LIMITS, PRINT, Desk, entry, prefill, runs, slot_of, verify
from transport.chain import Chain, root_hash
from transport.frame import (
    Claim,
    Copy,
    Frame,
    Free,
    LinkGap,
    Ping,
    Refusal,
    Reject,
    Result,
    RollCall,
    Run,
    StageLost,
    Verdict,
)

PROMPT = tuple(range(1, 11))  # three chunks: 4, 4 and 2 tokens


def claim(number: int, tokens: Sequence[int]) -> Claim:
    chain = Chain(root_hash(PRINT, b""), tokens)
    return Claim(number, len(chain), chain.hash_before(len(chain)))


def refusal(run: Run, turn: int, code: Refusal = Refusal.CONTENT) -> Reject:
    slot = next(s.slot for s in run.segments if s.turn == turn)
    return Reject("r", run.epoch, run.seq, "s1", code, "why", turn, slot)


def refuse(desk: Desk, run: Run, turn: int = 1) -> list[Action]:
    """Stage s1 refuses the turn's segment; the frame's verdict comes without it."""
    assert desk.tell(refusal(run, turn)) == [], "the verdict is what settles a frame"
    return desk.verdict(run, refused=[turn])


# ---- refused rows -------------------------------------------------------------------------------


def test_refused_rows_are_prefilled_from_0_when_the_last_frame_is_back() -> None:
    """CASES 8, 32: same turn, same slot, same budget; nothing is taken from a stale verdict."""
    desk = Desk().form()
    first = desk.submit(1, PROMPT)
    slot, sent = slot_of(first), runs(first)
    assert refuse(desk, sent[0]) == []
    assert refuse(desk, sent[1]) == []
    assert desk.resident(slot) == ()
    assert refuse(desk, sent[2]) == [
        Admitted(1, "r", slot, prompt=10, matched=0),
        desk.run(6, prefill(1, slot, (), PROMPT[:4])),
        desk.run(7, prefill(1, slot, PROMPT[:4], PROMPT[4:8])),
        desk.run(8, prefill(1, slot, PROMPT[:8], PROMPT[8:], want=1)),
    ]
    assert desk.ring.stats.refused == 3


def test_what_came_through_after_a_refusal_is_not_believed() -> None:
    desk = Desk().form()
    first = desk.submit(1, PROMPT)
    slot, sent = slot_of(first), runs(first)
    refuse(desk, sent[0])
    assert desk.verdict(sent[1]) == []
    assert desk.resident(slot) == ()
    assert len(desk.verdict(sent[2], 99)) == 4, "99 is no token of the turn"


def test_refused_decode_goes_on_at_the_committed_token() -> None:
    """CASES 29: nothing is repeated, nothing is lost, and only the missing tokens are owed."""
    desk = Desk().form()
    first = desk.submit(1, (1, 2), budget=3)
    slot = slot_of(first)
    actions = desk.verdict(runs(first)[0], 21)
    again = refuse(desk, runs(actions)[0])
    assert again == [
        Admitted(1, "r", slot, prompt=2, matched=0, resumed=True),
        desk.run(5, prefill(1, slot, (), (1, 2, 21), want=1)),
    ]
    assert desk.verdict(runs(again)[0], 22) == [
        Tokens(1, (22,)),
        desk.run(6, verify(1, slot, (1, 2, 21), 22)),
    ]
    last = Run("r", 1, 6, (verify(1, slot, (1, 2, 21), 22),))
    assert desk.verdict(last, 23) == [Tokens(1, (23,)), Finished(1, "length")]
    assert desk.resident(slot) == (1, 2, 21, 22)


def test_a_neighbour_of_a_refused_segment_goes_on() -> None:
    desk = Desk(limits=replace(LIMITS, window_frames=1)).form()
    first = desk.submit(1, (1, 2))
    a, b = slot_of(first), slot_of(desk.submit(2, (7, 8)))
    (both,) = runs(desk.verdict(runs(first)[0], 21))
    assert desk.tell(refusal(both, 1)) == []
    assert desk.verdict(both, 31, refused=[1]) == [
        Admitted(1, "r", a, prompt=2, matched=0, resumed=True),
        Tokens(2, (31,)),
        desk.run(5, verify(2, b, (7, 8), 31), prefill(1, a, (), (1, 2, 21), want=1)),
    ]


@pytest.mark.parametrize("code", [Refusal.GAP, Refusal.CONTENT, Refusal.RANGE])
def test_rows_refused_again_and_again_fail_the_turn(code: Refusal) -> None:
    desk = Desk().form()
    actions = desk.submit(1, (1, 2))
    slot = slot_of(actions)
    for _ in range(MAX_REFUSALS):
        (run,) = runs(actions)
        desk.tell(refusal(run, 1, code))
        actions = desk.verdict(run, refused=[1])
        assert actions[0] == Admitted(1, "r", slot, prompt=2, matched=0)
    text = f"the stages refused the turn's rows {MAX_REFUSALS + 1} times"
    assert refuse(desk, runs(actions)[0]) == [Failed(1, 500, "rows_refused", text)]
    assert (desk.core.turns, desk.resident(slot)) == ({}, ())


def test_a_turn_cancelled_after_a_refusal_ends_once() -> None:
    desk = Desk().form()
    first = desk.submit(1, PROMPT)
    slot, sent = slot_of(first), runs(first)
    refuse(desk, sent[0])
    assert desk.cancel(1) == [Finished(1, "cancelled")]
    assert refuse(desk, sent[1]) == []
    assert refuse(desk, sent[2]) == []
    assert (desk.core.turns, desk.resident(slot)) == ({}, ())


# ---- a fork -------------------------------------------------------------------------------------


def fork() -> tuple[Desk, Copy, list[Action]]:
    """Turn 1 goes on decoding a conversation; turn 2 asks for a fork of its prefix."""
    desk = Desk().form()
    actions = desk.submit(1, PROMPT, budget=9)
    for run in runs(actions):
        desk.verdict(run, *([21] if run.segments[0].want else []))
    actions = desk.submit(2, (*PROMPT, 50), budget=1)
    (copy,) = [a.frame for a in actions if isinstance(a, Send) and isinstance(a.frame, Copy)]
    assert (copy.turn, copy.length, copy.target) == (2, 10, slot_of(actions))
    assert actions.index(Send(copy)) < actions.index(Send(runs(actions)[-1]))
    first = next(iter(desk.ring.in_flight.values())).frame
    assert isinstance(first, Run)
    desk.verdict(first, 22)  # turn 1's: the ring is a queue, so it comes before the copy
    return desk, copy, actions


def test_a_fork_is_resident_when_its_copy_is_back() -> None:
    """CASES 5, 18."""
    desk, copy, actions = fork()
    assert desk.resident(copy.target) == ()
    assert desk.tell(replace(copy, done=("s0", "s1"))) == []
    assert desk.resident(copy.target) == PROMPT
    assert desk.verdict(runs(actions)[-1], 60) == [Tokens(2, (60,)), Finished(2, "length")]
    assert desk.resident(copy.target) == (*PROMPT, 50)
    assert desk.core.totals.copied_rows == 10


def test_a_refused_fork_is_prefilled_instead() -> None:
    """CASES 8: recompute, never continue."""
    desk, copy, actions = fork()
    reject = Reject("r", 1, copy.seq, "s1", Refusal.GAP, "no", 2, copy.target)
    assert desk.tell(reject) == [], "its first segment is still on its way"
    again = refuse(desk, runs(actions)[-1], turn=2)
    assert again[0] == Admitted(2, "r", copy.target, prompt=11, matched=0)
    assert runs(again)[0].segments[-1] == prefill(2, copy.target, (), PROMPT[:4])
    assert desk.core.totals.prefix_cache_hits == 0, "CASES 23: a refused match is no hit"


def test_a_source_that_was_refused_is_not_offered_again() -> None:
    """CASES 8: a wrong ledger costs one prefill, not one for every turn with that prefix."""
    desk = Desk().form()
    actions = desk.submit(1, PROMPT, budget=1)
    for run in runs(actions):
        desk.verdict(run, *([21] if run.segments[0].want else []))
    source = slot_of(actions)
    actions = desk.submit(2, (*PROMPT[:8], 50), budget=1)
    (copy,) = [a.frame for a in actions if isinstance(a, Send) and isinstance(a.frame, Copy)]
    assert copy.source == source
    desk.tell(Reject("r", 1, copy.seq, "s1", Refusal.CONTENT, "no", 2, copy.target))
    assert desk.resident(source) == ()


def parking() -> tuple[Desk, Copy]:
    """One slot and a park; a second conversation is parking the first."""
    desk = Desk(slots=1, limits=replace(LIMITS, max_model_len=128, chunk_tokens=128))
    desk.beats()
    roomy = {"capacity": 128, "row_bytes": 1, "park_bytes": 100}
    desk.probe(desk.answer([replace(each, **roomy) for each in desk.entries()]))  # type: ignore[arg-type]
    (run,) = runs(desk.submit(1, tuple(range(70)), budget=1))
    desk.verdict(run, 21)
    actions = desk.submit(2, (5, 6), budget=1)
    (copy,) = [a.frame for a in actions if isinstance(a, Send) and isinstance(a.frame, Copy)]
    assert (copy.turn, copy.source, copy.target, copy.length) == (0, 0, 1, 70)
    return desk, copy


def test_a_parked_prefix_is_resident_when_its_copy_is_back() -> None:
    desk, copy = parking()
    desk.tell(copy)
    assert desk.ring.ledger.holding(1).resident == 70
    (record,) = desk.ring.in_flight.values()
    assert isinstance(record.frame, Run)
    desk.verdict(record.frame, 22)
    actions = desk.submit(3, (*range(70), 9), budget=1)
    assert Admitted(3, "r", 0, prompt=71, matched=70) in actions
    assert runs(actions)[0].segments == (prefill(3, 0, range(70), (9,), want=1),)


def test_a_refused_park_is_freed_where_it_was_made() -> None:
    """CASES 38: an earlier stage has copied already; its rows must not stay without an owner."""
    desk, copy = parking()
    actions = desk.tell(Reject("r", 1, copy.seq, "s1", Refusal.CONTENT, "no", 0, 1))
    (sent,) = actions
    assert isinstance(sent, Send)
    assert isinstance(sent.frame, Free)
    assert sent.frame.slot == 1
    assert not desk.ring.ledger.has(1)


def test_parked_rows_of_a_lost_stage_are_freed_on_the_others() -> None:
    """CASES 38: the roll call told them to keep what the new ledger does not know."""
    desk, copy = parking()
    desk.tell(copy)
    (record,) = desk.ring.in_flight.values()
    assert isinstance(record.frame, Run)
    desk.verdict(record.frame, 22)
    desk.tick(RETRY_S)
    held = claim(0, (5, 6)), claim(1, range(70))
    assert desk.tell(StageLost("r", "s1", "killed")) == [Send(RollCall("r", 2, held))]
    roomy = {"capacity": 128, "row_bytes": 1, "park_bytes": 100}
    new = (entry(0, slots=1), replace(entry(1, slots=1), incarnation=99))
    entries = [replace(each, **roomy) for each in new]  # type: ignore[arg-type]
    freed, probe = desk.answer(entries)
    assert freed == Send(Free("r", 2, 6, 1))
    assert len(runs([probe])) == 1
    assert not desk.ring.ledger.parked


# ---- answers that nobody waits for --------------------------------------------------------------


def test_a_second_verdict_is_ignored_and_counted() -> None:
    """CASES 31."""
    desk = Desk().form()
    (run,) = runs(desk.submit(1, (1, 2)))
    desk.verdict(run, 21)
    stale = desk.ring.stats.stale
    assert desk.verdict(run, 22) == []
    assert desk.ring.stats.stale == stale + 1


def test_answers_of_an_older_epoch_are_ignored_and_counted() -> None:
    """CASES 25, 31."""
    desk = Desk().form()
    (run,) = runs(desk.submit(1, (1, 2)))
    desk.tick(RETRY_S)
    desk.tell(LinkGap("r/s1", 3, 4))
    (again,) = runs(desk.reform())
    assert desk.verdict(run, 99) == []
    assert desk.verdict(replace(again, epoch=1), 99) == []
    assert desk.ring.stats.stale == 2
    assert desk.verdict(again, 21)[0] == Tokens(1, (21,))


def nonsense(run: Run) -> dict[str, Frame]:
    """Answers to the frame that no honest ring can give."""
    s = run.segments[0]
    right = Result(s.turn, s.slot, s.end - 1, (21,))
    return {
        "copy": Copy("r", 1, run.seq, 1, 0, 1, 1, b"\0" * 16),
        "free": Free("r", 1, run.seq, 0),
        "ping": Ping("r", 1, run.seq),
        "other ring": Verdict("q", 1, run.seq, (right,), ()),
        "other seq": Verdict("r", 1, run.seq + 7, (right,), ()),
        "other epoch": Verdict("r", 2, run.seq, (right,), ()),
        "roll call": RollCall("r", 1, ()),
    }


@pytest.mark.parametrize("kind", nonsense(Run("r", 1, 1, (verify(1, 0, (), 1),))))
def test_an_answer_of_another_kind_settles_nothing(kind: str) -> None:
    """The peer sent nonsense: drop it, count it, carry on."""
    desk = Desk().form()
    (run,) = runs(desk.submit(1, (1, 2)))
    assert desk.tell(nonsense(run)[kind]) == []
    assert desk.verdict(run, 21)[0] == Tokens(1, (21,))


@pytest.mark.parametrize(
    "change",
    [
        lambda right: replace(right, tokens=()),
        lambda right: replace(right, tokens=(21, 22)),
        lambda right: replace(right, slot=right.slot + 1),
        lambda right: replace(right, start=right.start - 1),
        lambda right: replace(right, turn=7),
    ],
    ids=["no token", "two tokens", "slot", "position", "turn"],
)
def test_a_result_that_does_not_fit_its_segment_is_a_refusal(
    change: Callable[[Result], Result],
) -> None:
    desk = Desk().form()
    (run,) = runs(desk.submit(1, (1, 2)))
    segment = run.segments[0]
    wrong = change(Result(1, segment.slot, 1, (21,)))
    actions = desk.tell(Verdict("r", 1, run.seq, (wrong,), ()))
    assert actions[0] == Admitted(1, "r", segment.slot, prompt=2, matched=0)
    assert desk.verdict(runs(actions)[0], 21)[0] == Tokens(1, (21,))


def test_a_verdict_that_answers_a_copy_settles_nothing() -> None:
    desk, copy, _ = fork()
    assert desk.tell(Verdict("r", 1, copy.seq, (), ())) == []
    assert copy.seq in desk.ring.in_flight


def test_an_answer_that_overtakes_another_settles_nothing() -> None:
    """A ring is a queue: only a forged answer comes before an older frame's."""
    desk = Desk().form()
    first, second, third = runs(desk.submit(1, PROMPT))
    assert desk.verdict(second) == []
    assert desk.verdict(third, 21) == []
    assert desk.ring.stats.stale == 2
    slot = first.segments[0].slot
    assert desk.resident(slot) == ()
    desk.verdict(first)
    desk.verdict(second)
    assert desk.resident(slot) == PROMPT[:8]
    assert desk.verdict(third, 21)[0] == Tokens(1, (21,))


def test_a_changed_copy_is_taken_for_the_one_that_was_sent() -> None:
    desk, copy, _ = fork()
    assert desk.tell(replace(copy, turn=99, length=3, target=0)) == []
    assert desk.resident(copy.target) == PROMPT


# ---- a lost ring --------------------------------------------------------------------------------


@pytest.mark.parametrize("same", [True, False], ids=["link", "stage"])
def test_a_turn_goes_on_at_its_committed_tokens(same: bool) -> None:
    """CASES 22, 29, 32: no token lost or repeated, the same total, no hit for its own rows."""
    desk = Desk().form()
    actions = desk.submit(1, (1, 2), budget=4)
    for token in (21, 22):
        actions = desk.verdict(runs(actions)[0], token)
    desk.tick(RETRY_S)
    desk.tell(StageLost("r", "s1", "killed"))
    restarted = entry(1) if same else replace(entry(1), incarnation=99)
    actions = desk.probe(desk.answer((entry(0), restarted)))
    slot = slot_of(actions)
    known, matched = (1, 2, 21, 22), 3 if same else 0
    assert actions == [
        Admitted(1, "r", slot, prompt=2, matched=matched, resumed=True),
        desk.run(8, prefill(1, slot, known[:matched], known[matched:], want=1), epoch=2),
    ]
    actions = desk.verdict(runs(actions)[0], 23)
    assert actions[0] == Tokens(1, (23,))
    assert desk.verdict(runs(actions)[0], 24) == [Tokens(1, (24,)), Finished(1, "length")]
    totals = desk.core.totals
    assert (totals.resumed, totals.prompt_tokens, totals.prefix_cache_hits) == (1, 2, 0)


def test_a_draining_turn_ends_with_its_ring() -> None:
    """CASES 25: exactly what was acknowledged stays."""
    desk = Desk().form()
    first = desk.submit(1, PROMPT)
    slot = slot_of(first)
    desk.verdict(runs(first)[0])
    desk.cancel(1)
    desk.tick(RETRY_S)
    desk.tell(StageLost("r", "s1", "killed"))
    assert (desk.core.turns, desk.resident(slot)) == ({}, PROMPT[:4])
    assert desk.reform() == []


def test_a_turn_waiting_for_a_lost_ring_can_be_cancelled() -> None:
    desk = Desk().form()
    desk.submit(1, (1, 2))
    desk.tick(RETRY_S)
    desk.tell(StageLost("r", "s1", "killed"))
    assert desk.cancel(1) == [Finished(1, "cancelled")]
    assert desk.reform() == []

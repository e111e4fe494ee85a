"""Stage.handle for copies: forks between slots, prefixes parked in host memory, and their end.

CASES 5, 8, 38: a copy is proved like a segment, and parked rows have a bound.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.stage import CopyRows, DropRows, Forward, Send, Stage
from tests.test_stage import PRINT, copy, info, nothing, ready, refusal, run, segment, wrote
from transport.chain import Chain, root_hash
from transport.frame import Claim, Copy, Free, Refusal, RollCall

ROW_BYTES = 4


def parking(park_rows: int = 5) -> Stage:
    """A stage with room for some parked rows; slot 0 holds 1, 2, 3."""
    block = replace(info("head"), row_bytes=ROW_BYTES)
    stage = Stage("r", "me", 7, block, park_bytes=ROW_BYTES * park_rows + ROW_BYTES - 1)
    stage.handle(RollCall("r", 1), 0.0)
    return wrote(stage, 1, 2, 3)


def claim(number: int, *tokens: int) -> Claim:
    chain = Chain(root_hash(PRINT, b""), tokens)
    return Claim(number, len(tokens), chain.hash_before(len(tokens)))


def test_copy_forks_a_prefix() -> None:
    stage = wrote(ready(), 1, 2, 3)
    fork = replace(copy(2, (1, 2)), done=("s0",))
    assert stage.handle(fork, 0.0) == [CopyRows(0, 1, 2), Send(replace(fork, done=("s0", "me")))]
    assert [stage.slots.length(slot) for slot in range(3)] == [3, 2, 0]
    on = run(2, segment(7, after=(1, 2), slot=1), segment(4, after=(1, 2, 3)))
    assert stage.handle(on, 0.0) == [Forward(on, None)]


@pytest.mark.parametrize(
    ("bad", "code", "detail"),
    [
        (copy(3, (1, 2, 3)), Refusal.GAP, "slot 0 holds 2 rows, the frame names 3"),
        (copy(2, (1, 9)), Refusal.CONTENT, "slot 0 holds another text in rows [0, 2)"),
        (copy(2, (1, 2), source=3), Refusal.GAP, "nothing is parked as 3"),
        (copy(2, (1, 2), target=3), Refusal.RANGE, "0 rows are parked, room for 0"),
        (copy(2, (1, 2), target=0), Refusal.RANGE, "slot 0 onto itself"),
    ],
    ids=["gap", "content", "source", "target", "itself"],
)
def test_a_copy_that_cannot_be_made_is_refused(bad: Copy, code: Refusal, detail: str) -> None:
    """CASES 8: the frame does not go on, so no later stage copies either."""
    stage = wrote(wrote(ready(), 1, 2), 6, 6, 6, slot=1)
    assert stage.handle(bad, 0.0) == [refusal(5, code, detail, 9, bad.target)]
    assert [stage.slots.length(slot) for slot in range(3)] == [2, 3, 0]


def test_free_forgets_and_goes_on() -> None:
    stage = wrote(ready(), 1, 2)
    assert stage.handle(Free("r", 1, 5, 0), 0.0) == [Send(Free("r", 1, 5, 0))]
    gap = refusal(6, Refusal.GAP, "slot 0 holds 0 rows, the frame names 2")
    assert stage.handle(run(6, segment(3, after=(1, 2))), 0.0) == [gap, nothing(6)]


# ---- parked prefixes: numbers from the slot count on ---------------------------------------------


def test_a_prefix_is_parked() -> None:
    stage = parking()
    away = copy(3, (1, 2, 3), target=7)
    assert stage.handle(away, 0.0) == [CopyRows(0, 7, 3), Send(replace(away, done=("me",)))]
    assert stage.slots.length(0) == 3, "the slot keeps it until it is written"


def test_a_parked_prefix_comes_back_and_can_be_extended() -> None:
    stage = parking()
    stage.handle(copy(3, (1, 2, 3), target=7), 0.0)
    stage.handle(Free("r", 1, 2, 0), 0.0)
    back = copy(2, (1, 2), source=7, target=1)
    assert stage.handle(back, 0.0) == [CopyRows(7, 1, 2), Send(replace(back, done=("me",)))]
    on = run(3, segment(9, after=(1, 2), slot=1))
    assert stage.handle(on, 0.0) == [Forward(on, None)]


@pytest.mark.parametrize(
    ("bad", "code", "detail"),
    [
        (copy(4, (1, 2, 3, 4), source=7), Refusal.GAP, "slot 7 holds 3 rows, the frame names 4"),
        (copy(3, (1, 2, 9), source=7), Refusal.CONTENT, "slot 7 holds another text in rows [0, 3)"),
        (copy(1, (1,), source=8), Refusal.GAP, "nothing is parked as 8"),
        (copy(3, (1, 2, 3), target=8), Refusal.RANGE, "3 rows are parked, room for 5"),
        (copy(1, (1,), source=7, target=7), Refusal.RANGE, "slot 7 onto itself"),
    ],
    ids=["gap", "content", "unknown", "full", "itself"],
)
def test_parked_rows_are_proved_and_bounded(bad: Copy, code: Refusal, detail: str) -> None:
    stage = parking()
    stage.handle(copy(3, (1, 2, 3), target=7), 0.0)
    assert stage.handle(bad, 0.0) == [refusal(5, code, detail, 9, bad.target)]
    stage.check()


def test_a_parked_number_is_no_slot_to_write_in() -> None:
    stage = parking()
    stage.handle(copy(3, (1, 2, 3), target=7), 0.0)
    bad = run(1, segment(4, after=(1, 2, 3), slot=7))
    expected = refusal(1, Refusal.RANGE, "slot 7 of 3", 1, 7)
    assert stage.handle(bad, 0.0) == [expected, nothing(1)]


def test_parking_in_the_same_place_again_replaces_it() -> None:
    stage = parking(3)
    stage.handle(copy(3, (1, 2, 3), target=7), 0.0)
    assert stage.handle(copy(2, (1, 2), target=7), 0.0)[0] == CopyRows(0, 7, 2)
    stage.check()


def test_a_freed_parked_prefix_gives_its_memory_back() -> None:
    stage = parking(3)
    stage.handle(copy(3, (1, 2, 3), target=7), 0.0)
    assert stage.handle(Free("r", 1, 2, 7), 0.0) == [DropRows(7), Send(Free("r", 1, 2, 7))]
    assert stage.handle(copy(3, (1, 2, 3), target=8), 0.0)[0] == CopyRows(0, 8, 3)


def test_a_roll_call_drops_what_the_coordinator_does_not_know() -> None:
    """CASES 38: a coordinator that restarted, or lost a copy's answer, leaves no rows behind."""
    stage = parking()
    stage.handle(copy(3, (1, 2, 3), target=7), 0.0)
    stage.handle(copy(2, (1, 2), target=8), 0.0)
    dropped, answer = stage.handle(RollCall("r", 2, (claim(8, 1, 2), claim(9, 1))), 0.0)
    assert dropped == DropRows(7)
    assert isinstance(answer, Send)
    assert isinstance(answer.frame, RollCall)
    assert answer.frame.claims == (claim(8, 1, 2),)
    (entry,) = answer.frame.entries
    assert (entry.row_bytes, entry.park_bytes) == (ROW_BYTES, 23)
    back = replace(copy(2, (1, 2), source=8, target=1), epoch=2)
    assert stage.handle(back, 0.0)[0] == CopyRows(8, 1, 2)


@pytest.mark.parametrize(
    ("claimed", "confirmed"),
    [
        (claim(0, 1, 2, 3), True),
        (claim(0, 1, 2), True),  # the next turn writes on from there
        (claim(0, 1, 2, 3, 4), False),
        (claim(0, 1, 9), False),
        (claim(1, 1, 2), False),  # another slot
        (replace(claim(0, 1, 2), digest=b"\0" * 16), False),
        (claim(7, 1, 2), True),
        (claim(7, 1), False),  # parked rows that nobody would count
        (claim(8, 1, 2), False),
    ],
)
def test_a_roll_call_strikes_out_what_is_not_there(claimed: Claim, confirmed: bool) -> None:
    """A coordinator that restarted believes nothing that a stage has not confirmed."""
    stage = parking()
    stage.handle(copy(2, (1, 2), target=7), 0.0)
    *dropped, answer = stage.handle(RollCall("r", 2, (claimed,)), 0.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.frame, RollCall)
    assert answer.frame.claims == ((claimed,) if confirmed else ())
    kept = confirmed and claimed.number == 7
    assert dropped == ([] if kept else [DropRows(7)])
    assert stage.slots.tokens(0) == (1, 2, 3)

"""What a frame log must show of a roll call's claims: at stages, coordinators, their successors.

No false alarm over worlds of successors is in test_log_check, bugs of the cores are in
test_log_check_bugs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from tests.recording import COORDINATOR, Taken, prove, record
from tests.world import Plan
from tools.framelogs.residency import Residency, Violation, Who
from transport.chain import Chain, root_hash
from transport.frame import (
    Claim,
    Copy,
    Forwarded,
    Free,
    Kind,
    Remembered,
    RollCall,
    Run,
    Segment,
    StageEntry,
    Submit,
    Tensor,
    Timing,
    Wire,
)
from transport.framelog import Direction

STAGE = Who("stage", "s0", 1)
FINGERPRINT = b"model"
TEXT = tuple(range(20))
CHAIN = Chain(root_hash(FINGERPRINT, b""), TEXT)
ENTRY = StageEntry("s0", 1, (0, 1), 1, FINGERPRINT, 2, 64, 99, "toy", 8, 8000)
PARKED = 5
SEED = 6  # its stages confirm 27 claims and strike out 20


@pytest.fixture(scope="module")
def world() -> list[Taken]:
    return record(Plan(SEED, stages=3, slots=3, park=20000, trouble="successors"), steps=300)


def offender(log: Sequence[Taken]) -> tuple[int, str]:
    with pytest.raises(Violation) as found:
        prove(log, Residency())
    return int(found.value.place), found.value.rule


def calls(log: Sequence[Taken], role: str, direction: Direction) -> Iterator[tuple[int, RollCall]]:
    for at, (who, way, frame, _) in enumerate(log):
        if isinstance(frame, RollCall) and (who.role, way) == (role, direction):
            yield at, frame


def changed(log: Sequence[Taken], at: int, call: RollCall) -> list[Taken]:
    return [*log[:at], log[at]._replace(frame=call), *log[at + 1 :]]


# ---- what a stage confirms, in recorded worlds ---------------------------------------------------


def test_a_claim_that_a_stage_lets_pass_or_strikes_out_is_judged(world: list[Taken]) -> None:
    """Each claim of each roll call, turned over at the stage that judged it."""
    prove(world, Residency())
    struck = kept = 0
    asked: dict[Who, RollCall] = {}
    for at, (who, way, frame, _) in enumerate(world):
        if not isinstance(frame, RollCall) or who.role != "stage":
            continue
        if way is Direction.IN:
            asked[who] = frame
            continue
        for claim in asked[who].claims:
            if claim in frame.claims:
                kept += 1
                claims = tuple(each for each in frame.claims if each != claim)
            else:
                struck += 1
                claims = tuple(c for c in asked[who].claims if c in frame.claims or c == claim)
            assert offender(changed(world, at, replace(frame, claims=claims))) == (at, "R8")
    assert kept > 20
    assert struck > 5


def test_a_claim_that_a_stage_made_up_or_moved_is_named(world: list[Taken]) -> None:
    tried = 0
    for at, call in calls(world, "stage", Direction.OUT):
        if len(call.claims) < 2:
            continue
        tried += 1
        first, *others = call.claims
        for claims in (
            (*call.claims, first),
            (*others, first),
            (replace(first, length=first.length + 1), *others),
            (replace(first, digest=b"\1" * 16), *others),
        ):
            assert offender(changed(world, at, replace(call, claims=claims))) == (at, "R8")
    assert tried > 5


def test_what_a_coordinator_claims_and_is_told_is_judged(world: list[Taken]) -> None:
    tried = 0
    for at, call in calls(world, "coordinator", Direction.OUT):
        for claim in call.claims:
            tried += 1
            for wrong in (
                replace(claim, length=claim.length + 1),
                replace(claim, digest=b"\1" * 16),
            ):
                claims = tuple(wrong if each == claim else each for each in call.claims)
                assert offender(changed(world, at, replace(call, claims=claims))) == (at, "R3")
    assert tried > 10
    for at, call in calls(world, "coordinator", Direction.IN):
        claims = (*call.claims, Claim(0, 3, b"\1" * 16))
        place, rule = offender(changed(world, at, replace(call, claims=claims)))
        assert (place, rule) in ((at, "R7"), (at, "R8"))


def test_a_successor_believes_no_more_than_was_confirmed(world: list[Taken]) -> None:
    """Its log alone, with a confirmed claim cut out of the answer: whoever reuses it is named."""
    named = 0
    lives = dict.fromkeys(taken.who for taken in world if taken.who.role == "coordinator")
    assert len(lives) > 2
    for who in lives:
        mine = [taken for taken in world if taken.who == who]
        for at, call in calls(mine, "coordinator", Direction.IN):
            for claim in call.claims:
                claims = tuple(each for each in call.claims if each != claim)
                found = alarm(changed(mine, at, replace(call, claims=claims)))
                if found is not None:
                    assert found.rule == "R3"
                    assert int(found.place) > at
                    named += 1
    assert named > 1


def alarm(log: Sequence[Taken]) -> Violation | None:
    try:
        prove(log, Residency())
    except Violation as found:
        return found
    return None


# ---- by hand -------------------------------------------------------------------------------------


def claim(number: int, length: int) -> Claim:
    return Claim(number, length, CHAIN.hash_before(length))


def segment(slot: int, start: int, end: int, turn: int = 1) -> Segment:
    tokens = TEXT[start:end]
    return Segment(turn, slot, start, tokens, Kind.PREFILL, CHAIN.hash_before(start), 0)


class StageLog:
    """A stage that answers whatever it is told to."""

    def __init__(self, *, whole: bool = True) -> None:
        self.proof = Residency()
        self.proof.begin(STAGE, whole=whole)

    def passes(self, taken: Wire, *sent: Wire, way: Direction = Direction.OUT) -> None:
        self.proof.observe(STAGE, Direction.IN, taken, None, "in")
        if isinstance(taken, Run):
            done = Forwarded(taken.epoch, taken.seq, None)
            self.proof.observe(STAGE, Direction.LOCAL, done, None, "done")
        for frame in sent:
            self.proof.observe(STAGE, way, frame, None, "out")

    def runs(self, seq: int, *segments: Segment) -> None:
        run = Run("r", 1, seq, segments)
        rows = sum(len(each.tokens) for each in segments)
        out = replace(run, payload=Tensor("uint8", (rows, 1), bytes(rows)))
        self.passes(run, replace(out, timings=(Timing("s0", 0, 0),)))

    def copies(self, seq: int, source: int, target: int, length: int) -> None:
        copy = Copy("r", 1, seq, 0, source, target, length, CHAIN.hash_before(length))
        self.passes(copy, replace(copy, done=("s0",)))

    def calls(
        self,
        epoch: int,
        taken: Sequence[Claim] = (),
        kept: Sequence[Claim] = (),
        way: Direction = Direction.OUT,
    ) -> None:
        call = RollCall("r", epoch, tuple(taken))
        self.passes(call, RollCall("r", epoch, tuple(kept), (ENTRY,)), way=way)


def test_a_slot_may_hold_more_than_is_claimed_and_a_parked_prefix_may_not() -> None:
    log = StageLog()
    log.calls(1)
    log.runs(1, segment(0, 0, 10))
    log.copies(2, 0, PARKED, 8)
    log.calls(2, [claim(0, 6), claim(PARKED, 8)], [claim(0, 6), claim(PARKED, 8)])
    log.calls(3, [claim(0, 6), claim(PARKED, 8)], [claim(0, 6), claim(PARKED, 8)])
    with pytest.raises(Violation, match=r"R8: it confirms rows \[0, 6\) of parked prefix 5"):
        log.calls(4, [claim(PARKED, 6)], [claim(PARKED, 6)])


def test_a_parked_prefix_that_nobody_claims_is_gone() -> None:
    log = StageLog()
    log.calls(1)
    log.runs(1, segment(0, 0, 10))
    log.copies(2, 0, PARKED, 8)
    log.calls(2, [claim(0, 10)], [claim(0, 10)])
    log.calls(3, [claim(PARKED, 8)], [])
    with pytest.raises(Violation, match=r"it confirms rows .* where 0 are written"):
        log.calls(4, [claim(PARKED, 8)], [claim(PARKED, 8)])


@pytest.mark.parametrize("recorded", [True, False])
def test_a_roll_call_that_did_not_go_on_dropped_parked_rows(recorded: bool) -> None:
    """As a record without a number, or without a record: then it is not known."""
    log = StageLog()
    log.calls(1)
    log.runs(1, segment(0, 0, 10))
    log.copies(2, 0, PARKED, 8)
    if recorded:
        log.calls(2, way=Direction.UNSENT)
    else:
        log.passes(RollCall("r", 2))
    log.calls(3, [claim(PARKED, 8)], [])
    assert log.proof.tally.unproved["R8"] == (not recorded)


def test_a_log_that_begins_in_the_middle_learns_from_a_roll_call() -> None:
    log = StageLog(whole=False)
    both = [claim(0, 6), claim(PARKED, 8)]
    log.calls(1, both, both)
    assert log.proof.tally.unproved["R8"] == 2
    log.calls(2, [claim(0, 6)], [])  # the slot may have been written in the meantime
    assert log.proof.tally.unproved["R8"] == 3
    with pytest.raises(Violation, match="R8"):
        log.calls(3, [claim(PARKED, 8)], [claim(PARKED, 8)])


class CoordinatorLog:
    """A coordinator of one stage, which remembers, calls the roll, and sends."""

    def __init__(self, *, whole: bool = True) -> None:
        self.proof = Residency()
        self.proof.begin(COORDINATOR, whole=whole)

    def told(self, frame: Remembered | Submit) -> None:
        self.proof.observe(COORDINATOR, Direction.LOCAL, frame, None, "told")

    def sends(self, frame: Wire, way: Direction = Direction.OUT) -> None:
        self.proof.observe(COORDINATOR, way, frame, None, "sent")

    def forms(self, epoch: int, claims: Sequence[Claim], kept: Sequence[Claim]) -> None:
        self.sends(RollCall("r", epoch, tuple(claims)))
        back = RollCall("r", epoch, tuple(kept), (ENTRY,))
        self.proof.observe(COORDINATOR, Direction.IN, back, None, "back")


def remembered(number: int, length: int) -> Remembered:
    return Remembered("r", number, FINGERPRINT, b"", TEXT[:length])


def test_a_successor_may_reuse_exactly_what_was_confirmed() -> None:
    for start, legal in ((0, True), (9, True), (10, True), (11, False)):
        log = CoordinatorLog()
        log.told(remembered(0, 10))
        log.told(remembered(1, 12))
        log.forms(7, [claim(0, 10), claim(1, 12)], [claim(0, 10)])
        log.told(Submit(1, TEXT, 4))
        run = Run("r", 7, 1, (segment(0, start, 16),))
        if legal:
            log.sends(run)
            continue
        with pytest.raises(Violation, match="R3: turn 1 claims 11 rows, of which 10"):
            log.sends(run)


def test_what_was_struck_out_holds_nothing() -> None:
    log = CoordinatorLog()
    log.told(remembered(1, 12))
    log.forms(7, [claim(1, 12)], [])
    log.told(Submit(1, TEXT, 4))
    with pytest.raises(Violation, match="R3: turn 1 claims 12 rows, of which 0"):
        log.sends(Run("r", 7, 1, (segment(1, 12, 16),)))
    log.sends(Run("r", 7, 2, (segment(1, 0, 16),)))


def test_a_successor_claims_no_more_than_it_remembers() -> None:
    for claims in ([claim(0, 11)], [claim(1, 10)], [Claim(0, 10, b"\1" * 16)]):
        log = CoordinatorLog()
        log.told(remembered(0, 10))
        with pytest.raises(Violation, match="R3: the roll call of number"):
            log.forms(7, claims, [])


def test_a_restored_text_must_be_the_turns_own() -> None:
    log = CoordinatorLog()
    log.told(remembered(0, 10))
    log.forms(7, [claim(0, 10)], [claim(0, 10)])
    log.told(Submit(1, (*TEXT[:5], 50, *TEXT[6:]), 4))
    with pytest.raises(Violation, match="R"):
        log.sends(Run("r", 7, 1, (segment(0, 10, 16),)))


def test_a_roll_call_tells_a_log_that_begins_in_the_middle_what_is_there() -> None:
    log = CoordinatorLog(whole=False)
    log.forms(7, [claim(0, 10), claim(1, 4)], [claim(0, 10)])
    assert log.proof.tally.unproved["R3"] == 2
    log.sends(Run("r", 7, 1, (segment(0, 10, 16),)))
    log.sends(Free("r", 7, 2, 1))
    with pytest.raises(Violation, match="R3: turn 2 claims 4 rows, of which 0"):
        log.sends(Run("r", 7, 3, (segment(1, 4, 9, turn=2),)))


@pytest.mark.parametrize("recorded", [True, False])
def test_a_frame_that_no_socket_took_is_known_by_its_record(recorded: bool) -> None:
    log = CoordinatorLog()
    log.forms(7, [], [])
    log.told(Submit(1, TEXT, 4))
    if recorded:
        log.sends(Run("r", 7, 1, (segment(0, 0, 16),)), Direction.UNSENT)
    log.forms(8, [], [])
    log.sends(Run("r", 8, 2, (segment(0, 0, 16),)))
    assert any(log.proof.tally.unproved.values()) == (not recorded)
    if not recorded:
        return
    with pytest.raises(Violation, match="R3: turn 2 claims 16 rows, of which"):
        log.sends(Run("r", 8, 3, (segment(1, 16, 20, turn=2),)))

"""`kvring log check` and the Residency under it: no false alarm, and what is wrong is named.

Recordings come from rings in memory: any interleaving, restarts, gaps, forks, parks, cancels. Bugs
of the cores are in test_log_check_bugs, files and real processes in test_log_check_files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest

import tests.memoryworld
import tests.test_residency_property as property_worlds
import tests.world
from tests.recording import COORDINATOR, RecordedRing, RecordedWorld, Taken, prove, record
from tests.world import Plan
from tools.framelogs.residency import RULES, Residency, Violation, Who
from transport.frame import (
    Copy,
    Frame,
    Kind,
    Result,
    Run,
    Verdict,
)
from transport.framelog import Direction

SEEDS = 16  # of each kind of trouble; `python -m tests.soak --recorded 100` plays more
TROUBLES = ("none", "restarts", "gaps", "successors")


def plan_of(seed: int, trouble: str) -> Plan:
    draw = Random(seed)
    return Plan(
        seed,
        stages=draw.randint(1, 4),
        slots=draw.randint(1, 4),
        chunk=draw.choice((1, 3, 8, 16, 64)),
        window=draw.choice((None, 1, 2, 9)),
        park=draw.choice((0, 800, 2000, 20000)),
        rows=draw.choice((1, 4, 8, 64)),
        trouble=trouble,
        sampled=draw.random() < 0.3,
        model=draw.random() < 0.3,
    )


def partly(log: Sequence[Taken], draw: Random) -> tuple[list[Taken], Residency]:
    """Every process's log begins somewhere in the middle, and has a hole further on."""
    proof = Residency(repeats=True)
    kept: list[Taken] = []
    lives = list(dict.fromkeys(taken.who for taken in log))
    for who in lives:
        proof.begin(who, whole=False)
    begin = {who: draw.randrange(len(log)) for who in lives}
    for at, taken in enumerate(log):
        if at >= begin[taken.who]:
            kept.append(taken)
    return kept, proof


# ---- no false alarm ------------------------------------------------------------------------------


def sound(seed: int, trouble: str) -> None:
    """One world raises no alarm: whole, as one process's log alone, as logs that begin anywhere."""
    log = record(plan_of(seed, trouble))
    try:
        tally = prove(log)
        assert not any(tally.unproved[rule] for rule in RULES if rule != "R6"), tally
        for who in dict.fromkeys(taken.who for taken in log):
            alone = prove([taken for taken in log if taken.who == who])
            assert alone.proved["R7"] == 0
        prove(*partly(log, Random(seed)))
    except Violation as found:
        at = int(found.place)
        raise AssertionError(f"seed {seed}, record {at} {log[at]}") from found


@pytest.mark.parametrize("trouble", TROUBLES)
def test_no_false_alarm(trouble: str) -> None:
    for seed in range(SEEDS):
        sound(seed, trouble)


def test_every_rule_is_proved_in_a_common_world() -> None:
    tally = prove(record(plan_of(3, "none")))
    assert all(tally.proved.values()), tally
    assert tally.segments
    assert tally.rows > tally.segments


def test_no_false_alarm_over_two_rings() -> None:
    """Hints, keeps, idle limits, restarts and lost verdicts under one scheduler."""

    class Sound(property_worlds.World):
        def __init__(self, draw: Random) -> None:
            super().__init__(draw)
            self.damages = False  # rows lost behind everybody's back are a true alarm

    rings = set()
    for seed in range(10):
        log: list[Taken] = []
        with (
            patch.object(tests.memoryworld, "MemoryRing", RecordedRing),
            patch.object(property_worlds, "MemoryWorld", RecordedWorld),
            patch.object(property_worlds, "World", Sound),
            patch.object(RecordedRing, "sink", staticmethod(log.append), create=True),
        ):
            property_worlds.live(Random(seed), steps=50)
        prove(log, Residency(max_model_len=160, repeats=True))
        rings |= {taken.frame.ring for taken in log if isinstance(taken.frame, Run)}
    assert rings == {"r0", "r1"}


def test_a_log_that_begins_in_the_middle_says_what_it_cannot_prove() -> None:
    log = record(Plan(3, trouble="none", slots=3, park=8000))
    half = log[len(log) // 2 :]
    proof = Residency()
    for who in dict.fromkeys(taken.who for taken in log):
        proof.begin(who, whole=False)
    tally = prove(half, proof)
    assert tally.unproved["R1"]
    assert tally.unproved["R3"]
    assert tally.proved["R1"] > tally.unproved["R1"], "a slot that is seen written is known"


def test_a_hole_in_a_log_forgets_what_was_known() -> None:
    log = record(Plan(3, trouble="none", slots=3, park=8000))
    proof = Residency()
    head = Who("stage", "s0", 1)
    cut = len(log) // 2
    prove(log[:cut], proof)
    before = proof.tally.unproved["R1"]
    proof.missing(head)
    prove([taken for taken in log[cut + 60 :] if taken.who == head], proof)
    assert proof.tally.unproved["R1"] > before


def test_a_frame_that_no_socket_took_is_no_alarm() -> None:
    """Without a record it has no number on the link, only its place in the order of frames."""
    log = [taken for taken in record(CLEAN, steps=120) if taken.who == COORDINATOR]
    unproved = 0
    for at in Random(6).sample(list(runs(log, "coordinator", Direction.OUT)), 12):
        lost = log[at].frame
        assert isinstance(lost, Run)
        kept: list[Taken] = []
        numbers: dict[str, int] = {}
        for index, taken in enumerate(log):
            frame, envelope = taken.frame, taken.envelope
            if index == at or (isinstance(frame, Verdict) and frame.seq == lost.seq):
                continue
            if envelope is not None:
                number = numbers[envelope.sender] = numbers.get(envelope.sender, -1) + 1
                envelope = replace(envelope, number=number)
            kept.append(taken._replace(envelope=envelope))
        unproved += sum(prove(kept).unproved.values())
    assert unproved, "nor is it passed over"


# ---- what is wrong is named ----------------------------------------------------------------------


def offender(log: Sequence[Taken]) -> tuple[int, str]:
    """The index of the first offending record, and the rule."""
    with pytest.raises(Violation) as found:
        prove(log, Residency())
    return int(found.value.place), found.value.rule


def runs(log: Sequence[Taken], role: str, direction: Direction, start: int = 1) -> Iterator[int]:
    """Indices of compute frames of real turns; start: the least first row of their segments."""
    for at, (who, way, frame, _) in enumerate(log):
        if (who.role, way) != (role, direction) or not isinstance(frame, Run):
            continue
        if frame.segments and all(each.turn and each.start >= start for each in frame.segments):
            yield at


def first_segment(frame: Frame, **changes: object) -> Frame:
    assert isinstance(frame, Run)
    changed = replace(frame.segments[0], **changes)  # type: ignore[arg-type]
    return replace(frame, segments=(changed, *frame.segments[1:]))


def kinds(frame: Frame) -> set[Kind]:
    assert isinstance(frame, Run)
    return {segment.kind for segment in frame.segments}


def other_token(frame: Frame) -> Frame:
    assert isinstance(frame, Run)
    tokens = frame.segments[0].tokens
    return first_segment(frame, tokens=(tokens[0] ^ 1, *tokens[1:]))


def later_start(frame: Frame) -> Frame:
    assert isinstance(frame, Run)
    return first_segment(frame, start=frame.segments[0].start + 1)


def other_hash(frame: Frame) -> Frame:
    return first_segment(frame, parent_hash=b"\x01" * 16)


def other_slot(frame: Frame) -> Frame:
    assert isinstance(frame, Run)
    return first_segment(frame, slot=(frame.segments[0].slot + 1) % 3)


def other_seq(frame: Frame) -> Frame:
    assert isinstance(frame, Run)
    return replace(frame, seq=frame.seq - 1)


TAMPERS = [other_token, later_start, other_hash, other_slot, other_seq]
CLEAN = Plan(5, stages=3, slots=3, chunk=8, park=8000)


@pytest.fixture(scope="module")
def clean() -> list[Taken]:
    return record(CLEAN, steps=120)


@pytest.mark.parametrize("tamper", TAMPERS)
@pytest.mark.parametrize(
    ("role", "direction"),
    [("stage", Direction.IN), ("stage", Direction.OUT), ("coordinator", Direction.OUT)],
)
def test_a_changed_frame_is_named(
    clean: list[Taken], tamper: Callable[[Frame], Frame], direction: Direction, role: str
) -> None:
    """With all logs at hand it is exactly the record that was changed.

    Only a draft that the coordinator made up could have been any token: then it is named by what
    was built on it, or where the head took another one.
    """
    for at in Random(1).sample(list(runs(clean, role, direction)), 12):
        log = list(clean)
        log[at] = log[at]._replace(frame=tamper(log[at].frame))
        where, _ = offender(log)
        ends = [index for index, taken in enumerate(log) if taken.envelope == log[at].envelope]
        frame = clean[at].frame
        assert isinstance(frame, Run)
        draft = frame.segments[0].kind is Kind.VERIFY and tamper is other_token
        if role == "coordinator" and draft:
            assert at <= where <= max(ends)
        else:
            assert where == at


@pytest.mark.parametrize("tamper", TAMPERS)
@pytest.mark.parametrize("role", ["coordinator", "stage"])
def test_a_changed_frame_is_noticed_by_one_log_alone(
    clean: list[Taken], tamper: Callable[[Frame], Frame], role: str
) -> None:
    """At the frame or soon after it, by the log of the process that has it.

    A coordinator's draft may be any token: only its prompts and replies can be known.
    """
    found = list(runs(clean, role, Direction.OUT))
    if role == "coordinator" and tamper is other_token:
        found = [at for at in found if kinds(clean[at].frame) == {Kind.PREFILL}]
    for at in Random(2).sample(found, min(8, len(found))):
        log = list(clean)
        who = log[at].who
        log[at] = log[at]._replace(frame=tamper(log[at].frame))
        alone = [taken for taken in log if taken.who == who]
        index = sum(taken.who == who for taken in log[:at])
        where, _ = offender(alone)
        assert where == index or (where > index and role == "coordinator")


def test_a_changed_answer_is_named(clean: list[Taken]) -> None:
    """A verdict's token, its start and its turn, in the coordinator's log."""
    verdicts = [
        at
        for at, (who, _, frame, _) in enumerate(clean)
        if who == COORDINATOR and isinstance(frame, Verdict) and frame.results
        if frame.results[0].turn and frame.results[0].tokens
    ]

    def result(frame: Frame, **changes: object) -> Frame:
        assert isinstance(frame, Verdict)
        changed: Result = replace(frame.results[0], **changes)  # type: ignore[arg-type]
        return replace(frame, results=(changed, *frame.results[1:]))

    for at in Random(3).sample(verdicts, 10):
        frame = clean[at].frame
        assert isinstance(frame, Verdict)
        for changed in (
            result(frame, start=frame.results[0].start + 1),
            result(frame, turn=999),
            result(frame, tokens=()),
            result(frame, tokens=(frame.results[0].tokens[0] ^ 1, *frame.results[0].tokens[1:])),
        ):
            log = list(clean)
            log[at] = log[at]._replace(frame=changed)
            assert offender(log)[0] == at


def test_a_record_that_is_gone_or_twice_is_named(clean: list[Taken]) -> None:
    for role, direction in (
        ("stage", Direction.IN),
        ("stage", Direction.OUT),
        ("coordinator", Direction.OUT),
    ):
        for at in Random(4).sample(list(runs(clean, role, direction)), 8):
            twice = [*clean[: at + 1], *clean[at:]]
            assert offender(twice) == (at + 1, "R6")
            gone = [*clean[:at], *clean[at + 1 :]]
            where, rule = offender(gone)
            assert rule in ("R4", "R6")
            assert at <= where <= following(gone, clean[at], at), "what comes next on the link"


def following(log: Sequence[Taken], of: Taken, start: int) -> int:
    """The next record of the same end of the same link."""
    assert of.envelope is not None
    return next(
        index
        for index, (who, direction, _, envelope) in enumerate(log)
        if index >= start and (who, direction) == (of.who, of.direction)
        if envelope is not None and envelope.sender == of.envelope.sender
    )


def test_two_records_that_changed_places_are_named(clean: list[Taken]) -> None:
    for at in Random(5).sample(list(runs(clean, "stage", Direction.IN)), 8):
        mine = [i for i, each in enumerate(clean) if each.who == clean[at].who and i > at]
        other = next(i for i in mine if clean[i].direction is Direction.IN)
        log = list(clean)
        log[at], log[other] = log[other], log[at]
        assert offender(log)[0] in (at, *mine[: mine.index(other) + 1])


def test_swapped_slots_are_named(clean: list[Taken]) -> None:
    """From one record on, a stage's log names slot 1 where it was slot 0, and the reverse."""
    head = Who("stage", "s0", 1)
    mine = [taken for taken in clean if taken.who == head]

    def swap(taken: Taken) -> Taken:
        if not isinstance(taken.frame, Run):
            return taken
        segments = tuple(
            replace(segment, slot={0: 1, 1: 0}.get(segment.slot, segment.slot))
            for segment in taken.frame.segments
        )
        return taken._replace(frame=replace(taken.frame, segments=segments))

    tried = 0
    named: list[tuple[bool, int]] = []
    for at in runs(mine, "stage", Direction.IN):
        ways = [taken.direction for taken in mine[:at] if isinstance(taken.frame, Run)]
        frame = mine[at].frame
        assert isinstance(frame, Run)
        rests = ways.count(Direction.IN) == ways.count(Direction.OUT)
        if rests and any(segment.slot < 2 for segment in frame.segments):
            tried += 1
            log = [*mine[:at], *map(swap, mine[at:])]
            try:
                prove(log, Residency(pair=False))
            except Violation as found:
                first = following(mine, *first_out(mine, at))
                named.append((found.rule in ("R1", "R2"), int(found.place) - first))
    assert set(named) == {(True, 0)}
    assert len(named) > max(5, 0.8 * tried), "only where both slots hold the same rows"


def first_out(log: Sequence[Taken], start: int) -> tuple[Taken, int]:
    """The first frame that goes out, and where to look for it."""
    return next(each for each in log[start:] if each.direction is Direction.OUT), start


def test_a_copy_of_other_rows_is_named(clean: list[Taken]) -> None:
    copies = [
        at
        for at, (who, way, frame, _) in enumerate(clean)
        if isinstance(frame, Copy) and who == COORDINATOR and way is Direction.OUT
    ]
    assert copies
    for at in copies[:6]:
        frame = clean[at].frame
        assert isinstance(frame, Copy)
        for changed in (
            replace(frame, parent_hash=b"\x02" * 16),
            replace(frame, length=frame.length + 1),
        ):
            log = list(clean)
            log[at] = log[at]._replace(frame=changed)
            assert offender(log) == (at, "R3")

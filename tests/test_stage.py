"""Stage.handle as a script: these frames in, exactly these actions out; no model, no clock.

CASES 5, 6, 8, 10, 19, 20, 28, 31: the stage is the authority over what its rows hold.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline import stage as stage_module
from pipeline.model import ModelInfo
from pipeline.stage import CopyRows, Forward, Send, Stage
from transport.chain import Chain, root_hash
from transport.frame import (
    Copy,
    Forwarded,
    Frame,
    Free,
    Heartbeat,
    Kind,
    LinkGap,
    Ping,
    Refusal,
    Reject,
    Result,
    RollCall,
    Run,
    Segment,
    StageEntry,
    StageState,
    Tensor,
    Tick,
    Timing,
    Verdict,
)

PRINT = b"model-1"
SLOTS, CAPACITY, VOCABULARY = 3, 16, 50
LAYERS = {"head": (0, 2), "middle": (2, 4), "tail": (4, 6), "solo": (0, 6)}
NO_TIME = (Timing("me", 0, 0),)


def info(role: str) -> ModelInfo:
    return ModelInfo(LAYERS[role], 6, PRINT, SLOTS, CAPACITY, VOCABULARY, "toy")


def fresh(role: str = "head") -> Stage:
    return Stage("r", "me", 7, info(role))


def ready(role: str = "head", epoch: int = 1) -> Stage:
    """A stage that has answered a roll call."""
    stage = fresh(role)
    stage.handle(RollCall("r", epoch), 0.0)
    return stage


def segment(
    *tokens: int,
    after: tuple[int, ...] = (),
    slot: int = 0,
    want: int = 0,
    turn: int = 1,
    salt: bytes = b"",
) -> Segment:
    """Write `tokens` behind `after`, which the slot is believed to hold."""
    parent = Chain(root_hash(PRINT, salt), after).hash_before(len(after))
    return Segment(turn, slot, len(after), tokens, Kind.PREFILL, parent, want, salt=salt)


def rows(count: int) -> Tensor:
    return Tensor("uint8", (count, 2), bytes(2 * count))


def run(seq: int, *segments: Segment, epoch: int = 1, payload: Tensor | None = None) -> Run:
    return Run("r", epoch, seq, segments, payload)


def done(seq: int, payload: Tensor | None = None, *results: Result, epoch: int = 1) -> Forwarded:
    return Forwarded(epoch, seq, payload, results)


def refusal(
    seq: int, code: Refusal, detail: str, turn: int | None = 1, slot: int | None = 0, epoch: int = 1
) -> Send:
    return Send(Reject("r", epoch, seq, "me", code, detail, turn, slot))


def nothing(seq: int) -> Send:
    """What goes on when no segment of a frame was kept."""
    return Send(Run("r", 1, seq, (), None, NO_TIME))


def wrote(stage: Stage, *tokens: int, slot: int = 0) -> Stage:
    """The stage with these rows in one slot."""
    stage.handle(run(100, segment(*tokens, slot=slot)), 0.0)
    stage.handle(done(100), 0.0)
    stage.check()
    return stage


def copy(length: int, of: tuple[int, ...], source: int = 0, target: int = 1) -> Copy:
    digest = Chain(root_hash(PRINT, b""), of).hash_before(length)
    return Copy("r", 1, 5, 9, source, target, length, digest)


# ---- epochs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["head", "middle", "tail"])
def test_roll_call_adopts_the_epoch_and_adds_the_stage(role: str) -> None:
    before = StageEntry("other", 1, (0, 2), 6, PRINT, SLOTS, CAPACITY, VOCABULARY, "toy")
    me = StageEntry("me", 7, LAYERS[role], 6, PRINT, SLOTS, CAPACITY, VOCABULARY, "toy")
    stage = fresh(role)
    assert stage.epoch is None
    assert stage.handle(RollCall("r", 4, (), (before,)), 0.0) == [
        Send(RollCall("r", 4, (), (before, me)))
    ]
    assert stage.epoch == 4


@pytest.mark.parametrize(
    "frame",
    [run(3, segment(1)), replace(copy(1, (1,)), seq=3), Free("r", 1, 3, 0)],
    ids=["run", "copy", "free"],
)
def test_no_work_before_a_roll_call(frame: Run | Copy | Free) -> None:
    """CASES 28: a restarted stage says so instead of computing on empty rows."""
    stage = fresh()
    (action,) = stage.handle(frame, 0.0)
    assert isinstance(action, Send)
    reject = action.frame
    assert isinstance(reject, Reject)
    assert (reject.epoch, reject.seq, reject.code) == (1, 3, Refusal.EPOCH)
    assert reject.detail == "this stage is in epoch None, the frame in 1"


def test_a_newer_epoch_without_its_roll_call_is_refused() -> None:
    stage = ready(epoch=1)
    detail = "this stage is in epoch 1, the frame in 2"
    expected = refusal(3, Refusal.EPOCH, detail, turn=None, slot=None, epoch=2)
    assert stage.handle(run(3, segment(1), epoch=2), 0.0) == [expected]
    assert stage.epoch == 1


@pytest.mark.parametrize(
    "frame",
    [run(3, segment(1)), replace(copy(1, (1,)), seq=3), Free("r", 1, 3, 0)],
    ids=["run", "copy", "free"],
)
def test_work_of_an_older_epoch_is_dropped(frame: Frame) -> None:
    """CASES 31: the coordinator voided it; nobody waits for an answer."""
    stage = wrote(ready(), 1, 2)
    stage.handle(RollCall("r", 2), 0.0)
    assert stage.handle(frame, 0.0) == []
    assert stage.dropped == 1
    assert stage.slots.length(0) == 2


def test_an_older_roll_call_is_told_where_the_stage_is() -> None:
    stage = ready(epoch=9)
    detail = "this stage is in epoch 9, the roll call in 8"
    expected = refusal(0, Refusal.EPOCH, detail, turn=None, slot=None, epoch=9)
    assert stage.handle(RollCall("r", 8), 0.0) == [expected]
    assert stage.epoch == 9


def test_a_roll_call_keeps_the_rows() -> None:
    stage = wrote(ready(), 1, 2)
    stage.handle(RollCall("r", 2), 0.0)
    more = run(1, segment(3, after=(1, 2)), epoch=2)
    assert stage.handle(more, 0.0) == [Forward(more, None)]


# ---- what is run ---------------------------------------------------------------------------------


def test_the_head_runs_tokens_and_passes_activations_on() -> None:
    stage = ready("head")
    frame = run(1, segment(1, 2, want=1))
    assert stage.handle(frame, 0.0) == [Forward(frame, None)]
    expected = replace(frame, payload=rows(2), timings=NO_TIME)
    assert stage.handle(done(1, rows(2)), 0.0) == [Send(expected)]


def test_the_middle_runs_activations() -> None:
    stage = ready("middle")
    frame = replace(run(1, segment(1, 2), payload=rows(2)), timings=(Timing("s0", 3, 4),))
    assert stage.handle(frame, 0.0) == [Forward(frame, None)]
    out = Tensor("uint8", (2, 2), b"abcd")
    expected = replace(frame, payload=out, timings=(Timing("s0", 3, 4), *NO_TIME))
    assert stage.handle(done(1, out), 0.0) == [Send(expected)]


@pytest.mark.parametrize("role", ["tail", "solo"])
def test_the_tail_answers_with_a_verdict(role: str) -> None:
    stage = ready(role)
    frame = run(1, segment(1, 2, want=1), payload=rows(2) if role == "tail" else None)
    assert stage.handle(frame, 0.0) == [Forward(frame, None)]
    result = Result(1, 0, 1, (33,))
    assert stage.handle(done(1, None, result), 0.0) == [
        Send(Verdict("r", 1, 1, (result,), NO_TIME))
    ]


def test_timings_are_waiting_and_computing_in_microseconds() -> None:
    stage = ready("tail")
    stage.handle(run(1, segment(1), payload=rows(1)), 10.0)
    stage.handle(run(2, segment(2, slot=1, turn=2), payload=rows(1)), 10.25)
    first, started = stage.handle(done(1), 10.5)
    assert first == Send(Verdict("r", 1, 1, (), (Timing("me", 0, 500_000),)))
    assert isinstance(started, Forward)
    assert started.run.seq == 2
    assert stage.handle(done(2), 10.625) == [
        Send(Verdict("r", 1, 2, (), (Timing("me", 250_000, 125_000),)))
    ]


def test_frames_wait_behind_a_forward_in_order() -> None:
    stage = ready()
    first, third = run(1, segment(1)), run(3, segment(2, after=(1,)))
    assert stage.handle(first, 0.0) == [Forward(first, None)]
    for frame in (Ping("r", 1, 2), third, Free("r", 1, 4, 0), RollCall("r", 2)):
        assert stage.handle(frame, 0.0) == []
        stage.check()
    after_first = stage.handle(done(1, rows(1)), 0.0)
    assert [type(a) for a in after_first] == [Send, Send, Forward]
    assert after_first[1:] == [Send(Ping("r", 1, 2)), Forward(third, None)]
    after_third = [a.frame for a in stage.handle(done(3, rows(1)), 0.0) if isinstance(a, Send)]
    assert [type(frame) for frame in after_third] == [Run, Free, RollCall]
    assert (stage.epoch, stage.slots.length(0)) == (2, 0)


def test_a_copy_waits_for_the_rows_it_copies() -> None:
    stage = ready()
    stage.handle(run(1, segment(1, 2)), 0.0)
    fork = copy(2, (1, 2))
    assert stage.handle(fork, 0.0) == []
    assert stage.handle(done(1, rows(2)), 0.0)[1:] == [
        CopyRows(0, 1, 2),
        Send(replace(fork, done=("me",))),
    ]


def test_an_answer_to_another_frame_is_our_own_fault() -> None:
    stage = ready()
    with pytest.raises(AssertionError):
        stage.handle(done(1), 0.0)
    stage.handle(run(1, segment(1)), 0.0)
    with pytest.raises(AssertionError):
        stage.handle(done(2), 0.0)


def test_a_full_waiting_line_is_a_lost_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_module, "MAX_WAITING", 2)
    stage = ready()
    stage.handle(run(1, segment(1)), 0.0)
    assert stage.handle(Ping("r", 1, 2), 0.0) + stage.handle(Ping("r", 1, 3), 0.0) == []
    expected = refusal(0, Refusal.LINK, "more than 2 frames wait", turn=None, slot=None)
    assert stage.handle(Ping("r", 1, 4), 0.0) == [expected]
    assert stage.handle(done(1, rows(1)), 0.0)[1:] == [Send(Ping("r", 1, 2)), Send(Ping("r", 1, 3))]


# ---- what rows a slot holds ----------------------------------------------------------------------


def test_the_chain_covers_only_finished_rows() -> None:
    stage = ready()
    stage.handle(run(1, segment(1, 2)), 0.0)
    assert stage.slots.length(0) == 0
    stage.handle(done(1, rows(2)), 0.0)
    assert stage.slots.length(0) == 2
    stage.handle(run(2, segment(3, 4, after=(1, 2))), 0.0)
    assert stage.slots.length(0) == 2


@pytest.mark.parametrize("start", [0, 1, 3])
def test_writing_at_start_truncates_there(start: int) -> None:
    """CASES 10: rejected drafts need no message of their own."""
    stage, old = wrote(ready(), 1, 2, 3, 4), (1, 2, 3, 4)
    stage.handle(run(1, segment(9, after=old[:start])), 0.0)
    assert stage.slots.length(0) == start, "the rows behind are being overwritten"
    stage.handle(done(1, rows(1)), 0.0)
    assert stage.slots.length(0) == start + 1
    code = refusal(2, Refusal.CONTENT, f"slot 0 holds another text in rows [0, {start + 1})")
    assert stage.handle(run(2, segment(5, after=old[: start + 1])), 0.0) == [code, nothing(2)]


def test_a_gap_is_refused() -> None:
    stage = wrote(ready(), 1, 2)
    expected = refusal(1, Refusal.GAP, "slot 0 holds 2 rows, the frame names 3")
    assert stage.handle(run(1, segment(9, after=(1, 2, 3))), 0.0) == [expected, nothing(1)]
    assert stage.slots.length(0) == 2, "a refused segment changes nothing"


def test_foreign_content_is_refused() -> None:
    """CASES 5, 8: one differing token anywhere before start is enough."""
    stage = wrote(ready(), 1, 2, 3)
    for other in ((9, 2, 3), (1, 9, 3), (1, 2, 9)):
        expected = refusal(1, Refusal.CONTENT, "slot 0 holds another text in rows [0, 3)")
        assert stage.handle(run(1, segment(4, after=other)), 0.0) == [expected, nothing(1)]
    assert stage.slots.length(0) == 3


def test_repetitive_text_is_refused_at_the_wrong_length() -> None:
    """CASES 11: tokens that look alike do not hide an off-by-one."""
    stage = wrote(ready(), 5, 5, 5)
    code = stage.handle(run(1, segment(5, after=(5,) * 4)), 0.0)[0]
    assert code == refusal(1, Refusal.GAP, "slot 0 holds 3 rows, the frame names 4")
    wrong = replace(segment(5, after=(5, 5)), start=3)
    code = stage.handle(run(2, wrong), 0.0)[0]
    assert code == refusal(2, Refusal.CONTENT, "slot 0 holds another text in rows [0, 3)")


def test_another_salt_or_model_is_refused_at_start_0() -> None:
    """CASES 6, 19: the root is of the model's fingerprint and the salt."""
    stage = ready()
    expected = refusal(1, Refusal.CONTENT, "the root is of another model or salt")
    for parent in (root_hash(b"model-2", b""), root_hash(PRINT, b"tenant")):
        wrong = replace(segment(1), parent_hash=parent)
        assert stage.handle(run(1, wrong), 0.0) == [expected, nothing(1)]
    salted = run(2, segment(1, salt=b"tenant"))
    assert stage.handle(salted, 0.0) == [Forward(salted, None)]


def test_rows_of_one_salt_are_no_prefix_for_another() -> None:
    """CASES 19, 20."""
    stage = ready()
    stage.handle(run(1, segment(1, 2, salt=b"org_1")), 0.0)
    stage.handle(done(1, rows(2)), 0.0)
    expected = refusal(2, Refusal.CONTENT, "slot 0 holds another text in rows [0, 2)")
    for salt in (b"", b"org_12"):
        foreign = run(2, segment(3, after=(1, 2), salt=salt))
        assert stage.handle(foreign, 0.0) == [expected, nothing(2)]


@pytest.mark.parametrize(
    ("bad", "detail"),
    [
        (replace(segment(1), slot=SLOTS), "slot 3 of 3"),
        (segment(*range(17)), "rows up to 17, capacity 16"),
        (replace(segment(1, 2), start=15), "rows up to 17, capacity 16"),
        (segment(1, VOCABULARY), "token 50, vocabulary 50"),
        (segment(1, 2, want=3), "3 verdicts for 2 tokens"),
    ],
    ids=["slot", "capacity", "end", "token", "want"],
)
def test_out_of_range_is_refused(bad: Segment, detail: str) -> None:
    """CASES 33: no row at or past the capacity is ever written."""
    stage = ready()
    expected = refusal(1, Refusal.RANGE, detail, slot=bad.slot)
    assert stage.handle(run(1, bad), 0.0) == [expected, nothing(1)]
    stage.check()


def test_the_last_row_token_and_slot_are_in_range() -> None:
    stage = ready()
    frame = run(1, segment(*(VOCABULARY - 1,) * CAPACITY, slot=SLOTS - 1, want=CAPACITY))
    assert stage.handle(frame, 0.0) == [Forward(frame, None)]


# ---- mixed frames --------------------------------------------------------------------------------


def test_the_rest_of_a_frame_runs_without_a_refused_segment() -> None:
    stage = ready("middle")
    good = segment(1, 2, slot=0, turn=1), segment(6, slot=2, turn=3)
    bad = segment(9, 9, 9, after=(1,), slot=1, turn=2)
    frame = run(1, good[0], bad, good[1], payload=rows(6))
    assert stage.handle(frame, 0.0) == [
        refusal(1, Refusal.GAP, "slot 1 holds 0 rows, the frame names 1", 2, 1),
        Forward(replace(frame, segments=good), ((0, 2), (5, 6))),
    ]
    stage.check()
    expected = replace(frame, segments=good, payload=rows(3), timings=NO_TIME)
    assert stage.handle(done(1, rows(3)), 0.0) == [Send(expected)]


def test_a_slot_twice_in_one_frame_is_refused_the_second_time() -> None:
    stage = ready("middle")
    first, second = segment(1, 2), segment(3, after=())
    frame = run(1, first, replace(second, turn=2), payload=rows(3))
    assert stage.handle(frame, 0.0) == [
        refusal(1, Refusal.RANGE, "slot 0 twice in one frame", 2, 0),
        Forward(replace(frame, segments=(first,)), ((0, 2),)),
    ]


@pytest.mark.parametrize(
    ("role", "payload", "detail"),
    [
        ("head", rows(2), "activations on the head's link"),
        ("middle", None, "no activations"),
        ("tail", rows(3), "activations of shape (3, 2) for 2 tokens"),
        ("tail", Tensor("uint8", (), b"x"), "activations of shape () for 2 tokens"),
    ],
)
def test_wrong_activations_refuse_the_whole_frame(
    role: str, payload: Tensor | None, detail: str
) -> None:
    stage = ready(role)
    reject, passed = stage.handle(run(1, segment(1, 2), payload=payload), 0.0)
    assert reject == refusal(1, Refusal.RANGE, detail, turn=None, slot=None)
    verdict = Send(Verdict("r", 1, 1, (), NO_TIME))
    assert passed == (verdict if role == "tail" else nothing(1))
    assert stage.slots.length(0) == 0


def test_refused_segments_still_count_in_the_activations() -> None:
    """The sender made rows for all segments it named, refused here or not."""
    stage = ready("tail")
    frame = run(1, segment(1), segment(2, 2, after=(8,), slot=1, turn=2), payload=rows(3))
    rejected, forward = stage.handle(frame, 0.0)
    assert rejected == refusal(1, Refusal.GAP, "slot 1 holds 0 rows, the frame names 1", 2, 1)
    assert forward == Forward(replace(frame, segments=frame.segments[:1]), ((0, 1),))


@pytest.mark.parametrize("role", ["head", "middle", "tail"])
def test_an_empty_frame_goes_on(role: str) -> None:
    """What an earlier stage refused whole still gets its one verdict."""
    answer = Verdict("r", 1, 1, (), NO_TIME) if role == "tail" else nothing(1).frame
    assert ready(role).handle(run(1), 0.0) == [Send(answer)]


# ---- what passes through ------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_pings_and_refusals_pass_through(epoch: int) -> None:
    reject = Reject("r", epoch, 3, "s0", Refusal.GAP, "why", 1, 0)
    for stage in (fresh(), ready("middle"), ready("tail")):
        for frame in (Ping("r", epoch, 3), reject):
            assert stage.handle(frame, 0.0) == [Send(frame)]


@pytest.mark.parametrize("stage", [fresh(), ready(epoch=6)])
def test_a_link_gap_is_told_at_once(stage: Stage) -> None:
    expected = refusal(
        0, Refusal.LINK, "r/s0: frame 9, not 4", turn=None, slot=None, epoch=stage.epoch or 0
    )
    if stage.epoch:
        stage.handle(run(1, segment(1), epoch=6), 0.0)  # even while a forward runs
    assert stage.handle(LinkGap("r/s0", 4, 9), 0.0) == [expected]


@pytest.mark.parametrize(
    "frame",
    [
        replace(run(1, segment(1)), ring="q"),
        RollCall("q", 5),
        Ping("q", 1, 1),
        Verdict("r", 1, 1, (), ()),
        Heartbeat("r", "s0", 1, StageState.READY, 1.0, "", 1, 1),
        Tick(),
    ],
    ids=lambda frame: type(frame).__name__,
)
def test_frames_of_others_are_dropped_and_counted(frame: Frame) -> None:
    stage = ready()
    assert stage.handle(frame, 0.0) == []
    assert (stage.dropped, stage.epoch, stage.deadline()) == (1, 1, None)

"""Frames made to do harm: 20,000 seeded ones against decoder and cores, and what they found."""

from __future__ import annotations

import io
import struct
import sys
import tracemalloc
import zlib
from dataclasses import replace

import msgpack
import pytest

from bench.fuzz.campaign import FuzzFailure, run
from bench.fuzz.mutate import WAYS
from coord.ring import Phase
from coord.view import link_counters
from pipeline.model import ToyModel
from pipeline.stage import Forward, Send, Stage
from tests.desk import Desk, runs
from transport.bounds import overdrawn
from transport.chain import root_hash
from transport.codec import MAX_EPOCH, MAX_ROWS, MAX_SLOTS, MAX_STAGES, decode, encode
from transport.frame import (
    Buffer,
    Envelope,
    Forwarded,
    Frame,
    FrameError,
    Kind,
    Ping,
    Reject,
    Result,
    RollCall,
    Run,
    Sampling,
    Segment,
    Submit,
    Tensor,
    Tick,
    Timing,
    Verdict,
)
from transport.framelog import MAGIC, VERSION, FrameLogError, FrameLogReader
from transport.numbering import Inbox

SELF = Envelope("x", 7, 0)


# ---- the campaign --------------------------------------------------------------------------------


def test_twenty_thousand_hostile_frames() -> None:
    """The million is `python -m bench.fuzz frames`; docs/fuzzing.md has its figures."""
    report = run(20_000, seed=20)
    assert report.total == 20_000
    assert set(report.sent) == {name for name, _ in WAYS} | {"valid"}
    assert report.refused["valid"] == 0
    assert 0.5 < sum(report.refused.values()) / report.total < 0.9
    assert report.counts["rows proved and computed"] > 1000
    assert report.counts["turns finished"] > 100
    assert report.counts["inbox: local"] > 100
    assert report.measured > 100


def test_the_campaign_notices_what_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that believes every prefix is caught within a world or two."""
    monkeypatch.setattr("pipeline.slots.SlotTable._holds", lambda *_: None)
    with pytest.raises(FuzzFailure, match=r"world 3:\d+, message \d+"):
        run(8000, seed=3)


# ---- the decoder ---------------------------------------------------------------------------------


def refused(header: bytes) -> tuple[str, int]:
    """Why, and how many bytes were allocated at most."""
    tracemalloc.start()
    try:
        decode([header])
    except FrameError as error:
        return str(error), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    pytest.fail("it was taken for a frame")


@pytest.mark.parametrize("opening", [b"\xdc\xff\xff", b"\xdd\x00\x01\x00\x00", b"\xdc\x40\x00"])
def test_nested_lists_that_declare_more_than_follows(opening: bytes) -> None:
    """A thousand open lists of 65,536 items were 512 MiB for a header of 66 KB."""
    for count in (1000, 30_000):
        why, peak = refused(opening * count)
        assert "declares more" in why
        assert peak < 1 << 20, peak


def test_lists_in_lists_are_shown_by_their_length() -> None:
    """Quoting one in an error recursed as deep as the peer liked: a RecursionError escaped."""
    ping = encode(Ping("r", 1, 2), SELF)[0]
    assert isinstance(ping, bytes)
    deep = b"\x91" * 900 + b"\x00"
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    try:
        for at in (ping.index(b"\x01\xa1x"), ping.index(b"\xa4Ping"), len(ping) - 1):
            why, _ = refused(ping[:at] + deep + ping[at + 1 :])
            assert len(why) < 400
    finally:
        sys.setrecursionlimit(limit)


def test_a_long_list_is_not_quoted() -> None:
    ping = msgpack.packb([1, "x", 7, 0, "Ping", ["r", 1, list(range(50_000))]])
    why, peak = refused(ping)
    assert why.endswith("a list of 50000")
    assert peak < 4 << 20


@pytest.mark.parametrize("size", [0, 1, 15, 16, 1000, 65_536])
def test_an_honest_text_is_not_overdrawn(size: int) -> None:
    """All kinds of values, a lot of bytes that look like markers, and lists of every width."""
    items = [None, True, 1.5, -1, 200, 70_000, 2**40, -(2**40), "é" * 40, b"\xdd" * 300, [[1]], ""]
    text = msgpack.packb([b"\xdc" * 2000, [items[i % len(items)] for i in range(size)], [1, [2]]])
    assert not overdrawn(text, MAX_ROWS)
    assert overdrawn(text[:2] + b"\xdd\xff\xff\xff\xff" + text[2:], MAX_ROWS) or size < 1000


def test_an_epoch_past_all_others_is_no_frame() -> None:
    """A stage that was told 2^63 - 1 could never be asked again."""
    for frame in (RollCall("r", MAX_EPOCH, ()), Ping("r", MAX_EPOCH, 1)):
        assert decode(encode(frame, SELF))[0] == frame
        with pytest.raises(FrameError, match="epoch"):
            decode(encode(replace(frame, epoch=MAX_EPOCH + 1), SELF))


# ---- links ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frame",
    [Submit(1, (1,), 1), Tick(), Forwarded(1, 1, None)],
    ids=lambda each: type(each).__name__,
)
def test_a_local_input_off_the_wire_is_dropped(frame: Frame) -> None:
    """A Forwarded ended the stage by an assertion, a second Submit of a turn the coordinator."""
    told: list[str] = []
    inbox = Inbox("r", told.append)
    parts: list[Buffer] = encode(frame, SELF)
    assert inbox.take(parts) == []
    assert (inbox.counts.local, inbox.counts.frames) == (1, 0)
    assert f"a {type(frame).__name__}, which crosses no link" in told[0]


def test_a_flood_is_counted_and_told_of_now_and_then() -> None:
    told: list[str] = []
    inbox = Inbox("r", told.append)
    for _ in range(1000):
        inbox.take([b"\xc1"])
    assert inbox.counts.undecodable == inbox.counts.dropped == 1000
    assert len(told) == 10
    assert told[-1].endswith("(512 dropped so far)")


def test_what_links_drop_is_counted_by_reason() -> None:
    first, second = Inbox("r0", None), Inbox("r1", None)
    first.take([b"\xc1"])
    first.take(encode(Tick(), SELF))
    for life, number in ((1, 0), (1, 0), (2, 3), (1, 1)):
        second.take(encode(Ping("r", 1, 1), Envelope("a", life, number)))
    assert link_counters([first.counts, second.counts]) == {
        'frames_dropped_total{reason="undecodable"}': 1,
        'frames_dropped_total{reason="local"}': 1,
        'frames_dropped_total{reason="duplicate"}': 1,
        'frames_dropped_total{reason="stale"}': 1,
        "frames_lost_total": 3,
    }


def test_a_frame_log_whose_header_declares_nested_lists() -> None:
    """Its check sum is right: whoever wrote it meant it. 1,024 lists of two million items each."""
    packed = (b"\xdd" + (2_000_000).to_bytes(4, "big")) * 400_000
    start = MAGIC + struct.pack("<II", VERSION, len(packed))
    check = zlib.crc32(packed, zlib.crc32(start))
    tracemalloc.start()
    try:
        with pytest.raises(FrameLogError):
            FrameLogReader(io.BytesIO(start + struct.pack("<I", check) + packed))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


# ---- a stage -------------------------------------------------------------------------------------


def tail() -> tuple[Stage, bytes]:
    model = ToyModel((2, 4), 4, slots=2, capacity=32, vocabulary=64)
    stage = Stage("r", "s1", 1, model.info)
    stage.handle(RollCall("r", 1), 0.0)
    return stage, root_hash(model.info.fingerprint, b"")


@pytest.mark.parametrize(
    "payload",
    [
        Tensor("uint8", (2, 3), bytes(6)),
        Tensor("uint8", (2, 0), b""),
        Tensor("uint8", (2,), bytes(2)),
        Tensor("float32", (2, 8), bytes(64)),
        Tensor("uint8", (2, 2, 8), bytes(32)),
    ],
    ids=lambda payload: f"{payload.dtype} {list(payload.shape)}",
)
def test_activations_of_another_model_are_refused(payload: Tensor) -> None:
    """A real block asserted on them: one frame ended the stage."""
    stage, root = tail()
    segment = Segment(1, 0, 0, (1, 2), Kind.PREFILL, root, 1)
    actions = stage.handle(Run("r", 1, 1, (segment,), payload), 0.0)
    assert not any(isinstance(action, Forward) for action in actions)
    reject = actions[0]
    assert isinstance(reject, Send)
    assert isinstance(reject.frame, Reject)
    assert reject.frame.detail.startswith("activations")
    stage.check()


def test_a_frame_that_has_met_all_the_stages_there_can_be_is_dropped() -> None:
    """With one mark more nobody could decode it."""
    stage, _ = tail()
    marks = (Timing("s", 1, 1),) * MAX_STAGES
    assert stage.handle(Run("r", 1, 1, (), None, marks), 0.0) == []
    assert stage.dropped == 1


# ---- the scheduler -------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [0, MAX_SLOTS + 1, 2**31 - 1])
def test_stages_with_absurd_slots_are_no_ring(slots: int) -> None:
    """2^31 - 1 would be a ledger of 100 GB, and 0 left the self-check without a slot."""
    desk = Desk()
    desk.beats()
    assert desk.answer([replace(each, slots=slots) for each in desk.entries()]) == []
    assert desk.ring.phase is Phase.WAITING
    assert f"says that it has {slots} slots" in desk.ring.detail


@pytest.mark.parametrize(
    "forge",
    [
        lambda result: replace(result, tokens=(64,)),
        lambda result: replace(result, tokens=(2**32 - 1,)),
        lambda result: replace(result, logprobs=()),
        lambda result: replace(result, logprobs=(-1.0, -2.0)),
        lambda result: replace(result, top=((), ())),
    ],
)
def test_a_result_that_cannot_be_is_no_answer(forge: object) -> None:
    """A token that no vocabulary has went to the client; missing scores ended its request."""
    assert callable(forge)
    desk = Desk().form()
    (sent,) = runs(desk.submit(1, (1, 2), sampling=Sampling(logprobs=0)))
    slot = sent.segments[0].slot
    honest = Result(1, slot, 1, (21,), (-0.5,))
    actions = desk.tell(Verdict("r", 1, sent.seq, (forge(honest),), ()))
    (again,) = runs(actions)
    assert again.segments[0].start == 0
    assert desk.tell(Verdict("r", 1, again.seq, (honest,), ())) != []


def test_a_cost_next_to_nothing_is_no_infinite_window() -> None:
    """Thousands of verdicts that took no time: link time over cost is past every float."""
    desk = Desk().form()
    desk.ring.frame_s, desk.ring.link_s = 5e-324, 1.0
    assert desk.ring.pipe == len(desk.ring.spec.stages) + 32
    assert runs(desk.submit(1, (1, 2)))

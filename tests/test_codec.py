"""The codec: every frame survives the wire, and nothing malformed gets past decode()."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import FRAMES, envelopes, frames, records
from transport import codec
from transport.codec import decode, decode_header, encode
from transport.frame import (
    GREEDY,
    Claim,
    Envelope,
    Forwarded,
    Frame,
    FrameError,
    Heartbeat,
    Kind,
    Measure,
    Refusal,
    Reject,
    Remembered,
    Result,
    RollCall,
    Run,
    Sampling,
    Segment,
    StageEntry,
    StageState,
    Submit,
    Tensor,
    Timing,
    Verdict,
)

SELF = Envelope("s0", 77, 5)
SEGMENT = Segment(
    5, 1, 100, (11, 12), Kind.VERIFY, bytes(16), 2, Sampling(0.7, 40, 0.9, 0.1, 3, 2), b"salt"
)
RUN = Run("ring0", 3, 17, (SEGMENT,), Tensor("float32", (2, 3), bytes(24)), (Timing("s0", 1, 2),))
VERDICT = Verdict(
    "ring0", 3, 17, (Result(5, 1, 100, (7,), (-0.5,), (((7, -0.5), (9, -1.5)),)),), ()
)
ENTRY = StageEntry("s0", 9, (0, 10), 30, b"fingerprint", 4, 512, 256, "packed", 1, 2)
SAMPLES: list[Frame] = [
    RUN,
    VERDICT,
    RollCall("ring0", 4, (Claim(1000, 12, b"h" * 16),), (ENTRY,)),
    Reject("ring0", 3, 17, "s1", Refusal.GAP, "why", 5, 1),
    Heartbeat("ring0", "s0", 9, StageState.LOADING, 0.5, "layer 3", 4242, 1 << 30),
    Submit(5, (1, 2, 3), 10, (0,), GREEDY, b"salt", True, "session", 2.5),
    Remembered("ring0", 3, b"print", b"salt", (1, 2), "session", True, 1.5, 60.0),
]


def message(body: Any, kind: str = "Ping", head: tuple[Any, ...] = (1, "s0", 77, 5)) -> list[bytes]:
    return [msgpack.packb([*head, kind, body])]


def plain(frame: Frame) -> list[Any]:
    unpacked: list[Any] = msgpack.unpackb(encode(frame, SELF)[0])
    return unpacked


# ---- everything legal survives -------------------------------------------------------------------


@pytest.mark.parametrize("cls", FRAMES, ids=lambda cls: cls.__name__)
def test_every_class_round_trips(cls: type) -> None:
    @settings(max_examples=60, deadline=None)
    @given(records(cls), envelopes)
    def check(frame: Frame, envelope: Envelope) -> None:
        parts = encode(frame, envelope)
        assert len(parts[0]) > 0
        again = decode(parts)
        assert again == (frame, envelope)
        assert type(again[0]) is cls
        assert repr(again[0]) == repr(frame)  # types too: no str for an enum, no list for a tuple

    check()


@given(frames)
@settings(max_examples=100, deadline=None)
def test_header_alone_gives_the_frame_without_its_bytes(frame: Frame) -> None:
    again, envelope = decode_header(encode(frame, SELF)[0])
    assert envelope == SELF
    payload = getattr(frame, "payload", None)
    if payload is None:
        assert again == frame
    else:
        assert isinstance(again, Run | Forwarded | Measure)
        assert again.payload == Tensor(payload.dtype, payload.shape, b"")


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview])
def test_parts_may_be_any_buffer(form: type) -> None:
    assert decode([form(part) for part in encode(RUN, SELF)]) == (RUN, SELF)


def test_greedy_costs_one_byte_and_stays_one_object() -> None:
    frame = Submit(1, (), 1)
    assert plain(frame)[5][4] is None
    again = decode(encode(frame, SELF))[0]
    assert isinstance(again, Submit)
    assert again.sampling is GREEDY


def test_a_tensor_of_two_dimensions_leaves_flat() -> None:
    """Sockets take the length of a view's first dimension for its length."""
    view: Any = memoryview(bytes(24)).cast("f", (2, 3))
    parts = encode(Forwarded(1, 2, Tensor("float32", (2, 3), view)), SELF)
    assert isinstance(parts[1], memoryview)
    assert (parts[1].ndim, len(parts[1])) == (1, 24)


def test_a_tensor_of_the_wrong_length_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        encode(Forwarded(1, 2, Tensor("float32", (2, 3), bytes(23))), SELF)


# ---- nothing else does ---------------------------------------------------------------------------

BAD_MESSAGES: dict[str, list[bytes]] = {
    "no parts": [],
    "empty header": [b""],
    "three parts": [*message(["ring0", 1, 2]), b"", b""],
    "not msgpack": [b"\xc1"],
    "trailing bytes": [message([], "Tick")[0] + b"\x00"],
    "a number": [b"\x01"],
    "a short list": [msgpack.packb([1, "s0", 77, 5, "Tick"])],
    "a long list": [msgpack.packb([1, "s0", 77, 5, "Tick", [], 0])],
    "a map": [msgpack.packb({1: 2})],
    "an extension": message(msgpack.ExtType(1, b"x")),
    "a timestamp": message(msgpack.Timestamp(1)),
    "another protocol": message([], "Tick", (2, "s0", 77, 5)),
    "protocol true": message([], "Tick", (True, "s0", 77, 5)),
    "sender a number": message([], "Tick", (1, 0, 77, 5)),
    "sender too long": message([], "Tick", (1, "s" * 129, 77, 5)),
    "incarnation negative": message([], "Tick", (1, "s0", -1, 5)),
    "incarnation 2**63": message([], "Tick", (1, "s0", 2**63, 5)),
    "number a float": message([], "Tick", (1, "s0", 77, 5.0)),
    "number true": message([], "Tick", (1, "s0", 77, True)),
    "unknown kind": message([], "Shutdown"),
    "a kind that is a record": message(["s0", 1, 2], "Timing"),
    "kind a list": message([], [1]),  # type: ignore[arg-type]
    "fields nil": message(None),
    "too few fields": message(["ring0", 1]),
    "too many fields": message(["ring0", 1, 2, 3]),
    "a buffer nobody names": [*message(["ring0", 1, 2]), b"payload"],
    "surrogate text": [message(["ring0", 1, 2])[0].replace(b"ring0", b"ri\xed\xa0\x80")],
    "deep nesting": [b"\x91" * 100_000 + b"\x00"],
    "declared array of 4 G": [b"\xdd\xff\xff\xff\xff"],
    "declared string of 4 G": [b"\xdb\xff\xff\xff\xff"],
    "declared bytes of 4 G": [b"\xc6\xff\xff\xff\xff"],
    "declared map of 4 G": [b"\xdf\xff\xff\xff\xff"],
}


@pytest.mark.parametrize("parts", BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_malformed_message(parts: list[bytes]) -> None:
    with pytest.raises(FrameError):
        decode(parts)


def test_oversize_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = encode(RUN, SELF)
    monkeypatch.setattr(codec, "MAX_HEADER_BYTES", len(parts[0]) - 1)
    with pytest.raises(FrameError, match="header of"):
        decode(parts)
    monkeypatch.undo()
    monkeypatch.setattr(codec, "MAX_PAYLOAD_BYTES", 23)
    with pytest.raises(FrameError, match="payload of"):
        decode(parts)


def test_declared_lengths_allocate_nothing_much() -> None:
    """1,024 nested lists that each declare 64 Ki items, as a 5 KB header."""
    header = b"\xdd\x00\x01\x00\x00" * 1000
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            decode([header])
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


BAD_TENSORS: dict[str, tuple[Any, list[bytes]]] = {
    "one byte short": (["float32", [2, 3]], [bytes(23)]),
    "one byte more": (["float32", [2, 3]], [bytes(25)]),
    "bytes of another dtype": (["bfloat16", [2, 3]], [bytes(24)]),
    "missing buffer": (["float32", [2, 3]], []),
    "missing buffer of no bytes": (["float32", [0]], []),
    "two buffers": (["float32", [2, 3]], [bytes(24), b""]),
    "buffer without a tensor": (None, [bytes(24)]),
    "unknown dtype": (["float64", [3]], [bytes(24)]),
    "dtype a list": ([["float32"], [2, 3]], [bytes(24)]),
    "negative extents": (["float32", [-2, -3]], [bytes(24)]),
    "extent a float": (["float32", [2.0, 3]], [bytes(24)]),
    "extent true": (["float32", [True, 6]], [bytes(24)]),
    "extent too large": (["float32", [0, 2**31]], [b""]),
    "product overflows": (["float32", [2**31 - 1] * 4], [bytes(24)]),
    "five dimensions": (["float32", [1, 1, 1, 2, 3]], [bytes(24)]),
    "shape a number": (["float32", 6], [bytes(24)]),
    "three items": (["float32", [2, 3], 0], [bytes(24)]),
    "no list": ("float32", [bytes(24)]),
}


@pytest.mark.parametrize(("tensor", "buffers"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_malformed_tensor(tensor: Any, buffers: list[bytes]) -> None:
    body = plain(RUN)
    body[5][4] = tensor
    with pytest.raises(FrameError):
        decode([msgpack.packb(body), *buffers])


def places(value: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    yield path
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from places(item, (*path, i))


def replaced(value: Any, path: tuple[int, ...], new: Any) -> Any:
    if not path:
        return new
    copy = list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


def canonical(parts: list[Any]) -> None:
    """Either FrameError, or a frame that encodes to a message which decodes to the same."""
    try:
        frame, envelope = decode(parts)
    except FrameError:
        return
    assert decode(encode(frame, envelope)) == (frame, envelope)


@pytest.mark.parametrize("frame", SAMPLES, ids=lambda frame: type(frame).__name__)
def test_no_value_of_a_foreign_type_passes(frame: Frame) -> None:
    """Each place of each message in turn holds each foreign type; only nil has optional homes."""
    header = plain(frame)
    buffers = encode(frame, SELF)[1:]
    foreign = [{}, True, 1.5, -1, 2**64 - 1, "text", b"bytes", [], ["x"], math.nan, math.inf]
    for path in places(header):
        old: Any = header
        for step in path:
            old = old[step]
        for new in foreign:
            parts = [msgpack.packb(replaced(header, path, new)), *buffers]
            if type(new) is type(old) or old is None:
                canonical(parts)
            else:
                with pytest.raises(FrameError):
                    decode(parts)
        canonical([msgpack.packb(replaced(header, path, None)), *buffers])


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -0.1, 1.1])
def test_reals_outside_their_range(number: float) -> None:
    for frame, path in [
        (SAMPLES[4], (5, 4)),  # progress
        (RUN, (5, 3, 0, 7, 2)),  # top_p
        (RUN, (5, 3, 0, 7, 3)),  # min_p
    ]:
        header = replaced(plain(frame), path, number)
        with pytest.raises(FrameError, match=r"progress|top_p|min_p"):
            decode([msgpack.packb(header), *encode(frame, SELF)[1:]])


@pytest.mark.parametrize("number", [math.nan, math.inf, 0.1])
def test_log_probabilities_are_at_most_zero(number: float) -> None:
    for path in [(5, 3, 0, 4, 0), (5, 3, 0, 5, 0, 0, 1)]:
        with pytest.raises(FrameError, match="not a float"):
            decode([msgpack.packb(replaced(plain(VERDICT), path, number))])


def test_list_limits() -> None:
    ping = ["s", 1, 2]
    for body, kind in [
        (["r", 1, 2, [], [ping] * (codec.MAX_STAGES + 1)], "Verdict"),
        (["r", 1, 2, [[1, 1, 1, b"", [], []]] * (codec.MAX_SEGMENTS + 1), []], "Verdict"),
        (["r", 1, 2, [[1, 1, 1, b"", [-1.0] * (codec.MAX_ROWS + 1), []]], []], "Verdict"),
        (["r", 1, 2, [[1, 1, 1, b"", [], [[[1, -1.0]] * (codec.MAX_TOP + 1)]]], []], "Verdict"),
        ([1, bytes(4 * (codec.MAX_TOKENS + 1)), 1, b"", None, b"", True, "", 0.0], "Submit"),
        ([1, b"123", 1, b"", None, b"", True, "", 0.0], "Submit"),
        ([1, "x" * (codec.MAX_TEXT + 1)], "Cancel"),
        (["r", 1, [1] * (codec.MAX_PARKED + 1), []], "RollCall"),
        ([1, b"", 1, b"", None, bytes(65), True, "", 0.0], "Submit"),
    ]:
        with pytest.raises(FrameError):
            decode(message(body, kind))


def test_an_error_names_the_field() -> None:
    body = replaced(plain(RUN), (5, 3, 0, 1), -1)
    with pytest.raises(FrameError, match=r"Run\.segments: Segment\.slot: not an integer in \[0, "):
        decode([msgpack.packb(body), bytes(24)])


@given(st.lists(st.binary(max_size=200), max_size=3))
@settings(max_examples=500, deadline=None)
def test_random_bytes(parts: list[bytes]) -> None:
    canonical(parts)


_plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
    | st.binary(max_size=17),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.integers(0, 9), inner),
    max_leaves=12,
)  # fmt: skip


@given(st.sampled_from([cls.__name__ for cls in FRAMES]), _plain_values)
@settings(max_examples=500, deadline=None)
def test_random_fields(kind: str, body: Any) -> None:
    canonical(message(body, kind))


@given(frames, st.data())
@settings(max_examples=500, deadline=None)
def test_mutated_messages(frame: Frame, data: st.DataObject) -> None:
    header, *buffers = [bytearray(part) for part in encode(frame, SELF)]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(header) - 1))
        match data.draw(st.sampled_from(["set", "delete", "insert", "cut"])):
            case "set":
                header[at] = data.draw(st.integers(0, 255))
            case "delete" if len(header) > 1:
                del header[at]
            case "insert":
                header.insert(at, data.draw(st.integers(0, 255)))
            case "cut" if at:
                del header[at:]
    canonical([header, *buffers])


@given(frames, st.data())
@settings(max_examples=200, deadline=None)
def test_one_place_replaced_by_any_value(frame: Frame, data: st.DataObject) -> None:
    header = plain(frame)
    path = data.draw(st.sampled_from(list(places(header))))
    new = data.draw(_plain_values)
    canonical([msgpack.packb(replaced(header, path, new)), *encode(frame, SELF)[1:]])


def test_every_truncation_is_refused() -> None:
    for frame in SAMPLES:
        header, *buffers = encode(frame, SELF)
        for end in range(len(header)):
            with pytest.raises(FrameError):
                decode([header[:end], *buffers])

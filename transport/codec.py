"""Owns the bytes of a frame: bounded encode and decode for every class of transport.frame.

A message is [msgpack header, buffer...]. The header is
[PROTOCOL, sender, incarnation, number, kind, fields]; a record's fields are a list in the order of
its dataclass; tensors leave [dtype, shape] there and their bytes as a further part. Decoding checks
every type, range and size before it allocates, and raises FrameError for all else. Nothing here
can run code from the wire.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from enum import StrEnum
from typing import Any

import msgpack

from transport.chain import DIGEST_BYTES, TOKEN_BYTES, pack_tokens, unpack_tokens
from transport.frame import (
    GREEDY,
    Buffer,
    Cancel,
    Copy,
    Envelope,
    Forwarded,
    Frame,
    FrameError,
    Free,
    FreeSlot,
    Heartbeat,
    Kind,
    LinkGap,
    Ping,
    Refusal,
    Reject,
    Result,
    RollCall,
    Run,
    Sampling,
    Segment,
    StageEntry,
    StageLost,
    StageState,
    Submit,
    Tensor,
    Tick,
    Timing,
    Verdict,
)

PROTOCOL = 1
MAX_HEADER_BYTES = 16 << 20  # a 1M-token Submit is 4 MiB; a Verdict with 20 logprobs per row fits
MAX_PAYLOAD_BYTES = 1 << 30  # 8,192 rows x 16,384 hidden x 4 bytes is half of it
MAX_PARTS = 2  # the header and at most one tensor
MAX_SEGMENTS = 1024  # turns in one frame
MAX_TOKENS = 1 << 20  # tokens of one segment or prompt
MAX_STAGES = 256  # stages in one ring: timings and roll-call entries
MAX_TOP = 64  # most likely tokens listed per position
MAX_TEXT = 4096  # characters of a detail
MAX_NAME = 128
U31, U63 = 2**31 - 1, 2**63 - 1
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1, "int64": 8}

# One codec is a pair: out(value, parts) -> plain msgpack value; into(plain, parts, where) -> value.
_Out = Callable[[Any, list[Buffer]], Any]
_Into = Callable[[Any, Sequence[Buffer], str], Any]
_Codec = tuple[_Out, _Into]


def _same(value: Any, parts: list[Buffer]) -> Any:
    return value


def _integer(low: int, high: int) -> _Codec:
    def into(plain: Any, parts: Sequence[Buffer], where: str) -> int:
        if type(plain) is not int or not low <= plain <= high:
            raise FrameError(f"{where}: not an integer in [{low}, {high}]: {plain!r:.80}")
        return plain

    return _same, into


def _real(low: float, high: float) -> _Codec:
    def into(plain: Any, parts: Sequence[Buffer], where: str) -> float:
        if type(plain) is not float or not low <= plain <= high:  # NaN fails the comparison
            raise FrameError(f"{where}: not a float in [{low}, {high}]: {plain!r:.80}")
        return plain

    return _same, into


def _text(limit: int) -> _Codec:
    def into(plain: Any, parts: Sequence[Buffer], where: str) -> str:
        if type(plain) is not str or len(plain) > limit:
            raise FrameError(f"{where}: not a string of at most {limit} characters")
        return plain

    return _same, into


def _binary(low: int, high: int) -> _Codec:
    def into(plain: Any, parts: Sequence[Buffer], where: str) -> bytes:
        if type(plain) is not bytes or not low <= len(plain) <= high:
            raise FrameError(f"{where}: not {low} to {high} bytes")
        return plain

    return _same, into


def _flag() -> _Codec:
    def into(plain: Any, parts: Sequence[Buffer], where: str) -> bool:
        if type(plain) is not bool:
            raise FrameError(f"{where}: not a boolean: {plain!r:.80}")
        return plain

    return _same, into


def _choice(enum: type[StrEnum]) -> _Codec:
    table = {member.value: member for member in enum}

    def into(plain: Any, parts: Sequence[Buffer], where: str) -> StrEnum:
        member = table.get(plain) if type(plain) is str else None
        if member is None:
            raise FrameError(f"{where}: not one of {', '.join(table)}: {plain!r:.80}")
        return member

    return (lambda value, parts: value.value), into


def _optional(inner: _Codec) -> _Codec:
    inner_out, inner_into = inner

    def out(value: Any, parts: list[Buffer]) -> Any:
        return None if value is None else inner_out(value, parts)

    def into(plain: Any, parts: Sequence[Buffer], where: str) -> Any:
        return None if plain is None else inner_into(plain, parts, where)

    return out, into


def _default(inner: _Codec, default: Any) -> _Codec:
    """The common value travels as nil: most segments are greedy, and a hop costs less."""
    inner_out, inner_into = inner

    def out(value: Any, parts: list[Buffer]) -> Any:
        return None if value is default else inner_out(value, parts)

    def into(plain: Any, parts: Sequence[Buffer], where: str) -> Any:
        return default if plain is None else inner_into(plain, parts, where)

    return out, into


def _many(inner: _Codec, low: int, high: int) -> _Codec:
    inner_out, inner_into = inner

    def out(value: Any, parts: list[Buffer]) -> list[Any]:
        return [inner_out(item, parts) for item in value]

    def into(plain: Any, parts: Sequence[Buffer], where: str) -> tuple[Any, ...]:
        if type(plain) is not list or not low <= len(plain) <= high:
            raise FrameError(f"{where}: not a list of {low} to {high} items")
        return tuple([inner_into(item, parts, where) for item in plain])

    return out, into


def _tuple(*inner: _Codec) -> _Codec:
    def out(value: Any, parts: list[Buffer]) -> list[Any]:
        return [codec[0](item, parts) for codec, item in zip(inner, value, strict=True)]

    def into(plain: Any, parts: Sequence[Buffer], where: str) -> tuple[Any, ...]:
        if type(plain) is not list or len(plain) != len(inner):
            raise FrameError(f"{where}: not a list of {len(inner)} items")
        return tuple(
            [codec[1](item, parts, where) for codec, item in zip(inner, plain, strict=True)]
        )

    return out, into


def _tokens(low: int) -> _Codec:
    def out(value: tuple[int, ...], parts: list[Buffer]) -> bytes:
        return pack_tokens(value)

    def into(plain: Any, parts: Sequence[Buffer], where: str) -> tuple[int, ...]:
        if type(plain) is not bytes or len(plain) % TOKEN_BYTES:
            raise FrameError(f"{where}: not packed token ids")
        if not low <= len(plain) // TOKEN_BYTES <= MAX_TOKENS:
            raise FrameError(f"{where}: not {low} to {MAX_TOKENS} token ids")
        return unpack_tokens(plain)

    return out, into


def _tensor() -> _Codec:
    def out(value: Tensor, parts: list[Buffer]) -> list[Any]:
        parts.append(value.data)
        return [value.dtype, list(value.shape)]

    def into(plain: Any, parts: Sequence[Buffer], where: str) -> Tensor:
        if type(plain) is not list or len(plain) != 2 or type(plain[1]) is not list:
            raise FrameError(f"{where}: not [dtype, shape]")
        dtype, shape = plain
        item = ITEM_BYTES.get(dtype) if type(dtype) is str else None
        if item is None:
            raise FrameError(f"{where}: unknown dtype {dtype!r:.80}")
        if len(shape) > 4 or any(type(n) is not int or not 0 <= n <= U31 for n in shape):
            raise FrameError(f"{where}: bad shape {shape!r:.80}")
        if len(parts) < 2:
            raise FrameError(f"{where}: its bytes are missing")
        size = memoryview(parts[1]).nbytes
        if size != math.prod(shape) * item:
            raise FrameError(f"{where}: {size} bytes, but {dtype} {shape} needs another length")
        return Tensor(dtype, tuple(shape), parts[1])

    return out, into


def _record(cls: type, *codecs: _Codec) -> _Codec:
    names = [field.name for field in fields(cls)]
    assert len(names) == len(codecs), cls
    outs = list(zip(names, [codec[0] for codec in codecs], strict=True))
    paths = [f"{cls.__name__}.{name}" for name in names]
    intos = list(zip([codec[1] for codec in codecs], paths, strict=True))

    def out(value: Any, parts: list[Buffer]) -> list[Any]:
        return [codec(getattr(value, name), parts) for name, codec in outs]

    def into(plain: Any, parts: Sequence[Buffer], where: str) -> Any:
        if type(plain) is not list or len(plain) != len(intos):
            raise FrameError(f"{where}: {cls.__name__} is not a list of {len(intos)} fields")
        return cls(
            *[
                codec(item, parts, path)
                for item, (codec, path) in zip(plain, intos, strict=True)
            ]
        )

    return out, into


_NAME = _text(MAX_NAME)
_TEXT = _text(MAX_TEXT)
_COUNT = _integer(0, U31)
_SERIAL = _integer(0, U63)
_DIGEST = _binary(DIGEST_BYTES, DIGEST_BYTES)
_SALT = _binary(0, 64)
_INFINITY = math.inf

_SAMPLING = _default(
    _record(
        Sampling,
        _real(0.0, 1e6),
        _COUNT,
        _real(0.0, 1.0),
        _real(0.0, 1.0),
        _SERIAL,
        _optional(_integer(0, MAX_TOP)),
    ),
    GREEDY,
)
_SEGMENT = _record(
    Segment,
    _SERIAL,
    _COUNT,
    _COUNT,
    _tokens(1),
    _choice(Kind),
    _DIGEST,
    _COUNT,
    _SAMPLING,
    _SALT,
)
_TIMINGS = _many(_record(Timing, _NAME, _SERIAL, _SERIAL), 0, MAX_STAGES)
_LOGPROB = _real(-_INFINITY, 0.0)
_TOP = _many(_tuple(_COUNT, _LOGPROB), 0, MAX_TOP)
_RESULT = _record(
    Result,
    _SERIAL,
    _COUNT,
    _COUNT,
    _tokens(0),
    _many(_LOGPROB, 0, MAX_TOKENS),
    _many(_TOP, 0, MAX_TOKENS),
)
_RESULTS = _many(_RESULT, 0, MAX_SEGMENTS)
_ENTRY = _record(
    StageEntry,
    _NAME,
    _SERIAL,
    _tuple(_COUNT, _COUNT),
    _COUNT,
    _binary(1, 64),
    _COUNT,
    _COUNT,
    _COUNT,
    _TEXT,
)

_CODECS: dict[str, tuple[type, _Codec]] = {
    cls.__name__: (cls, _record(cls, *codecs))
    for cls, codecs in {
        Run: (
            _NAME,
            _SERIAL,
            _SERIAL,
            _many(_SEGMENT, 0, MAX_SEGMENTS),
            _optional(_tensor()),
            _TIMINGS,
        ),
        Verdict: (_NAME, _SERIAL, _SERIAL, _RESULTS, _TIMINGS),
        Reject: (
            _NAME,
            _SERIAL,
            _SERIAL,
            _NAME,
            _choice(Refusal),
            _TEXT,
            _optional(_SERIAL),
            _optional(_COUNT),
        ),
        RollCall: (_NAME, _SERIAL, _many(_ENTRY, 0, MAX_STAGES)),
        Copy: (
            _NAME,
            _SERIAL,
            _SERIAL,
            _SERIAL,
            _COUNT,
            _COUNT,
            _integer(1, U31),
            _DIGEST,
            _many(_NAME, 0, MAX_STAGES),
        ),
        Free: (_NAME, _SERIAL, _SERIAL, _COUNT),
        Ping: (_NAME, _SERIAL, _SERIAL),
        Heartbeat: (
            _NAME,
            _NAME,
            _SERIAL,
            _choice(StageState),
            _real(0.0, 1.0),
            _TEXT,
            _SERIAL,
            _SERIAL,
        ),
        Submit: (_SERIAL, _tokens(0), _COUNT, _tokens(0), _SAMPLING, _SALT, _flag()),
        Cancel: (_SERIAL, _TEXT),
        Tick: (),
        Forwarded: (_SERIAL, _SERIAL, _optional(_tensor()), _RESULTS),
        LinkGap: (_NAME, _SERIAL, _SERIAL),
        StageLost: (_NAME, _NAME, _TEXT),
        FreeSlot: (_NAME, _COUNT),
    }.items()
}


def encode(frame: Frame, envelope: Envelope) -> list[Buffer]:
    """One multipart message: the header (never empty), then the frame's buffers."""
    kind = type(frame).__name__
    parts: list[Buffer] = [b""]
    body = _CODECS[kind][1][0](frame, parts)
    parts[0] = msgpack.packb(
        [PROTOCOL, envelope.sender, envelope.incarnation, envelope.number, kind, body]
    )
    return parts


def decode(parts: Sequence[Buffer]) -> tuple[Frame, Envelope]:
    """The reverse of `encode`. Raises FrameError on anything that `encode` cannot have written."""
    if not 1 <= len(parts) <= MAX_PARTS:
        raise FrameError(f"a message of {len(parts)} parts")
    header = parts[0]
    if memoryview(header).nbytes > MAX_HEADER_BYTES:
        raise FrameError(f"a header of {memoryview(header).nbytes} bytes")
    if len(parts) > 1 and memoryview(parts[1]).nbytes > MAX_PAYLOAD_BYTES:
        raise FrameError(f"a payload of {memoryview(parts[1]).nbytes} bytes")
    try:
        plain = msgpack.unpackb(header, max_map_len=0, max_ext_len=0)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise FrameError(f"not msgpack: {error!r:.200}") from None
    if type(plain) is not list or len(plain) != 6:
        raise FrameError("not a frame header")
    if plain[0] != PROTOCOL:
        raise FrameError(f"protocol {plain[0]!r:.20}, this side speaks {PROTOCOL}")
    sender = _NAME[1](plain[1], parts, "sender")
    incarnation = _SERIAL[1](plain[2], parts, "incarnation")
    number = _SERIAL[1](plain[3], parts, "number")
    entry = _CODECS.get(plain[4]) if type(plain[4]) is str else None
    if entry is None:
        raise FrameError(f"unknown kind {plain[4]!r:.80}")
    frame: Frame = entry[1][1](plain[5], parts, plain[4])
    if (len(parts) == 2) != (getattr(frame, "payload", None) is not None):
        raise FrameError(f"{plain[4]}: a buffer that the header does not name")
    return frame, Envelope(sender, incarnation, number)

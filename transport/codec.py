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
from operator import attrgetter
from typing import Any

import msgpack

from transport.bounds import overdrawn
from transport.chain import DIGEST_BYTES, TOKEN_BYTES, pack_tokens, unpack_tokens
from transport.frame import (
    GREEDY,
    Buffer,
    Cancel,
    Claim,
    Copy,
    Drafted,
    Envelope,
    Forwarded,
    Frame,
    FrameError,
    Free,
    FreeSlot,
    Heartbeat,
    KeepSlot,
    Kind,
    LinkGap,
    Look,
    Machine,
    Measure,
    Measured,
    Ping,
    Refusal,
    Reject,
    Remembered,
    Result,
    RollCall,
    Run,
    Sampling,
    Segment,
    Shaping,
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
MAX_SLOTS = 1024  # slots of one stage
MAX_STAGES = 256  # stages in one ring: timings and roll-call entries
MAX_ROWS = 1 << 16  # positions of one Result with logprobs; the longest list of all
MAX_PARKED = 1 << 16  # parked prefixes of one stage, and claims of a roll call
MAX_TOP = 64  # most likely tokens listed per position
MAX_BIAS = 300  # biased tokens of one turn, as OpenAI's API has it; 4 KB in each of its segments
MAX_TEXT = 4096  # characters of a detail
MAX_NAME = 128
MAX_DIMENSIONS = 4
MAX_EPOCH = 1 << 62  # 2^41 is now, in ms since 1970; who was told more could never be asked again
U31, U63 = 2**31 - 1, 2**63 - 1
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1, "int64": 8}

# One codec is a pair: out(value, parts) -> plain msgpack value, None where the value will do as it
# is; into(plain, parts) -> value. parts: the message's, none where only the header was kept. The
# pairs are closures, built once from the tables below: about 0.15 us per field, less than what it
# costs to construct the frozen dataclasses.
_Out = Callable[[Any, list[Buffer]], Any]
_Into = Callable[[Any, Sequence[Buffer]], Any]
_Codec = tuple[_Out | None, _Into]


def _integer(low: int, high: int) -> _Codec:
    def into(plain: Any, _: Sequence[Buffer]) -> int:
        if type(plain) is int and low <= plain <= high:
            return plain
        raise FrameError(f"not an integer in [{low}, {high}]: {_shown(plain)}")

    return None, into


def _real(low: float, high: float) -> _Codec:
    def into(plain: Any, _: Sequence[Buffer]) -> float:
        if type(plain) is float and low <= plain <= high:  # NaN fails the comparison
            return plain
        raise FrameError(f"not a float in [{low}, {high}]: {_shown(plain)}")

    return (lambda value, _: float(value)), into


def _text(limit: int) -> _Codec:
    def into(plain: Any, _: Sequence[Buffer]) -> str:
        if type(plain) is str and len(plain) <= limit:
            return plain
        raise FrameError(f"not a string of at most {limit} characters")

    return None, into


def _binary(low: int, high: int) -> _Codec:
    def into(plain: Any, _: Sequence[Buffer]) -> bytes:
        if type(plain) is bytes and low <= len(plain) <= high:
            return plain
        raise FrameError(f"not {low} to {high} bytes")

    return None, into


def _flag() -> _Codec:
    def into(plain: Any, _: Sequence[Buffer]) -> bool:
        if type(plain) is bool:
            return plain
        raise FrameError(f"not a boolean: {_shown(plain)}")

    return None, into


def _choice(enum: type[StrEnum]) -> _Codec:
    table = {member.value: member for member in enum}

    def into(plain: Any, _: Sequence[Buffer]) -> StrEnum:
        member = table.get(plain) if type(plain) is str else None
        if member is not None:
            return member
        raise FrameError(f"not one of {', '.join(table)}: {_shown(plain)}")

    return None, into  # msgpack packs a StrEnum as the string that it is


def _optional(inner: _Codec, default: Any = None) -> _Codec:
    """None, or a common value, travels as nil: most segments are greedy, and a hop costs less."""
    inner_out, inner_into = inner

    def out(value: Any, parts: list[Buffer]) -> Any:
        if value is default:
            return None
        return value if inner_out is None else inner_out(value, parts)

    def into(plain: Any, parts: Sequence[Buffer]) -> Any:
        return default if plain is None else inner_into(plain, parts)

    return (None if inner_out is None and default is None else out), into


def _many(inner: _Codec, low: int, high: int) -> _Codec:
    inner_out, inner_into = inner

    def out(value: Any, parts: list[Buffer]) -> list[Any]:
        assert inner_out is not None
        return [inner_out(item, parts) for item in value]

    def into(plain: Any, parts: Sequence[Buffer]) -> tuple[Any, ...]:
        if type(plain) is not list or not low <= len(plain) <= high:
            raise FrameError(f"not a list of {low} to {high} items")
        return tuple([inner_into(item, parts) for item in plain])

    return (None if inner_out is None else out), into


def _pair(first: _Codec, second: _Codec) -> _Codec:
    """Two plain values (neither needs an `out`: a float here must be one)."""
    first_into, second_into = first[1], second[1]

    def into(plain: Any, parts: Sequence[Buffer]) -> tuple[Any, ...]:
        if type(plain) is not list or len(plain) != 2:
            raise FrameError("not a list of 2 items")
        return first_into(plain[0], parts), second_into(plain[1], parts)

    return None, into


def _tokens(low: int) -> _Codec:
    def out(value: tuple[int, ...], _: list[Buffer]) -> bytes:
        return pack_tokens(value)

    def into(plain: Any, _: Sequence[Buffer]) -> tuple[int, ...]:
        if type(plain) is not bytes or len(plain) % TOKEN_BYTES:
            raise FrameError("not packed token ids")
        if not low <= len(plain) // TOKEN_BYTES <= MAX_TOKENS:
            raise FrameError(f"not {low} to {MAX_TOKENS} token ids")
        return unpack_tokens(plain)

    return out, into


def _tensor() -> _Codec:
    def out(value: Tensor, parts: list[Buffer]) -> list[Any]:
        data = value.data
        if isinstance(data, memoryview) and (data.ndim != 1 or data.itemsize != 1):
            data = data.cast("B")  # sockets count the first dimension only
        assert len(data) == math.prod(value.shape) * ITEM_BYTES[value.dtype], (
            len(data), value.shape, value.dtype,
        )  # fmt: skip
        parts.append(data)
        return [value.dtype, value.shape]

    def into(plain: Any, parts: Sequence[Buffer]) -> Tensor:
        if type(plain) is not list or len(plain) != 2 or type(plain[1]) is not list:
            raise FrameError("not [dtype, shape]")
        dtype, shape = plain
        item = ITEM_BYTES.get(dtype) if type(dtype) is str else None
        if item is None:
            raise FrameError(f"unknown dtype {_shown(dtype)}")
        if len(shape) > MAX_DIMENSIONS:
            raise FrameError(f"{len(shape)} dimensions")
        size = item
        for extent in shape:
            if type(extent) is not int or not 0 <= extent <= U31:
                raise FrameError(f"a bad extent {_shown(extent)}")
            size *= extent
        if not parts:
            return Tensor(dtype, tuple(shape), b"")
        if len(parts) < 2:
            raise FrameError("its bytes are missing")
        if _size(parts[1]) != size:
            raise FrameError(f"{_size(parts[1])} bytes, but {dtype} {shape} has {size}")
        return Tensor(dtype, tuple(shape), parts[1])

    return out, into


def _record(cls: type, *codecs: _Codec) -> _Codec:
    names = [field.name for field in fields(cls)]
    assert len(names) == len(codecs), cls
    count = len(names)
    outs = [(i, codec[0]) for i, codec in enumerate(codecs) if codec[0] is not None]
    intos = [codec[1] for codec in codecs]
    read: Callable[[Any], tuple[Any, ...]] = attrgetter(*names) if count > 1 else _row_of(names)

    def out(value: Any, parts: list[Buffer]) -> Any:
        if not outs:
            return read(value)
        row = list(read(value))
        for i, codec in outs:
            row[i] = codec(row[i], parts)
        return row

    def into(plain: Any, parts: Sequence[Buffer]) -> Any:
        if type(plain) is not list or len(plain) != count:
            raise FrameError(f"{cls.__name__} is not a list of {count} fields")
        row: list[Any] = []
        try:
            for codec, item in zip(intos, plain):  # noqa: B905 - equal lengths, and in a hot loop
                row.append(codec(item, parts))
        except FrameError as error:
            raise FrameError(f"{cls.__name__}.{names[len(row)]}: {error}") from None
        return cls(*row)

    return out, into


def _shown(plain: Any) -> str:
    """A value for an error message: a list's own repr could be as deep as the peer likes."""
    if isinstance(plain, (list, bytes)):
        return f"a {type(plain).__name__} of {len(plain)}"
    return f"{plain[:60] if isinstance(plain, str) else plain!r:.80}"


def _row_of(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """What attrgetter does for two names or more."""
    return lambda value: tuple([getattr(value, name) for name in names])


def _size(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


_NAME = _text(MAX_NAME)
_TEXT = _text(MAX_TEXT)
_COUNT = _integer(0, U31)
_SERIAL = _integer(0, U63)
_EPOCH = _integer(0, MAX_EPOCH)
_DIGEST = _binary(DIGEST_BYTES, DIGEST_BYTES)
_SALT = _binary(0, 64)
_PRINT = _binary(1, 64)

_PENALTY = _real(-1e3, 1e3)
_SHAPING = _record(
    Shaping,
    _real(1e-3, 1e3),
    _PENALTY,
    _PENALTY,
    _many(_pair(_COUNT, _PENALTY), 0, MAX_BIAS),
    _COUNT,
    _COUNT,
    _tokens(0),
)
_SAMPLING = _optional(
    _record(
        Sampling,
        _real(0.0, 1e6),
        _COUNT,
        _real(0.0, 1.0),
        _real(0.0, 1.0),
        _SERIAL,
        _optional(_integer(0, MAX_TOP)),
        _optional(_SHAPING),
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
_ENVELOPE = _record(Envelope, _NAME, _SERIAL, _SERIAL)[1]
_TIMINGS = _many(_record(Timing, _NAME, _SERIAL, _SERIAL), 0, MAX_STAGES)
_KEEP = _real(0.0, 1e9)
_CLAIM = _record(Claim, _COUNT, _integer(1, U31), _DIGEST)
_LOGPROB = _real(-math.inf, 0.0)
_TOP = _many(_pair(_COUNT, _LOGPROB), 0, MAX_TOP)
_RESULT = _record(
    Result,
    _SERIAL,
    _COUNT,
    _COUNT,
    _tokens(0),
    _many(_LOGPROB, 0, MAX_ROWS),
    _many(_TOP, 0, MAX_ROWS),
)
_RESULTS = _many(_RESULT, 0, MAX_SEGMENTS)
_ENTRY = _record(
    StageEntry,
    _NAME,
    _SERIAL,
    _pair(_COUNT, _COUNT),
    _COUNT,
    _PRINT,
    _COUNT,
    _COUNT,
    _COUNT,
    _TEXT,
    _SERIAL,
    _SERIAL,
)

_TRIPS = _many(_pair(_NAME, _SERIAL), 0, MAX_STAGES)
_MACHINE = _record(
    Machine, _NAME, _NAME, _NAME, _TEXT, _PRINT, _pair(_COUNT, _COUNT), *[_SERIAL] * 16, _TRIPS
)
_MACHINES = _many(_MACHINE, 0, MAX_STAGES)

_CODECS: dict[str, _Codec] = {
    cls.__name__: _record(cls, *codecs)
    for cls, codecs in {
        Run: (
            _NAME,
            _EPOCH,
            _SERIAL,
            _many(_SEGMENT, 0, MAX_SEGMENTS),
            _optional(_tensor()),
            _TIMINGS,
        ),
        Verdict: (_NAME, _EPOCH, _SERIAL, _RESULTS, _TIMINGS),
        Reject: (
            _NAME,
            _EPOCH,
            _SERIAL,
            _NAME,
            _choice(Refusal),
            _TEXT,
            _optional(_SERIAL),
            _optional(_COUNT),
        ),
        RollCall: (_NAME, _EPOCH, _many(_CLAIM, 0, MAX_PARKED), _many(_ENTRY, 0, MAX_STAGES)),
        Copy: (
            _NAME,
            _EPOCH,
            _SERIAL,
            _SERIAL,
            _COUNT,
            _COUNT,
            _integer(1, U31),
            _DIGEST,
            _many(_NAME, 0, MAX_STAGES),
        ),
        Free: (_NAME, _EPOCH, _SERIAL, _COUNT),
        Ping: (_NAME, _EPOCH, _SERIAL),
        Measure: (
            _NAME,
            _SERIAL,
            _choice(Look),
            _flag(),
            _MACHINES,
            _many(_SERIAL, 0, MAX_STAGES),
            _optional(_tensor()),
        ),
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
        Submit: (_SERIAL, _tokens(0), _COUNT, _tokens(0), _SAMPLING, _SALT, _flag(), _NAME, _KEEP),
        Cancel: (_SERIAL, _TEXT),
        Tick: (),
        Forwarded: (_EPOCH, _SERIAL, _optional(_tensor()), _RESULTS),
        Measured: (_SERIAL, _flag(), _MACHINES),
        LinkGap: (_NAME, _SERIAL, _SERIAL),
        StageLost: (_NAME, _NAME, _TEXT),
        FreeSlot: (_NAME, _COUNT),
        KeepSlot: (_NAME, _COUNT, _KEEP),
        Remembered: (_NAME, _COUNT, _PRINT, _SALT, _tokens(1), _NAME, _flag(), _KEEP, _KEEP),
        Drafted: (_SERIAL, _COUNT, _tokens(0)),
    }.items()
}


def encode(frame: Frame, envelope: Envelope) -> list[Buffer]:
    """One multipart message: the header (never empty), then the frame's buffers."""
    kind = type(frame).__name__
    parts: list[Buffer] = [b""]
    out = _CODECS[kind][0]
    assert out is not None
    body = out(frame, parts)
    parts[0] = msgpack.packb(
        (PROTOCOL, envelope.sender, envelope.incarnation, envelope.number, kind, body)
    )
    return parts


def decode(parts: Sequence[Buffer]) -> tuple[Frame, Envelope]:
    """The reverse of `encode`. Raises FrameError on anything that `encode` cannot have written."""
    if not 1 <= len(parts) <= MAX_PARTS:
        raise FrameError(f"a message of {len(parts)} parts")
    if len(parts) == 2 and _size(parts[1]) > MAX_PAYLOAD_BYTES:
        raise FrameError(f"a payload of {_size(parts[1])} bytes")
    frame, envelope = _open(parts[0], parts)
    if len(parts) == 2 and getattr(frame, "payload", None) is None:
        raise FrameError(f"{type(frame).__name__}: a buffer that the header does not name")
    return frame, envelope


def decode_header(header: Buffer) -> tuple[Frame, Envelope]:
    """`decode` for a header whose buffers were not kept: a tensor has its shape but no data."""
    return _open(header, ())


def _open(header: Buffer, parts: Sequence[Buffer]) -> tuple[Frame, Envelope]:
    size = _size(header)
    if size > MAX_HEADER_BYTES:
        raise FrameError(f"a header of {size} bytes")
    if overdrawn(header, MAX_ROWS):
        raise FrameError("not msgpack: it declares more than it holds")
    try:
        plain = msgpack.unpackb(
            header,
            max_array_len=min(size, MAX_ROWS),  # lists are allocated by their declared length
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise FrameError(f"not msgpack: {type(error).__name__}: {str(error)[:200]}") from None
    if type(plain) is not list or len(plain) != 6:
        raise FrameError("not a frame header")
    protocol, sender, incarnation, number, kind, body = plain
    if type(protocol) is not int or protocol != PROTOCOL:
        raise FrameError(f"protocol {_shown(protocol)}, this side speaks {PROTOCOL}")
    codec = _CODECS.get(kind) if type(kind) is str else None
    if codec is None:
        raise FrameError(f"unknown kind {_shown(kind)}")
    envelope = _ENVELOPE([sender, incarnation, number], parts)
    frame: Frame = codec[1](body, parts)
    return frame, envelope

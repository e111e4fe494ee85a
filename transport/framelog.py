"""Owns the frame log: the bytes of a segment file, and their writer and reader over a file object.

A segment is magic, version, and a msgpack header that says who recorded; then records, appended,
never changed. Every byte is under a CRC-32, so one flipped byte is always found; a tail that was
torn by a crash is cut and reported. Knows no clock, no directory and no rotation: those are
transport.recorder's. The format is fixed; docs/frames.md describes it to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from enum import IntEnum
from hashlib import blake2b
from struct import Struct
from typing import IO
from zlib import crc32

import msgpack

from transport.codec import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, decode, decode_header, encode
from transport.frame import Buffer, Envelope, Frame, FrameError, Tensor

MAGIC = b"\x89KVRLOG\n"  # not text, and a changed line end is noticed
VERSION = 1
DIGEST_BYTES = 16
MAX_LOG_HEADER_BYTES = 2 << 20  # a ring.toml has at most 1 MiB
MAX_LINK_BYTES = 512
_START = Struct("<8sIII")  # magic, version, header bytes, CRC-32 of those 16 bytes and the header
_RECORD = Struct("<IIII")  # mark, body bytes, CRC-32 of the body, CRC-32 of the 12 bytes before
_BODY = Struct("<QQBBHIQQ")  # see docs/frames.md; then link, frame header, payload or digest
_MARK = 0x4352564B  # "KVRC" in the file: what to look for after damage
_MAX_BODY = _BODY.size + MAX_LINK_BYTES + MAX_HEADER_BYTES + MAX_PAYLOAD_BYTES
_ZEROS = bytes(1 << 16)
U64 = 2**64 - 1


class FrameLogError(FrameError):
    """A frame log is damaged. offset: where in the file, in bytes."""

    def __init__(self, offset: int, message: str) -> None:
        super().__init__(f"byte {offset}: {message}")
        self.offset = offset


class Direction(IntEnum):
    """Which way a frame went, seen from the recorder.

    LOCAL is an input that crossed no link; UNSENT is what the core sent and its link refused.
    """

    IN = 0
    OUT = 1
    LOCAL = 2
    UNSENT = 3


class Payloads(IntEnum):
    """How much of a frame's tensor bytes a record keeps."""

    NONE = 0
    DIGEST = 1  # 16 bytes of BLAKE2b: enough to compare two runs
    FULL = 2  # enough to replay a stage


@dataclass(frozen=True, slots=True)
class LogHeader:
    """Who recorded a segment. role: "stage" or "coordinator"; wall_ns: when, since 1970.

    segment: from 0, counts this process's files. config: the ring.toml it ran with, as text, so
    that a log can be replayed alone; keep secrets out of it. first_epoch and vocabulary: what a
    coordinator's Scheduler was made with.
    """

    role: str
    name: str
    incarnation: int
    version: str
    wall_ns: int
    segment: int = 0
    config: str = ""
    first_epoch: int = 0
    vocabulary: int = 0


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One frame, and what was kept of it.

    mono_ns orders records and is what a core's `now` came from (mono_ns / 1e9); wall_ns compares
    machines. payload_bytes: length of the tensor, whether kept or not. data: the
    tensor's bytes, its digest or nothing, by `payloads`. offset: of the record in its file.
    """

    offset: int
    mono_ns: int
    wall_ns: int
    direction: Direction
    link: str
    number: int
    header: bytes
    payloads: Payloads
    payload_bytes: int
    data: bytes

    def decode(self) -> tuple[Frame, Envelope]:
        """The frame; where its tensor was not kept, its data is empty. Raises FrameError."""
        if self.payloads is not Payloads.FULL or not self.payload_bytes:
            return decode_header(self.header)
        return decode([self.header, self.data])


@dataclass(slots=True)  # not frozen: one is made per frame, and that would cost three times as much
class Unwritten:
    """One frame as it is to be recorded. envelope: None for a local one.

    header: of the frame's message, where it is at hand, so that it is not encoded again.
    """

    mono_ns: int
    wall_ns: int
    direction: Direction
    link: str
    frame: Frame
    envelope: Envelope | None = None
    header: Buffer | None = None


class FrameLogWriter:
    """Appends records to a binary file object that is at its start; flushing is the caller's."""

    def __init__(
        self, file: IO[bytes], header: LogHeader, payloads: Payloads = Payloads.NONE
    ) -> None:
        self._file = file
        self._payloads = payloads
        self._self = Envelope(header.name, header.incarnation, 0)
        packed = msgpack.packb(list(astuple(header)))
        assert len(packed) <= MAX_LOG_HEADER_BYTES, header
        start = MAGIC + _U32x2.pack(VERSION, len(packed))
        self.bytes_written = 0
        self.write(start + _U32.pack(crc32(packed, crc32(start))) + packed)

    def record(
        self,
        mono_ns: int,
        wall_ns: int,
        direction: Direction,
        link: str,
        frame: Frame,
        *,
        envelope: Envelope | None = None,
    ) -> None:
        """Append one frame; envelope is None where it has no number: it crossed no link.

        Raises what the file raises.
        """
        self.write(self.pack(Unwritten(mono_ns, wall_ns, direction, link, frame, envelope)))

    def pack(self, wanted: Unwritten) -> bytes:
        """One record's bytes."""
        envelope, payloads = wanted.envelope, self._payloads
        payload: Tensor | None = getattr(wanted.frame, "payload", None)
        header = wanted.header
        if header is None:
            header = encode(wanted.frame, envelope or self._self)[0]
        data: Buffer = b"" if payload is None else memoryview(payload.data).cast("B")
        size = len(data)
        if payloads is Payloads.NONE or (size == 0 and payloads is Payloads.DIGEST):
            data = b""
        elif payloads is Payloads.DIGEST:
            data = blake2b(data, digest_size=DIGEST_BYTES).digest()
        name = wanted.link.encode()
        number = envelope.number if envelope else 0
        fixed = _BODY.pack(
            wanted.mono_ns,
            wanted.wall_ns,
            wanted.direction,
            payloads,
            len(name),
            len(header),
            number,
            size,
        )
        head = b"".join((fixed, name, header))
        check = crc32(data, crc32(head))
        start = _START_OF_RECORD.pack(_MARK, len(head) + len(data), check)
        return b"".join((start, _U32.pack(crc32(start)), head, data))

    def write(self, data: bytes) -> None:
        """Append the bytes of packed records. Raises what the file raises."""
        left = memoryview(data)
        while left:
            done = self._file.write(left)
            self.bytes_written += done
            left = left[done:]


_U32 = Struct("<I")
_U32x2 = Struct("<II")
_START_OF_RECORD = Struct("<III")


class FrameLogReader:
    """Iterates over the records of one segment, one record in memory at a time.

    file: binary, at its start. Raises FrameLogError at once where the start is no frame log's.
    Iterating raises FrameLogError at a damaged record; when only its body is damaged, the next call
    goes on with the record after it. A torn tail ends the iteration: see `torn_bytes`.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._at = 0
        self._done = False
        self.torn_bytes = 0  # cut off at the end of the file, once the iteration has ended
        self.header = self._read_header()

    @property
    def offset(self) -> int:
        """Where the next record starts; after the end, the length of the intact part."""
        return self._at

    def resume(self) -> None:
        """The file may have grown since the iteration ended: go on where the intact part ended."""
        self._file.seek(self._at)
        self._done = False
        self.torn_bytes = 0

    def __iter__(self) -> Iterator[LogRecord]:
        return self

    def __next__(self) -> LogRecord:
        if self._done:
            raise StopIteration
        at = self._at
        start = self._read(_RECORD.size)
        if len(start) < _RECORD.size:
            self._cut(len(start))
        mark, size, check, check_start = _RECORD.unpack(start)
        if crc32(start[:12]) != check_start or mark != _MARK or size > _MAX_BODY:
            if not start.strip(b"\0") and self._only_zeros(len(start)):
                raise StopIteration
            self._done = True
            raise FrameLogError(at, "a damaged record start; nothing after it can be read")
        if size < _BODY.size:
            self._done = True
            raise FrameLogError(at, f"a record of {size} bytes")
        body = self._read(size)
        if len(body) < size:
            self._cut(len(start) + len(body))
        self._at += len(start) + size
        if crc32(body) != check:
            raise FrameLogError(at, f"a damaged record of {size} bytes")
        return _record(at, body)

    def _read_header(self) -> LogHeader:
        start = self._read(_START.size)
        if len(start) < _START.size or start[: len(MAGIC)] != MAGIC:
            raise FrameLogError(0, "not a frame log")
        _, version, size, check = _START.unpack(start)
        packed = self._read(size) if size <= MAX_LOG_HEADER_BYTES else b""
        if len(packed) != size or crc32(packed, crc32(start[:16])) != check:
            raise FrameLogError(0, "a damaged frame log header")
        if version != VERSION:
            raise FrameLogError(0, f"frame log version {version}, this reader knows {VERSION}")
        try:
            plain = msgpack.unpackb(
                packed, max_array_len=len(fields(LogHeader)), max_map_len=0, max_ext_len=0
            )
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
            raise FrameLogError(0, "a frame log header that is not msgpack") from None
        types = [str, str, int, str, int, int, str, int, int]
        assert len(types) == len(fields(LogHeader))
        if type(plain) is not list or [type(each) for each in plain] != types:
            raise FrameLogError(0, "a frame log header with other fields")
        self._at = _START.size + size
        return LogHeader(*plain)

    def _read(self, size: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file."""
        data = self._file.read(size)
        while len(data) < size:
            more = self._file.read(size - len(data))
            if not more:
                break
            data += more
        return data

    def _only_zeros(self, seen: int) -> bool:
        """Whether the rest is zeros: a tail that the file system allotted but never wrote."""
        while block := self._read(len(_ZEROS)):
            if block != _ZEROS[: len(block)]:
                return False
            seen += len(block)
        self._done = True
        self.torn_bytes = seen
        return True

    def _cut(self, torn: int) -> None:
        self._done = True
        self.torn_bytes = torn
        raise StopIteration


def _record(at: int, body: bytes) -> LogRecord:
    mono_ns, wall_ns, way, kept, link_size, header_size, number, size = _BODY.unpack_from(body)
    link_end = _BODY.size + link_size
    header_end = link_end + header_size
    try:
        direction, payloads = Direction(way), Payloads(kept)
        link = body[_BODY.size : link_end].decode()
    except ValueError as error:
        raise FrameLogError(at, f"a record that this version does not know: {error}") from None
    if header_end > len(body) or (payloads is Payloads.FULL and len(body) - header_end != size):
        raise FrameLogError(at, "a record whose lengths do not agree")
    return LogRecord(
        at, mono_ns, wall_ns, direction, link, number,
        body[link_end:header_end], payloads, size, body[header_end:],
    )  # fmt: skip

"""Owns how recorded segments become one stream of frames, by process or in order of time.

Files are grouped by the process that wrote them (role, name, incarnation); a rotated segment that
is missing is said, a torn tail is cut and said. Knows what a record is, not what its frame means.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from pathlib import Path

from tools.errors import ToolError
from transport.frame import Envelope, Frame, FrameError
from transport.framelog import (
    Direction,
    FrameLogError,
    FrameLogReader,
    LogHeader,
    LogRecord,
    Payloads,
)
from transport.recorder import segments

MAX_ONCE = 4096  # frames of which the other end's record is waited for: far above any window
CLOCK_RECORDS = 100  # that tell how a process's clocks differ


class LogDamageError(ToolError):
    """A frame log can't be read on. path, offset: where, in bytes."""

    def __init__(self, path: Path, offset: int, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.offset = offset


@dataclass(frozen=True, slots=True)
class Entry:
    """One recorded frame. index: the how-manieth record of its process that was read, from 0.

    at_ns: time on one scale for all processes of a log: since 1970, advancing with each process's
    monotonic clock, so that a clock that was set does not shuffle records. path and record.offset
    say where it lies.
    """

    process: Process
    index: int
    at_ns: int
    path: Path
    record: LogRecord
    frame: Frame
    envelope: Envelope

    @property
    def place(self) -> str:
        """FILE:BYTE, for people."""
        return f"{self.path.name}:{self.record.offset}"


@dataclass(eq=False, slots=True)
class Process:
    """One life of one recorder: its segment files in order. torn_bytes: cut off at the end.

    missing: segment numbers that are not among the files (rotated away, or not sent).
    """

    header: LogHeader
    paths: list[Path] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    torn_bytes: int = 0

    @property
    def name(self) -> str:
        """The stage's name, or "coordinator"."""
        return self.header.name


def processes(paths: Sequence[Path]) -> list[Process]:
    """The recorders of files and directories (searched for segments), coordinators first.

    Raises ToolError where there is no such file or no log in a directory, LogDamageError where the
    start of a file can't be read.
    """
    found: dict[tuple[str, str, int], dict[int, tuple[LogHeader, Path]]] = {}
    for path in files(paths):
        header = _open_header(path)
        key = header.role, header.name, header.incarnation
        found.setdefault(key, {})[header.segment] = header, path
    result = []
    for life in found.values():
        numbers = sorted(life)
        process = Process(life[numbers[0]][0])
        process.paths = [life[number][1] for number in numbers]
        process.missing = [n for n in range(numbers[-1]) if n not in life]
        result.append(process)
    return sorted(result, key=lambda each: (each.header.role, each.header.wall_ns))


class Decoder:
    """Decodes a frame once that both ends of a link recorded: their bytes are the same."""

    def __init__(self) -> None:
        self._once: dict[bytes, tuple[Frame, Envelope]] = {}

    def decode(self, record: LogRecord) -> tuple[Frame, Envelope]:
        """As LogRecord.decode."""
        crossed = record.direction in (Direction.IN, Direction.OUT)
        if not crossed or (record.payload_bytes and record.payloads is Payloads.FULL):
            return record.decode()
        found = self._once.pop(record.header, None)
        if found is None:
            found = self._once[record.header] = record.decode()
            if len(self._once) > MAX_ONCE:
                del self._once[next(iter(self._once))]
        return found


def entries(process: Process, decoder: Decoder | None = None) -> Iterator[Entry]:
    """Every record of one process, in order. Raises LogDamageError at the first damaged one.

    decoder: of all processes that are read at once.
    """
    index, shift = 0, clock_shift(process.paths[0])
    process.torn_bytes = 0
    for path in process.paths:
        with path.open("rb") as file:
            try:
                reader = FrameLogReader(file)
                for record in reader:
                    yield entry(process, index, shift, path, record, decoder)
                    index += 1
                process.torn_bytes += reader.torn_bytes
            except FrameLogError as error:
                raise LogDamageError(path, error.offset, str(error)) from None


def clock_shift(path: Path) -> int:
    """What to add to a process's monotonic clock for time since 1970; 0 without a record.

    A recorder reads the wall clock after the monotonic one and may be interrupted in between, for
    milliseconds on a busy machine: the least difference of the first records is the nearest.
    """
    found = []
    with path.open("rb") as file, contextlib.suppress(FrameLogError):
        for record in islice(FrameLogReader(file), CLOCK_RECORDS):
            found.append(record.wall_ns - record.mono_ns)
    return min(found, default=0)


def merged(wanted: Sequence[Process]) -> Iterator[Entry]:
    """The records of several processes in order of time; equal times in order of `wanted`."""
    decoder = Decoder()
    return heapq.merge(*(entries(each, decoder) for each in wanted), key=attrgetter("at_ns"))


def entry(
    process: Process,
    index: int,
    shift: int,
    path: Path,
    record: LogRecord,
    decoder: Decoder | None = None,
) -> Entry:
    """A record with its frame. shift: see Entry.at_ns. Raises LogDamageError."""
    try:
        frame, envelope = record.decode() if decoder is None else decoder.decode(record)
    except FrameError as error:
        raise LogDamageError(path, record.offset, f"byte {record.offset}: {error}") from None
    return Entry(process, index, record.mono_ns + shift, path, record, frame, envelope)


def files(paths: Sequence[Path]) -> Iterator[Path]:
    """The files among `paths`, and the segments in its directories. Raises ToolError."""
    for path in paths:
        if path.is_dir():
            inside = segments(path)
            if not inside:
                raise ToolError(f"{path}: no frame logs (*.kvrlog) in it")
            yield from inside
        elif path.is_file():
            yield path
        else:
            raise ToolError(f"{path}: no such file or directory")


def _open_header(path: Path) -> LogHeader:
    try:
        with path.open("rb") as file:
            return FrameLogReader(file).header
    except FrameLogError as error:
        raise LogDamageError(path, error.offset, str(error)) from None
    except OSError as error:
        raise ToolError(f"{path}: {error.strerror}") from None

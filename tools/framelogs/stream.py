"""Owns frame logs that are read for people: damage is noted and the rest goes on; logs may grow.

Knows what a record is, not what its frame means.
"""

from __future__ import annotations

import contextlib
import heapq
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import IO

from tools.errors import ToolError
from tools.framelogs.read import (
    Decoder,
    Entry,
    LogDamageError,
    Process,
    clock_shift,
    entries,
    entry,
    files,
    processes,
)
from transport.framelog import FrameLogError, FrameLogReader, LogHeader

POLL_S = 0.2  # between two looks at a log that grows
_IN_TIME = attrgetter("at_ns")


class Stream:
    """The entries of all processes below `paths`, in order of time, one of each in memory.

    damages: what could not be read, in words with file and byte, once it was come upon; the process
    it belongs to ends there, the others go on. Raises ToolError where there is no log.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self.processes = processes(paths)
        self.damages: list[str] = []
        self.notes = [_note(each) for each in self.processes if each.missing]

    def __iter__(self) -> Iterator[Entry]:
        return self.of(self.processes)

    def of(self, wanted: Sequence[Process]) -> Iterator[Entry]:
        """The same for some of the processes."""
        decoder = Decoder()
        return heapq.merge(*(self._intact(each, decoder) for each in wanted), key=_IN_TIME)

    def _intact(self, process: Process, decoder: Decoder) -> Iterator[Entry]:
        try:
            yield from entries(process, decoder)
        except LogDamageError as error:
            self._damaged(error.message)
            return
        if process.torn_bytes:
            path = process.paths[-1]
            at = path.stat().st_size - process.torn_bytes
            self._damaged(
                f"{path}: byte {at}: torn, {process.torn_bytes} bytes are no whole record"
            )

    def _damaged(self, text: str) -> None:
        if text not in self.damages:  # a log that is read twice
            self.damages.append(text)

    def follow(
        self, pause: Callable[[], None] | None = None
    ) -> Generator[Entry | None, None, None]:
        """The entries so far, then those that are appended, in rotated and in new files, for ever.

        None stands for "that is all for now"; then `pause` is called. A torn tail is a record that
        is being written.
        """
        wait = pause or (lambda: time.sleep(POLL_S))
        tails: dict[tuple[str, str, int], _Tail] = {}
        try:
            while True:
                for path, header in _headers(self._paths):
                    key = header.role, header.name, header.incarnation
                    tail = tails.setdefault(key, _Tail(Process(header), self._damaged))
                    tail.add(header.segment, path)
                yield from heapq.merge(*(tail.drain() for tail in tails.values()), key=_IN_TIME)
                yield None
                wait()
        finally:
            for tail in tails.values():
                tail.close()


class _Tail:
    """One process's growing log: where reading goes on."""

    def __init__(self, process: Process, damaged: Callable[[str], None]) -> None:
        self._process = process
        self._damaged = damaged
        self._paths: dict[int, Path] = {}
        self._segment = -1
        self._file: IO[bytes] | None = None
        self._reader: FrameLogReader | None = None
        self._index = 0
        self._shift: int | None = None
        self._ended = False

    def add(self, segment: int, path: Path) -> None:
        """A segment exists: then the ones before it are complete."""
        self._paths[segment] = path

    def drain(self) -> Iterator[Entry]:
        """What was appended since the last call."""
        while not self._ended:
            if self._reader is not None:
                yield from self._rest(self._reader, self._paths[self._segment])
            later = [number for number in self._paths if number > self._segment]
            if not later:
                return
            self._open(min(later))

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()

    def _open(self, segment: int) -> None:
        self.close()
        self._segment, self._reader, self._file = segment, None, None
        with contextlib.suppress(FileNotFoundError):  # rotated away before it was read
            self._file = self._paths[segment].open("rb")
            self._reader = FrameLogReader(self._file)

    def _rest(self, reader: FrameLogReader, path: Path) -> Iterator[Entry]:
        reader.resume()
        try:
            for record in reader:
                if self._shift is None:
                    self._shift = clock_shift(path)
                yield entry(self._process, self._index, self._shift, path, record)
                self._index += 1
        except FrameLogError as error:
            self._ended = True
            self._damaged(f"{path}: {error}")
        except LogDamageError as error:
            self._ended = True
            self._damaged(error.message)


def _headers(paths: Sequence[Path]) -> Iterator[tuple[Path, LogHeader]]:
    """The segments there are; one whose header is being written comes at the next look."""
    with contextlib.suppress(ToolError):  # all files of a directory were moved away
        for path in files(paths):
            with contextlib.suppress(OSError, FrameLogError), path.open("rb") as file:
                yield path, FrameLogReader(file).header


def _note(process: Process) -> str:
    first = ", ".join(map(str, process.missing[:5]))
    more = f" and {len(process.missing) - 5} more" if len(process.missing) > 5 else ""
    return f"{process.name}: segments {first}{more} are not among the files"

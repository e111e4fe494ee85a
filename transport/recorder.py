"""Owns a directory of frame-log segments: opens, rotates, and deletes the oldest past a total.

What a daemon's --record writes through; any of its threads may call record(). Knows files and
bytes, not what the frames mean, and no clock: times come with each call.
"""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import IO

from transport.frame import Buffer, Envelope, Frame
from transport.framelog import Direction, FrameLogWriter, LogHeader, Payloads, Unwritten

SEGMENT_BYTES = 64 << 20
TOTAL_BYTES = 1 << 30
MAX_WAITING = 32  # records: what one event of a core may send; their frames stay in memory
SUFFIX = ".kvrlog"


class Recorder:
    """Records one process's frames as NAME.TIME.SEGMENT.kvrlog in `directory` (made if missing).

    header names the process (its segment number is set here). Records go to the file as they come,
    or wait for a `flush`: then several cost one write, when their frames are on their way. What was
    written a killed process does not lose. total_bytes bounds all segments of that name, those of
    earlier lives included; the oldest go first, at a rotation. A disk that is full or gone ends the
    recording, never the process: see `error`. Raises OSError if it can't start.
    """

    def __init__(
        self,
        directory: Path,
        header: LogHeader,
        payloads: Payloads = Payloads.NONE,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        total_bytes: int = TOTAL_BYTES,
    ) -> None:
        self._directory = directory
        self._header = header
        self._payloads = payloads
        self._segment_bytes = segment_bytes
        self._total_bytes = total_bytes
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._segment = 0
        self._waiting: list[Unwritten] = []  # at most MAX_WAITING
        self.error: str | None = None  # why recording ended early
        directory.mkdir(parents=True, exist_ok=True)
        self._writer = self._open()

    def record(
        self,
        mono_ns: int,
        wall_ns: int,
        direction: Direction,
        link: str,
        frame: Frame,
        *,
        envelope: Envelope | None = None,
        header: Buffer | None = None,
        wait: bool = False,
    ) -> None:
        """Append one frame (see framelog.Unwritten), now or with the next flush.

        Does nothing once recording has ended.
        """
        wanted = Unwritten(mono_ns, wall_ns, direction, link, frame, envelope, header)
        with self._lock:
            if self._file is None:
                return
            self._waiting.append(wanted)
            if not wait or len(self._waiting) >= MAX_WAITING:
                self._flush()

    def flush(self) -> None:
        """Write what waits, in one piece."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self._file is None or not waiting:
            return
        try:
            if self._writer.bytes_written >= self._segment_bytes:
                self._file.close()
                self._writer = self._open()
            packed = [self._writer.pack(each) for each in waiting]
            self._writer.write(packed[0] if len(packed) == 1 else b"".join(packed))
        except OSError as error:
            self.error = f"recording to {self._directory} ended: {error}"
            self._close()

    def close(self) -> None:
        """End the recording; further records are ignored."""
        with self._lock:
            self._flush()
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> FrameLogWriter:
        header = self._header
        name = f"{header.name}.{header.wall_ns:020d}.{self._segment:06d}{SUFFIX}"
        kept = segments(self._directory, header.name)
        total = self._segment_bytes + sum(path.stat().st_size for path in kept)
        for path in kept:
            if total <= self._total_bytes:
                break
            total -= path.stat().st_size
            path.unlink(missing_ok=True)
        self._file = (self._directory / name).open("xb", buffering=0)
        started = replace(header, segment=self._segment)
        self._segment += 1
        return FrameLogWriter(self._file, started, self._payloads)


def segments(directory: Path, name: str | None = None) -> list[Path]:
    """The segment files of one recorder, or of all, oldest process first."""
    who = ".+" if name is None else re.escape(name)
    pattern = re.compile(who + r"\.(\d{20})\.(\d{6,})" + re.escape(SUFFIX))
    found: list[tuple[int, str, int, Path]] = []
    for path in directory.iterdir():
        if match := pattern.fullmatch(path.name):
            found.append((int(match[1]), path.name, int(match[2]), path))
    return [path for *_, path in sorted(found)]

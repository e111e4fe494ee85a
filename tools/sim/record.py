"""Owns the frame logs of a simulated world: each process writes what its daemon would record."""

from __future__ import annotations

from pathlib import Path

from transport.frame import Envelope, Frame
from transport.framelog import Direction, LogHeader, Payloads
from transport.recorder import Recorder

WALL_NS = 1_700_000_000 * 10**9  # of virtual time 0


class Recorders:
    """Opens one Recorder per process life; none where there is no directory."""

    def __init__(self, directory: Path | None, config: str) -> None:
        self._directory, self._config = directory, config
        self._open: list[Recorder] = []

    def open(self, role: str, name: str, incarnation: int, now: int) -> Recorder | None:
        """The recorder of a process that starts now."""
        if self._directory is None:
            return None
        header = LogHeader(role, name, incarnation, "sim", WALL_NS + now, config=self._config)
        recorder = Recorder(self._directory, header, Payloads.FULL)
        self._open.append(recorder)
        return recorder

    def note(
        self,
        recorder: Recorder,
        now: int,
        direction: Direction,
        link: str,
        frame: Frame,
        envelope: Envelope | None,
    ) -> None:
        """One frame that reached or left a core; now: nanoseconds of virtual time."""
        recorder.record(now, WALL_NS + now, direction, link, frame, envelope=envelope)

    def close(self) -> None:
        """End all recordings."""
        for recorder in self._open:
            recorder.close()

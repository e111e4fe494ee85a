"""Owns what a simulated world writes down: each process's frames, as its daemon would record them.

To frame logs, where there is a directory; and to the proof of `kvring log check`, where one is
wanted.
"""

from __future__ import annotations

from pathlib import Path

from tools.framelogs.residency import Residency, Who
from transport.frame import Envelope, Frame
from transport.framelog import Direction, LogHeader, Payloads
from transport.recorder import Recorder

WALL_NS = 1_700_000_000 * 10**9  # of virtual time 0


class Recording:
    """One life of one process."""

    def __init__(self, who: Who, recorder: Recorder | None, proof: Residency | None) -> None:
        self._who, self._recorder, self._proof = who, recorder, proof

    def note(
        self, now: int, direction: Direction, link: str, frame: Frame, envelope: Envelope | None
    ) -> None:
        """One frame that reached or left the core; now: nanoseconds of virtual time."""
        if self._recorder is not None:
            wall = WALL_NS + now
            self._recorder.record(now, wall, direction, link, frame, envelope=envelope)
        if self._proof is not None:
            place = f"{self._who.name} at {now / 1e9:.6f} s"
            self._proof.observe(self._who, direction, frame, envelope, place)

    def close(self) -> None:
        """The process has ended."""
        if self._recorder is not None:
            self._recorder.close()


class Recorders:
    """Opens a Recording per process life; none where nobody reads it."""

    def __init__(self, directory: Path | None, config: str, proof: Residency | None) -> None:
        self._directory, self._config, self._proof = directory, config, proof
        self._open: list[Recording] = []

    def open(
        self, role: str, name: str, incarnation: int, now: int, first_epoch: int = 0
    ) -> Recording | None:
        """The recording of a process that starts now; first_epoch: a coordinator's."""
        if self._directory is None and self._proof is None:
            return None
        recorder, who = None, Who(role, name, incarnation)
        if self._directory is not None:
            header = LogHeader(
                role,
                name,
                incarnation,
                "sim",
                WALL_NS + now,
                config=self._config,
                first_epoch=first_epoch,
            )
            recorder = Recorder(self._directory, header, Payloads.FULL)
        if self._proof is not None:
            self._proof.begin(who)
        self._open.append(Recording(who, recorder, self._proof))
        return self._open[-1]

    def close(self) -> None:
        """End all recordings."""
        for recording in self._open:
            recording.close()

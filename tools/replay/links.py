"""Owns the comparison of both ends of a link: what one process sent is what another received.

A frame's envelope (sender, incarnation, number) names it in both logs, and its bytes must be equal.
So a record that was changed is found where it lies, also where the cores can't tell: the last
token of a turn is the input of no later frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from tools.framelogs.read import Entry
from transport.frame import Heartbeat, LinkGap
from transport.framelog import Direction, Payloads


@dataclass(frozen=True, slots=True)
class End:
    """One end's record of a frame: where it lies, and digests of its bytes."""

    place: str
    direction: Direction
    header: bytes
    payloads: Payloads
    payload: bytes


class Links:
    """Sees the records of several processes in any order; each frame is compared once."""

    def __init__(self) -> None:
        self.compared = 0
        # frames of which one end was seen: those that were lost, or whose other log is not here,
        # stay, 300 bytes each
        self._open: dict[tuple[str, int, int], End] = {}

    def see(self, entry: Entry) -> str | None:
        """Take a record; what is wrong with its frame, once both ends were seen."""
        record, envelope = entry.record, entry.envelope
        if record.direction not in (Direction.IN, Direction.OUT):
            return None
        if isinstance(entry.frame, (Heartbeat, LinkGap)):
            return None  # no log has the other end: of a control link, of what was lost
        key = envelope.sender, envelope.incarnation, envelope.number
        mine = End(
            entry.place,
            record.direction,
            _digest(record.header),
            record.payloads,
            _digest(record.data),
        )
        other = self._open.get(key)
        if other is None or other.direction is mine.direction:
            self._open[key] = mine
            return None
        del self._open[key]
        self.compared += 1
        if mine.header == other.header:
            if mine.payloads is not other.payloads or mine.payload == other.payload:
                return None
            return f"its activations are not those of the other end ({other.place})"
        return f"it is not what the other end of the link recorded ({other.place})"


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()

"""Owns the comparison of both ends of a link: what one process sent is what another received.

A frame's envelope (sender, incarnation, number) names it in both logs, and its bytes must be equal.
So a record that was changed is found where it lies, also where the cores can't tell: the last
token of a turn is the input of no later frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from tools.framelogs.read import Entry, Process, merged
from tools.replay import words
from tools.replay.core import DifferenceError
from transport.frame import Heartbeat, LinkGap
from transport.framelog import Direction, Payloads


@dataclass(frozen=True, slots=True)
class End:
    """One end's record of a frame: where it lies, what it says, and digests of its bytes."""

    place: str
    direction: Direction
    header: bytes
    payloads: Payloads
    payload: bytes


def compare_links(wanted: Sequence[Process]) -> tuple[int, DifferenceError | None]:
    """How many frames two of the processes recorded, up to the first that is not the same frame."""
    compared = 0
    # frames of which one end was seen: those that were lost, or whose other log is not here, stay,
    # 300 bytes each
    seen: dict[tuple[str, int, int], End] = {}
    for entry in merged(wanted):
        if entry.record.direction not in (Direction.IN, Direction.OUT):
            continue
        if isinstance(entry.frame, (Heartbeat, LinkGap)):
            continue  # no log has the other end: of a control link, of what was lost
        key = entry.envelope.sender, entry.envelope.incarnation, entry.envelope.number
        mine, other = _end(entry), seen.get(key)
        if other is None or other.direction is mine.direction:
            seen[key] = mine
            continue
        del seen[key]
        compared += 1
        wrong = _wrong(mine, other)
        if wrong is not None:
            return compared, DifferenceError(entry, wrong, [f"> {words.of_entry(entry)}"])
    return compared, None


def _end(entry: Entry) -> End:
    record = entry.record
    header, payload = _digest(record.header), _digest(record.data)
    return End(entry.place, record.direction, header, record.payloads, payload)


def _wrong(mine: End, other: End) -> str | None:
    if mine.header != other.header:
        return f"it is not what the link's other end recorded ({other.place})"
    if mine.payloads is other.payloads and mine.payload != other.payload:
        return f"its activations are not those of the link's other end ({other.place})"
    return None


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()

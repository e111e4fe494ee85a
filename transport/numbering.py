"""Owns the numbers of the frames on a link: lost, repeated, or left over from a dead sender.

Pure state, no sockets. A sender is one sending socket; its frames carry (sender, incarnation,
number) and count from 0. libzmq loses one contiguous run of messages, without an error, when a
receiver dies or rebinds, and can deliver frames that a sender queued before it crashed; it does not
reorder or repeat. See docs/frames.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from transport.frame import Envelope

MAX_SENDERS = 256  # remembered per receiver; the least recently heard is forgotten first
MAX_RETIRED = 8  # earlier incarnations remembered per sender


class Arrival(Enum):
    """What a frame's number says. Only NEXT and GAP are delivered."""

    NEXT = auto()
    GAP = auto()  # frames before this one were lost
    DUPLICATE = auto()  # a number that was already delivered, or was given up as lost
    STALE = auto()  # from an incarnation that a newer one has replaced


@dataclass(slots=True)
class _Sender:
    incarnation: int
    expected: int = 0
    retired: list[int] = field(default_factory=list)


class Numbering:
    """The receiving side of all links that end in one socket.

    A sender's incarnations are random and have no order: the one that appeared last is the living
    one, and whatever its predecessors still had queued is STALE. (Their frames belong to an epoch
    that their crash ended. Two living processes under one name are a mistake: the first is cut off
    as soon as the second speaks.) A sender that was forgotten, or an incarnation more than
    MAX_RETIRED lives old, looks new; its number then shows as a GAP, never as silence.
    """

    __slots__ = ("_senders",)

    def __init__(self) -> None:
        self._senders: dict[str, _Sender] = {}

    def place(self, envelope: Envelope) -> tuple[Arrival, int]:
        """Take note of one frame. Returns its arrival and the number that was expected."""
        sender = self._senders.pop(envelope.sender, None)
        if sender is None:
            if len(self._senders) >= MAX_SENDERS:
                del self._senders[next(iter(self._senders))]
            sender = _Sender(envelope.incarnation)
        self._senders[envelope.sender] = sender  # last in the dict: most recently heard
        if envelope.incarnation != sender.incarnation:
            if envelope.incarnation in sender.retired:
                return Arrival.STALE, sender.expected
            sender.retired = [*sender.retired[1 - MAX_RETIRED :], sender.incarnation]
            sender.incarnation, sender.expected = envelope.incarnation, 0
        expected = sender.expected
        if envelope.number < expected:
            return Arrival.DUPLICATE, expected
        sender.expected = envelope.number + 1
        return (Arrival.NEXT if envelope.number == expected else Arrival.GAP), expected

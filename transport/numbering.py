"""Owns what a link does between bytes and frames: it numbers, and finds what was lost or repeated.

Pure state, no sockets: transport.link moves the bytes. A sender is one sending socket; its frames
carry (sender, incarnation, number) and count from 0. libzmq loses one contiguous run of messages,
without an error, when a receiver dies or rebinds, and can deliver frames that a sender queued
before it crashed; it does not reorder or repeat. See docs/frames.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias, get_args

from transport.codec import decode, encode
from transport.frame import Buffer, Envelope, Frame, FrameError, LinkGap, Wire
from transport.pieces import join

OnDrop: TypeAlias = Callable[[str], None]
_CROSSES: tuple[type, ...] = get_args(Wire)

MAX_SENDERS = 256  # remembered per receiver; the least recently heard is forgotten first
MAX_RETIRED = 8  # earlier incarnations remembered per sender
REVIVE = 3  # frames in a row by which a retired incarnation shows that it lives


class Arrival(Enum):
    """What a frame's number says. Only NEXT and GAP are delivered."""

    NEXT = auto()
    GAP = auto()  # frames before this one were lost
    DUPLICATE = auto()  # a number that was already delivered, or was given up as lost
    STALE = auto()  # from an incarnation that a newer one has replaced


NEXT, GAP, DUPLICATE, STALE = Arrival  # found sooner than on the class: each message asks


@dataclass(slots=True)
class _Sender:
    incarnation: int
    expected: int = 0
    retired: list[int] = field(default_factory=list)
    voice: tuple[int, int, int] = (0, 0, 0)  # retired incarnation, its last number, how many


class Numbering:
    """The receiving side of all links that end in one socket.

    A sender's incarnations are random and have no order: the one that appeared last is the living
    one, and whatever its predecessors still had queued is STALE. (Their frames belong to an epoch
    that their crash ended. Two living processes under one name are a mistake: the first is cut off
    as soon as the second speaks.) But a receiver that was itself restarted may hear the living one
    first and then a leftover: so a retired incarnation that speaks REVIVE times, in order, while
    its successor says nothing lives after all, and what was dropped shows as a GAP. A sender that
    was forgotten, or an incarnation more than
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
                if not _lives(sender, envelope):
                    return STALE, sender.expected
                sender.retired.remove(envelope.incarnation)
            sender.retired = [*sender.retired[1 - MAX_RETIRED :], sender.incarnation]
            sender.incarnation, sender.expected = envelope.incarnation, 0
        sender.voice = 0, 0, 0
        expected = sender.expected
        if envelope.number < expected:
            return DUPLICATE, expected
        sender.expected = envelope.number + 1
        return (NEXT if envelope.number == expected else GAP), expected


def _lives(sender: _Sender, envelope: Envelope) -> bool:
    """Whether a retired incarnation has spoken often enough in a row to be the living one."""
    life, last, count = sender.voice
    goes_on = life == envelope.incarnation and count and envelope.number > last
    sender.voice = envelope.incarnation, envelope.number, count + 1 if goes_on else 1
    return sender.voice[2] >= REVIVE


@dataclass(slots=True)
class LinkCounts:
    """What arrived on a receiving link since it was opened; frames counts what was delivered.

    local: inputs that a core only takes from its own process, and that came over the link.
    """

    frames: int = 0
    gaps: int = 0
    lost: int = 0
    duplicates: int = 0
    stale: int = 0
    undecodable: int = 0
    local: int = 0

    @property
    def dropped(self) -> int:
        """Messages that were not delivered."""
        return self.duplicates + self.stale + self.undecodable + self.local


class Inbox:
    """Turns messages into deliveries; the part that both receiving sides share."""

    def __init__(self, link: str, on_drop: OnDrop | None) -> None:
        self.link = link
        self.counts = LinkCounts()
        self.header: Buffer = b""  # of the last message, put together again; its tensor is not kept
        self._numbering = Numbering()
        self._on_drop = on_drop

    def take(self, parts: Sequence[Buffer]) -> list[tuple[Frame, Envelope]]:
        """The frames that one message delivers, in order: none, it, or a LinkGap and it."""
        try:
            parts = join(parts)
            frame, envelope = decode(parts)
        except FrameError as error:
            self.counts.undecodable += 1
            return self._drop(str(error))
        self.header = parts[0]
        return self.arrived(frame, envelope)

    def arrived(self, frame: Frame, envelope: Envelope) -> list[tuple[Frame, Envelope]]:
        """The same for a message that was decoded."""
        counts = self.counts
        if not isinstance(frame, _CROSSES):
            counts.local += 1
            return self._drop(f"{envelope}: a {type(frame).__name__}, which crosses no link")
        arrival, expected = self._numbering.place(envelope)
        if arrival is DUPLICATE:
            counts.duplicates += 1
            return self._drop(f"{envelope}: a duplicate, {expected} was expected")
        if arrival is STALE:
            counts.stale += 1
            return self._drop(f"{envelope}: left over from an earlier life of its sender")
        counts.frames += 1
        if arrival is NEXT:
            return [(frame, envelope)]
        counts.gaps += 1
        counts.lost += envelope.number - expected
        return [(LinkGap(envelope.sender, expected, envelope.number), envelope), (frame, envelope)]

    def _drop(self, reason: str) -> list[tuple[Frame, Envelope]]:
        """Tell of the 1st, 2nd, 4th, 8th, ... only: a flood must not become one of log lines."""
        count = self.counts.dropped
        if self._on_drop is not None and count & (count - 1) == 0:
            self._on_drop(f"{self.link}: {reason} ({count} dropped so far)")
        return []


class Outbox:
    """Numbers and encodes frames; the part that both sending sides share."""

    def __init__(self, sender: str, incarnation: int, max_bytes: int) -> None:
        self.next = Envelope(sender, incarnation, 0)
        self._max_bytes = max_bytes

    def pack(self, frame: Frame) -> list[Buffer]:
        """The next message. Raises FrameError where the peer would cut the connection over it."""
        parts = encode(frame, self.next)
        size = max([memoryview(part).nbytes for part in parts])
        if size > self._max_bytes:
            raise FrameError(
                f"{type(frame).__name__} of {size} bytes is over limits.max_frame_bytes "
                f"({self._max_bytes}); use smaller chunks"
            )
        return parts

    def sent(self) -> Envelope:
        """Count the message as sent; returns the envelope it left under."""
        envelope = self.next
        self.next = Envelope(envelope.sender, envelope.incarnation, envelope.number + 1)
        return envelope

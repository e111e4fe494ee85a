"""Owns what a socket monitor's events mean: who came, went, or was refused, and how often.

Pure state; transport.link feeds it. libzmq names the connection in some of its events only, so a
refusal beside another handshake may be counted twice or called a disconnection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

SAME_KEYS = "do both ends have the keys of the same ring.toml?"  # for who was refused
LOG_EVERY_S = 10.0  # a stranger that tries all day must not fill the disk


class Seen(Enum):
    """A monitor's event."""

    OPENED = auto()  # accepted, or connected: the handshake begins
    LET_IN = auto()
    NO_KEY = auto()  # it speaks without CURVE
    WRONG_KEY = auto()  # it knows neither this side's key, or is not the one it says
    STRANGER = auto()  # a whole handshake with a key that is not one of the ring's
    NONSENSE = auto()  # anything else, or nothing in time
    CLOSED = auto()


_WHY = {
    Seen.NO_KEY: "it has no keys",
    Seen.WRONG_KEY: "its handshake is not for this side's public key",
    Seen.STRANGER: "its key is not one of those allowed here",
    Seen.NONSENSE: "it made no handshake",
}


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """What a socket monitor saw. event: "connected", "disconnected" or "refused" (then `why`)."""

    link: str
    event: str
    address: str
    why: str = ""


OnPeer: TypeAlias = Callable[[PeerEvent], None]


class PeerWatch:
    """The events of one socket, in order."""

    def __init__(self, link: str) -> None:
        self._link = link
        self._shaking: dict[int, None] = {}  # descriptors of connections before their handshake
        self._failed = False  # the last event was a refusal: its connection closes next

    def take(self, seen: Seen, value: int, address: str) -> PeerEvent | None:
        """What an event says; value: the connection's descriptor, where libzmq tells it."""
        failed, self._failed = self._failed, False
        if seen is Seen.OPENED:
            self._shaking[value] = None
            return None
        if seen is Seen.LET_IN:
            if self._shaking:  # most likely the newest: an honest handshake takes a millisecond
                self._shaking.popitem()
            return PeerEvent(self._link, "connected", address)
        if seen is Seen.CLOSED:
            early = value in self._shaking
            self._shaking.pop(value, None)
            if failed:
                return None  # told already
            if early:
                return PeerEvent(self._link, "refused", address, _WHY[Seen.NONSENSE])
            return PeerEvent(self._link, "disconnected", address)
        self._failed = True
        return PeerEvent(self._link, "refused", address, _WHY[seen])


class Refusals:
    """Counts refused peers, and says when it is time to log another line."""

    def __init__(self) -> None:
        self.total = 0
        self._told = 0
        self._told_at: float | None = None

    def note(self, event: PeerEvent, now: float) -> dict[str, object] | None:
        """Count a refusal; what to log of it and of those since the last line, or None.

        Any other event is ignored. now: seconds on any monotonic clock.
        """
        if event.event != "refused":
            return None
        self.total += 1
        if self._told_at is not None and now < self._told_at + LOG_EVERY_S:
            return None
        count, self._told, self._told_at = self.total - self._told, self.total, now
        return {
            "link": event.link, "address": event.address, "why": event.why,
            "count": count, "total": self.total,
        }  # fmt: skip

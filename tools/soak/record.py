"""Owns what is known of one request: what was asked, what came, and when. Judges nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tools.client import Json

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class Reading(StrEnum):
    """What the client does with its answer."""

    WHOLE = "whole"
    SLOW = "slow"  # reads nothing for a while, with a small receive buffer
    LEAVE = "leave"  # closes its connection on the way
    CANCEL = "cancel"  # POST /v1/cancel on the way, and reads on


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETE = "complete"
    CANCELLED = "cancelled"  # by POST /v1/cancel; what it had is its answer
    LEFT = "left"  # the client closed
    ERROR = "error event"
    REFUSED = "refused"  # another status than 200
    CUT = "cut"  # the connection ended in the middle
    UNREACHABLE = "unreachable"
    ENDLESS = "endless"  # nothing came for SILENCE_S, or it took longer than LONGEST_S


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request. parts: of the prompt, each with the spellings it may have been given.

    after: pieces that the client reads before it leaves, cancels or falls asleep.
    """

    kind: str
    path: str
    body: Json
    tenant: str
    reading: Reading = Reading.WHOLE
    parts: tuple[tuple[bytes, ...], ...] = ()
    after: int = 0

    @property
    def choices(self) -> int:
        """How many replies were asked for."""
        return int(self.body.get("n", 1))


@dataclass(slots=True)
class Choice:
    """One reply as far as it came. ids: of its tokens, where they were asked for (toy only)."""

    text: str = ""
    ids: list[int] | None = None
    finishes: list[str] = field(default_factory=list)

    @property
    def began(self) -> bool:
        """Something came that can be compared."""
        return bool(self.text or self.ids or self.finishes)


@dataclass(slots=True)
class Record:
    """One request and its answer. Times by time.monotonic()."""

    wanted: Wanted
    sent: float
    choices: list[Choice]
    ended: float = 0.0
    pieces: list[float] = field(default_factory=list)  # when text came
    outcome: Outcome | None = None
    status: int = 0
    code: str = ""  # of the error, or what the HTTP library says
    errors: int = 0  # error events
    dones: int = 0
    behind: int = 0  # events behind [DONE]
    usage: Json = field(default_factory=dict)

    @property
    def streamed(self) -> bool:
        """The answer was a stream that began."""
        return bool(self.wanted.body.get("stream")) and self.status == 200

    @property
    def tokens(self) -> int:
        """Generated tokens, as the server counts them."""
        found = self.usage.get("completion_tokens")
        return found if isinstance(found, int) else 0

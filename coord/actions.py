"""Owns what the scheduler asks its driver to do, and the error a client gets. Performs nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from coord.ledger import Miss
from transport.frame import Wire
from transport.quick import quick


class TurnError(Exception):
    """The client asked for the impossible, or the ring cannot serve it.

    status: the HTTP status. code: a stable machine-readable name. param: the request's field.
    retry_after_s: when to ask again, where that can be said.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        *,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


@quick
@dataclass(frozen=True, slots=True)
class Send:
    """Send a frame to the head of frame.ring."""

    frame: Wire


@dataclass(frozen=True, slots=True)
class Admitted:
    """The turn has a slot. matched: prompt tokens already resident; the rest is prefilled.

    resumed: the turn was running before (its ring was lost); matched then counts its own rows. A
    second one with resumed False corrects the first: the stages refused what was matched. miss: why
    reuse ended where it did, None when all but the last token was resident. cold_s: what the whole
    prompt's prefill would take at the rates measured so far, None before any was.
    """

    turn: int
    ring: str
    slot: int
    prompt: int
    matched: int
    resumed: bool = False
    miss: Miss | None = None
    cold_s: float | None = field(default=None, compare=False)  # a measurement


@quick
@dataclass(frozen=True, slots=True)
class Tokens:
    """Newly committed tokens of a turn, in order; logprobs and top as in transport.frame.Result.

    accepted, rejected: the drafts that this answer judged.
    """

    turn: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    accepted: int = field(default=0, compare=False)
    rejected: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Finished:
    """The turn is over.

    reason: "stop" (a stop token, which is the last committed one), "length" (budget or context
    limit), or the reason of the Cancel that ended it.
    """

    turn: int
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The turn ended without a result; see TurnError for status and code."""

    turn: int
    status: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Draft:
    """Ask the draft model for `count` tokens after a turn's known ones; answered by a Drafted.

    tokens: the known tokens from position `start` on that no earlier Draft of the turn told. A
    later one of the same turn replaces it; Finished and Failed end them all. salt: turns under
    different salts must not speed each other up.
    """

    turn: int
    start: int
    tokens: tuple[int, ...]
    count: int
    salt: bytes = b""

    @property
    def known(self) -> int:
        """How many tokens of the turn are known: where the answer starts."""
        return self.start + len(self.tokens)


Action: TypeAlias = Send | Admitted | Tokens | Finished | Failed | Draft

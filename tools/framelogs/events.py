"""Owns what can happen to a turn or ring, as the coordinator's log tells it. See framelogs.life."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from transport.frame import Copy, Free, Ping, Reject, RollCall, Run, Segment, Submit, Verdict


class How(StrEnum):
    """Why a turn was given a slot."""

    ADMITTED = "admitted"
    RESUMED = "resumed"  # its ring was lost
    RESTARTED = "started over"  # stages refused its rows


@dataclass(slots=True)
class Flight:
    """A numbered frame that went out. drafts: of each segment of a Run, how many are guesses.

    number: None where its link did not take it.
    """

    frame: Run | Copy | Free | Ping
    sent_ns: int
    number: int | None
    drafts: tuple[int, ...] = ()
    guesses: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Submitted:
    """A client's turn came."""

    at_ns: int
    turn: int
    submit: Submit


@dataclass(frozen=True, slots=True)
class Placed:
    """Its first frame in a slot leaves: rows [0, start) are used as they are."""

    at_ns: int
    turn: int
    ring: str
    slot: int
    start: int
    rows: int
    how: How


@dataclass(frozen=True, slots=True)
class Forked:
    """Rows are copied for a turn."""

    at_ns: int
    turn: int
    copy: Copy
    flight: Flight


@dataclass(frozen=True, slots=True)
class Copied:
    """The copy is made on every stage."""

    at_ns: int
    turn: int
    copy: Copy
    flight: Flight


@dataclass(frozen=True, slots=True)
class Sent:
    """A segment leaves in a frame. drafts: how many of its last tokens are guesses."""

    at_ns: int
    turn: int
    segment: Segment
    flight: Flight
    drafts: int


@dataclass(frozen=True, slots=True)
class Answered:
    """A segment's verdict. tokens: committed by it, of which the first `accepted` were drafts.

    void: it was sent on guesses that turned out wrong. judged: the drafts that it answers for.
    """

    at_ns: int
    turn: int
    segment: Segment
    flight: Flight
    verdict: Verdict
    tokens: tuple[int, ...] = ()
    judged: int = 0
    accepted: int = 0
    void: bool = False
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """A stage refuses a turn's rows."""

    at_ns: int
    turn: int
    reject: Reject


@dataclass(frozen=True, slots=True)
class Lost:
    """A ring can't be trusted any more; `frames` of it were in flight."""

    at_ns: int
    ring: str
    why: str
    frames: int
    turns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Called:
    """The roll is called."""

    at_ns: int
    ring: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Formed:
    """The roll call came back with the claims that all stages confirm, of `claimed`."""

    at_ns: int
    ring: str
    call: RollCall
    claimed: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A turn is over. reason: "stop", "length", or its Cancel's."""

    at_ns: int
    turn: int
    reason: str


Event: TypeAlias = (
    Submitted
    | Placed
    | Forked
    | Copied
    | Sent
    | Answered
    | Refused
    | Lost
    | Called
    | Formed
    | Ended
)

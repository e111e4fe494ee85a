"""Owns what is noted of a frame whose answer is still to come, and which answer may settle it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from transport.chain import Chain
from transport.frame import Copy, Free, Ping, Result, Run, Segment
from transport.quick import quick

Numbered: TypeAlias = Run | Copy | Free | Ping


@quick
@dataclass(frozen=True, slots=True)
class InFlight:
    """A numbered frame without its answer."""

    frame: Numbered
    sent_at: float
    chain: Chain | None = None  # of a copy: the tokens of its rows
    guesses: tuple[int, ...] = ()  # of a Run: each segment's Turn.guess
    alone: bool = False  # of a copy: nothing else was in flight when it was sent
    rows: int = 0  # of a Run; every event asks for those of all frames in flight

    @property
    def owners(self) -> list[int]:
        """The turns that wait for the answer."""
        if isinstance(self.frame, Run):
            return [segment.turn for segment in self.frame.segments]
        return [self.frame.turn] if isinstance(self.frame, Copy) else []


def awaited(records: Iterable[InFlight]) -> dict[int, int]:
    """How many of these answers each turn waits for."""
    count: dict[int, int] = {}
    for record in records:
        for owner in record.owners:
            count[owner] = count.get(owner, 0) + 1
    return count


def fits(result: Result, segment: Segment, vocabulary: int) -> bool:
    """True when a result answers exactly the positions that the segment wanted."""
    wanted = segment.turn, segment.slot, segment.end - segment.want, segment.want
    if (result.turn, result.slot, result.start, len(result.tokens)) != wanted:
        return False
    scored = segment.sampling.logprobs is None or len(result.logprobs) == segment.want
    listed = len(result.top) in (0, segment.want)
    return scored and listed and max(result.tokens, default=0) < vocabulary

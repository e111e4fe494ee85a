"""Owns speculation: what to propose as a turn's next tokens, how much of it, and how deep.

A draft is accepted exactly when it is the token that would have been picked anyway, so nothing here
can change a reply; it only decides what is worth computing ahead. Knows no ring and no slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

NGRAM = 3  # longest suffix that is looked up; then 2, then 1
ROW_STEP = 8  # rows of a frame cost in steps: exact mode pads to them, and 8 cost what 1 costs
MAX_DRAFT = 32  # tokens of one verify segment after its first
DECAY = 0.8  # of the acceptance counts at each verdict: about the last 5 count
MAX_DEPTH = 16  # verify frames of one turn in flight


class Drafter(Protocol):
    """Proposes the tokens after a sequence; one per turn, fed with the turn's known tokens."""

    def extend(self, tokens: Sequence[int]) -> None:
        """These tokens are known now, after all earlier ones."""

    def propose(self, branch: Sequence[int], count: int) -> tuple[int, ...]:
        """Up to `count` tokens that may follow the known tokens and then `branch`."""


class LookupDrafter:
    """Prompt lookup: what followed the latest earlier occurrence of the last 3, 2 or 1 tokens.

    Saxena, "Prompt Lookup Decoding" (2023). An index of every n-gram's latest position, extended
    as tokens come; it depends on the known tokens alone, so a warm turn proposes what a cold one
    would.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        # per n: n-gram -> position after its latest occurrence that has a successor
        self._after: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in range(NGRAM))

    def extend(self, tokens: Sequence[int]) -> None:
        """See Drafter. Cost: about 0.5 us per token."""
        start = len(self._tokens)
        self._tokens.extend(tokens)
        last = len(self._tokens) - 1  # the n-gram that ends here has no successor yet
        for n, after in enumerate(self._after, 1):
            first = max(0, start - n)  # the n-grams [first, first + n) that now have a successor
            parts = [self._tokens[first + k : last - n + 1 + k] for k in range(n)]
            after.update(zip(zip(*parts, strict=False), range(first + n, last + 1), strict=False))

    def propose(self, branch: Sequence[int], count: int) -> tuple[int, ...]:
        """See Drafter."""
        tail = [*self._tokens[-NGRAM:], *branch][-NGRAM:]
        for n in range(min(NGRAM, len(tail)), 0, -1):
            at = self._after[n - 1].get(tuple(tail[len(tail) - n :]))
            if at is None:
                continue
            found = self._tokens[at : at + count]
            whole = [*self._tokens[at:], *branch] if len(found) < count else found
            while len(whole) < count:  # a period that runs into the end goes on
                whole = whole + whole
            return tuple(whole[:count])
        return ()


def accepted(proposed: Sequence[int], picked: Sequence[int]) -> int:
    """How many leading proposals are the tokens that were picked."""
    count = 0
    for draft, token in zip(proposed, picked, strict=False):
        if draft != token:
            break
        count += 1
    return count


@dataclass(slots=True)
class Acceptance:
    """A turn's measured chance that one more draft is right, and how deep it may speculate."""

    hits: float = 1.0  # begin at 1 of 2: undecided
    trials: float = 2.0
    depth: int = 1  # verify frames in flight: one more for each that was accepted whole

    @property
    def rate(self) -> float:
        """In (0, 1)."""
        return self.hits / self.trials

    def learn(self, proposed: int, right: int) -> None:
        """`right` of `proposed` drafts were accepted; what is behind a wrong one says nothing."""
        if not proposed:
            return
        wrong = right < proposed
        self.hits = self.hits * DECAY + right
        self.trials = self.trials * DECAY + right + wrong
        self.trials = max(self.trials, self.hits + 0.05)  # never certain
        self.depth = 1 if wrong else min(self.depth + 1, MAX_DEPTH)


def worthwhile(rate: float, rows: int, frame_s: float, row_s: float, latency_s: float) -> int:
    """How many draft rows to add to a frame that has `rows` certain rows.

    rate: chance that a draft is accepted given those before it. frame_s: a small frame in the
    slowest stage; row_s: each further row there; latency_s: the ring's round trip, 0 when other
    frames fill the ring meanwhile. Rows are added by steps while a step's expected tokens per
    second beat the frame's own rate; the first step is what padding would compute anyway.
    """
    free = -rows % ROW_STEP
    best = free if rows else ROW_STEP
    if row_s <= 0.0:
        return min(best, MAX_DRAFT)
    time_s = max(frame_s, latency_s, 1e-6)
    gained = max(rows, 1) + _expected(rate, 0, best)
    while best < MAX_DRAFT:
        more = _expected(rate, best, best + ROW_STEP)
        if more / (ROW_STEP * row_s) <= gained / time_s:
            break
        best += ROW_STEP
        gained += more
        time_s += ROW_STEP * row_s
    return min(best, MAX_DRAFT)


def _expected(rate: float, low: int, high: int) -> float:
    """Expected accepted drafts among the low-th to the high-th of a run (geometric)."""
    total: float = sum(rate ** (index + 1) for index in range(low, high))
    return total

"""Owns speculation: what to propose as a turn's next tokens, how much of it, and how deep.

A draft is accepted exactly when it is the token that would have been picked anyway, so nothing here
can change a reply; it only decides what is worth computing ahead. Knows no ring and no slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import Protocol

NGRAM = 3  # longest suffix that is looked up; then 2, then 1
ROW_STEP = 8  # rows of a frame cost in steps: exact mode pads to them, and 8 cost what 1 costs
MAX_DRAFT = 32  # tokens of one verify segment after its first
DECAY = 0.8  # of the acceptance counts at each verdict: about the last 5 count
USUAL_DECAY = 0.98  # of the counts over all turns
TRUST = 2.0  # verdicts that a new turn's expectation weighs
MAX_DEPTH = 16  # verify frames of one turn in flight
LEAST_SHARE = 0.2  # of a frame's chance to count x the ring's places: see docs/speculation.md
LEAST_GAIN = 0.5  # of what the frames in flight give, for guesses that would ride beside them


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an operator allows (ring.toml), or a bench prescribes by equal bounds.

    tokens: of one verify segment after its first; depth: verify frames of a turn in flight.
    """

    most_tokens: int = MAX_DRAFT
    most_depth: int = MAX_DEPTH
    least_tokens: int = 0
    least_depth: int = 1

    def tokens(self, wanted: int) -> int:
        """`wanted` within the bounds."""
        return max(self.least_tokens, min(wanted, self.most_tokens))

    def depth(self, wanted: int) -> int:
        """`wanted` within the bounds."""
        return max(self.least_depth, min(wanted, self.most_depth))


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
    would. least: shorter occurrences propose nothing.
    """

    def __init__(self, least: int = 1) -> None:
        self._least = least
        self._tokens: list[int] = []
        # per n: n-gram -> position after its latest occurrence that has a successor
        self._after: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in range(NGRAM))

    def extend(self, tokens: Sequence[int]) -> None:
        """See Drafter. Cost: about 0.5 us per token."""
        start = len(self._tokens)
        self._tokens.extend(tokens)
        last = len(self._tokens) - 1  # the n-gram that ends here has no successor yet
        for n, after in enumerate(self._after, 1):
            if n < self._least:
                continue  # nobody looks it up
            first = max(0, start - n)  # the n-grams [first, first + n) that now have a successor
            parts = [self._tokens[first + k : last - n + 1 + k] for k in range(n)]
            after.update(zip(zip(*parts, strict=False), range(first + n, last + 1), strict=False))

    def propose(self, branch: Sequence[int], count: int) -> tuple[int, ...]:
        """See Drafter."""
        tail = [*self._tokens[-NGRAM:], *branch][-NGRAM:]
        for n in range(min(NGRAM, len(tail)), self._least - 1, -1):
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
class Usual:
    """How drafts of a server's latest turns fared: what a new turn is expected to be like.

    Hits and trials, decaying over about 50 verdicts: at first hopeful, so that drafts are tried.
    """

    start: tuple[float, float] = (1.0, 2.0)
    onward: tuple[float, float] = (1.4, 2.0)


@dataclass(slots=True)
class Acceptance:
    """A turn's measured chances that drafts are right.

    Two, because accepted drafts come in runs: `start` is the chance that a run begins at all (the
    first draft after a miss), `onward` that one goes on for another draft. One rate for both would
    either guess far ahead in a chat or too little in a quotation.
    """

    usual: Usual = field(default_factory=Usual)
    start: float = field(init=False)
    onward: float = field(init=False)
    running: bool = False  # the latest draft that was judged was right
    _start: tuple[float, float] = field(init=False)  # hits and trials, decaying
    _onward: tuple[float, float] = field(init=False)

    def __post_init__(self) -> None:
        self.start, self.onward = _rate(self.usual.start), _rate(self.usual.onward)
        self._start, self._onward = (TRUST * self.start, TRUST), (TRUST * self.onward, TRUST)

    def chance(self, count: int) -> float:
        """That the next `count` drafts are all right, from the last known token on."""
        first = self.onward if self.running else self.start
        return first * self.onward ** (count - 1) if count else 1.0

    def expected(self, low: int, high: int) -> float:
        """Expected accepted drafts among the (low + 1)-th to the high-th from here on."""
        if high <= low:
            return 0.0
        first, ratio = self.chance(low + 1), self.onward
        return first * (1.0 - ratio ** (high - low)) / (1.0 - ratio)

    def learn(self, proposed: int, right: int) -> None:
        """`right` of `proposed` drafts were accepted; what is behind a wrong one says nothing."""
        if not proposed:
            self.running = False
            return
        wrong = right < proposed
        began = not self.running
        if began:
            self._start = _counted(self._start, float(right > 0), 1.0)
            self.start = _rate(self._start)
            self.usual.start = _counted(self.usual.start, float(right > 0), 1.0, USUAL_DECAY)
        hits = max(0, right - began)
        trials = hits + (wrong and (right > 0 or not began))
        if trials:
            self._onward = _counted(self._onward, hits, trials)
            self.onward = _rate(self._onward)
            self.usual.onward = _counted(self.usual.onward, hits, trials, USUAL_DECAY)
        self.running = not wrong


def _counted(
    old: tuple[float, float], hits: float, trials: float, decay: float = DECAY
) -> tuple[float, float]:
    return old[0] * decay + hits, old[1] * decay + trials


def _rate(counts: tuple[float, float]) -> float:
    return min(0.995, max(0.005, counts[0] / counts[1]))  # never certain


@dataclass(frozen=True, slots=True)
class Pace:
    """What a ring's frames take, in seconds.

    frame_s: a small frame in the slowest stage; row_s: each further row there; link_s: what the
    links add to a round trip; stages: how many there are.
    """

    frame_s: float = 0.0
    row_s: float = 0.0
    link_s: float = 0.0
    stages: int = 1


def worthwhile(
    turns: Sequence[tuple[Acceptance, int]], rows: int, pace: Pace, *, alone: bool
) -> list[int]:
    """How many draft rows of each turn to add to a frame that has `rows` certain rows.

    turns: each one's acceptance, and its drafts in flight that must all be right before these
    count. alone: one turn has the ring to itself, so its latency counts and not the throughput.
    Rows come in steps; the first is what padding would compute anyway.
    """
    free = -rows % ROW_STEP if rows else ROW_STEP
    if alone and pace.row_s > 0.0:
        return [_shortest_run(acceptance.onward, free, pace) for acceptance, _ in turns]
    return _best_rate(turns, rows, free, pace)


def _best_rate(
    turns: Sequence[tuple[Acceptance, int]], rows: int, step: int, pace: Pace
) -> list[int]:
    """The likeliest drafts of all turns, by steps, while a step beats the rest's tokens per second.

    The frame's tokens per second before drafts are its certain rows over its time.
    """
    counts = [0] * len(turns)
    heap = [(-each.chance(pending + 1), i) for i, (each, pending) in enumerate(turns)]
    heapify(heap)
    gained = float(rows)
    time_s = pace.frame_s + pace.row_s * max(0, rows - ROW_STEP)
    cost_s = 0.0  # the first step is free
    while heap:
        taken: list[int] = []
        more = 0.0
        while heap and len(taken) < step:
            chance, i = heap[0]
            taken.append(i)
            more -= chance
            acceptance, pending = turns[i]
            count = counts[i] + taken.count(i)
            if count < MAX_DRAFT:
                heapreplace(heap, (-acceptance.chance(pending + count + 1), i))
            else:
                heappop(heap)
        if cost_s and more / cost_s <= gained / time_s:
            break
        for i in taken:
            counts[i] += 1
        if pace.row_s <= 0.0 or pace.frame_s <= 0.0:
            break
        gained += more
        time_s += cost_s
        step, cost_s = ROW_STEP, ROW_STEP * pace.row_s
    return counts


def _shortest_run(onward: float, free: int, pace: Pace) -> int:
    """The length whose frames, one behind another, come soonest to the end of a run of right ones.

    The first frame takes the round trip, each further one the slowest stage's time, and the frame
    that corrects the miss waits for half a frame of guesses.
    """
    best, least_s = free, 0.0
    for count in range(free, MAX_DRAFT + 1, ROW_STEP):
        frame_s = pace.frame_s + pace.row_s * (count - free)
        more = 1.0 / (1.0 - onward ** (count + 1)) - 1.0  # expected frames behind the first
        took_s = pace.link_s + frame_s * (pace.stages + more + 0.5)
        if not least_s or took_s < least_s:
            best, least_s = count, took_s
    return best

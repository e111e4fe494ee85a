"""Owns what a ring's next frame takes: certain work first, guesses only where they pay.

Cuts segments off turns; sends nothing and knows no slot's contents.
"""

from __future__ import annotations

import math

from coord.draft import LEAST_GAIN, LEAST_SHARE, MAX_DEPTH, MAX_DRAFT, ROW_STEP, Pace, worthwhile
from coord.ring import Ring
from coord.turn import Phase, Turn
from transport.config import Limits
from transport.frame import Segment

CHUNK_STEP = 32  # rows


def certain(ring: Ring, mine: list[Turn], limits: Limits) -> list[Segment]:
    """A frame of work that is surely needed: every ready decode segment, then prefill.

    Drafts ride along as far as they pay. While a turn decodes, prefill comes in smaller chunks, so
    that the decoding turn's gaps stay short.
    """
    ready = [turn for turn in mine if turn.decoding and turn.ready]
    ready = ready[: _at_most(len(ready), ring)]
    decodes = any(turn.decoding and turn.phase is Phase.RUNNING for turn in mine)
    waiting = sum(turn.known - turn.sent for turn in mine if not turn.decoding)
    left = limits.shared_chunk_tokens if decodes else chunk_rows(ring, waiting, limits)
    prefill: list[Segment] = []
    for turn in mine:
        segment = None if turn.decoding else turn.next_segment(left)
        if segment is not None:
            prefill.append(segment)
            left -= len(segment.tokens)
    rows = len(ready) + sum(len(segment.tokens) for segment in prefill)
    drafted = [turn for turn in ready if turn.drafter is not None]
    _speculate(ring, drafted, _worthwhile(ring, drafted, rows, alone=len(mine) == 1))
    found = [turn.next_segment(1 + MAX_DRAFT) for turn in ready]
    return [segment for segment in found if segment is not None] + prefill


def chunk_rows(ring: Ring, rows: int, limits: Limits) -> int:
    """Rows of the next prefill frame when `rows` wait: small enough that the stages overlap.

    With chunks of c rows a prefill of n takes (n / c + stages - 1) frames in a row, each of
    frame_s + c x row_s in the slowest stage; the least is at c = sqrt(n frame_s / (row_s (stages -
    1))). Rounded up to CHUNK_STEP rows, which exact mode computes at once (docs/exactness.md).
    """
    stages = len(ring.spec.stages)
    if stages == 1 or not ring.row_s or not ring.frame_s:
        return limits.chunk_tokens
    best = math.sqrt(rows * ring.frame_s / (ring.row_s * (stages - 1)))
    return min(limits.chunk_tokens, max(1, math.ceil(best / CHUNK_STEP)) * CHUNK_STEP)


def ahead(ring: Ring, mine: list[Turn]) -> list[Segment]:
    """A frame of guesses alone, behind the turns' frames in flight.

    Only where the ring would be idle, for turns whose guess has a fair chance to count; and where
    several turns share the ring, only if all guesses together come near what their frames give.
    """
    flying = [turn for turn in mine if turn.ahead and turn.drafter is not None]
    if not flying or not ring.room_to_guess():
        return []
    guessing = []
    for turn in flying:
        deep = ring.bounds.depth(MAX_DEPTH if _chance(turn) * ring.pipe >= LEAST_SHARE else 1)
        if turn.ahead < deep:
            guessing.append(turn)
    alone = len(mine) == 1
    counts = _worthwhile(ring, guessing, 0, alone=alone)
    if not alone:
        decoding = sum(turn.decoding and turn.phase is Phase.RUNNING for turn in mine)
        gained = sum(
            turn.acceptance.expected(turn.pending, turn.pending + count)
            for turn, count in zip(guessing, counts, strict=True)
        )
        if gained * len(ring.in_flight) < LEAST_GAIN * decoding:
            return []
    _speculate(ring, guessing, counts)
    found = [turn.next_segment(MAX_DRAFT) for turn in guessing]
    return [segment for segment in found if segment is not None]


def _at_most(ready: int, ring: Ring) -> int:
    """How many of the ready turns one frame takes: more than a step only if places are short.

    Two frames of 8 rows, one behind the other, are back sooner than one of 16.
    """
    places = max(1, ring.pipe - len(ring.in_flight))
    return max(ROW_STEP, -(-ready // places))


def _worthwhile(ring: Ring, turns: list[Turn], rows: int, *, alone: bool) -> list[int]:
    if not turns:
        return []
    pace = Pace(ring.frame_s, ring.row_s, ring.link_s, len(ring.spec.stages))
    judged = [(turn.acceptance, turn.pending) for turn in turns]
    return worthwhile(judged, rows, pace, alone=alone)


def _speculate(ring: Ring, turns: list[Turn], counts: list[int]) -> None:
    """Append so many drafts to the turns' chains."""
    for turn, count in zip(turns, counts, strict=True):
        turn.speculate(ring.bounds.tokens(count))


def _chance(turn: Turn) -> float:
    """That the turn's next draft will count."""
    return turn.acceptance.chance(turn.pending + 1)

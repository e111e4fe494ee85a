"""Owns what a ring's next frame takes: certain work first, guesses only where they pay.

Cuts segments off turns; sends nothing and knows no slot's contents.
"""

from __future__ import annotations

import math

from coord.draft import LEAST_GAIN, LEAST_SHARE, MAX_DEPTH, MAX_DRAFT, ROW_STEP, Pace, worthwhile
from coord.ring import Ring
from coord.turn import RUNNING, Turn
from transport.config import Limits
from transport.frame import Kind, Run, Segment

CHUNK_STEP = 32  # rows
LIKELY = 1.0  # accepted drafts expected of a turn's next 7


def certain(ring: Ring, mine: list[Turn], limits: Limits) -> list[Segment]:
    """A frame of work that is surely needed: every ready decode segment, then prefill.

    Drafts ride along as far as they pay. While a turn decodes, prefill comes in smaller chunks, so
    that the decoding turn's gaps stay short.
    """
    if not any(turn.ready for turn in mine):
        return []
    ready = [turn for turn in mine if turn.decoding and turn.ready]
    decoding = sum(turn.decoding and turn.phase is RUNNING for turn in mine)
    frames = max(1, min(math.ceil(decoding / ROW_STEP), ring.pipe))
    if ready and _should_join(ready, frames, ring, mine):
        ready = []
    ready = ready[: max(ROW_STEP, math.ceil(decoding / frames))]
    decodes = decoding > 0
    waiting = sum(turn.known - turn.sent for turn in mine if not turn.decoding)
    left = limits.shared_chunk_tokens if decodes else chunk_rows(ring, waiting, limits)
    prefill: list[Segment] = []
    for turn in mine:
        segment = None if turn.decoding else turn.next_segment(left)
        if segment is not None:
            prefill.append(segment)
            left -= len(segment.tokens)
    rows = len(ready) + sum(len(segment.tokens) for segment in prefill)
    drafted = [turn for turn in ready if turn.hopeful]
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


def cold_s(ring: Ring, rows: int, limits: Limits) -> float | None:
    """Seconds until the first token of a prompt of `rows` tokens that nothing of is resident.

    On an idle ring, at the rates of its slowest stage (see chunk_rows). None before a prefill was
    timed: a guess would stand beside measurements as if it were one.
    """
    if not ring.row_s:
        return None
    chunk = min(rows, chunk_rows(ring, rows, limits))
    frames = math.ceil(rows / chunk)
    queued = (len(ring.spec.stages) - 1) * (ring.frame_s + chunk * ring.row_s)
    return frames * ring.frame_s + rows * ring.row_s + queued + ring.link_s


def ahead(ring: Ring, mine: list[Turn]) -> list[Segment]:
    """A frame of guesses alone, behind the turns' frames in flight.

    Only where the ring would be idle, for turns whose guess has a fair chance to count; and where
    several turns share the ring, only if all guesses together come near what their frames give.
    """
    flying = [turn for turn in mine if turn.ahead and turn.hopeful]
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
        decoding = sum(turn.decoding and turn.phase is RUNNING for turn in mine)
        gained = sum(
            turn.acceptance.expected(turn.pending, turn.pending + count)
            for turn, count in zip(guessing, counts, strict=True)
        )
        if gained * len(ring.in_flight) < LEAST_GAIN * decoding:
            return []
    _speculate(ring, guessing, counts)
    found = [turn.next_segment(MAX_DRAFT) for turn in guessing]
    return [segment for segment in found if segment is not None]


def _should_join(ready: list[Turn], frames: int, ring: Ring, mine: list[Turn]) -> bool:
    """True when the ready turns should wait for others to go with them in one frame.

    A step of rows costs what one row costs, so that more `frames` than steps only take the stages'
    time: turns that came to decode one by one would stay apart for ever. Each waits for the first
    frame that comes back. Not where a turn is likely to have drafts accepted: it fills a frame.
    """
    if any(turn.acceptance.expected(0, ROW_STEP - 1) >= LIKELY for turn in ready if turn.hopeful):
        return False
    turns = {turn.id: turn for turn in mine}
    flying = 0
    for record in ring.in_flight.values():
        if isinstance(record.frame, Run):
            pairs = zip(record.frame.segments, record.guesses, strict=True)
            flying += any(_is_certain(turns.get(each.turn), each, guess) for each, guess in pairs)
    return flying >= frames


def _is_certain(turn: Turn | None, segment: Segment, guess: int) -> bool:
    """True for a segment whose verdict brings a running turn at least one token."""
    return (
        turn is not None
        and segment.kind is Kind.VERIFY
        and turn.phase is RUNNING
        and guess == turn.guess
        and segment.start < turn.known
    )


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

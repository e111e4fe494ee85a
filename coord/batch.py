"""Owns what a ring's next frame takes: certain work first, guesses only where they pay.

Cuts segments off turns; sends nothing and knows no slot's contents.
"""

from __future__ import annotations

from coord.draft import MAX_DRAFT, worthwhile
from coord.ring import Ring
from coord.turn import Phase, Turn
from transport.config import Limits
from transport.frame import Segment


def certain(ring: Ring, mine: list[Turn], limits: Limits) -> list[Segment]:
    """A frame of work that is surely needed: every ready decode segment, then prefill.

    Drafts ride along as far as they pay. While a turn decodes, prefill comes in smaller chunks, so
    that the decoding turn's gaps stay short.
    """
    ready = [turn for turn in mine if turn.decoding and turn.ready]
    decodes = any(turn.decoding and turn.phase is Phase.RUNNING for turn in mine)
    left = limits.shared_chunk_tokens if decodes else limits.chunk_tokens
    prefill: list[Segment] = []
    for turn in mine:
        segment = None if turn.decoding else turn.next_segment(left)
        if segment is not None:
            prefill.append(segment)
            left -= len(segment.tokens)
    rows = len(ready) + sum(len(segment.tokens) for segment in prefill)
    for turn in sorted(ready, key=lambda turn: -turn.acceptance.rate):
        rows += _draft(ring, turn, rows)
    found = [turn.next_segment(1 + MAX_DRAFT) for turn in ready]
    return [segment for segment in found if segment is not None] + prefill


def ahead(ring: Ring, mine: list[Turn]) -> list[Segment]:
    """A frame of guesses alone: behind a turn's frames in flight, as deep as it was right."""
    segments: list[Segment] = []
    for turn in mine:
        if 0 < turn.ahead < turn.acceptance.depth and _draft(ring, turn, 0):
            segment = turn.next_segment(MAX_DRAFT)
            if segment is not None:
                segments.append(segment)
    return segments


def _draft(ring: Ring, turn: Turn, rows: int) -> int:
    latency_s = 0.0 if ring.in_flight else ring.round_s
    rate = turn.acceptance.rate
    return turn.speculate(worthwhile(rate, rows, ring.frame_s, ring.row_s, latency_s))

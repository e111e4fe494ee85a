"""Owns the choice of where a waiting turn goes: which ring, which slot, or behind which other turn.

Pure functions over the scheduler's state; they change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coord.ledger import FORK_ROWS, Placement, Wanted
from coord.ring import Phase as RingPhase
from coord.ring import Ring
from coord.turn import Phase, Turn
from transport.chain import root_hash


@dataclass(frozen=True, slots=True)
class Choice:
    """A ring, what the turn wants there, and where it goes."""

    ring: Ring
    wanted: Wanted
    placement: Placement


def choose(
    turn: Turn, turns: Mapping[int, Turn], rings: Mapping[str, Ring], now: float
) -> Choice | None:
    """The ring and slot with the least predicted time to the first token; None: no slot is free.

    The time is that of the rows ahead in the ring's queue and of the turn's own suffix at the
    measured rate, and a small frame for each turn that is there. Before anything was measured all
    rings count the same: rows decide. So affinity is strong, and load overrides it.
    """
    packed, submit = turn.packed(), turn.submit
    measured = [ring.row_s for ring in rings.values() if ring.row_s]
    usual = sum(measured) / len(measured) if measured else 1.0
    best: tuple[float, Choice] | None = None
    for ring in rings.values():
        if ring.phase is not RingPhase.READY:
            continue
        root = root_hash(ring.fingerprint, submit.salt)
        reuse = submit.reuse and ring.reuse
        wanted = Wanted(packed, root, turn.known - 1, reuse, submit.hint)
        placement = ring.ledger.place(wanted, now)
        if placement is None:
            continue
        there = [other for other in turns.values() if other.ring == ring.name]
        ahead = sum(max(0, other.known - other.sent) for other in there)
        rows = ahead + turn.known - placement.matched
        predicted = rows * (ring.row_s or usual) + len(there) * (ring.frame_s or usual)
        if best is None or predicted < best[0]:
            best = predicted, Choice(ring, wanted, placement)
    return None if best is None else best[1]


def leader(turn: Turn, turns: Mapping[int, Turn], choice: Choice) -> tuple[int, int] | None:
    """A turn that is prefilling more of this prompt than is resident, and how many rows of it.

    Waiting for them and copying costs less than computing them twice (single flight).
    """
    if not choice.wanted.reuse:
        return None
    packed, root, limit = choice.wanted.packed, choice.wanted.root, choice.wanted.limit
    best: tuple[int, int] | None = None
    for other in turns.values():
        if other.ring != choice.ring.name or other.phase is not Phase.RUNNING or other is turn:
            continue
        assert other.chain is not None
        assert other.slot is not None
        rows = min(other.chain.common(packed, root), other.known, limit)
        resident = choice.ring.ledger.slots[other.slot].resident
        if rows < choice.placement.matched + FORK_ROWS or resident >= rows:
            continue
        if best is None or rows > best[1]:
            best = other.id, rows
    return best


def waits_behind(turn: Turn, turns: Mapping[int, Turn], rings: Mapping[str, Ring]) -> bool:
    """True while the turn's leader still computes the rows that this one will copy."""
    if turn.behind is None:
        return False
    other = turns.get(turn.behind[0])
    if other is None or other.phase is not Phase.RUNNING:
        return False
    assert other.ring is not None
    assert other.slot is not None
    return rings[other.ring].ledger.slots[other.slot].resident < turn.behind[1]

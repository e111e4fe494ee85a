"""Owns carrying a placement out: what is freed, parked, given up and copied, in the ring's order.

Links are first in, first out, so every frame here means the rows that the frames before it left.
Part of the scheduler core; knows no turn but the one that is placed.
"""

from __future__ import annotations

from coord.admission import Choice
from coord.ring import PROBE_TURN, Ring
from coord.turn import Turn
from transport.frame import Copy, Free

NO_TURN = PROBE_TURN  # the owner of copies that no turn waits for
MAX_EXPIRED = 64  # frees of one event; a link takes 1,000 frames, the rest expire with the next


def carry_out(turn: Turn, choice: Choice, now: float) -> list[Copy | Free]:
    """Give the turn its slot: park or give up what is in the way, copy what is shared."""
    ring, placement = choice.ring, choice.placement
    ledger, slot, matched = ring.ledger, placement.slot, placement.matched
    source = placement.source
    donor = ledger.holding(slot if source is None else source)
    donor.used = now
    donor.proven = donor.proven or matched > 0
    turn.admit(ring.name, slot, choice.wanted.root, donor.chain, matched)
    assert turn.chain is not None
    frames: list[Copy | Free] = [
        free(ring, index, "parked too long", now) for index in placement.dropped
    ]
    reason = "replaced" if source is None and matched else "evicted"
    if placement.park is not None:
        held = ledger.slots[slot]
        assert held.chain is not None
        ledger.reserve(placement.park, held)
        chain, reason = held.chain.clone(), "parked"
        frames.append(ring.copy(NO_TURN, slot, placement.park, chain, held.resident, now))
    ledger.pin(slot, turn.id)
    ledger.give_up(slot, matched if source is None else 0, reason)
    ledger.claim(slot, turn.submit.hint, proven=matched > 0)
    if source is not None:
        turn.in_flight += 1
        frames.append(ring.copy(turn.id, source, slot, turn.chain, matched, now))
        if source in ledger.parked and donor.resident == matched:
            ledger.forget(source)  # all of it is in the slot again
            ledger.restored += 1
            frames.append(ring.free(source, now))
        else:
            ledger.share(source, slot, matched)
    return frames


def free(ring: Ring, index: int, reason: str, now: float) -> Free:
    """Give a slot or parked prefix up on every stage."""
    if ring.ledger.has(index):
        ring.ledger.give_up(index, 0, reason)
    ring.ledger.forget(index)
    return ring.free(index, now)


def expire(ring: Ring, before: float, now: float) -> list[Free]:
    """Give up what nobody has used since `before` (seconds, the driver's clock)."""
    return [free(ring, index, "ttl", now) for index in ring.ledger.idle(before)[:MAX_EXPIRED]]

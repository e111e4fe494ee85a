"""Owns the choice of where a waiting turn goes: which ring, which slot, or behind which other turn.

Pure functions over the scheduler's state; they change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from coord.ledger import FORK_ROWS, Miss, Placement, Wanted
from coord.ring import READY, Ring
from coord.turn import DRAINING, RUNNING, WAITING, Turn
from transport.chain import root_hash

OWNER_BYTES = 16  # a salt begins with its tenant's tag: whose salts begin alike is one owner
WORK = 0.5  # of a second that a ring computes, next to one that a client waits


@dataclass(frozen=True, slots=True)
class Choice:
    """A ring, what the turn wants there, and where it goes."""

    ring: Ring
    wanted: Wanted
    placement: Placement


def round_of(salt: bytes, turns: Iterable[Turn], now: int) -> int:
    """The round in which a new turn of this salt gets its slot; now: the last admitted turn's.

    Each owner has one turn in each round, so that who has a hundred turns waiting holds another's
    single one up by one turn, not by a hundred. One owner's turns keep their order. (Self-clocked
    fair queueing, Golestani 1994, with turns of equal length.)
    """
    owner = salt[:OWNER_BYTES]
    mine = [turn.round + 1 for turn in turns if turn.submit.salt[:OWNER_BYTES] == owner]
    return max(mine, default=now)


def queue(turns: Iterable[Turn]) -> list[Turn]:
    """The waiting turns, next one first."""
    waiting = [turn for turn in turns if turn.phase is WAITING]
    waiting.sort(key=lambda turn: turn.round)  # stable: then in order of arrival
    return waiting


def choose(
    turn: Turn, turns: Mapping[int, Turn], rings: Mapping[str, Ring], now: float
) -> Choice | None:
    """The ring and slot with the least predicted cost; None: no slot is free.

    The cost is the predicted time to the first token (the rows ahead in the ring's queue and the
    turn's own suffix at the measured rate, the copy, and a small frame for each turn that is there)
    and a share of the work, because rows that are computed twice delay others, now or when what is
    given up for the turn returns. Before anything was
    measured all rings count the same: rows decide. So affinity is strong, and load overrides it.
    """
    ready = _serving(rings)
    ready = [ring for ring in ready if any(slot.turn is None for slot in ring.ledger.slots)]
    if not ready:
        return None  # before anything is packed or compared: a full queue asks at every frame
    packed, submit = turn.packed(), turn.submit
    measured = [ring.row_s for ring in rings.values() if ring.row_s]
    usual = sum(measured) / len(measured) if measured else 1.0
    best: tuple[float, Choice] | None = None
    for ring in ready:
        root = root_hash(ring.fingerprint, submit.salt)
        reuse = submit.reuse and ring.reuse
        restore = ring.restore_pays(now)
        wanted = Wanted(packed, root, turn.known - 1, reuse, submit.hint, restore)
        placement = ring.ledger.place(wanted, now)
        if placement is None:
            continue
        choice = Choice(ring, wanted, placement)
        there = [other for other in turns.values() if other.ring == ring.name]
        ahead = sum(max(0, other.known - other.sent) for other in there) + ring.rows_in_flight()
        led = leader(turns, choice)
        matched = placement.matched if led is None else led[1]
        row_s = ring.row_s or usual
        own = turn.known - matched
        work = WORK * (own + placement.loss)
        cost = (ahead + own + work) * row_s + len(there) * (ring.frame_s or usual)
        cost += ring.copy_time(placement)
        if best is None or cost < best[0]:
            best = cost, choice
    return None if best is None else best[1]


def _serving(rings: Mapping[str, Ring]) -> list[Ring]:
    """Rings that take turns: the ready ones, spares only while another one is not ready."""
    ready = [each for each in rings.values() if each.phase is READY]
    regular = [each for each in rings.values() if not each.spec.spare]
    whole = all(each.phase is READY for each in regular)
    return [each for each in ready if not (whole and each.spec.spare)]


def explain(choice: Choice, rings: Mapping[str, Ring]) -> Miss | None:
    """Why reuse ends where it does; call it before the placement is carried out.

    Another ring may know better: there the prompt is resident (and the ring busy), or was lost.
    """
    wanted, matched = choice.wanted, choice.placement.matched
    miss = choice.ring.ledger.explain(wanted, matched)
    if miss is None or miss.reason not in ("new", "edited"):
        return miss
    for ring in rings.values():
        if ring is choice.ring or ring.fingerprint != choice.ring.fingerprint:
            continue
        if ring.ledger.longest(wanted) > matched:
            return Miss(matched, "busy ring")
        length, reason, _ = ring.ledger.gone.longest(wanted)
        if length > matched:
            return Miss(matched, reason)
    return miss


def leader(turns: Mapping[int, Turn], choice: Choice) -> tuple[int, int] | None:
    """A turn that is prefilling more of this prompt than is resident, and how many rows of it.

    Waiting for them and copying costs less than computing them twice (single flight). Also one that
    is over, whose last frames are still in flight, when this prompt goes on where it ended: within
    a round trip its slot is free and all its rows are known.
    """
    if not choice.wanted.reuse:
        return None
    packed, root, limit = choice.wanted.packed, choice.wanted.root, choice.wanted.limit
    best: tuple[int, int] | None = None
    for other in turns.values():
        ending = other.phase is DRAINING
        if other.ring != choice.ring.name or not (ending or other.phase is RUNNING):
            continue
        assert other.chain is not None
        assert other.slot is not None
        rows = min(other.chain.common(packed, root), other.known, limit)
        resident = choice.ring.ledger.slots[other.slot].resident
        if ending:
            if rows < max(resident, choice.placement.matched, FORK_ROWS):
                continue  # another text than the one that ended there
        elif rows < choice.placement.matched + FORK_ROWS or resident >= rows:
            continue
        if best is None or rows > best[1]:
            best = other.id, rows
    return best


def waits_behind(turn: Turn, turns: Mapping[int, Turn], rings: Mapping[str, Ring]) -> bool:
    """True while the turn's leader still computes the rows that this one will use."""
    if turn.behind is None:
        return False
    other = turns.get(turn.behind[0])
    if other is None or other.phase not in (RUNNING, DRAINING):
        return False
    if other.phase is DRAINING:
        return True  # until its last frame is back
    assert other.ring is not None
    assert other.slot is not None
    return rings[other.ring].ledger.slots[other.slot].resident < turn.behind[1]

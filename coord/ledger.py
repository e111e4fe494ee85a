"""Owns one ring's ledger: which prefix is resident where, as far as it was acknowledged.

A hint, never the authority: the stages refuse what they do not hold. Truncated when a frame is
sent, extended when its verdict comes back. Holds slots and parked prefixes, and says what to give
up for a new prompt; knows no turn but the one that pins a slot.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from transport.chain import TOKEN_BYTES, Chain

HALF_LIFE_S = 600.0  # an idle prefix is worth half as much after this long
UNPROVEN = 0.25  # worth of a prefix that no second turn has used: titles and other side requests
FORK_ROWS = 8  # a shorter common prefix is cheaper to prefill than to copy: 8 rows cost as one
PARK_ROWS = 64  # a shorter loss is not worth a place in the park
GONE_TOKENS = 1 << 18  # token ids of given-up prefixes that are remembered: 5 MiB with hashes
GONE_PREFIXES = 128  # and how many of them: a miss compares the prompt with each
MAX_DROPPED = 32  # parked prefixes that make room for one; more would flood the ring with frees
MAX_PARKED = 1024  # parked prefixes of one ring; each is compared at every match
WITNESSES = 8  # candidates whose loss is computed exactly: 8 x slots comparisons, about 1 ms


@dataclass(slots=True)
class Holding:
    """One slot or parked prefix: the acknowledged rows' chain, its pin, and its use.

    hint: the session that used it last. proven: a second turn has reused it. keep_until: an
    operator's or client's wish not to give it up before (seconds, the driver's clock).
    """

    chain: Chain | None = None
    turn: int | None = None  # the turn that writes here
    coming: int = 0  # rows that are being copied to a parked prefix
    used: float = 0.0
    hint: str = ""
    proven: bool = False
    keep_until: float = 0.0
    twin: tuple[int, int] | None = None  # the holding that shares most of it, and how many rows

    @property
    def resident(self) -> int:
        """Acknowledged rows."""
        return 0 if self.chain is None else len(self.chain)

    def weight(self, now: float) -> float:
        """What one of its rows is worth now, in [0, 1]."""
        age = max(0.0, now - self.used)
        decay: float = 0.5 ** (age / HALF_LIFE_S)
        return decay if self.proven else decay * UNPROVEN


@dataclass(frozen=True, slots=True)
class Wanted:
    """A prompt that needs a slot. limit: at most so many rows are reused (its length - 1).

    restore: copying from the park is worth while; else parked rows don't count, nor are any parked.
    """

    packed: bytes
    root: bytes
    limit: int
    reuse: bool
    hint: str = ""
    restore: bool = True


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a turn goes: write `slot` from row `matched` on.

    source: copy rows [0, matched) of this holding into the slot first, because it must stay whole.
    park: copy what the slot holds to this parked id before. dropped: parked ids to free for that.
    loss: rows that are given up for it, weighted by what they are worth.
    """

    slot: int
    matched: int
    source: int | None = None
    park: int | None = None
    dropped: tuple[int, ...] = ()
    loss: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a prompt was not reused further: from `position` on it is not resident.

    reason: "new", "edited" (another text is resident there), "reuse off", "busy ring" (resident on
    another one), "parked" (restoring costs more than prefilling), or why a matching prefix was
    given up (docs/residency.md). resident: up to 8 token ids that stand (or stood) at position.
    """

    position: int
    reason: str
    resident: tuple[int, ...] = ()


@dataclass(slots=True)
class Gone:
    """Prefixes that were given up, newest last, so that a miss can say why."""

    prefixes: deque[tuple[Chain, str]] = field(default_factory=deque)
    tokens: int = 0

    def add(self, chain: Chain, reason: str) -> None:
        """Remember a prefix; forget the oldest past GONE_TOKENS."""
        self.prefixes.append((chain, reason))
        self.tokens += len(chain)
        while self.tokens > GONE_TOKENS or len(self.prefixes) > GONE_PREFIXES:
            self.tokens -= len(self.prefixes.popleft()[0])

    def longest(self, wanted: Wanted) -> tuple[int, str, Chain | None]:
        """Longest common prefix with any of them, why it went, and its chain."""
        chains = dict(enumerate(chain for chain, _ in self.prefixes))
        best, found = longest(chains, wanted.packed, wanted.root)
        if not best:
            return 0, "", None
        chain, reason = self.prefixes[found[-1]]
        return best, reason, chain


def longest(chains: dict[int, Chain], packed: bytes, root: bytes) -> tuple[int, list[int]]:
    """The longest common prefix with any chain, and which chains have it (none for 0).

    Whoever does not begin with the best prefix so far is out after one memory compare.
    """
    best, found = 0, []
    start, beyond = b"", packed[:TOKEN_BYTES]
    for index, chain in chains.items():
        if chain.root != root:
            continue
        if len(beyond) > len(start) and chain.starts_with(beyond):
            best, found = chain.common(packed, root, best + 1), [index]
            start, beyond = packed[: best * TOKEN_BYTES], packed[: (best + 1) * TOKEN_BYTES]
        elif best and chain.starts_with(start):
            found.append(index)
    return best, found


class Ledger:
    """The slots [0, slots) of one ring and its parked prefixes, numbered from `slots` on."""

    def __init__(self, slots: int, capacity: int, park_rows: int = 0) -> None:
        self.capacity = capacity
        self.park_rows = park_rows  # rows that may be parked on every stage
        self.slots = [Holding() for _ in range(slots)]
        self.parked: dict[int, Holding] = {}
        self.evictions: dict[str, int] = {}
        self.restored = 0  # parked prefixes that came back whole
        self.gone = Gone()
        self._next_park = slots

    def holding(self, index: int) -> Holding:
        """A slot or a parked prefix by its number."""
        return self.slots[index] if index < len(self.slots) else self.parked[index]

    def has(self, index: int) -> bool:
        """True when there is such a slot or parked prefix."""
        return index < len(self.slots) or index in self.parked

    def holdings(self) -> dict[int, Holding]:
        """Slots and parked prefixes by their numbers."""
        return {**dict(enumerate(self.slots)), **self.parked}

    def _chains(self, *, parked: bool = True) -> dict[int, Chain]:
        numbered = self.holdings() if parked else dict(enumerate(self.slots))
        return {index: each.chain for index, each in numbered.items() if each.chain is not None}

    def longest(self, wanted: Wanted) -> int:
        """How many of a prompt's rows are resident somewhere, whether it may use them or not."""
        packed = wanted.packed[: wanted.limit * TOKEN_BYTES]
        return longest(self._chains(), packed, wanted.root)[0]

    def place(self, wanted: Wanted, now: float) -> Placement | None:
        """The slot for a prompt, or None while every slot is pinned. Changes nothing.

        Either the longest match is extended in place, or it is copied to the slot whose loss costs
        least; whichever gives up less of what is likely to be used again.
        """
        free = [index for index, slot in enumerate(self.slots) if slot.turn is None]
        if not free:
            return None
        best = 0
        donors: list[int] = []
        if wanted.reuse:
            packed = wanted.packed[: wanted.limit * TOKEN_BYTES]
            best, donors = longest(self._chains(parked=wanted.restore), packed, wanted.root)
        here = [index for index in donors if index in free]
        for index in here:
            if self.slots[index].resident <= best + 1:
                return Placement(index, best)  # an extension
        source = donors[0] if donors and best >= FORK_ROWS else None
        victims = [i for i in free if i != source and not self._kept(i, now)]
        victim, loss = self._cheapest(victims, now)
        if victim in here:
            # its first rows are the wanted ones: nothing to copy
            return Placement(victim, best, loss=loss)
        tails = [
            (self._tail(index, best, wanted.hint, now), index)
            for index in here
            if victim is None or not self._kept(index, now)
        ]
        if tails and min(tails)[0] <= loss:
            return Placement(min(tails)[1], best, loss=min(tails)[0])
        if victim is None:  # all that is free is kept on request: the oldest wish yields
            victim = min(free, key=lambda index: self.slots[index].keep_until)
            loss = float(self.slots[victim].resident)
        matched = 0 if source is None else best
        park, dropped = self._parking(victim, source, now) if wanted.restore else (None, ())
        loss = 0.0 if park is not None else loss
        return Placement(victim, matched, source, park, dropped, loss)

    def _tail(self, index: int, length: int, hint: str, now: float) -> float:
        """What a slot's rows from `length` on are worth; a session's own old branch, less."""
        slot = self.slots[index]
        worth = (slot.resident - length) * slot.weight(now)
        return worth * UNPROVEN if hint and slot.hint == hint else worth

    def _kept(self, index: int, now: float) -> bool:
        slot = self.slots[index]
        return slot.keep_until > now and slot.resident > 0

    def _cheapest(self, among: list[int], now: float) -> tuple[int | None, float]:
        """The holding that costs least to lose, and that cost in weighted rows.

        What is resident elsewhere too costs nothing to lose. Exact for the WITNESSES cheapest by
        their whole length, which bounds their loss from above.
        """
        bounds = sorted((self.holding(i).resident * self.holding(i).weight(now), i) for i in among)
        best: tuple[int | None, float] = (None, float("inf"))
        for bound, index in bounds[:WITNESSES]:
            loss = bound
            if bound > 0.0:
                loss = self.unique_rows(index) * self.holding(index).weight(now)
            if loss < best[1]:
                best = index, loss
        return best

    def unique_rows(self, index: int) -> int:
        """Rows that no other holding has: what it would cost to lose this one."""
        each = self.holding(index)
        if each.chain is None:
            return 0
        if each.twin is None or not self._shares(each.chain, *each.twin):
            others = self._chains()
            del others[index]
            shared, found = longest(others, each.chain.packed(), each.chain.root)
            each.twin = (found[0], shared) if found else (index, 0)
        return len(each.chain) - min(len(each.chain), each.twin[1])

    def _shares(self, chain: Chain, twin: int, rows: int) -> bool:
        """True while `twin` still holds the first `rows` of a chain: one hash says so."""
        if not rows:
            return True
        other = self.holding(twin).chain if self.has(twin) else None
        if other is None or len(other) < rows or len(chain) < rows:
            return False
        return chain.hash_before(rows) == other.hash_before(rows)

    def _parking(
        self, victim: int, source: int | None, now: float
    ) -> tuple[int | None, tuple[int, ...]]:
        """A parked id for what the victim holds, and the parked ids that make room for it."""
        rows = self.slots[victim].resident
        if rows > self.park_rows or self.unique_rows(victim) < PARK_ROWS:
            return None, ()
        used = sum(max(each.resident, each.coming) for each in self.parked.values())
        dropped: list[int] = []
        while used + rows > self.park_rows or len(self.parked) - len(dropped) >= MAX_PARKED:
            left = [i for i in self.parked if i != source and i not in dropped]
            index, _ = self._cheapest(left, now)
            if index is None or len(dropped) >= MAX_DROPPED:
                return None, ()
            dropped.append(index)
            used -= max(self.parked[index].resident, self.parked[index].coming)
        return self._next_park, tuple(dropped)

    def explain(self, wanted: Wanted, matched: int) -> Miss | None:
        """Why reuse ended at `matched`; None when all of `limit` is reused.

        Call it before the placement is carried out.
        """
        if matched >= wanted.limit:
            return None
        if not wanted.reuse:
            return Miss(matched, "reuse off")
        length, reason, chain = self.gone.longest(wanted)
        if chain is not None and length > matched:
            return Miss(matched, reason, chain.tokens(matched, min(len(chain), matched + 8)))
        best, found = longest(self._chains(), wanted.packed, wanted.root)
        if best > matched and found[0] >= len(self.slots):
            return Miss(matched, "parked")
        for index in found if best == matched else []:
            other = self.holding(index).chain
            if other is not None and len(other) > best:
                end = min(len(other), best + 8)
                return Miss(matched, "edited", other.tokens(best, end))
        return Miss(matched, "new") if matched == 0 else None

    def coldest(self, now: float) -> int | None:
        """The slot whose loss costs least, or None while every slot is pinned."""
        free = [index for index, slot in enumerate(self.slots) if slot.turn is None]
        victim, _ = self._cheapest([i for i in free if not self._kept(i, now)], now)
        return victim if victim is not None else min(free, default=None)

    def pin(self, index: int, turn: int) -> None:
        """Only `turn` may write here until `release`."""
        slot = self.slots[index]
        assert slot.turn is None, (index, slot.turn, turn)
        slot.turn = turn

    def release(self, index: int, turn: int, now: float) -> None:
        """The turn is over and none of its frames is in flight."""
        slot = self.slots[index]
        assert slot.turn == turn, (index, slot.turn, turn)
        slot.turn = None
        slot.used = now
        slot.twin = None  # what others have in common with it may be more now

    def claim(self, index: int, hint: str, *, proven: bool) -> None:
        """The slot's next rows belong to a session; proven: they extend a reused prefix."""
        slot = self.slots[index]
        slot.hint, slot.proven = hint, proven

    def share(self, one: int, other: int, rows: int) -> None:
        """Two holdings will have these rows in common: losing one of them costs that much less."""
        if self.has(one) and self.unique_rows(one) > self.holding(one).resident - rows:
            self.holding(one).twin = other, rows

    def keep(self, index: int, until: float, now: float) -> bool:
        """Don't give a slot up before `until`; False when no other slot would be left to give."""
        others = [s for i, s in enumerate(self.slots) if i != index and s.keep_until <= now]
        if until > now and not others:
            return False
        self.slots[index].keep_until = until
        return True

    def give_up(self, index: int, length: int, reason: str) -> None:
        """Rows from `length` on will be overwritten or freed: remember why, and count it."""
        chain = self.holding(index).chain
        if chain is None or len(chain) <= length:
            return
        if reason != "parked":
            self.lose(chain.clone(), reason)
        else:
            self.evictions[reason] = self.evictions.get(reason, 0) + 1
        self.truncate(index, length)

    def truncate(self, index: int, length: int) -> None:
        """A frame that writes at `length` was sent: rows from there on are no longer resident."""
        each = self.holding(index)
        if each.chain is not None:
            each.chain.truncate(length)
            if not len(each.chain):
                self.forget(index)

    def extend(self, index: int, chain: Chain, end: int) -> None:
        """Rows up to `end` hold the first tokens of `chain`; they were acknowledged in order."""
        each = self.holding(index)
        if each.chain is None:
            each.chain = Chain(chain.root)
        each.chain.extend_from(chain, end)

    def forget(self, index: int) -> None:
        """Nothing is known of the holding any more."""
        if index < len(self.slots):
            slot = self.slots[index]
            slot.chain, slot.hint, slot.proven, slot.keep_until = None, "", False, 0.0
            slot.twin = None
        else:
            self.parked.pop(index, None)

    def emptied(self, slots: int, capacity: int, park_rows: int) -> Ledger:
        """One of this size that holds nothing, and still knows why other prefixes are gone."""
        fresh = Ledger(slots, capacity, park_rows)
        fresh.gone, fresh.evictions, fresh.restored = self.gone, self.evictions, self.restored
        fresh._next_park = max(slots, self._next_park)
        return fresh

    def adopt(self, index: int, holding: Holding) -> bool:
        """Take over a holding that the stages have confirmed; False when there is no place."""
        rows = sum(each.resident for each in self.parked.values()) + holding.resident
        if index < len(self.slots):
            if holding.resident > self.capacity:
                return False
            self.slots[index] = holding
            return True
        if rows > self.park_rows or len(self.parked) >= MAX_PARKED:
            return False
        self.parked[index] = holding
        self._next_park = max(self._next_park, index + 1)
        return True

    def lose(self, chain: Chain, reason: str) -> None:
        """A prefix is gone: count it, and remember why."""
        self.gone.add(chain, reason)
        self.evictions[reason] = self.evictions.get(reason, 0) + 1

    def reserve(self, park: int, like: Holding) -> None:
        """A copy of `like` is on its way to a parked id; it holds nothing until that is done."""
        self._next_park = max(self._next_park, park + 1)
        self.parked[park] = Holding(None, None, like.resident, like.used, like.hint, like.proven)

    def idle(self, before: float) -> list[int]:
        """Holdings with rows that nobody has used since `before`, kept ones excepted."""
        return [
            index
            for index, each in self.holdings().items()
            if each.resident and each.turn is None and max(each.used, each.keep_until) < before
        ]

    def oldest_use(self) -> float | None:
        """When the holding that was idle longest was used last (seconds)."""
        uses = [
            max(each.used, each.keep_until)
            for each in self.holdings().values()
            if each.resident and each.turn is None
        ]
        return min(uses, default=None)

    def check(self) -> None:
        """Assert the invariants."""
        for each in self.holdings().values():
            assert each.chain is None or 0 < len(each.chain) <= self.capacity, each
        assert sum(each.resident for each in self.parked.values()) <= self.park_rows, self.parked

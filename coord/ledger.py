"""Owns one ring's ledger: which prefix is resident in which slot, as far as it was acknowledged.

A hint, never the authority: the stages refuse what they do not hold. Truncated when a frame is
sent, extended when its verdict comes back. Knows no turn but the one that pins a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

from transport.chain import Chain


@dataclass(slots=True)
class Slot:
    """One slot: the acknowledged rows' chain (None when empty), its pin, and its last use."""

    chain: Chain | None = None
    turn: int | None = None  # the turn that writes here
    used: float = 0.0  # seconds, the driver's clock

    @property
    def resident(self) -> int:
        """Acknowledged rows."""
        return 0 if self.chain is None else len(self.chain)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a turn goes: write slot `slot` from row `matched` on.

    source: fork rows [0, matched) of this slot first, because its owner needs them whole.
    """

    slot: int
    matched: int
    source: int | None = None


class Ledger:
    """The slots of one ring."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.capacity = capacity
        self.slots = [Slot() for _ in range(slots)]

    def match(self, packed: bytes, root: bytes) -> list[int]:
        """Per slot, how many leading tokens of the packed prompt are resident there."""
        return [0 if slot.chain is None else slot.chain.common(packed, root) for slot in self.slots]

    def place(self, packed: bytes, root: bytes, limit: int, *, reuse: bool) -> Placement | None:
        """The slot for a prompt, or None while every slot is pinned.

        limit: at most this many rows are reused (prompt length - 1, because the last token's
        logits are wanted). A slot that would lose rows beyond the match is forked when another is
        free to be overwritten; an extension of a resident prefix goes on in place.
        """
        free = [index for index, slot in enumerate(self.slots) if slot.turn is None]
        if not free:
            return None
        matches = [min(length, limit) for length in self.match(packed, root)] if reuse else []
        best = max(matches, default=0)
        if best == 0:
            return Placement(self._coldest(free), 0)
        donors = [index for index, length in enumerate(matches) if length == best]
        for index in donors:
            if index in free and self.slots[index].resident <= best + 1:
                return Placement(index, best)  # nothing (or one clamped row) is lost
        victims = [index for index in free if index not in donors]
        if victims:
            return Placement(self._coldest(victims), best, source=donors[0])
        return Placement(self._coldest([index for index in donors if index in free]), best)

    def _coldest(self, among: list[int]) -> int:
        """Empty slots first, then the least recently used."""
        return min(
            among, key=lambda index: (self.slots[index].resident > 0, self.slots[index].used)
        )

    def coldest(self) -> int | None:
        """The slot that is cheapest to overwrite, or None while every slot is pinned."""
        free = [index for index, slot in enumerate(self.slots) if slot.turn is None]
        return self._coldest(free) if free else None

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

    def truncate(self, index: int, length: int) -> None:
        """A frame that writes at `length` was sent: rows from there on are no longer resident."""
        chain = self.slots[index].chain
        if chain is not None:
            chain.truncate(length)
            if not len(chain):
                self.slots[index].chain = None

    def extend(self, index: int, chain: Chain, end: int) -> None:
        """Rows up to `end` hold the first tokens of `chain`; they were acknowledged in order."""
        slot = self.slots[index]
        if slot.chain is None:
            slot.chain = Chain(chain.root)
        slot.chain.extend_from(chain, end)

    def forget(self, index: int) -> None:
        """Nothing is known of the slot any more."""
        self.slots[index].chain = None

    def check(self) -> None:
        """Assert the invariants."""
        for slot in self.slots:
            assert slot.chain is None or 0 < len(slot.chain) <= self.capacity, slot

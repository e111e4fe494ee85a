"""Owns a stage's slot table: which token prefix each slot's KV rows hold, as a hash chain.

Bookkeeping only: the rows themselves belong to the model. The chain covers rows whose forward has
finished; whoever wants to write after row p must name h[p], or is refused.
"""

from __future__ import annotations

from transport.chain import Chain, root_hash
from transport.frame import Copy, Refusal, Segment

Refused = tuple[Refusal, str]


class SlotTable:
    """One prefix-hash chain per slot; at most `capacity` rows each."""

    def __init__(self, slots: int, capacity: int, vocabulary: int, fingerprint: bytes) -> None:
        self.capacity = capacity
        self._vocabulary = vocabulary
        self._fingerprint = fingerprint
        self._chains = [Chain(root_hash(fingerprint, b"")) for _ in range(slots)]

    def __len__(self) -> int:
        return len(self._chains)

    def length(self, slot: int) -> int:
        """Rows of `slot` that later segments may read."""
        return len(self._chains[slot])

    def refuses(self, segment: Segment) -> Refused | None:
        """Why this stage can't run the segment on what it holds, or None when it can."""
        if segment.slot >= len(self._chains):
            return Refusal.RANGE, f"slot {segment.slot} of {len(self._chains)}"
        if segment.end > self.capacity:
            return Refusal.RANGE, f"rows up to {segment.end}, capacity {self.capacity}"
        if max(segment.tokens) >= self._vocabulary:
            return Refusal.RANGE, f"token {max(segment.tokens)}, vocabulary {self._vocabulary}"
        if segment.want > len(segment.tokens):
            return Refusal.RANGE, f"{segment.want} verdicts for {len(segment.tokens)} tokens"
        if segment.start == 0:
            if segment.parent_hash != root_hash(self._fingerprint, segment.salt):
                return Refusal.CONTENT, "the root is of another model or salt"
            return None
        return self._holds(segment.slot, segment.start, segment.parent_hash)

    def refuses_copy(self, copy: Copy) -> Refused | None:
        """Why this stage can't make the copy, or None when it can."""
        for slot in (copy.source, copy.target):
            if slot >= len(self._chains):
                return Refusal.RANGE, f"slot {slot} of {len(self._chains)}"
        if copy.source == copy.target:
            return Refusal.RANGE, f"slot {copy.source} onto itself"
        return self._holds(copy.source, copy.length, copy.parent_hash)

    def _holds(self, slot: int, length: int, digest: bytes) -> Refused | None:
        chain = self._chains[slot]
        if length > len(chain):
            return Refusal.GAP, f"slot {slot} holds {len(chain)} rows, the frame names {length}"
        if chain.hash_before(length) != digest:
            return Refusal.CONTENT, f"slot {slot} holds another text in rows [0, {length})"
        return None

    def begin(self, segment: Segment) -> None:
        """The segment's rows are about to be written: forget the slot from `start` on."""
        if segment.start == 0:
            self._chains[segment.slot] = Chain(segment.parent_hash)
        else:
            self._chains[segment.slot].truncate(segment.start)

    def finish(self, segment: Segment) -> None:
        """The segment's rows are written."""
        chain = self._chains[segment.slot]
        assert len(chain) == segment.start, (segment.slot, len(chain), segment.start)
        chain.extend(segment.tokens)

    def copy(self, source: int, target: int, length: int) -> None:
        """Slot `target` now holds rows [0, length) of `source`."""
        chain = Chain(self._chains[source].root)
        chain.extend_from(self._chains[source], length)
        self._chains[target] = chain

    def free(self, slot: int) -> None:
        """Forget all rows of a slot."""
        self._chains[slot].truncate(0)

    def check(self) -> None:
        """Assert the table's invariants."""
        for slot, chain in enumerate(self._chains):
            assert len(chain) <= self.capacity, (slot, len(chain), self.capacity)

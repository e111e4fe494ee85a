"""Owns a stage's slot table: which token prefix each slot's and parked KV rows hold, as chains.

Bookkeeping only: the rows themselves belong to the model. The chain covers rows whose forward has
finished; whoever wants to write after row p must name h[p], or is refused.
"""

from __future__ import annotations

from transport.chain import Chain, root_hash
from transport.codec import MAX_PARKED
from transport.frame import Claim, Copy, Refusal, Segment

Refused = tuple[Refusal, str]


class SlotTable:
    """One prefix-hash chain per slot; at most `capacity` rows each.

    Numbers from `slots` on are parked prefixes; together they have at most park_rows rows.
    """

    def __init__(
        self, slots: int, capacity: int, vocabulary: int, fingerprint: bytes, park_rows: int = 0
    ) -> None:
        self.capacity = capacity
        self.park_rows = park_rows
        self._parked: dict[int, Chain] = {}
        self._vocabulary = vocabulary
        self._fingerprint = fingerprint
        self._chains = [Chain(root_hash(fingerprint, b"")) for _ in range(slots)]

    def __len__(self) -> int:
        return len(self._chains)

    @property
    def parked(self) -> tuple[int, ...]:
        """The numbers of parked prefixes."""
        return tuple(self._parked)

    def length(self, slot: int) -> int:
        """Rows of `slot` that later segments may read."""
        return len(self._chains[slot])

    def tokens(self, number: int) -> tuple[int, ...]:
        """Token ids of a slot's or parked prefix's rows; none for an unknown one."""
        return self._chain(number).tokens() if self._known(number) else ()

    def refuses(self, segment: Segment) -> Refused | None:
        """Why this stage can't run the segment on what it holds, or None when it can."""
        if segment.slot >= len(self._chains):
            return Refusal.RANGE, f"slot {segment.slot} of {len(self._chains)}"
        if segment.end > self.capacity:
            return Refusal.RANGE, f"rows up to {segment.end}, capacity {self.capacity}"
        if max(segment.tokens) >= self._vocabulary:
            return Refusal.RANGE, f"token {max(segment.tokens)}, vocabulary {self._vocabulary}"
        shaping = segment.sampling.shaping
        if shaping is not None and shaping.largest >= self._vocabulary:
            return Refusal.RANGE, f"token {shaping.largest}, vocabulary {self._vocabulary}"
        if segment.want > len(segment.tokens):
            return Refusal.RANGE, f"{segment.want} verdicts for {len(segment.tokens)} tokens"
        if segment.start == 0:
            if segment.parent_hash != root_hash(self._fingerprint, segment.salt):
                return Refusal.CONTENT, "the root is of another model or salt"
            return None
        return self._holds(segment.slot, segment.start, segment.parent_hash)

    def refuses_copy(self, copy: Copy) -> Refused | None:
        """Why this stage can't make the copy, or None when it can."""
        slots = len(self._chains)
        if copy.source >= slots and copy.source not in self._parked:
            return Refusal.GAP, f"nothing is parked as {copy.source}"
        if copy.source == copy.target:
            return Refusal.RANGE, f"slot {copy.source} onto itself"
        if copy.target < slots:
            if copy.length > self.capacity:
                return Refusal.RANGE, f"{copy.length} rows, capacity {self.capacity}"
        else:
            others = [len(c) for park, c in self._parked.items() if park != copy.target]
            if sum(others) + copy.length > self.park_rows or len(others) >= MAX_PARKED:
                return Refusal.RANGE, f"{sum(others)} rows are parked, room for {self.park_rows}"
        return self._holds(copy.source, copy.length, copy.parent_hash)

    def _known(self, number: int) -> bool:
        return number < len(self._chains) or number in self._parked

    def _chain(self, number: int) -> Chain:
        return self._chains[number] if number < len(self._chains) else self._parked[number]

    def _holds(self, slot: int, length: int, digest: bytes) -> Refused | None:
        chain = self._chain(slot)
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

    def history(self, segment: Segment) -> tuple[int, ...]:
        """The tokens right before the segment that its sampling needs; call after `begin`."""
        shaping = segment.sampling.shaping
        since = shaping.since if shaping is not None and segment.want else None
        if since is None or since >= segment.start:
            return ()
        return self._chains[segment.slot].tokens(since, segment.start)

    def finish(self, segment: Segment) -> None:
        """The segment's rows are written."""
        chain = self._chains[segment.slot]
        assert len(chain) == segment.start, (segment.slot, len(chain), segment.start)
        chain.extend(segment.tokens)

    def copy(self, source: int, target: int, length: int) -> None:
        """`target` now holds rows [0, length) of `source`."""
        origin = self._chain(source)
        chain = Chain(origin.root)
        chain.extend_from(origin, length)
        if target < len(self._chains):
            self._chains[target] = chain
        else:
            self._parked[target] = chain

    def free(self, number: int) -> None:
        """Forget all rows of a slot or parked prefix."""
        if number < len(self._chains):
            self._chains[number].truncate(0)
        else:
            self._parked.pop(number, None)

    def confirms(self, claim: Claim) -> bool:
        """True when the claimed rows are here; of a parked prefix, those and no others.

        A slot is written on behind them, but parked rows that nobody counts would stay for ever.
        """
        if not self._known(claim.number):
            return False
        chain = self._chain(claim.number)
        if claim.length > len(chain) or chain.hash_before(claim.length) != claim.digest:
            return False
        return claim.number < len(self._chains) or claim.length == len(chain)

    def parked_beside(self, claims: tuple[Claim, ...]) -> list[int]:
        """Parked prefixes that nobody claims."""
        keep = dict.fromkeys(claim.number for claim in claims)
        return [number for number in self._parked if number not in keep]

    def check(self) -> None:
        """Assert the table's invariants."""
        for slot, chain in enumerate(self._chains):
            assert len(chain) <= self.capacity, (slot, len(chain), self.capacity)
        parked = sum(len(chain) for chain in self._parked.values())
        assert parked <= self.park_rows, (parked, self.park_rows)

"""Owns the prefix-hash chain: token ids of one sequence and the hash of every prefix of them.

Both sides of the ring compute it and must agree to the byte, so it lives beside the frames: a stage
keeps one chain per slot, the coordinator one per turn and one per resident prefix. Knows no model,
no slot and no turn.

h[-1] = root = H(fingerprint, salt), h[p] = H(h[p-1], token[p]); H is BLAKE2b cut to 16 bytes
(a cryptographic hash, so a client cannot choose two prompts that collide).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from struct import Struct, pack, unpack

DIGEST_BYTES = 16
TOKEN_BYTES = 4
GALLOP_TOKENS = 16  # of the first compare; then twice as many, and so on
_LENGTH = Struct("<Q")
_EMPTY = blake2b(digest_size=DIGEST_BYTES)  # a copy takes two thirds of a new one's time


def root_hash(fingerprint: bytes, salt: bytes) -> bytes:
    """The hash of the empty prefix for one model and one tenant, 16 bytes.

    Both parts are length-prefixed: ("ab", "c") and ("a", "bc") are different roots.
    """
    parts = (_LENGTH.pack(len(fingerprint)), fingerprint, _LENGTH.pack(len(salt)), salt)
    return blake2b(b"".join(parts), digest_size=DIGEST_BYTES).digest()


class Chain:
    """Token ids [0, len) of one sequence with the hash of each prefix; 20 bytes per token."""

    __slots__ = ("_digests", "_tokens", "root")

    def __init__(self, root: bytes, tokens: Iterable[int] = ()) -> None:
        assert len(root) == DIGEST_BYTES, root
        self.root = root
        self._tokens = bytearray()
        self._digests = bytearray()
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens) // TOKEN_BYTES

    def __repr__(self) -> str:
        return f"Chain({len(self)} tokens, {self.hash_before(len(self)).hex()[:8]})"

    def extend(self, tokens: Iterable[int]) -> None:
        """Append token ids (each in [0, 2**32))."""
        digest, rows, digests = self.hash_before(len(self)), [], []
        for token in tokens:
            packed = token.to_bytes(TOKEN_BYTES, "little")
            state = _EMPTY.copy()
            state.update(digest + packed)
            digest = state.digest()
            rows.append(packed)
            digests.append(digest)
        self._tokens += b"".join(rows)
        self._digests += b"".join(digests)

    def extend_from(self, other: Chain, end: int) -> None:
        """Append other's tokens [len(self), end) without hashing them again.

        Right only where both agree up to len(self); that is asserted.
        """
        start = len(self)
        assert start <= end <= len(other), (start, end, len(other))
        assert self.hash_before(start) == other.hash_before(start), (self, other, start)
        self._tokens += other._tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]
        self._digests += other._digests[start * DIGEST_BYTES : end * DIGEST_BYTES]

    def clone(self) -> Chain:
        """An independent copy."""
        twin = Chain(self.root)
        twin.extend_from(self, len(self))
        return twin

    def truncate(self, length: int) -> None:
        """Drop everything at or after `length`; a no-op when the chain is not longer."""
        del self._tokens[length * TOKEN_BYTES :]
        del self._digests[length * DIGEST_BYTES :]

    def hash_before(self, position: int) -> bytes:
        """h[position - 1], the hash of tokens [0, position); the root for position 0."""
        if position == 0:
            return self.root
        end = position * DIGEST_BYTES
        assert end <= len(self._digests), (position, len(self))
        return bytes(self._digests[end - DIGEST_BYTES : end])

    def tokens(self, start: int = 0, end: int | None = None) -> tuple[int, ...]:
        """Token ids [start, end) as a tuple."""
        stop = len(self._tokens) if end is None else end * TOKEN_BYTES
        return unpack_tokens(self._tokens[start * TOKEN_BYTES : stop])

    def starts_with(self, packed: bytes | bytearray) -> bool:
        """True when these packed tokens are its first ones; one memory compare."""
        return self._tokens.startswith(packed)

    def common(self, packed: bytes | bytearray, root: bytes, start: int = 0) -> int:
        """Length of the longest common prefix with packed token ids (see `pack_tokens`).

        0 under another root. start: they are known to agree so far. Steps that double, then halve,
        over memory compares: 0.3 us where they differ at once, 10 us for 8,000 equal tokens.
        """
        if root != self.root:
            return 0
        mine, theirs = self._tokens, packed  # slices are copied and compared by memcmp
        end = min(len(mine), len(theirs)) // TOKEN_BYTES
        low, step = start, GALLOP_TOKENS
        while low < end:
            high = min(end, low + step)
            first, last = low * TOKEN_BYTES, high * TOKEN_BYTES
            if mine[first:last] != theirs[first:last]:
                break
            low, step = high, 2 * step
        high = min(end, low + step) - 1  # the last place where they may still agree
        while low < high:
            middle = (low + high + 1) // 2
            first, last = low * TOKEN_BYTES, middle * TOKEN_BYTES
            if mine[first:last] == theirs[first:last]:
                low = middle
            else:
                high = middle - 1
        return low

    def packed(self, end: int | None = None) -> bytes:
        """The token ids [0, end) as uint32, little endian."""
        return bytes(self._tokens if end is None else self._tokens[: end * TOKEN_BYTES])


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as uint32, little endian."""
    return pack(f"<{len(tokens)}I", *tokens)


def unpack_tokens(packed: bytes | bytearray | memoryview) -> tuple[int, ...]:
    """The reverse of `pack_tokens`; len(packed) must be a multiple of 4."""
    return unpack(f"<{len(packed) // TOKEN_BYTES}I", packed)

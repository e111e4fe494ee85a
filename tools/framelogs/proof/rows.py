"""Owns what is written in one slot, by hash, and the tally of what was proved.

The chain is computed here from docs/frames.md's definition and shares no code with
transport.chain: two implementations must agree to the byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from transport.frame import Claim

HASH_BYTES = 16
MAX_MEMO = 1024  # segments whose hashes are kept: every stage of a ring asks for the same ones

RULES = {
    "R1": "no segment and no copy reads past the rows that were written",
    "R2": "every row that is read was last written with the text that the frame names",
    "R3": "the coordinator claims no row that was not acknowledged, or is ahead on the same link",
    "R4": "every answer belongs to one frame, and its tokens are the ones that go on",
    "R5": "a slot is one turn's at a time, within its capacity",
    "R6": "a stage sends on what it took, once and in order; no frame is missing unseen",
    "R7": "what one process took is what the other one sent",
    "R8": "of what a roll call claims, every stage confirms what it holds, and nothing else",
}


class Violation(Exception):  # noqa: N818 - it is what a log shows, not a failure of the checker
    """A rule is broken. place: where the offending frame lies; text: what was expected."""

    def __init__(self, rule: str, text: str, place: str = "") -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule
        self.text = text
        self.place = place


@dataclass(slots=True)
class Tally:
    """How often each rule was proved, and how often a log did not tell enough to."""

    proved: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RULES, 0))
    unproved: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RULES, 0))
    records: int = 0
    segments: int = 0
    rows: int = 0
    copies: int = 0
    answers: int = 0
    stale: int = 0  # answers of an earlier epoch, which nobody may use

    def note(self, rule: str, *, known: bool = True) -> None:
        """Count one proof; known False: the log can't tell."""
        (self.proved if known else self.unproved)[rule] += 1


class Hasher:
    """The chain's hashes: root = H(fingerprint, salt), h[p] = H(h[p - 1], token[p])."""

    def __init__(self) -> None:
        self._memo: dict[tuple[bytes, tuple[int, ...]], list[bytes]] = {}
        self._roots: dict[tuple[bytes, bytes], bytes] = {}

    def root(self, fingerprint: bytes, salt: bytes) -> bytes:
        """The hash of no rows."""
        known = self._roots.get((fingerprint, salt))
        if known is None:
            plain = b"".join(len(part).to_bytes(8, "little") + part for part in (fingerprint, salt))
            known = blake2b(plain, digest_size=HASH_BYTES).digest()
            if len(self._roots) >= MAX_MEMO:
                self._roots.clear()
            self._roots[fingerprint, salt] = known
        return known

    def after(self, parent: bytes, tokens: tuple[int, ...]) -> list[bytes]:
        """The hash behind each of the tokens."""
        known = self._memo.get((parent, tokens))
        if known is None:
            known = list(self._each(parent, tokens))
            if len(self._memo) >= MAX_MEMO:
                del self._memo[next(iter(self._memo))]
            self._memo[parent, tokens] = known
        return known

    def of(self, root: bytes, tokens: Iterable[int]) -> bytes:
        """The hash of a whole text."""
        digest = root
        for digest in self._each(root, tokens):  # noqa: B007 - the last one counts
            pass
        return digest

    @staticmethod
    def _each(digest: bytes, tokens: Iterable[int]) -> Iterator[bytes]:
        for token in tokens:
            plain = digest + token.to_bytes(4, "little")
            digest = blake2b(plain, digest_size=HASH_BYTES).digest()
            yield digest


class Rows:
    """The rows [0, end) of one slot, by the hash of each prefix from `base` on.

    base is 0 where every write was seen. A log that begins in the middle anchors a slot at the
    first row that it sees written: what is before is then known by its hash alone.
    """

    __slots__ = ("_hashes", "base")

    def __init__(self, base: int = 0, digest: bytes | None = None) -> None:
        """digest: of the rows before `base`; None where nothing was ever written."""
        self.base = base
        self._hashes: list[bytes | None] = [digest]

    @property
    def end(self) -> int:
        """First row that is not written."""
        return self.base + len(self._hashes) - 1

    def before(self, position: int) -> bytes | None:
        """The hash of rows [0, position); None where it is not known."""
        at = position - self.base
        return self._hashes[at] if 0 <= at < len(self._hashes) else None

    def write(self, start: int, parent: bytes, digests: Sequence[bytes]) -> None:
        """Rows from `start` on are now these, and nothing is behind them."""
        if start == 0 or not self.base <= start <= self.end:
            self.base, self._hashes = start, [parent]
        else:
            del self._hashes[start - self.base + 1 :]
        self._hashes += digests

    def cut(self, length: int) -> None:
        """Nothing from `length` on is known any more."""
        if length < self.base:
            self.base, self._hashes = length, [None]
        else:
            del self._hashes[length - self.base + 1 :]

    def fork(self, length: int) -> Rows:
        """Another slot's copy of rows [0, length)."""
        made = Rows(self.base)
        made._hashes = self._hashes[: length - self.base + 1]
        return made


def struck_out(taken: Sequence[Claim], kept: Sequence[Claim]) -> list[Claim] | None:
    """The claims that were left out of `taken`; None where `kept` is no part of it, in order."""
    struck, left = [], list(kept)
    for claim in taken:
        if left and left[0] == claim:
            del left[0]
        else:
            struck.append(claim)
    return None if left else struck

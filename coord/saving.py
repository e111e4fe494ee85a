"""Owns when the ledgers are written down, and how they come back after a restart.

Looks at all slots a moment after a turn began or ended, and now and then while one runs; never per
token. What it hands over is a copy: the file's own thread writes (coord.store).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coord.actions import Action, Admitted, Failed, Finished
from coord.ledger import Holding
from coord.ring import Ring
from coord.store import Saved, Store
from coord.view import holdings
from transport.chain import TOKEN_BYTES, unpack_tokens
from transport.codec import MAX_TOKENS, decode_header, encode
from transport.frame import Copy, Envelope, Frame, FrameError, Free, KeepSlot, Remembered, RollCall

SAVE_S = 0.05  # behind a change: a turn's end and the next one's start are one look
RUNNING_S = 5.0  # between two looks while turns run: what a killed process loses of a long one
_TYPES = (str, int, bytes, bytes, bytes, str, int, float, float)  # of Store.holdings
_SELF = Envelope("state", 0, 0)


class Saver:
    """Writes the ledgers' changes to a Store. salts: root of a chain -> salt."""

    def __init__(self, store: Store, rings: Mapping[str, Ring], salts: Mapping[bytes, bytes]):
        self._store = store
        self._rings = rings
        self._salts = salts
        # what each holding was when it was written; bounded like the ledgers
        self._written: dict[tuple[str, int], tuple[object, ...]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.look_s = 0.0  # spent in `look` so far, and how often: the loop's share of the cost
        self.looks = 0

    def remembered(self) -> Iterator[Remembered]:
        """What the file says; rows that make no sense or name no ring are deleted."""
        now = time.time()
        for row in self._store.holdings():
            said = _remembered(row, now)
            if said is not None and said.ring in self._rings:
                self._written[said.ring, said.number] = ()
                yield said
            else:
                self._store.put(row[0], row[1], None)

    def note(self, frame: Frame, actions: Sequence[Action]) -> None:
        """After a step: plan a look when it can have changed what is resident, but for a token."""
        ends = (Admitted, Finished, Failed)
        if isinstance(frame, (RollCall, Copy, Free, KeepSlot)) or any(
            isinstance(action, ends) for action in actions
        ):
            self._plan(SAVE_S)

    def _plan(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._due)

    def _due(self) -> None:
        self._timer = None
        if self.look():
            self._plan(RUNNING_S)

    def look(self) -> bool:
        """Hand over what changed; True while a turn writes somewhere."""
        started, mono, wall = time.perf_counter(), time.monotonic(), time.time()
        running = False
        for name, ring in self._rings.items():
            if not ring.entries:
                continue  # it has not formed yet: what the file says is still to be proven
            held = dict(holdings(ring))
            for number, holding in held.items():
                running = running or holding.turn is not None
                self._compare(name, number, holding, wall - mono)
            for key in [k for k in self._written if k[0] == name and k[1] not in held]:
                del self._written[key]
                self._store.put(*key, None)
        self.looks += 1
        self.look_s += time.perf_counter() - started
        return running

    def _compare(self, ring: str, number: int, holding: Holding, clock_s: float) -> None:
        chain = holding.chain
        salt = None if chain is None else self._salts.get(chain.root)
        key = ring, number
        if chain is None or salt is None:
            if self._written.pop(key, None) is not None:
                self._store.put(ring, number, None)
            return
        state = (
            chain.hash_before(len(chain)),
            holding.hint,
            holding.proven,
            holding.used,
            holding.keep_until,
        )
        if self._written.get(key) == state:
            return
        self._written[key] = state
        keep_until = holding.keep_until + clock_s if holding.keep_until else 0.0
        self._store.put(
            ring,
            number,
            Saved(
                self._rings[ring].fingerprint,
                salt,
                chain.packed(),
                holding.hint,
                holding.proven,
                holding.used + clock_s,
                keep_until,
            ),
        )

    def close(self) -> None:
        """Write the last state and close the file."""
        if self._timer is not None:
            self._timer.cancel()
        self.look()
        self._store.close()


def _remembered(row: tuple[Any, ...], now: float) -> Remembered | None:
    """A row of the file as a frame; None for one that this program can't have written."""
    if tuple(map(type, row)) != _TYPES or len(row[4]) % TOKEN_BYTES:
        return None
    ring, number, fingerprint, salt, packed, hint, proven, used_at, keep_until = row
    if not 0 < len(packed) <= MAX_TOKENS * TOKEN_BYTES or not 0 <= number < 1 << 31:
        return None
    idle_s = min(1e9, max(0.0, now - used_at))
    keep_s = min(1e9, max(0.0, keep_until - now))
    tokens = unpack_tokens(packed)
    said = Remembered(ring, number, fingerprint, salt, tokens, hint, proven == 1, idle_s, keep_s)
    try:
        checked, _ = decode_header(encode(said, _SELF)[0])
    except FrameError:
        return None
    assert isinstance(checked, Remembered)
    return checked

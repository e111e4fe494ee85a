"""Owns who may start a turn now, which replies run, and when a refused client should come back.

Knows callers, counts and time; no request, no ring. The queue itself is the scheduler's.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from coord.actions import TurnError
from coord.http.keys import Caller
from coord.http.reply import Reply

MAX_RETRY_S = 120  # a longer wait is no estimate any more
SHARE = 0.2  # of the newest turn in the moving average
QUEUE_SHARE = 0.25  # of the queue must be served before a refused client has a fair chance


class Pace:
    """How long turns hold their slots, and so when the next ones come free."""

    def __init__(self) -> None:
        self._turn_s: float | None = None  # moving average

    def took(self, turn_s: float) -> None:
        """A turn gave its slot back after so long."""
        old = self._turn_s
        self._turn_s = turn_s if old is None else old + SHARE * (turn_s - old)

    def wait_s(self, turns: float, running: float) -> int | None:
        """Until so many turns have ended while so many run: whole seconds, 1 to MAX_RETRY_S.

        None before any was measured.
        """
        if self._turn_s is None:
            return None
        estimate = self._turn_s * turns / max(1.0, running)
        return max(1, min(MAX_RETRY_S, math.ceil(estimate)))


class Door:
    """The replies that run, by tenant; closed once the server drains.

    per_key_turns: most turns of a tenant at once, waiting ones included; 0 for no limit. A caller
    whose key says another number has that one.
    """

    def __init__(
        self, counters: Callable[[], Mapping[str, float]], *, per_key_turns: int = 0
    ) -> None:
        """counters: the engine's, for how many turns wait and run."""
        self._counters = counters
        self._per_key = per_key_turns
        self._pace = Pace()
        # by tenant and id, then by choice; bounded by the engine's queue and slots
        self._replies: dict[tuple[bytes, str], dict[int, Reply]] = {}
        self._closes_at: float | None = None  # when the server ends whatever still runs
        self._empty = asyncio.Event()

    # ---- may it? ----

    def check_open(self) -> None:
        """TurnError 503 while the server drains."""
        if self._closes_at is not None:
            left_s = math.ceil(self._closes_at - time.monotonic())
            text = "the server is shutting down and takes no new turns"
            raise TurnError(503, "draining", text, retry_after_s=max(1, left_s))

    def check(self, caller: Caller, choices: int) -> None:
        """TurnError where the caller may not start so many turns now."""
        self.check_open()
        limit = self._per_key if caller.turns is None else caller.turns
        if not limit:
            return
        if choices > limit:
            text = f"n: {choices}, but this API key may run {limit} turns at once"
            raise TurnError(400, "invalid_value", text, "n")
        running = self._count(caller.tenant)
        if running + choices > limit:
            seconds = self._pace.wait_s(running + choices - limit, min(limit, running))
            text = f"{running} turns of this API key run or wait already, and {limit} may"
            raise self._refusal("too_many_turns", text, seconds)

    def full(self, refusal: TurnError) -> TurnError:
        """The engine's refusal of a turn; of a full queue with the time to come back."""
        if refusal.status != 429:
            return refusal
        counters = self._counters()
        waiting = counters.get("num_requests_waiting", 0.0)
        running = counters.get("num_requests_running", 0.0)
        seconds = self._pace.wait_s(max(1.0, QUEUE_SHARE * waiting), running)
        return self._refusal(refusal.code, refusal.message, seconds)

    @staticmethod
    def _refusal(code: str, text: str, seconds: int | None) -> TurnError:
        when = "later" if seconds is None else f"in {seconds} s"
        return TurnError(429, code, f"{text}; try again {when}", retry_after_s=seconds)

    def _count(self, tenant: bytes) -> int:
        return sum(len(each) for (owner, _), each in self._replies.items() if owner == tenant)

    # ---- what runs ----

    @property
    def running(self) -> int:
        """Replies that are not over yet."""
        return sum(len(each) for each in self._replies.values())

    def start(self, tenant: bytes, reply_id: str) -> dict[int, Reply]:
        """A place for the choices of a new reply, to be filled."""
        self._empty.clear()
        choices = self._replies[tenant, reply_id] = {}
        return choices

    def find(self, tenant: bytes, reply_id: str) -> list[Reply] | None:
        """The choices that run of a tenant's reply; None where there is no such reply."""
        found = self._replies.get((tenant, reply_id))
        return None if found is None else list(found.values())

    def end(self, tenant: bytes, reply_id: str, index: int) -> Reply | None:
        """A choice is over: the reply, the first time it is said."""
        choices = self._replies.get((tenant, reply_id), {})
        reply = choices.pop(index, None)
        if reply is not None and reply.slot_s is not None:
            self._pace.took(reply.slot_s)
        if not choices:
            self.drop(tenant, reply_id)
        return reply

    def drop(self, tenant: bytes, reply_id: str) -> None:
        """Forget a reply, or one that could not be started."""
        self._replies.pop((tenant, reply_id), None)
        if not self._replies:
            self._empty.set()

    # ---- draining ----

    @property
    def draining(self) -> bool:
        """True once no new turn is taken."""
        return self._closes_at is not None

    async def drain(self, limit_s: float) -> bool:
        """Take no new turns; wait for those that run. False when some are left after limit_s."""
        self._closes_at = time.monotonic() + limit_s
        if not self._replies:
            return True
        try:
            async with asyncio.timeout(limit_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True


class BodyBudget:
    """Bytes of request bodies that are being received; many slow senders must not fill the memory.

    A body of its own limit is refused by read_body; this bounds all of them together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0

    @property
    def held(self) -> int:
        """Bytes that are held now."""
        return self._held

    @contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """Receive a body: call what this gives with the size of each part that came."""
        mine = 0

        def take(size: int) -> None:
            nonlocal mine
            if self._held + size > self._limit:
                text = f"{self._limit} bytes of other requests' bodies are being received"
                raise TurnError(503, "too_many_bodies", text)
            mine += size
            self._held += size

        try:
            yield take
        finally:
            self._held -= mine

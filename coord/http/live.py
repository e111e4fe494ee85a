"""Owns GET /ring/events: what GET /ring says, again and again, as server-sent events.

Knows JSON values and time, nothing of what they mean but which of them only age.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any, TypeAlias

from fastapi import Request
from fastapi.responses import Response

from coord.actions import TurnError
from coord.http.keys import Caller
from coord.http.limits import Door
from coord.http.rings import RingApi
from coord.http.sse import EventStream, encode_named

Path: TypeAlias = list[str | int]
Change: TypeAlias = tuple[Path, Any]

EVERY_S = 0.5  # between two looks; a person sees no more
SHARE = 0.03  # of a core: what all watchers together may cost; with more of them each waits longer
MAX_WATCHERS = 64  # pages; each holds a connection, and one copy of what it was told (5-20 KB)
# Change by themselves, and are told with whatever else changes: an idle ring is silent in between.
AGING = frozenset(("uptime_s", "idle_s", "kept_s", "heartbeat_age_s"))
AGING_S = 5.0


class LiveRing:
    """The handler."""

    def __init__(self, rings: RingApi, door: Door, keep_alive_s: float) -> None:
        self._rings = rings
        self._door = door
        self._keep_alive_s = keep_alive_s
        self._watchers = 0

    async def watch(self, request: Request) -> Response:
        """GET /ring/events: an event `ring` with everything, then `change` events."""
        if self._watchers >= MAX_WATCHERS:
            text = f"{MAX_WATCHERS} clients watch the ring already"
            raise TurnError(503, "too_many_watchers", text)
        self._watchers += 1
        return EventStream(
            self._events(request.state.caller),
            keep_alive_s=self._keep_alive_s,
            on_close=self._left,
            headers={},
        )

    def _left(self) -> None:
        self._watchers -= 1

    async def _events(self, caller: Caller) -> AsyncGenerator[bytes, None]:
        """Until the client goes, or the server has nothing left to do before it ends."""
        told = self._rings.seen_by(caller)
        aged_at = time.monotonic()
        yield encode_named("ring", told)
        took_s = 0.0
        while not (self._door.draining and not self._door.running):
            await asyncio.sleep(max(EVERY_S, took_s * self._watchers / SHARE))
            began = time.thread_time()
            seen = self._rings.seen_by(caller)
            changes = list(differences(told, seen))
            news = any(path[-1] not in AGING for path, _ in changes)
            event = encode_named("change", {"set": changes})
            took_s = time.thread_time() - began
            if news or (changes and time.monotonic() >= aged_at + AGING_S):
                told, aged_at = seen, time.monotonic()
                yield event


def differences(old: Any, new: Any, at: tuple[str | int, ...] = ()) -> Iterator[Change]:
    """What to put where in `old` to get `new`: (path, value) pairs.

    A list of another length, or an object with other keys, is replaced as a whole.
    """
    keys: Iterable[str | int]
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        keys = new.keys()
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        keys = range(len(new))
    else:
        if old != new or type(old) is not type(new):
            yield list(at), new
        return
    for key in keys:
        yield from differences(old[key], new[key], (*at, key))

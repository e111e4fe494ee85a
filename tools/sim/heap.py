"""Owns virtual time: one heap of events, by time and then by the order they were made in."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

MICROSECOND = 1_000  # nanoseconds, the heap's unit: a core's `now` is ns / 1e9, as in a frame log
SECOND = 1_000_000_000


class Heap:
    """Events to come. `now` is the time of the one that happens."""

    def __init__(self) -> None:
        self.now = 0  # nanoseconds
        self.happened = 0
        self._events: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: int, event: Callable[..., None], *arguments: Any) -> None:
        """Let `event` happen at a time, now at the earliest."""
        self._count += 1
        heappush(self._events, (max(when, self.now), self._count, event, arguments))

    def step(self) -> None:
        """The next event happens."""
        self.happened += 1
        self.now, _, event, arguments = heappop(self._events)
        event(*arguments)

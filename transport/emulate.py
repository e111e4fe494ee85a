"""Owns link emulation: when a message that is sent now would arrive over a longer, narrower link.

For benches and tests (ring.toml's [emulate]). Messages wait in the air, on the sending side, so
that the time a receiver spends computing does not add to the delay; neither the sender nor the
thread that computes ever waits. Knows no socket: `deliver` is called when a message is due.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from transport.frame import Buffer

MAX_IN_AIR = 1000  # messages: the sockets' own high-water mark

Deliver: TypeAlias = Callable[[Sequence[Buffer]], None]


@dataclass(frozen=True, slots=True)
class Emulate:
    """What every link of the installation is made to look like; all zero for no emulation.

    delay_ms: one way, of every frame; jitter_ms: up to so much more, never out of order; mbit:
    megabits per second that a link carries, 0 for no limit; seed: of the jitter.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    mbit: float = 0.0
    seed: int = 0

    @property
    def on(self) -> bool:
        """True when links differ from what they are."""
        return bool(self.delay_ms or self.jitter_ms or self.mbit)


class Line:
    """One link's clockwork: the bytes go out one after another, then all take their time to land.

    name: of the link; with the seed it decides every jitter, whatever other links do.
    """

    def __init__(self, emulate: Emulate, name: str) -> None:
        self._emulate = emulate
        self._random = random.Random(f"{emulate.seed} {name}")
        self._sent = 0.0  # when the last byte of the latest message has left
        self._landed = 0.0  # when the latest message lands

    def due(self, now: float, size: int) -> float:
        """When a message of `size` bytes lands that is sent `now` (seconds, any one clock)."""
        emulate = self._emulate
        self._sent = max(now, self._sent)
        if emulate.mbit:
            self._sent += size * 8 / (emulate.mbit * 1e6)
        flight_ms = emulate.delay_ms + emulate.jitter_ms * self._random.random()
        self._landed = max(self._landed, self._sent + flight_ms / 1e3)
        return self._landed


class Air:
    """Messages between sending and landing, and the thread that hands them over when due."""

    def __init__(self, line: Line, deliver: Deliver) -> None:
        """Deliver: called from the Air's own thread, one message at a time, in order of `put`."""
        self._line = line
        self._deliver = deliver
        self._flying: deque[tuple[float, Sequence[Buffer]]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._land, name="air", daemon=True)
        self._thread.start()

    def put(self, parts: Sequence[Buffer]) -> bool:
        """Send one message; returns at once. False when MAX_IN_AIR are flying: it was not sent."""
        with self._changed:
            if len(self._flying) >= MAX_IN_AIR:
                return False
            size = sum(memoryview(part).nbytes for part in parts)
            self._flying.append((self._line.due(time.monotonic(), size), parts))
            if len(self._flying) == 1:  # otherwise the thread waits for an earlier one
                self._changed.notify()
            return True

    def close(self, *, land: bool) -> None:
        """End the thread. What still flies lands at once, or is lost."""
        with self._changed:
            self._closed = True
            if not land:
                self._flying.clear()
            self._changed.notify()
        self._thread.join()

    def _land(self) -> None:
        while True:
            with self._changed:
                if not self._flying:
                    if self._closed:
                        return
                    self._changed.wait()
                    continue
                due, parts = self._flying[0]
                pause_s = 0.0 if self._closed else due - time.monotonic()
                if pause_s > 0:
                    self._changed.wait(pause_s)
                    continue
                self._flying.popleft()
            self._deliver(parts)

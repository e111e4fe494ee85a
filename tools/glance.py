"""Owns what `kvring up` shows of a ring that runs: speed, turns, slots, how busy its stages are.

Reads GET /ring and GET /metrics.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from tools.client import Client, Json, integer, number
from tools.errors import ToolError
from tools.terminal import Painter, in_place, laid_out, painted, printable, region, width

EVERY_S = 1.0  # between two looks
PATIENCE_S = 2.0  # for an answer

WINDOW_S = 3.0  # tokens per second are the mean of so long
BUSY_CELLS = 6
_COUNTER = re.compile(
    r"^kvring:(generation_tokens|prompt_tokens|prefix_cache_hits)_total(?:\{\})? (\S+)$",
    re.MULTILINE,
)


@contextmanager
def glancing(client: Client, stream: TextIO) -> Iterator[Callable[[], None]]:
    """Call often: looks every EVERY_S, and rewrites the lines. Nothing where it can't."""
    if not in_place(stream):
        yield lambda: None
        return
    rate, shown = Rate(), [""]
    looked_at = -EVERY_S
    with region(stream, leave=False) as show:

        def look() -> None:
            nonlocal looked_at, shown
            if time.monotonic() < looked_at + EVERY_S:
                return
            looked_at = time.monotonic()
            try:
                ring = client.get("/ring", PATIENCE_S)
                counted = totals(client.text("/metrics", PATIENCE_S))
            except ToolError as error:
                now = [painted(printable(error.told), "red"), *shown]
            else:
                rate.note(time.monotonic(), counted.get("generation_tokens", 0.0))
                now = shown = lines(ring, counted, rate.per_s, painted)
            show(laid_out(["", *now], width(stream)))

        yield look


class Rate:
    """How fast a counter grows, over the last WINDOW_S."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()

    def note(self, now: float, count: float) -> None:
        """The counter was `count` at `now` (s). One that has shrunk began again."""
        if self._seen and count < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now, count))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()

    @property
    def per_s(self) -> float | None:
        """None before it was noted twice."""
        if len(self._seen) < 2:
            return None
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return (last - first) / (ended - began) if ended > began else None


def totals(metrics: str) -> dict[str, float]:
    """The counters of GET /metrics that `lines` wants."""
    return {name: float(value) for name, value in _COUNTER.findall(metrics)}


def lines(ring: Json, counted: dict[str, float], rate: float | None, painter: Painter) -> list[str]:
    """What is done and held, and a line for each ring."""
    turns = ring.get("turns") or {}
    running, waiting = integer(turns.get("running")) or 0, integer(turns.get("waiting")) or 0
    rings = [each for each in ring.get("rings") or [] if isinstance(each, dict)]
    doing = f"{rate or 0.0:.1f} tokens/s" if running or rate else "idle"
    active = f"{running} turn{'' if running == 1 else 's'} active"
    first = [painter(doing, "bold"), active]
    if waiting:
        first.append(painter(f"{waiting} waiting", "yellow"))
    found = [" · ".join(first), " · ".join([*_slots(rings), *_reused(counted)])]
    for each in rings:
        name = f"{each.get('name')} " if len(rings) > 1 else ""
        if each.get("state") == "ready":
            found.append(f"{name}busy {_busy(each)}")
        else:
            detail = f": {each['detail']}" if each.get("detail") else ""
            found.append(painter(f"{each.get('name')} is {each.get('state')}{detail}", "yellow"))
    return found


def _slots(rings: list[Json]) -> list[str]:
    slots = [slot for ring in rings for slot in ring.get("slots") or []]
    used = sum(bool(slot.get("resident")) or slot.get("turn") is not None for slot in slots)
    rows = sum(integer(slot.get("resident")) or 0 for slot in slots)
    capacity = sum(integer(slot.get("capacity")) or 0 for slot in slots)
    share = f" ({rows / capacity:.0%})" if capacity else ""
    return [f"{used} of {len(slots)} slots used", f"{rows:,} rows resident{share}"]


def _reused(counted: dict[str, float]) -> list[str]:
    asked = counted.get("prompt_tokens", 0.0)
    if not asked:
        return []
    return [
        f"{counted.get('prefix_cache_hits', 0.0) / asked:.0%} of {asked:,.0f} prompt tokens cached"
    ]


def _busy(ring: Json) -> str:
    """Each stage with a bar: the share of its time in forwards, between its last heartbeats."""
    parts = []
    for stage in ring.get("stages") or []:
        share = number(stage.get("busy_share"))
        cells = 0 if share is None else min(BUSY_CELLS, round(share * BUSY_CELLS))
        bar = "█" * cells + "·" * (BUSY_CELLS - cells)
        parts.append(f"{stage.get('name')} {bar} {'-' if share is None else f'{share:.0%}'}")
    return " · ".join(parts)

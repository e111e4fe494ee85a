"""Owns a load of concurrent streamed requests, and what the ring did meanwhile.

Each request is a thread with a stream of its own; times are the clients'. The ring is looked at
from outside, through GET /ring and GET /metrics, so that any server can be measured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean, median

from tools.client import Client, Json, Reply, ServerError, number
from tools.errors import ToolError

LOOK_S = 0.05  # between two looks at the frames in flight


@dataclass(slots=True)
class Timeline:
    """One request. pieces: (time, characters) of each event with text, on the clock of time()."""

    sent: float
    reply: Reply = field(default_factory=Reply)
    pieces: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first(self) -> float:
        """When the first text came. Raises ToolError when none came."""
        if not self.pieces:
            raise ToolError("the server sent no text: nothing to time (is --max-tokens too small?)")
        return self.pieces[0][0]

    @property
    def last(self) -> float:
        """When the last text came."""
        return self.pieces[-1][0]

    @property
    def gaps(self) -> list[float]:
        """Seconds between two events with text."""
        times = [at for at, _ in self.pieces]
        return [after - before for before, after in pairwise(times)]

    def tokens_between(self, start: float, end: float) -> float:
        """Tokens that came in (start, end], by the share of the reply's characters."""
        total = sum(count for _, count in self.pieces)
        part = sum(count for at, count in self.pieces if start < at <= end)
        return self.reply.tokens * part / max(1, total)


@dataclass(frozen=True, slots=True)
class Watch:
    """What the ring did in an interval. None where the server does not say.

    busy: each stage's share of the time in forwards; per_verify: tokens committed per verdict.
    """

    frames_in_flight: float | None
    most_in_flight: int | None
    busy: dict[str, float]
    per_verify: float | None


def ask(client: Client, body: Json, on_piece: Callable[[], None] | None = None) -> Timeline:
    """One streamed request to its end."""
    line = Timeline(time.monotonic())

    def note(text: str) -> None:
        line.pieces.append((time.monotonic(), len(text)))
        if on_piece is not None:
            on_piece()

    line.reply.read(client.chat(body), note)
    return line


def ask_all(client: Client, bodies: Sequence[Json]) -> list[Timeline]:
    """All requests at once; raises what the first failing one raises."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: ask(client, body), bodies))


def ask_in_turn(client: Client, bodies: Iterator[Json], clients: int) -> list[Timeline]:
    """Closed loop: each client asks its next request as soon as its last one has ended."""
    lines: list[Timeline] = []
    lock = threading.Lock()

    def loop() -> None:
        while True:
            with lock:
                body = next(bodies, None)
            if body is None:
                return
            line = ask(client, body)
            with lock:
                lines.append(line)

    with ThreadPoolExecutor(clients) as pool:
        for done in [pool.submit(loop) for _ in range(clients)]:
            done.result()
    return lines


def ask_at(client: Client, bodies: Sequence[Json], pauses_s: Sequence[float]) -> list[Timeline]:
    """Open loop: each request is sent its pause after the one before, whatever has come back."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        futures = []
        for body, pause_s in zip(bodies, pauses_s, strict=True):
            time.sleep(pause_s)
            futures.append(pool.submit(ask, client, body))
        return [future.result() for future in futures]


def steady_rate(lines: Sequence[Timeline]) -> float:
    """Tokens per second of all together while all of them decode; else from first to last text."""
    start, end = max(line.first for line in lines), min(line.last for line in lines)
    if end <= start:
        start, end = min(line.first for line in lines), max(line.last for line in lines)
    tokens = sum(line.tokens_between(start, end) for line in lines)
    return tokens / max(1e-6, end - start)


def ttft_ms(lines: Sequence[Timeline]) -> float:
    """Median time to first text."""
    return median((line.first - line.sent) * 1e3 for line in lines)


class Watcher:
    """Looks at the ring while a block runs: `with watcher.look(): ...`, then `watcher.seen`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.seen = Watch(None, None, {}, None)

    @contextmanager
    def look(self) -> Iterator[None]:
        """The interval to describe."""
        flying: list[int] = []
        stop = threading.Event()
        thread = threading.Thread(target=self._sample, args=(flying, stop), daemon=True)
        busy, counts, started = self._busy(), self._counts(), time.monotonic()
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        passed = time.monotonic() - started
        after = self._counts()
        verdicts = _difference(after, counts, "generation_tokens_total", "drafts_accepted_total")
        tokens = after.get("generation_tokens_total", 0.0) - counts.get(
            "generation_tokens_total", 0.0
        )
        self.seen = Watch(
            mean(flying) if flying else None,
            max(flying, default=None),
            {
                name: min(1.0, (value - busy.get(name, 0.0)) / max(passed, 1e-6))
                for name, value in self._busy().items()
            },
            tokens / verdicts if verdicts > 0 else None,
        )

    def _sample(self, flying: list[int], stop: threading.Event) -> None:
        while not stop.wait(LOOK_S):
            for ring in self._rings():
                count = ring.get("frames_in_flight")
                if isinstance(count, int):
                    flying.append(count)

    def _rings(self) -> list[Json]:
        try:
            rings = self._client.get("/ring").get("rings")
        except ServerError:
            return []
        return rings if isinstance(rings, list) else []

    def _busy(self) -> dict[str, float]:
        return {
            str(stage.get("name")): number(stage.get("forward_s")) or 0.0
            for ring in self._rings()
            for stage in ring.get("stages") or []
        }

    def _counts(self) -> dict[str, float]:
        try:
            text = self._client.text("/metrics")
        except ServerError:
            return {}
        found: dict[str, float] = {}
        for line in text.splitlines():
            name, _, value = line.removeprefix("kvring:").rpartition(" ")
            if name and not line.startswith("#"):
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + _float(value)
        return found


def _difference(after: dict[str, float], before: dict[str, float], plus: str, minus: str) -> float:
    """Growth of one counter less the growth of another."""
    grown = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in (plus, minus)}
    return grown[plus] - grown[minus]


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0

"""Owns what each process takes over time, and whether that grows: memory, descriptors, threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import psutil

LOOK_S = 0.5
WARM_S = 30.0  # of a process' life that don't count
LEAST_S = 40.0  # of life behind them, for a slope to mean anything
POINTS = 150  # of a series that the slope is taken of
# Grown by more over the whole series, a process leaks.
RSS_BYTES = 6 << 20
RSS_SHARE = 0.08  # of its size, where that is more
HANDLES = 4  # descriptors or threads, by the least that it had in each third
AT_REST = 10  # more descriptors or threads than before the load: lazily made helpers, spare sockets


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at one process. at: time.monotonic()."""

    at: float
    name: str
    pid: int
    rss: int
    fds: int
    threads: int


@dataclass(frozen=True, slots=True)
class Trend:
    """One process' growth over `span_s` behind its warm-up."""

    name: str
    pid: int
    span_s: float
    rss: float  # bytes at the median
    rss_grown: float  # bytes: slope times span
    fds_grown: int
    threads_grown: int

    @property
    def leak(self) -> str | None:
        """What grows; None where all is flat."""
        who = f"{self.name} (pid {self.pid}) within {self.span_s:.0f} s"
        if self.rss_grown > max(RSS_BYTES, RSS_SHARE * self.rss):
            return f"memory of {who}: +{self.rss_grown / 1e6:.1f} MB"
        for what, grown in (("descriptors", self.fds_grown), ("threads", self.threads_grown)):
            if grown >= HANDLES:
                return f"{what} of {who}: +{grown}"
        return None


def look(name: str, pid: int) -> Sample | None:
    """One process now; None where it is gone."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        with process.oneshot():
            rss, threads, fds = (
                process.memory_info().rss,
                process.num_threads(),
                process.num_fds(),
            )
        if threads:  # 0: a zombie
            return Sample(time.monotonic(), name, pid, rss, fds, threads)
    return None


class Watcher:
    """Looks at all processes in a thread of its own, until stopped."""

    def __init__(self, pids: Callable[[], dict[str, int]], also: Callable[[], None]) -> None:
        """also: called at every other look, to read the server's own counters."""
        self._pids, self._also = pids, also
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self.samples: list[Sample] = []

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """The last look has been taken when this returns."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        looks = 0
        while not self._stop.wait(LOOK_S):
            for name, pid in self._pids().items():
                sample = look(name, pid)
                if sample is not None:
                    self.samples.append(sample)
            looks += 1
            if looks % 2 == 0:
                self._also()


def trends(samples: Sequence[Sample], start: float, end: float) -> list[Trend]:
    """Of every process that lived long enough while the load ran."""
    lives: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        lives.setdefault((sample.name, sample.pid), []).append(sample)
    found = []
    for (name, pid), life in lives.items():
        warm = max(start, life[0].at) + WARM_S
        late = [sample for sample in life if warm <= sample.at <= end]
        if len(late) >= 9 and late[-1].at - late[0].at >= LEAST_S:
            found.append(_trend(name, pid, late))
    return found


def _trend(name: str, pid: int, life: list[Sample]) -> Trend:
    span_s = life[-1].at - life[0].at
    thin = life[:: max(1, len(life) // POINTS)]
    slopes = [
        (after.rss - before.rss) / (after.at - before.at)
        for index, before in enumerate(thin)
        for after in thin[index + 1 :]
    ]  # Theil-Sen: their median is not moved by a few outliers
    return Trend(
        name,
        pid,
        span_s,
        median(sample.rss for sample in life),
        median(slopes) * span_s,
        _ratchet([sample.fds for sample in life]),
        _ratchet([sample.threads for sample in life]),
    )


def _ratchet(values: Sequence[int]) -> int:
    """Growth of the least value from third to third; 0 where it did not grow each time."""
    third = len(values) // 3
    first, second, last = min(values[:third]), min(values[third:-third]), min(values[-third:])
    return last - first if first < second < last else 0


def grown_at_rest(before: Sequence[Sample], after: Sequence[Sample]) -> list[str]:
    """What processes hold at rest behind the load that they did not hold before it."""
    held = {sample.name: sample for sample in before}
    found = []
    for sample in after:
        first = held.get(sample.name)
        if first is None:
            continue
        for what in ("fds", "threads"):
            more = getattr(sample, what) - getattr(first, what)
            if more > AT_REST:
                found.append(f"{what} of {sample.name} at rest: {more} more than before the load")
    return found

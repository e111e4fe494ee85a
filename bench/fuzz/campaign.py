"""Owns one run of hostile messages: make, spoil, decode, tell the cores, and count by name."""

from __future__ import annotations

import contextlib
import math
import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from bench.fuzz.frames import Maker
from bench.fuzz.mutate import mutate
from bench.fuzz.world import World
from transport.codec import decode, encode
from transport.frame import Buffer, FrameError

LIFE = 400  # hostile messages of one world
VALID = 0.25  # share of messages that are sent as they were made
LOOK_EVERY = 8
HONEST_EVERY = 3
MEASURE_EVERY = 97  # messages of which the memory is traced: it makes them ten times slower
# Of one decode, beside its bytes. A list of nils costs 8 bytes for each of its own, small objects
# up to 64; the rest is the message of an error and what the tracer itself holds.
BYTES_FREE, BYTES_EACH = 64 << 10, 80
CPU_FREE_S, CPU_EACH_S = 0.05, 2e-6  # CPU time of this thread, however busy the machine
AGAIN = 3  # a decode that took longer is timed so often again, and the least counts

_REASONS = (
    ("a message of", "number of parts"),
    ("a payload of", "payload too large"),
    ("a header of", "header too large"),
    ("not msgpack", "not msgpack"),
    ("declares", "declares more than it holds"),
    ("not a frame header", "no frame header"),
    ("protocol", "protocol"),
    ("unknown kind", "unknown kind"),
    ("Envelope", "envelope"),
)


@dataclass
class Report:
    """sent, refused: by the way it was spoiled. reasons: of refusals. counts: of the cores."""

    sent: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    most_bytes: int = 0  # traced beside the message, at most
    worst_ratio: float = 0.0  # of traced bytes to the message's, where it is over 4 KiB
    measured: int = 0

    @property
    def total(self) -> int:
        """Messages so far."""
        return sum(self.sent.values())


class FuzzFailure(AssertionError):  # noqa: N818 - it is a test's verdict
    """Something escaped; the message says how to see it again."""


def run(
    count: int, seed: int, every: int = 0, until_s: float = math.inf, report: Report | None = None
) -> Report:
    """Send `count` hostile messages; FuzzFailure at the first that does harm.

    until_s: end early at this time.monotonic(). every: say how far it is after so many messages.
    Worlds are seeded by (seed, world's number), so a failure is repeated from its world on.
    """
    report = report or Report()
    number = 0
    while report.total < count and time.monotonic() < until_s:
        life(f"{seed}:{number}", min(LIFE, count - report.total), report)
        number += 1
        if every and number * LIFE % every < LIFE:
            refused = sum(report.refused.values())
            print(f"{report.total:,} messages, {refused:,} refused", flush=True)
    return report


def life(seed: str, count: int, report: Report) -> None:
    """One world from its start to its end."""
    random = Random(seed)
    world = World(random)
    maker = Maker(random, world.hints)
    previous: list[Buffer] = encode(maker.ping(), maker.envelope())
    parts: Sequence[Buffer] = previous
    index = -1
    try:
        for index in range(count):
            if index % LOOK_EVERY == 0:
                world.look()
            whole = encode(maker.frame(), maker.envelope())
            way, parts = "valid", whole
            if random.random() >= VALID:
                way, parts = mutate(whole, previous, random)
            report.sent[way] += 1
            _decode(parts, way, report, measure=(report.total % MEASURE_EVERY == 0))
            world.hostile(parts)
            if index % HONEST_EVERY == 0:
                world.honest()
            previous = whole
        world.end()
    except Exception as error:
        shown = [bytes(part[:400]).hex() for part in parts]
        raise FuzzFailure(f"world {seed}, message {index}: {error!r}; parts {shown}") from error
    report.counts.update(world.counts)


def _decode_s(parts: Sequence[Buffer]) -> float:
    began = time.thread_time()
    with contextlib.suppress(FrameError):
        decode(parts)
    return time.thread_time() - began


def _decode(parts: Sequence[Buffer], way: str, report: Report, *, measure: bool) -> None:
    size = sum(len(part) for part in parts)
    if measure:
        tracemalloc.start()
    began = time.thread_time()
    try:
        frame, envelope = decode(parts)
    except FrameError as error:
        frame = None
        reason = str(error)
        report.refused[way] += 1
        report.reasons[_bucket(reason)] += 1
        assert len(reason) < 1000, reason
    took = time.thread_time() - began
    if measure:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        report.measured += 1
        report.most_bytes = max(report.most_bytes, peak)
        if size > 4096:
            report.worst_ratio = max(report.worst_ratio, peak / size)
        assert peak <= BYTES_FREE + BYTES_EACH * size, f"{peak} bytes for a message of {size}"
    else:
        bound_s = CPU_FREE_S + CPU_EACH_S * size
        for _ in range(AGAIN):
            if took > bound_s:  # a shared core is stolen from; what decoding itself takes, it takes
                took = min(took, _decode_s(parts))
        report.slowest_s = max(report.slowest_s, took)
        assert took <= bound_s, f"{took:.3f} s for a message of {size}"
    if frame is not None:
        assert decode(encode(frame, envelope)) == (frame, envelope)


def _bucket(reason: str) -> str:
    for start, name in _REASONS:
        if reason.startswith(start):
            return name
    return f"a field of {reason.split('.', 1)[0].split(' ', 1)[0].rstrip(':')}"

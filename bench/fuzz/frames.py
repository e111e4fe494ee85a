"""Owns seeded valid frames: every class, near enough to a live ring's state to reach its depths.

Half of the numbers are what a ring of two stages would say now, the others anywhere in their range.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from transport.codec import ITEM_BYTES, MAX_EPOCH, U31, U63
from transport.frame import (
    GREEDY,
    Cancel,
    Claim,
    Copy,
    Drafted,
    Envelope,
    Forwarded,
    Frame,
    Free,
    FreeSlot,
    Heartbeat,
    KeepSlot,
    Kind,
    LinkGap,
    Look,
    Machine,
    Measure,
    Ping,
    Refusal,
    Reject,
    Result,
    RollCall,
    Run,
    Sampling,
    Segment,
    Shaping,
    StageEntry,
    StageLost,
    StageState,
    Submit,
    Tensor,
    Tick,
    Timing,
    Verdict,
)

EDGES = (0, 1, 2, 7, 255, 65535, U31, U31 + 1, 2**32 - 1, 2**53, U63)
TEXTS = ("", "x", "r", "s0", "\0", "é" * 60, "a" * 128)


class Hints:
    """What is true of the ring that the frames are for; the world keeps it up to date."""

    def __init__(self) -> None:
        self.ring = "r"
        self.stages = ("s0", "s1")
        self.epoch = 1
        self.seq = 1
        self.turn = 1
        self.life = 1
        self.slots = 3
        self.rows = 8
        self.fingerprint = b"f"
        self.digests: list[bytes] = [bytes(16)]
        self.entries: tuple[StageEntry, ...] = ()
        self.runs: list[Run] = []  # that are in flight: a forged verdict may name them


class Maker:
    """Draws frames; equal seeds and hints give equal frames."""

    def __init__(self, random: Random, hints: Hints) -> None:
        self.random = random
        self.hints = hints
        self._kinds: tuple[Callable[[], Frame], ...] = (
            self.run, self.run, self.verdict, self.verdict, self.reject, self.roll_call, self.copy,
            self.free, self.ping, self.measure, self.heartbeat, self.local,
        )  # fmt: skip

    def frame(self) -> Frame:
        """A frame of any class."""
        return self.random.choice(self._kinds)()

    def envelope(self) -> Envelope:
        """A new sender's first frame, or something else."""
        r = self.random
        if r.random() < 0.001:  # a stage's own name: from then on that stage is not heard
            return Envelope("r/s1", r.getrandbits(63), 0)
        if r.random() < 0.9:
            return Envelope(self.name(), r.getrandbits(63), 0)
        return Envelope(self.name(), min(r.choice(EDGES), U63), min(r.choice(EDGES), U63))

    # ---- fields ----

    def name(self) -> str:
        r = self.random
        return r.choice(self.hints.stages) if r.random() < 0.6 else r.choice(TEXTS)

    def ring(self) -> str:
        return self.hints.ring if self.random.random() < 0.95 else self.name()

    def near(self, value: int, limit: int = U63) -> int:
        """The value, one beside it, or an edge."""
        r = self.random
        draw = r.random()
        if draw < 0.7:
            return value
        if draw < 0.85:
            return min(limit, max(0, value + r.randrange(-2, 3)))
        return min(r.choice(EDGES), limit)

    def epoch(self) -> int:
        return self.near(self.hints.epoch, MAX_EPOCH >> 1)

    def slot(self) -> int:
        return self.near(self.random.randrange(self.hints.slots + 2), U31)

    def turn(self) -> int:
        r = self.random
        return self.near(r.randrange(max(0, self.hints.turn - 8), self.hints.turn + 2))

    def tokens(self, low: int = 0) -> tuple[int, ...]:
        r = self.random
        count = r.randrange(low, low + 6) if r.random() < 0.95 else r.randrange(300)
        most = 64 if r.random() < 0.9 else 2**32
        return tuple([r.randrange(most) for _ in range(max(low, count))])

    def digest(self) -> bytes:
        r = self.random
        return r.choice(self.hints.digests) if r.random() < 0.8 else r.randbytes(16)

    def logprob(self) -> float:
        r = self.random
        return r.choice((0.0, -0.5, -1e308, -math.inf)) if r.random() < 0.2 else -r.random()

    def sampling(self) -> Sampling:
        r = self.random
        if r.random() < 0.7:
            return GREEDY
        shaping = None
        if r.random() < 0.5:
            shaping = Shaping(
                r.choice((1.0, 1e-3, 1e3, 1.5)),
                r.choice((0.0, -1e3, 1e3)),
                r.choice((0.0, -1e3, 0.5)),
                tuple([(r.randrange(80), r.uniform(-1e3, 1e3)) for _ in range(r.randrange(4))]),
                r.choice((0, 3, U31)),
                r.choice((0, 2, U31)),
                self.tokens(),
            )
        return Sampling(
            r.choice((0.0, 1e-5, 5e-324, 0.7, 1e6)),
            r.choice((0, 1, 40, U31)),
            r.choice((0.0, 0.5, 1.0)),
            r.choice((0.0, 0.1, 1.0)),
            min(r.choice(EDGES), U63),
            r.choice((None, 0, 5, 64)),
            shaping,
        )

    def tensor(self, rows: int) -> Tensor:
        r = self.random
        dtype = "uint8" if r.random() < 0.8 else r.choice(sorted(ITEM_BYTES))
        shape: tuple[int, ...] = (rows, 8) if r.random() < 0.8 else (r.randrange(9), r.randrange(9))
        if r.random() < 0.05:
            shape = tuple([r.randrange(4) for _ in range(r.randrange(5))])
        return Tensor(dtype, shape, r.randbytes(math.prod(shape) * ITEM_BYTES[dtype]))

    def timings(self) -> tuple[Timing, ...]:
        r = self.random
        count = r.randrange(4) if r.random() < 0.98 else 256
        return tuple(
            [
                Timing(self.name(), r.randrange(10**4), min(r.choice(EDGES), U63))
                for _ in range(count)
            ]
        )

    # ---- frames ----

    def segment(self) -> Segment:
        r = self.random
        tokens = self.tokens(1)
        start = self.near(r.choice((0, r.randrange(self.hints.rows + 1))), U31)
        want = r.choice((0, 1, len(tokens), len(tokens) + 1))
        kind = r.choice(tuple(Kind))
        salt = b"" if r.random() < 0.9 else r.randbytes(r.randrange(65))
        slot, turn = self.slot(), self.turn()
        return Segment(turn, slot, start, tokens, kind, self.digest(), want, self.sampling(), salt)

    def run(self) -> Frame:
        r = self.random
        count = r.randrange(4) if r.random() < 0.98 else r.randrange(200)
        segments = tuple([self.segment() for _ in range(count)])
        rows = sum(len(segment.tokens) for segment in segments)
        payload = self.tensor(rows) if r.random() < 0.5 else None
        epoch, seq = self.epoch(), self.near(self.hints.seq)
        return Run(self.ring(), epoch, seq, segments, payload, self.timings())

    def result(self) -> Result:
        r = self.random
        tokens = self.tokens()
        scores = tuple([self.logprob() for _ in tokens]) if r.random() < 0.3 else ()
        top = tuple([((r.randrange(99), self.logprob()),) for _ in tokens]) if scores else ()
        return Result(
            self.turn(), self.slot(), self.near(self.hints.rows, U31), tokens, scores, top
        )

    def verdict(self) -> Frame:
        """Anything, or a forged answer to a frame that is in flight."""
        r, hints = self.random, self.hints
        if not hints.runs or r.random() < 0.5:
            results = tuple([self.result() for _ in range(r.randrange(4))])
            epoch, seq = self.epoch(), self.near(hints.seq)
            return Verdict(self.ring(), epoch, seq, results, self.timings())
        run = r.choice(hints.runs)
        forged = []
        for segment in run.segments:
            count = segment.want if r.random() < 0.8 else r.randrange(9)
            tokens = tuple([r.randrange(64 if r.random() < 0.9 else 2**32) for _ in range(count)])
            start = segment.end - segment.want
            scores = tuple([self.logprob() for _ in range(self.near(count, 9))])
            result = Result(segment.turn, segment.slot, start, tokens, scores)
            forged += [result] * (1 if r.random() < 0.9 else r.randrange(3))
        return Verdict(run.ring, run.epoch, run.seq, tuple(forged), self.timings())

    def reject(self) -> Frame:
        r, hints = self.random, self.hints
        turn = self.turn() if r.random() < 0.7 else None
        slot = self.slot() if r.random() < 0.7 else None
        code = r.choice(tuple(Refusal))
        epoch, seq = self.epoch(), self.near(hints.seq)
        return Reject(self.ring(), epoch, seq, self.name(), code, r.choice(TEXTS), turn, slot)

    def entry(self) -> StageEntry:
        r, hints = self.random, self.hints
        layers = r.choice(((0, 2), (2, 4), (0, 4), (U31, 0)))
        prints = hints.fingerprint if r.random() < 0.8 else r.randbytes(r.randrange(1, 65))
        return StageEntry(
            self.name(),
            r.getrandbits(63),
            layers,
            self.near(4, U31),
            prints,
            self.near(hints.slots, U31),
            self.near(128, U31),
            self.near(64, U31),
            "toy",
            self.near(16),
            self.near(4096),
        )

    def roll_call(self) -> Frame:
        """Anything, or what the stages would answer with one number changed."""
        r, hints = self.random, self.hints
        count = r.randrange(4) if r.random() < 0.98 else 256
        entries = tuple([self.entry() for _ in range(count)])
        if hints.entries and r.random() < 0.6:
            entries = hints.entries
            if r.random() < 0.7:
                slots, capacity = self.near(hints.slots, U31), self.near(128, U31)
                entries = tuple(
                    [
                        StageEntry(
                            e.name, e.incarnation, e.layers, e.layers_total, e.fingerprint, slots,
                            capacity, self.near(e.vocabulary, U31), e.kernel, self.near(16),
                            self.near(4096),
                        )
                        for e in entries
                    ]
                )  # fmt: skip
        claims = tuple(
            [
                Claim(self.slot(), max(1, self.near(hints.rows + 1, U31)), self.digest())
                for _ in range(r.randrange(4))
            ]
        )
        return RollCall(self.ring(), self.epoch(), claims, entries)

    def copy(self) -> Frame:
        r, hints = self.random, self.hints
        done = tuple([self.name() for _ in range(r.randrange(4) if r.random() < 0.98 else 256)])
        length = max(1, self.near(r.randrange(1, hints.rows + 2), U31))
        epoch, seq = self.epoch(), self.near(hints.seq)
        turn, source, target = self.turn(), self.slot(), self.slot()
        return Copy(self.ring(), epoch, seq, turn, source, target, length, self.digest(), done)

    def free(self) -> Frame:
        hints = self.hints
        return Free(self.ring(), self.epoch(), self.near(hints.seq), self.slot())

    def ping(self) -> Frame:
        return Ping(self.ring(), self.epoch(), self.near(self.hints.seq))

    def machine(self) -> Machine:
        r, hints = self.random, self.hints
        n = [min(r.choice(EDGES), U63) for _ in range(16)]
        trips = tuple([(self.name(), r.choice(EDGES[:-1])) for _ in range(r.randrange(3))])
        return Machine(
            self.name(), self.name(), "cpu", r.choice(TEXTS), hints.fingerprint,
            (0, self.near(2, U31)), n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9],
            n[10], n[11], n[12], n[13], n[14], n[15], trips,
        )  # fmt: skip

    def measure(self) -> Frame:
        r = self.random
        count = r.randrange(4) if r.random() < 0.98 else 256
        look, wide = r.choice(tuple(Look)), r.random() < 0.5
        machines = tuple([self.machine() for _ in range(count)]) if r.random() < 0.5 else ()
        gaps = tuple([r.randrange(10**9) for _ in range(count)])
        payload = self.tensor(r.randrange(9)) if r.random() < 0.5 else None
        return Measure(self.ring(), self.near(1), look, wide, machines, gaps, payload)

    def heartbeat(self) -> Frame:
        r = self.random
        state = r.choice(tuple(StageState))
        life = self.near(self.hints.life)
        return Heartbeat(
            self.ring(), self.name(), life, state, r.random(), r.choice(TEXTS), r.choice(EDGES), 1
        )

    def local(self) -> Frame:
        """What must never cross a link."""
        r = self.random
        return r.choice(
            (
                Submit(
                    self.turn(), self.tokens(), min(r.choice(EDGES), U31), sampling=self.sampling()
                ),
                Cancel(self.turn(), r.choice(TEXTS)),
                Tick(),
                Forwarded(self.epoch(), self.near(self.hints.seq), self.tensor(2)),
                LinkGap("r/s1", r.choice(EDGES), r.choice(EDGES)),
                StageLost(self.ring(), self.name(), "gone"),
                FreeSlot(self.ring(), self.slot()),
                KeepSlot(self.ring(), self.slot(), r.random() * 1e9),
                Drafted(self.turn(), self.slot(), self.tokens()),
            )
        )

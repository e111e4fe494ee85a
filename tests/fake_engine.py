"""A scripted engine for the gateway's tests: it answers what the script says, and records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coord.actions import Admitted, Failed, Finished, Tokens, TurnError
from coord.http.engine import Limits, Resident
from coord.http.reply import Event
from transport.frame import Sampling

Step = Event | float  # an event, or seconds to wait before the next one

LIMITS = Limits(512, ("toy",))


@dataclass
class Submitted:
    """What a turn was submitted with."""

    prompt: tuple[int, ...]
    budget: int
    stops: tuple[int, ...]
    sampling: Sampling
    salt: bytes
    reuse: bool
    hint: str
    keep_s: float


class FakeStream:
    """Plays a script; a cancel ends it at once with Finished(reason)."""

    def __init__(self, turn: int, script: Sequence[Step]) -> None:
        self.turn = turn
        self.cancelled: list[str] = []
        self.ended = asyncio.Event()
        self._script = script
        self._stop = asyncio.Event()

    def cancel(self, reason: str) -> None:
        self.cancelled.append(reason)
        self._stop.set()

    async def __aiter__(self) -> AsyncIterator[Event]:
        try:
            for step in self._script:
                if isinstance(step, float):
                    try:
                        await asyncio.wait_for(self._stop.wait(), step)
                    except TimeoutError:
                        continue
                if self._stop.is_set():
                    yield Finished(self.turn, self.cancelled[0])
                    return
                assert not isinstance(step, float)
                yield step
        finally:
            self.ended.set()


@dataclass
class FakeEngine:
    """script is what each turn plays; refusal is raised by submit instead."""

    script: Sequence[Step] = ()
    refusal: TurnError | None = None
    limits: Limits = LIMITS
    is_ready: tuple[bool, str] = (True, "")
    values: dict[str, float] = field(default_factory=dict)
    submitted: list[Submitted] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)
    held: list[Resident] = field(default_factory=list)
    asked: list[tuple[object, ...]] = field(default_factory=list)

    def submit(
        self,
        prompt: Sequence[int],
        *,
        budget: int,
        stops: Sequence[int],
        sampling: Sampling,
        salt: bytes,
        reuse: bool,
        hint: str,
        keep_s: float,
    ) -> FakeStream:
        if self.refusal is not None:
            raise self.refusal
        turn = Submitted(tuple(prompt), budget, tuple(stops), sampling, salt, reuse, hint, keep_s)
        self.submitted.append(turn)
        self.streams.append(FakeStream(len(self.streams) + 1, self.script))
        return self.streams[-1]

    def describe(self) -> dict[str, Any]:
        slots = [
            {"slot": each.slot, "resident": each.rows} for each in self.held if not each.parked
        ]
        parked = [{"slot": each.slot, "resident": each.rows} for each in self.held if each.parked]
        ring = {
            "name": "r0",
            "stages": [],
            "slots": slots,
            "parked": parked,
            "evictions": {"ttl": 1},
        }
        return {"rings": [ring]}

    def residents(self) -> list[Resident]:
        return self.held

    def free(self, ring: str, slot: int) -> int:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append(("free", ring, slot))
        return 7

    def keep(self, ring: str, slot: int, keep_s: float) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append(("keep", ring, slot, keep_s))

    async def measure(self, ring: str, *, wide: bool) -> dict[str, object]:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append(("measure", ring, wide))
        return {"ring": ring, "stages": [], "links": []}

    def ready(self) -> tuple[bool, str]:
        return self.is_ready

    def progress(self) -> dict[str, object]:
        return {"stages": [{"name": "s0", "state": "loading", "progress": 0.5, "detail": "x"}]}

    def counters(self) -> Mapping[str, float]:
        return self.values


def says(
    *pieces: str | bytes,
    reason: str = "stop",
    matched: int = 0,
    prompt: int = 10,
    stop: int | None = None,
    logprobs: bool = False,
) -> list[Step]:
    """Admitted, one Tokens per piece (a token is a byte), and Finished."""
    script: list[Step] = [Admitted(1, "r0", 0, prompt, matched)]
    for piece in pieces:
        data = piece.encode() if isinstance(piece, str) else piece
        scores = tuple(-float(byte) / 100 for byte in data) if logprobs else ()
        top = tuple(((byte, -0.1), (65, -0.2)) for byte in data) if logprobs else ()
        script.append(Tokens(1, tuple(data), scores, top))
    if stop is not None:
        script.append(Tokens(1, (stop,), (-0.5,) if logprobs else (), ((),) if logprobs else ()))
    return [*script, Finished(1, reason)]


def fails(status: int = 503, code: str = "ring_lost", after: str = "") -> list[Step]:
    """Like says, but the turn fails."""
    return [*says(after)[:-1], Failed(1, status, code, "the ring was lost")]

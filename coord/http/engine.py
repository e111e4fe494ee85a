"""Owns what the HTTP API needs of whatever runs turns: a protocol, so that tests can script it.

The coordinator's shell is the real one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from coord.http.reply import TurnStream
from transport.frame import Sampling


@dataclass(frozen=True, slots=True)
class Limits:
    """max_model_len: rows of a slot, so a prompt and its answer together. models: names served."""

    max_model_len: int
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resident:
    """What one slot or parked prefix holds, for deciding who may see it. Never sent as it is.

    salt: of the turn that writes or wrote it, None for an empty slot. tokens: the first few.
    """

    ring: str
    slot: int
    rows: int
    writing: bool
    parked: bool
    salt: bytes | None
    tokens: tuple[int, ...]


class Engine(Protocol):
    """What runs turns."""

    @property
    def limits(self) -> Limits:
        """Constant while the app lives."""

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
    ) -> TurnStream:
        """Start a turn. TurnError: 429 queue full, 503 not ready, 400 over the context length."""

    def describe(self) -> dict[str, Any]:
        """GET /ring, JSON-able, with everybody's slots."""

    def residents(self) -> Sequence[Resident]:
        """Every slot, and every parked prefix, of all rings."""

    def free(self, ring: str, slot: int) -> int:
        """Give a slot or parked prefix up now; the rows it held.

        TurnError: 404 no such ring or slot, 409 while a turn writes there, 503 ring not ready.
        """

    def keep(self, ring: str, slot: int, keep_s: float) -> None:
        """Don't give a slot up for keep_s seconds, 0: as any other.

        TurnError: 404 no such ring or slot, 409 when no other slot would be left to give up.
        """

    async def measure(self, ring: str, *, wide: bool) -> dict[str, object]:
        """POST /ring/measure, JSON-able: what each machine says of itself, and every link.

        wide: links of stages that are no neighbours, too. TurnError: 404 no such ring, 409 while
        turns run or it is measured already, 503 where the frame does not come round.
        """

    def ready(self) -> tuple[bool, str]:
        """(True, "") or (False, what is missing, in words)."""

    def progress(self) -> dict[str, object]:
        """Details for GET /ready: per stage its state and how far loading is."""

    def counters(self) -> Mapping[str, float]:
        """Gauges, and counters by their _total: name or name{label="value"} -> value."""

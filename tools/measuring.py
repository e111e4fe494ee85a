"""Owns how the tools learn what only a ring's machines can tell: from its coordinator, or as one.

A ring serves one coordinator at a time. Where one runs it is asked over HTTP; where none does, this
process binds the verdict link for a moment, hears who is there, and sends the measuring frame
itself. That frame belongs to no epoch, so nothing is taken from anybody.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Self

from coord.actions import TurnError
from coord.survey import Survey
from tools.client import Client, Json, number
from tools.errors import ToolError
from transport.config import Config, Ring
from transport.frame import Envelope, Frame, Heartbeat, StageState
from transport.link import open_pull
from transport.trust import CoordinatorTrust

HEAR_S = 1.5  # for heartbeats, beside two of their intervals: a stage connects again within 0.25 s


@dataclass(frozen=True, slots=True)
class Machine:
    """A stage's answer: transport.machine.Machine in seconds, and its clock's offset."""

    name: str
    machine: str
    device: str
    software: str
    fingerprint: str
    layers: tuple[int, int]
    layers_total: int
    slots: int
    capacity: int
    row_bytes: int
    wire_bytes: int
    weight_bytes: int
    end_bytes: int
    free_bytes: int
    total_bytes: int
    files: int
    decode_s: float
    end_s: float
    prefill_rows: int
    prefill_s: float
    trips: dict[str, float]
    clock_offset_s: float
    clock_error_s: float

    @classmethod
    def read(cls, said: Json) -> Self:
        """From the server's JSON. Raises KeyError, TypeError or ValueError where it is none."""
        plain = {
            name: said[name]
            for name in cls.__slots__
            if name not in {"decode_s", "end_s", "prefill_s", "layers", "trips"}
        }
        first, last = said["layers"]
        trips = {str(name): float(took) for name, took in said["trips"].items()}
        seconds = {f"{name}_s": said[f"{name}_ns"] / 1e9 for name in ("decode", "end", "prefill")}
        return cls(**plain, **seconds, layers=(int(first), int(last)), trips=trips)

    @property
    def count(self) -> int:
        """Layers of its block."""
        return self.layers[1] - self.layers[0]


@dataclass(frozen=True, slots=True)
class Link:
    """One link of the ring; the coordinator's name is empty. None: it could not be measured."""

    source: str
    target: str
    round_trip_s: float | None
    mbit: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """A ring as it was measured. round_trip_s: of a small frame, without compute."""

    ring: str
    round_trip_s: float
    machines: tuple[Machine, ...]
    links: tuple[Link, ...]
    trips: dict[str, float]  # of the coordinator to stages

    @classmethod
    def read(cls, said: Json) -> Self:
        """From the answer of POST /ring/measure. Raises ToolError where it is none."""
        try:
            machines = tuple([Machine.read(each) for each in said["stages"]])
            links = tuple(
                [
                    Link(each["from"], each["to"], number(each["round_trip_s"]), _rate(each))
                    for each in said["links"]
                ]
            )
            trips = {str(name): float(took) for name, took in said["trips"].items()}
            return cls(said["ring"], float(said["round_trip_s"]), machines, links, trips)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ToolError(
                f"the coordinator measures in another way ({type(error).__name__}: {error}): "
                "is it another version of kvring?"
            ) from None


def _rate(said: Json) -> float | None:
    return number(said["mbit"])


@dataclass(slots=True)
class Heard:
    """What a ring without a coordinator said. beats: the last heartbeat of each stage heard."""

    beats: dict[str, Heartbeat] = field(default_factory=dict)
    measured: Measured | None = None
    fault: str = ""  # why nothing was measured


def ask(client: Client, ring: str, *, wide: bool = False) -> Measured:
    """Let the running coordinator measure. Raises ToolError."""
    path = f"/ring/measure?ring={ring}{'&wide=1' if wide else ''}"
    return Measured.read(client.post(path, {}))


def join(
    config: Config, ring: Ring, trust: CoordinatorTrust | None, *, wide: bool = False
) -> Heard:
    """Be the ring's coordinator for a moment. Raises LinkError where its address can't be bound."""
    return asyncio.run(_join(config, ring, trust, wide=wide))


async def _join(config: Config, ring: Ring, trust: CoordinatorTrust | None, *, wide: bool) -> Heard:
    survey = Survey(config.limits, config.emulate)
    heard = Heard()
    names = [stage.name for stage in ring.stages]

    def take(frame: Frame, _: Envelope) -> None:
        if isinstance(frame, Heartbeat) and frame.stage in names:
            heard.beats[frame.stage] = frame
        survey.heard(frame)

    pull = await open_pull(
        ring.listen,
        take,
        link=ring.name,
        max_bytes=config.limits.max_frame_bytes,
        security=trust.verdicts[ring.name] if trust else None,
    )
    try:
        deadline = time.monotonic() + HEAR_S + 2 * config.limits.heartbeat_s
        while time.monotonic() < deadline and not _all_ready(heard, names):
            await asyncio.sleep(0.05)
        if not _all_ready(heard, names):
            heard.fault = "not every stage is there"
            return heard
        security = trust.heads[ring.name] if trust else None
        try:
            heard.measured = Measured.read(await survey.measure(ring, security, wide=wide))
        except TurnError as error:
            heard.fault = error.message
    finally:
        await pull.close()
    return heard


def _all_ready(heard: Heard, names: list[str]) -> bool:
    beats: list[Any] = [heard.beats.get(name) for name in names]
    return all(beat is not None and beat.state is StageState.READY for beat in beats)

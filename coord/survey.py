"""Owns the measuring of a ring: sends Measure frames round it, and says what came back.

Has a socket of its own to the head, so that the coordinator's frames keep their numbers. The caller
hands it what arrives on the verdict link. Decides nothing about turns.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import asdict, dataclass
from statistics import median

from coord.actions import TurnError
from transport.config import Limits, Ring
from transport.emulate import Emulate
from transport.frame import Frame, Look, Machine, Measure, Tensor
from transport.keys import Security
from transport.link import AsyncPush, LinkError, open_push
from transport.reach import round_trip

WARM_BYTES = 1 << 10  # opens the connections, and tells the round trip without a payload
WARM_ROUNDS = 5
BULKS = (1 << 16, 1 << 20, 1 << 22)  # bytes; a larger one tells a fast link's rate better
BULK_ROUNDS = 3
ENOUGH_S = 0.2  # a bulk that took a link so long tells its rate well
FIRST_S = 3.0  # for the first small frame to come round, and per stage 1 s more
STAGE_S = 20.0  # for a stage's trial forwards; a frame that takes longer is a ring's end
MOST_S = 120.0  # for all stages together
REACH_S = 1.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A Measure that came round, and its mark's and its own time of arrival (monotonic)."""

    frame: Measure
    marked_at: float | None
    at: float


class Survey:
    """Measures one ring at a time; `heard` is told of every Measure that came round."""

    def __init__(self, limits: Limits, emulate: Emulate) -> None:
        self._limits, self._emulate = limits, emulate
        self._number = secrets.randbits(48)
        self._marked: tuple[int, float] | None = None
        self._waiting: asyncio.Future[Arrival] | None = None

    @property
    def running(self) -> bool:
        """True while a ring is measured."""
        return self._waiting is not None

    def heard(self, frame: Frame) -> None:
        """A frame came in on the verdict link; only a Measure is looked at."""
        if not isinstance(frame, Measure) or frame.number != self._number:
            return
        if self._waiting is None or self._waiting.done():
            return
        now = time.monotonic()
        if frame.look is Look.MARK:
            self._marked = frame.number, now
            return
        marked = self._marked[1] if self._marked and self._marked[0] == frame.number else None
        self._waiting.set_result(Arrival(frame, marked, now))

    async def measure(
        self, ring: Ring, security: Security | None, *, wide: bool = False
    ) -> dict[str, object]:
        """What POST /ring/measure answers: docs/api.md. Raises TurnError, within MOST_S.

        wide: the stages connect to each other, whether or not they are neighbours.
        """
        if self.running:
            raise TurnError(409, "measuring", "the ring is being measured already", None)
        self._waiting = asyncio.get_running_loop().create_future()
        push: AsyncPush | None = None
        try:
            push = await open_push(
                ring.head.address,
                sender=f"{ring.name}/coordinator/measure",
                incarnation=secrets.randbits(63),
                max_bytes=self._limits.max_frame_bytes,
                security=security,
                emulate=self._emulate,
            )
            trips = await asyncio.to_thread(_trips, ring, wide)
            return await self._rounds(push, ring, trips, wide=wide)
        except LinkError as error:
            raise TurnError(503, "measure_failed", f"ring {ring.name}: {error}") from None
        finally:
            self._waiting = None
            if push is not None:
                await push.close()

    async def _rounds(
        self, push: AsyncPush, ring: Ring, trips: dict[str, float], *, wide: bool
    ) -> dict[str, object]:
        count = len(ring.stages)
        await self._bulk(push, ring, WARM_BYTES, FIRST_S + count)
        hops = [await self._bulk(push, ring, WARM_BYTES, FIRST_S) for _ in range(WARM_ROUNDS)]
        trip_s = median([arrival.at - sent for sent, arrival in hops])
        began_ns = time.time_ns()
        asked = Measure(ring.name, self._next(), Look.MACHINES, wide)
        machines = (await self._ask(push, asked, min(MOST_S, 5 + STAGE_S * count))).frame.machines
        wanted = [stage.name for stage in ring.stages]
        if [each.name for each in machines] != wanted:
            met = [each.name for each in machines]
            text = f"ring {ring.name}: the measuring frame met {met}, not {wanted}"
            raise TurnError(503, "measure_failed", text)
        rates = await self._rates(push, ring)
        return _said(ring, machines, trip_s, began_ns, rates, trips)

    async def _rates(self, push: AsyncPush, ring: Ring) -> list[float]:
        """Bits per second of every link, the coordinator's to the head first.

        The medians of a few: a receiver that was busy takes its mark late, or its bulk.
        """
        for most in BULKS:
            size = min(most, self._limits.max_frame_bytes)
            some = [await self._gaps(push, ring, size)]
            if max(some[0]) > ENOUGH_S / 4:  # the next is 4 times as large, or 16
                break
        while len(some) < BULK_ROUNDS:
            some.append(await self._gaps(push, ring, size))
        return [size * 8 / max(1e-9, median(gaps)) for gaps in zip(*some, strict=True)]

    async def _gaps(self, push: AsyncPush, ring: Ring, size: int) -> list[float]:
        """Seconds that each link took for a bulk."""
        arrival = (await self._bulk(push, ring, size, MOST_S))[1]
        gaps = [gap / 1e9 for gap in arrival.frame.gaps_ns]
        return [*gaps, arrival.at - (arrival.marked_at or arrival.at)]

    async def _bulk(
        self, push: AsyncPush, ring: Ring, size: int, limit_s: float
    ) -> tuple[float, Arrival]:
        """When a mark and a bulk behind it left, and how they came round."""
        number = self._next()
        sent = time.monotonic()
        push.send(Measure(ring.name, number, Look.MARK))
        payload = Tensor("uint8", (size,), bytes(size))
        bulk = Measure(ring.name, number, Look.BULK, payload=payload)
        arrival = await self._ask(push, bulk, limit_s)
        if len(arrival.frame.gaps_ns) != len(ring.stages):
            met = len(arrival.frame.gaps_ns)
            text = f"ring {ring.name}: the measuring frame met {met} stages, not those of ring.toml"
            raise TurnError(503, "measure_failed", text)
        return sent, arrival

    async def _ask(self, push: AsyncPush, frame: Measure, limit_s: float) -> Arrival:
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        push.send(frame)
        try:
            async with asyncio.timeout(limit_s):
                return await self._waiting
        except TimeoutError:
            text = (
                f"ring {frame.ring}: the measuring frame did not come round within {limit_s:g} s: "
                "does every stage run, and is each the same version of kvring?"
            )
            raise TurnError(503, "measure_unanswered", text) from None

    def _next(self) -> int:
        self._number += 1
        return self._number


def _trips(ring: Ring, wide: bool) -> dict[str, float]:
    """Seconds of the coordinator's own connections, by stage; those that answer."""
    stages = ring.stages if wide else ring.stages[:1]
    found = {stage.name: round_trip(stage.address, REACH_S) for stage in stages}
    return {name: took for name, took in found.items() if took is not None}


def _said(
    ring: Ring,
    machines: tuple[Machine, ...],
    trip_s: float,
    began_ns: int,
    rates: list[float],
    trips: dict[str, float],
) -> dict[str, object]:
    """JSON values. A clock's offset is against the coordinator's, known to half a round trip."""
    names = ["", *(each.name for each in machines), ""]
    reached = {"": trips} | {
        each.name: {name: ns / 1e9 for name, ns in each.trips} for each in machines
    }
    hop_ns = trip_s * 1e9 / (len(machines) + 1)
    came_ns = float(began_ns)
    stages = []
    for each in machines:
        came_ns += hop_ns
        said = {
            **asdict(each),
            "fingerprint": each.fingerprint.hex(),
            "layers": list(each.layers),
            "trips": {name: ns / 1e9 for name, ns in each.trips},
            "clock_offset_s": (each.came_ns - came_ns) / 1e9,
            "clock_error_s": trip_s / 2,
        }
        came_ns += each.left_ns - each.came_ns
        stages.append(said)
    links = [
        {
            "from": names[at],
            "to": names[at + 1],
            "round_trip_s": reached[names[at]].get(names[at + 1]),
            "mbit": rates[at] / 1e6 or None,
        }
        for at in range(len(names) - 1)
    ]
    return {
        "ring": ring.name,
        "round_trip_s": trip_s,
        "stages": stages,
        "links": links,
        "trips": trips,
    }

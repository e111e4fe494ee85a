"""A MemoryRing whose processes' frames are recorded: what --record would have written of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import tests.world
from pipeline.stage import CopyRows, DropRows, Forward
from pipeline.stage import Send as StageSend
from tests.memoryring import MemoryRing
from tests.memoryworld import MemoryWorld
from tests.world import Plan, visit
from tools.framelogs.residency import Residency, Tally, Who
from transport.frame import (
    Cancel,
    Drafted,
    Envelope,
    Forwarded,
    Frame,
    FreeSlot,
    Heartbeat,
    KeepSlot,
    LinkGap,
    Remembered,
    StageLost,
    Submit,
    Tick,
    Wire,
)
from transport.framelog import Direction, LogHeader, Payloads
from transport.recorder import Recorder

COORDINATOR = Who("coordinator", "coord", 1)
LOCAL = (Submit, Cancel, Tick, StageLost, FreeSlot, KeepSlot, Drafted, Remembered)


class Taken(NamedTuple):
    """One record, as Residency.observe takes it."""

    who: Who
    direction: Direction
    frame: Frame
    envelope: Envelope | None


class RecordedRing(MemoryRing):
    """Every frame that reaches or leaves a core goes to `sink` first, numbered as links number."""

    sink: Callable[[Taken], None]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._senders = [f"{self.name}/coordinator", *(f"{self.name}/{n}" for n in self.names)]
        self._lives = [1, *self.incarnations]
        self._counts = [0] * len(self.links)
        self._numbers: list[deque[Envelope]] = [deque() for _ in self.links]
        self._beats: dict[str, int] = {}
        self._came: Envelope | None = None  # of the frame that is being delivered
        self._coordinator = COORDINATOR
        self._fresh = False  # a successor that no verdict has reached yet

    def _record(
        self, who: Who, direction: Direction, frame: Frame, envelope: Envelope | None
    ) -> None:
        type(self).sink(Taken(who, direction, frame, envelope))

    def _stage_who(self, index: int) -> Who:
        return Who("stage", self.names[index], self.incarnations[index])

    def _push(self, link: int, who: Who, frame: Frame) -> None:
        envelope = Envelope(self._senders[link], self._lives[link], self._counts[link])
        self._counts[link] += 1
        self._numbers[link].append(envelope)
        self.links[link].append(frame)
        self._record(who, Direction.OUT, frame, envelope)

    def send(self, wire: Wire) -> None:
        frame = self.tamper(wire)
        self.sent.append(frame)
        self._push(0, self._coordinator, frame)

    def note(self, frame: Frame) -> None:
        """The coordinator is told a frame that came over no link of the ring, or again."""
        if isinstance(frame, LOCAL):
            self._record(self._coordinator, Direction.LOCAL, frame, None)
        elif isinstance(frame, Heartbeat):
            sender = f"{frame.ring}/{frame.stage}/control"
            key = f"{sender} {frame.incarnation}"
            number = self._beats[key] = self._beats.get(key, -1) + 1
            envelope = Envelope(sender, frame.incarnation, number)
            self._record(self._coordinator, Direction.IN, frame, envelope)
        else:  # an answer, from the link or again
            self._record(self._coordinator, Direction.IN, frame, self._came)
        self._came = None

    def tell(self, frame: Frame) -> None:
        if self._tell is None or not isinstance(frame, Heartbeat):  # else the world notes it
            self.note(frame)
        super().tell(frame)

    def happen(self, choice: int) -> None:
        index = choice // 2
        if not choice % 2:
            frame, numbers = self.links[index][0], self._numbers[index]
            if isinstance(frame, LinkGap):
                came = numbers[0] if numbers else self._following(index)
                frame = self.links[index][0] = LinkGap(came.sender, 0, came.number)
            else:
                came = numbers.popleft()
            if index == len(self.stages):
                self._came = came
                self._greet(came)
            else:
                self._record(self._stage_who(index), Direction.IN, frame, came)
        super().happen(choice)

    def _greet(self, came: Envelope) -> None:
        """A coordinator's first frame from a tail that is older: its link tells of a gap.

        It is noted, not told: the core would call the roll once more.
        """
        if self._fresh and came.number:
            gap = LinkGap(came.sender, 0, came.number)
            self._record(self._coordinator, Direction.IN, gap, came)
        self._fresh = False

    def succeed(self, remembered: Sequence[Remembered], first_epoch: int) -> None:
        """The successor sends and is recorded as another process."""
        if not self.links[-1]:
            self._numbers[-1].clear()
        who = self._coordinator
        self._coordinator = Who(who.role, who.name, who.incarnation + 1)
        self._lives[0], self._counts[0], self._fresh = self._lives[0] + 1000, 0, True
        self._beats.clear()
        super().succeed(remembered, first_epoch)

    def _following(self, link: int) -> Envelope:
        return Envelope(self._senders[link], self._lives[link], self._counts[link])

    def _stage_takes(self, index: int, frame: Frame) -> None:
        stage, who = self.stages[index], self._stage_who(index)
        if isinstance(frame, Forwarded):
            self._record(who, Direction.LOCAL, frame, None)
        for action in stage.handle(frame, self.now):
            match action:
                case StageSend():
                    self._push(index + 1, who, action.frame)
                case Forward():
                    assert self.forwards[index] is None
                    self.forwards[index] = action
                case CopyRows():
                    self.models[index].copy(action.source, action.target, action.length)
                case DropRows():
                    self.models[index].drop(action.parked)
        stage.check()

    def lose_answers(self) -> LinkGap:
        """All that is on the last link is lost; the gap that the coordinator is told of."""
        self.links[-1].clear()
        self._numbers[-1].clear()
        came = self._came = self._following(len(self.links) - 1)
        return LinkGap(came.sender, 0, came.number)

    def restart(self, index: int, *, told: bool = True) -> None:
        """Its incoming link is a new one, too: a MemoryRing tells of no gap there."""
        self._numbers[index].clear()
        self._lives[index], self._counts[index] = self._lives[index] + 1000, 0
        self._lives[index + 1], self._counts[index + 1] = self.incarnations[index] + 100, 0
        super().restart(index, told=told)

    def lose(self, link: int, count: int) -> None:
        for frame in list(self.links[link])[:count]:
            if not isinstance(frame, LinkGap):
                self._numbers[link].popleft()
        super().lose(link, count)


class RecordedWorld(MemoryWorld):
    """A MemoryWorld over RecordedRings (patched in), under one coordinator."""

    def tell(self, frame: Frame) -> None:
        ring = self.rings[0]
        assert isinstance(ring, RecordedRing)
        if isinstance(frame, (*LOCAL, Heartbeat)):
            ring.note(frame)
        super().tell(frame)

    def gap(self, ring: MemoryRing) -> None:
        assert isinstance(ring, RecordedRing)
        lost = ring.lose_answers()
        ring.note(lost)
        super().tell(lost)


def record(plan: Plan, steps: int = 25) -> list[Taken]:
    """Play a world; what its processes recorded. Raises what the world raises, if it does."""
    log: list[Taken] = []
    with (
        patch.object(tests.world, "MemoryRing", RecordedRing),
        patch.object(RecordedRing, "sink", staticmethod(log.append), create=True),
    ):
        visit(plan, steps)
    return log


def prove(log: Sequence[Taken], known: Residency | None = None) -> Tally:
    """Feed a recording; a Violation's place is the record's index."""
    proof = known or Residency(repeats=True)
    for at, taken in enumerate(log):
        proof.observe(*taken, at)
    return proof.tally


START_NS = 1_700_000_000_000_000_000


def save(
    log: Iterable[Taken],
    directory: Path,
    *,
    payloads: Payloads = Payloads.NONE,
    skews: dict[str, int] | None = None,
    segment_bytes: int = 1 << 20,
) -> None:
    """Write what --record would have; skews: by how many ns each process's clocks are ahead."""
    recorders: dict[Who, Recorder] = {}
    for at, taken in enumerate(log):
        who = taken.who
        now = START_NS + at * 1_000_000 + (skews or {}).get(who.name, 0)
        if who not in recorders:
            header = LogHeader(who.role, who.name, who.incarnation, "test", now)
            recorders[who] = Recorder(directory, header, payloads, segment_bytes=segment_bytes)
        recorders[who].record(
            now, now, taken.direction, "link", taken.frame, envelope=taken.envelope
        )
    for recorder in recorders.values():
        recorder.close()

"""A ring in virtual time: the real Scheduler in front of stages that only take their time.

No process, no clock, no model: a stage serves frames one after another, a link delays each, and the
tail knows every turn's true continuation. The same inputs give the same run, so that arms can be
compared to the token. Used by bench.controller and the tests of the controller.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coord.actions import Failed, Finished, Send, Tokens
from coord.draft import Drafter
from coord.ring import Ring as RingView
from coord.scheduler import Scheduler
from transport.config import Limits, Ring, Stage
from transport.frame import (
    Copy,
    Frame,
    Free,
    Heartbeat,
    Ping,
    Result,
    RollCall,
    Run,
    Sampling,
    Segment,
    StageEntry,
    StageState,
    Submit,
    Tick,
    Timing,
    Verdict,
)

VOCABULARY = 1 << 20
ROW_STEP = 8  # rows that exact mode computes together
FOREVER_S = 80_000.0


@dataclass(frozen=True, slots=True)
class Costs:
    """What things take, in seconds. step_s: each 8 rows after a frame's first 8, in one stage.

    processors: that the stages share, in order of arrival; None: each stage has its own.
    """

    frame_s: float = 0.010
    step_s: float = 0.003
    delay_s: float = 0.0
    send_s: float = 0.0002  # of a link without delay
    processors: int | None = None

    def forward_s(self, rows: int) -> float:
        """One stage's time for a frame."""
        return self.frame_s + self.step_s * (max(0, rows - 1) // ROW_STEP)


@dataclass(slots=True)
class Script:
    """One turn: its prompt, and the tokens that the model would give one by one."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    got: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # when each came
    frames: int = 0  # that carried a verify segment of it


class VirtualRing:
    """One ring; `run` serves scripts to their end."""

    def __init__(
        self,
        costs: Costs,
        drafter: Callable[[], Drafter] | None,
        *,
        stages: int = 3,
        slots: int = 4,
        limits: Limits | None = None,
    ) -> None:
        self.costs = costs
        self.limits = limits or Limits(
            slots=slots, max_model_len=8192, lost_after_s=FOREVER_S, frame_timeout_s=FOREVER_S
        )
        specs = tuple(Stage(f"s{i}", f"tcp://s{i}:1", (i, i + 1)) for i in range(stages))
        self.spec = Ring("r", "tcp://c:1", specs)
        self.scheduler = Scheduler((self.spec,), self.limits, drafter=drafter)
        self.now = 0.0
        self.busy_s = [0.0] * stages
        self.frames = 0
        self.sizes: list[int] = []  # turns in each frame
        self.most_in_flight = 0
        self.turns: dict[int, Script] = {}
        self._free_at = [0.0] * stages
        self._processors = [0.0] * (costs.processors or 0)  # when each is free; a heap
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        for each in specs:
            self._tell(Heartbeat("r", each.name, 1, StageState.READY, 1.0, "", 1, 1))
        self._settle(lambda: self.scheduler.rings["r"].phase.value == "ready")

    @property
    def ring(self) -> RingView:
        """The coordinator's view of the ring."""
        return self.scheduler.rings["r"]

    def rest(self, seconds: float) -> None:
        """Nobody asks anything for a while; pings go round."""
        end = self.now + seconds
        self._at(end, lambda: None)
        self._settle(lambda: self.now >= end)

    def run(self, scripts: Sequence[Script]) -> float:
        """Submit all at once, and return the seconds until the last has ended."""
        started = self.now
        first = len(self.turns) + 1
        for number, script in enumerate(scripts, first):
            self.turns[number] = script
            self._tell(Submit(number, script.prompt, len(script.reply), (), Sampling()))
        self._settle(lambda: not self.scheduler.turns)
        for script in scripts:
            assert tuple(script.got) == script.reply, "the text depends on the schedule"
        return self.now - started

    # ---- events ----

    def _at(self, time: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, act))

    def _settle(self, done: Callable[[], bool]) -> None:
        while not done():
            deadline = self.scheduler.deadline()
            if deadline is not None and (not self._events or deadline < self._events[0][0]):
                self.now = max(self.now, deadline)
                self._tell(Tick())
                continue
            time, _, act = heapq.heappop(self._events)
            self.now = max(self.now, time)
            act()

    def _tell(self, frame: Frame) -> None:
        for action in self.scheduler.handle(frame, self.now):
            if isinstance(action, Send):
                self._fly(action.frame, 0, ())
                self.most_in_flight = max(self.most_in_flight, len(self.ring.in_flight))
            elif isinstance(action, Tokens):
                script = self.turns[action.turn]
                script.got += action.tokens
                script.times += [self.now] * len(action.tokens)
            else:
                assert not isinstance(action, Failed), action
                assert isinstance(action, Finished) or action.turn in self.turns

    def _fly(self, frame: Frame, index: int, timings: tuple[Timing, ...]) -> None:
        """A frame leaves for stage `index`, or for the coordinator behind the last."""
        lands = self.now + self.costs.delay_s + self.costs.send_s
        if index == len(self.spec.stages):
            self._at(lands, lambda: self._tell(self._answer(frame, timings)))
        else:
            self._at(lands, lambda: self._arrive(frame, index, timings))

    def _arrive(self, frame: Frame, index: int, timings: tuple[Timing, ...]) -> None:
        name = self.spec.stages[index].name
        took = 0.0
        if isinstance(frame, Run):
            rows = sum(len(segment.tokens) for segment in frame.segments)
            took = self.costs.forward_s(rows)
            timings = (*timings, Timing(name, 0, round(took * 1e6)))
            self.busy_s[index] += took
            if index == 0:
                self.frames += 1
                self.sizes.append(len(frame.segments))
        start = max(self.now, self._free_at[index])
        if took and self._processors:
            start = max(start, heapq.heappop(self._processors))
            heapq.heappush(self._processors, start + took)
        done = self._free_at[index] = start + took
        self._at(done, lambda: self._fly(frame, index + 1, timings))

    def _answer(self, frame: Frame, timings: tuple[Timing, ...]) -> Frame:
        if isinstance(frame, Run):
            results = tuple(self._result(segment) for segment in frame.segments if segment.want)
            results += tuple(
                Result(segment.turn, segment.slot, segment.end, ())
                for segment in frame.segments
                if not segment.want
            )
            return Verdict("r", frame.epoch, frame.seq, results, timings)
        if isinstance(frame, RollCall):
            count = len(self.spec.stages)
            entries = tuple(
                StageEntry(
                    each.name, 1, each.layers, count, b"v" * 16, self.limits.slots,
                    self.limits.max_model_len, VOCABULARY, "virtual",
                )
                for each in self.spec.stages
            )  # fmt: skip
            return RollCall("r", frame.epoch, frame.claims, entries)
        assert isinstance(frame, Ping | Copy | Free), frame
        return frame

    def _result(self, segment: Segment) -> Result:
        start = segment.end - segment.want
        script = self.turns.get(segment.turn)
        if script is None:  # the self-check
            return Result(segment.turn, segment.slot, start, (0,) * segment.want, (0.0,))
        script.frames += segment.kind.value == "verify"
        known = script.prompt + script.reply
        tokens = tuple(known[p + 1] if p + 1 < len(known) else 0 for p in range(start, segment.end))
        return Result(segment.turn, segment.slot, start, tokens)

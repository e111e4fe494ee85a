"""Owns a simulated stage process: what pipeline.daemon does around the core, in virtual time."""

from __future__ import annotations

from random import Random

from pipeline.daemon import LOADING_BEAT_S
from pipeline.forward import perform_forward
from pipeline.stage import Action, CopyRows, DropRows, Forward, Send, Stage, Survey
from tools.sim.check import EVERY, SELDOM, Checks
from tools.sim.heap import MICROSECOND, SECOND, Heap
from tools.sim.links import Link, Receiver
from tools.sim.oracle import Oracle
from tools.sim.record import Recorders, Recording
from tools.sim.script import Shape
from tools.sim.toy import TreeToy
from tools.sim.trial import tried
from transport.config import Ring
from transport.frame import (
    Envelope,
    Frame,
    Heartbeat,
    Measured,
    Refusal,
    Reject,
    RollCall,
    StageState,
)
from transport.framelog import Direction

IN, OUT, LOCAL = Direction.IN, Direction.OUT, Direction.LOCAL
BEATS_S = {StageState.LOADING: LOADING_BEAT_S}  # else limits.heartbeat_s


class StageProcess(Receiver):
    """One stage through all its lives. `wire` gives it its links before `start`."""

    def __init__(
        self,
        heap: Heap,
        shape: Shape,
        ring: Ring,
        index: int,
        oracle: Oracle,
        checks: Checks,
        recorders: Recorders,
    ) -> None:
        self.spec = ring.stages[index]
        super().__init__(heap, f"{ring.name}/{self.spec.name}", codec=shape.codec)
        self.ring = ring
        self.shape = shape
        self.life = 0
        self.state = StageState.LOADING
        self.stalled_until = 0  # of the compute thread alone
        self.following: Receiver | None = None
        self.coordinator: Receiver | None = None
        self._oracle, self._checks = oracle, checks
        self._recorders = recorders
        self._recording: Recording | None = None
        self._forwarding = False
        self.trial_us = 0  # what measuring takes it
        self._tried_at = 0  # until then the compute thread measures
        self._handled = 0
        self._random = Random(f"{shape.seed} {self.spec.name}")

    # ---- life ----

    def start(self, load_ns: int) -> None:
        """A new process: empty KV, new links, a new incarnation; ready after load_ns."""
        shape, limits = self.shape, self.shape.limits
        self.life += 1
        name, incarnation = self.spec.name, 1000 * self.life + self._random.randrange(1000)
        self.incarnation = incarnation
        self.model = TreeToy(
            self.spec.layers, self._oracle.tree, limits.slots, limits.max_model_len
        )
        self.core = Stage(self.ring.name, name, incarnation, self.model.info, limits.park_bytes)
        assert self.following is not None
        assert self.coordinator is not None
        delay, jitter = shape.link_us * MICROSECOND, shape.jitter_us * MICROSECOND
        self.out = Link(
            self.heap, self.following, self.name, incarnation, delay, jitter, self._random
        )
        control = f"{self.name}/control"
        self._control = Link(
            self.heap, self.coordinator, control, incarnation, delay, jitter, self._random
        )
        self._recording = self._recorders.open("stage", name, incarnation, self.heap.now)
        self._forwarding, self._tried_at = False, 0
        self.called = 0  # the epoch of the last roll call that it heard in this life
        self.stalled_until = self.heap.now + load_ns
        self.state = StageState.LOADING if load_ns else StageState.READY
        self._beat(self.life)
        if load_ns:
            self.heap.at(self.stalled_until, self._loaded, self.life)
        self.rise()

    def crash(self, lost: int) -> None:
        """The process is gone, with what it held and `lost` frames that were coming."""
        for link in self.links:
            link.lose(min(lost, link.in_air()))
        self.die()
        self.life += 1  # events of the old life find another one
        if self._recording is not None:
            self._recording.close()

    def _loaded(self, life: int) -> None:
        if life == self.life:
            self.state = StageState.READY
            self._send_beat()
            self.serve()

    def _beat(self, life: int) -> None:
        if life != self.life:
            return
        if self.heap.now >= self.paused_until:
            self._send_beat()
        pause_s = BEATS_S.get(self.state, self.shape.limits.heartbeat_s)
        due = max(self.heap.now + int(pause_s * SECOND), self.paused_until)
        self.heap.at(due, self._beat, life)

    def _send_beat(self) -> None:
        ready = self.state is StageState.READY
        progress, detail = (1.0, "") if ready else (0.5, "loading")
        name = self.spec.name
        self._control.send(
            Heartbeat(self.ring.name, name, self.incarnation, self.state, progress, detail, 1, 1)
        )

    def say_lost(self) -> None:
        """The stage that it sends to is gone."""
        if self.up and self.heap.now >= self.paused_until:
            ring, name = self.ring, self.spec.name
            detail = f"its link to {ring.next_address(self.spec)} ended"
            self._control.send(Reject(ring.name, 0, 0, name, Refusal.LINK, detail))

    # ---- frames ----

    def stall(self, for_ns: int) -> None:
        """The compute thread alone stands still: heartbeats go on."""
        self.stalled_until = max(self.stalled_until, self.heap.now + for_ns)
        self.heap.at(self.stalled_until, self.wake)

    def busy(self) -> bool:
        """See Receiver. The daemon's compute thread computes before it takes the next frame."""
        waits = max(self.paused_until, self.stalled_until, self._tried_at) > self.heap.now
        return waits or (self._forwarding and not self.shape.eager)

    def deliver(self, frame: Frame, envelope: Envelope | None, direction: Direction = IN) -> None:
        """See Receiver. Or the answer of its own compute thread."""
        now = self.heap.now
        if self._recording is not None:
            link = self.spec.listen if direction is IN else self.spec.name
            self._recording.note(now, direction, link, frame, envelope)
        judged = direction is IN and not self._forwarding
        if isinstance(frame, RollCall):
            self.called = max(self.called, frame.epoch)
        actions = self.core.handle(frame, now / 1e9)
        if judged:
            self._checks.answered(self, frame, actions)
        for action in actions:
            self._perform(action)
        self._checks.frames += 1
        self._handled += 1
        if self._handled % EVERY == 0:
            self.core.check()
            if self._handled % SELDOM == 0:
                self._checks.stage(self)

    def _perform(self, action: Action) -> None:
        match action:
            case Send():
                envelope = self.out.send(action.frame)
                if self._recording is not None:
                    link, frame = self.ring.next_address(self.spec), action.frame
                    now = self.heap.now
                    self._recording.note(now, OUT, link, frame, envelope)
            case Forward():
                rows = sum([len(segment.tokens) for segment in action.run.segments])
                took_us = self.shape.frame_us + self.shape.row_us * rows
                self._forwarding = True
                self._checks.reads(self, action.run)
                due = max(self.heap.now, self._tried_at) + took_us * MICROSECOND
                self.heap.at(due, self._forwarded, self.life, action)
            case CopyRows():
                self.model.copy(action.source, action.target, action.length)
            case DropRows():
                self.model.drop(action.parked)
            case Survey():
                found = tried(action, self.model, self.spec.name, self.trial_us)
                due = max(self.heap.now, self._tried_at) + self.trial_us * MICROSECOND
                self._tried_at = due
                self.heap.at(due, self._measured, self.life, found)

    def _measured(self, life: int, found: Measured) -> None:
        if life != self.life:
            return
        stopped = max(self.paused_until, self.stalled_until)
        if self.heap.now < stopped:
            self._tried_at = max(self._tried_at, stopped)
            self.heap.at(stopped, self._measured, life, found)
            return
        self.deliver(found, None, LOCAL)
        self.serve()

    def _forwarded(self, life: int, action: Forward) -> None:
        if life != self.life:
            return
        now, stopped = self.heap.now, max(self.paused_until, self.stalled_until)
        if now < stopped:
            self.heap.at(stopped, self._forwarded, life, action)
            return
        self._forwarding = False
        self.deliver(perform_forward(self.model, action), None, LOCAL)
        self.serve()

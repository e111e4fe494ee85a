"""Owns the simulated coordinator process: what coord.coordinator does around the core."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from math import inf
from random import Random

from coord.actions import Action, Admitted, Draft, Failed, Finished, Send, Tokens
from coord.coordinator import DRAFTERS
from coord.draft import MAX_DEPTH, MAX_DRAFT, Bounds
from coord.ring import Phase
from coord.saving import RUNNING_S, SAVE_S
from coord.scheduler import Scheduler
from tools.sim.check import EVERY, Checks, Told, violated
from tools.sim.heap import MICROSECOND, Heap
from tools.sim.links import Link, Receiver
from tools.sim.memory import Memory
from tools.sim.record import WALL_NS, Recorders, Recording
from tools.sim.script import Shape
from tools.sim.stage import StageProcess
from tools.sim.toy import VOCABULARY
from transport.chain import root_hash
from transport.frame import (
    Cancel,
    Copy,
    Drafted,
    Envelope,
    Frame,
    Free,
    LinkGap,
    Measure,
    Reject,
    Run,
    Submit,
    Tick,
    Verdict,
)
from transport.framelog import Direction

TIMER_NS = 1000  # an event loop's timer comes a little late,
LATE_NS = 20_000_000  # and this late under load
REPLIES = 400  # that may come again
SPIN_NS = 1_000_000  # Ticks that come closer together than this are a spin,
MAX_SPIN = 1000  # if there are so many in a row
UNANSWERED = 0.05  # of what the draft model is asked

Event = Admitted | Tokens | Finished | Failed


def unmeasured(_: Measure) -> None:
    """Nobody has asked."""


def unheard(_: Event) -> None:
    """What a client does who does not listen."""


class CoordinatorProcess(Receiver):
    """The coordinator through all its lives. `hear` is told each client's events."""

    def __init__(
        self,
        heap: Heap,
        shape: Shape,
        stages: dict[str, list[StageProcess]],
        checks: Checks,
        recorders: Recorders,
    ) -> None:
        super().__init__(heap, "coordinator", codec=shape.codec)
        self.shape = shape
        self.config = shape.config()
        self.life = 0
        self.hear: Callable[[Event], None] = unheard
        self.measured: Callable[[Measure], None] = unmeasured
        self.replies: deque[tuple[Frame, Envelope]] = deque(maxlen=REPLIES)
        self.confused: dict[str, Envelope] = {}  # ring: whose name such a reply comes under
        self._stages = stages
        self._checks = checks
        self._recorders = recorders
        self._recording: Recording | None = None
        self._timer: int | None = None  # when the next look at the deadline is due
        self._handled = 0
        self._ticks, self._ticked_at = 0, 0
        self._looked_at = -LATE_NS
        self._random = Random(f"{shape.seed} coordinator")
        self._memory = Memory() if shape.memory else None
        self._salts: dict[bytes, bytes] = {}  # root of a chain -> salt
        self._look_at: int | None = None  # when the next look at the ledgers is due

    # ---- life ----

    def start(self, jump_s: float) -> None:
        """A new process, which knows nothing; jump_s: what its wall clock is off by."""
        self.life += 1
        incarnation = 1000 * self.life + self._random.randrange(1000)
        wall_ns = WALL_NS + self.heap.now + int(jump_s * 1e9)
        self.scheduler = Scheduler(
            self.config.rings,
            self.config.limits,
            first_epoch=wall_ns // 1_000_000,
            drafter=DRAFTERS[self.shape.drafter],
        )
        depth, tokens = self.shape.depth, self.shape.tokens
        for ring in self.scheduler.rings.values():
            ring.bounds = Bounds(
                MAX_DRAFT if tokens is None else tokens, MAX_DEPTH if depth is None else depth
            )
        delay, jitter = self.shape.link_us * MICROSECOND, self.shape.jitter_us * MICROSECOND
        self.pushes = {
            name: Link(
                self.heap, stages[0], f"{name}/coordinator", incarnation, delay, jitter,
                self._random,
            )
            for name, stages in self._stages.items()
        }  # fmt: skip
        self._recording = self._recorders.open(
            "coordinator", "coord", incarnation, self.heap.now, wall_ns // 1_000_000
        )
        self._timer, self._looked_at = None, -LATE_NS
        self.last_turn = 0
        self._clock_s = (wall_ns - self.heap.now) / 1e9
        self._salts, self._look_at = {}, None
        self._served_s = -inf  # until then a ring of this life was ready
        for said in self._memory.remembered(wall_ns / 1e9) if self._memory else ():
            self._salts[root_hash(said.fingerprint, said.salt)] = said.salt
            self.take(said)
        self.rise()
        self.take(Tick())

    def crash(self) -> None:
        """The process is gone, and with it all turns."""
        self.die()
        self.life += 1
        self._checks.restarted()
        if self._recording is not None:
            self._recording.close()

    @property
    def awake(self) -> bool:
        """True when a client is heard."""
        return self.up and not self.busy()

    def ready(self) -> bool:
        """Every ring takes turns, on the stages that there are now."""
        rings = self.scheduler.rings.values()
        return self.up and all(
            ring.phase is Phase.READY
            and [entry.incarnation for entry in ring.entries]
            == [stage.incarnation for stage in self._stages[ring.name]]
            for ring in rings
        )

    def idle(self) -> bool:
        """No turn, and nothing in flight."""
        rings = self.scheduler.rings.values()
        return not self.scheduler.turns and not any(ring.in_flight for ring in rings)

    # ---- clients ----

    def prepare(self, submit: Submit) -> Told:
        """Give a turn its number; what its client will be told. `take` starts it."""
        self.last_turn += 1
        submit = replace(submit, turn=self.last_turn)
        return self._checks.submitted(submit, self.config.limits.max_model_len)

    def cancel(self, turn: int) -> None:
        """End a turn."""
        told = self._checks.turns[turn]
        if not told.over:
            told.cancelled = True
            self.take(Cancel(turn))

    # ---- frames ----

    def deliver(self, frame: Frame, envelope: Envelope) -> None:
        """See Receiver."""
        if isinstance(frame, (Verdict, Copy, Free, Reject)):
            self.replies.append((frame, envelope))
            if isinstance(frame, Reject):
                self._checks.refused(frame, self.scheduler)
        if isinstance(frame, Measure):
            self.measured(frame)
        self.take(frame, Direction.IN, envelope)
        if isinstance(frame, LinkGap):
            self._checks.gap(frame, self.scheduler)

    def take(
        self,
        frame: Frame,
        direction: Direction = Direction.LOCAL,
        envelope: Envelope | None = None,
    ) -> None:
        """The core takes a frame; its actions are performed."""
        now, checks = self.heap.now, self._checks
        if self._recording is not None:
            link = envelope.sender if envelope is not None else "coordinator"
            self._recording.note(now, direction, link, frame, envelope)
        scheduler = self.scheduler
        for ring in scheduler.rings.values():
            if ring.phase is Phase.READY:
                self._served_s = now / 1e9
        actions = scheduler.handle(frame, now / 1e9)
        for action in actions:
            self._perform(action)
        if self._memory is not None and self._memory.changes(frame, actions):
            self._plan_look(SAVE_S)
        checks.frames += 1
        self._handled += 1
        if self._handled % EVERY == 0:
            scheduler.check()
            checks.coordinator(scheduler)
        self._set_timer()

    def _perform(self, action: Action) -> None:
        if isinstance(action, Send):
            frame = action.frame
            if isinstance(frame, Run):
                self._checks.sent(frame)
            envelope = self.pushes[frame.ring].send(frame)
            if frame.ring in self.confused and isinstance(frame, Run) and frame.segments[0].turn:
                self._confuse(frame)
            if self._recording is not None:
                now, link = self.heap.now, frame.ring
                self._recording.note(now, Direction.OUT, link, frame, envelope)
        elif isinstance(action, Draft):
            self._draft(action)
        else:
            if isinstance(action, Failed) and action.code == "not_ready":
                self._refused(action)
            if isinstance(action, Admitted):
                self._admitted(action)
            ring = self.scheduler.rings[action.ring] if isinstance(action, Admitted) else None
            self._checks.heard(action, 0 if ring is None else ring.epoch)
            self.hear(action)

    def _admitted(self, action: Admitted) -> None:
        turn, rings = self.scheduler.turns[action.turn], self.scheduler.rings
        assert turn.chain is not None, turn
        self._salts[turn.chain.root] = turn.submit.salt
        whole = all(each.phase is Phase.READY for each in rings.values() if not each.spec.spare)
        told = self._checks.turns[action.turn]
        # what was refused there starts over where it is
        stays = told.refused and told.place is not None and told.place[0] == action.ring
        if whole and rings[action.ring].spec.spare and not stays:
            violated("needless spare", f"{action}: every other ring is ready")

    def _plan_look(self, seconds: float) -> None:
        due = self.heap.now + int(seconds * 1e9)
        if self._look_at is None or due < self._look_at:
            self._look_at = due
            self.heap.at(due, self._look, self.life, due)

    def _look(self, life: int, due: int) -> None:
        if life != self.life or due != self._look_at:
            return
        if self.busy():
            self._look_at = self.paused_until
            self.heap.at(self.paused_until, self._look, life, self.paused_until)
            return
        self._look_at = None
        assert self._memory is not None
        if self._memory.look(self.scheduler.rings, self._salts, self._clock_s):
            self._plan_look(RUNNING_S)

    def _refused(self, action: Failed) -> None:
        """A loss is ridden out: only a ring that is away for longer takes no turn at all."""
        away_s = self.heap.now / 1e9 - self._served_s
        if away_s < self.config.limits.resume_s:
            violated("needless refusal", f"{action}, and a ring served {away_s:g} s ago")

    def _confuse(self, run: Run) -> None:
        """An answer to another frame of that number comes before its own."""
        for old, _ in self.replies:
            same = (getattr(old, "ring", ""), getattr(old, "seq", 0)) == (run.ring, run.seq)
            if isinstance(old, Verdict) and same and old.epoch != run.epoch:
                self.heap.at(self.heap.now, self.arrive, old, self.confused.pop(run.ring))
                return

    def _draft(self, request: Draft) -> None:
        told = self._checks.asked(request)
        if self._random.random() < UNANSWERED:
            return
        at = request.known - len(told.submit.prompt)
        right = self.shape.draft_right
        tokens = [
            token if self._random.random() < right else (token + 1) % VOCABULARY
            for token in told.further[at : at + request.count]
        ]
        answer = Drafted(request.turn, request.known, tuple(tokens))
        due = self.heap.now + self.shape.draft_us * MICROSECOND
        self.heap.at(due, self._drafted, self.life, answer)

    def _drafted(self, life: int, answer: Drafted) -> None:
        if life != self.life:
            return
        if self.busy():
            self.heap.at(self.paused_until, self._drafted, life, answer)
        else:
            self.take(answer)

    # ---- time ----

    def _set_timer(self) -> None:
        """While frames come thick and fast, the deadline is looked at every LATE_NS only."""
        now = self.heap.now
        if self._timer is not None and self._timer <= now + LATE_NS:
            return
        due = now + LATE_NS
        if now >= self._looked_at + LATE_NS:
            self._looked_at = now
            deadline = self.scheduler.deadline()
            if deadline is None:
                return
            due = max(int(deadline * 1e9), now) + TIMER_NS
        if self._timer is None or due < self._timer:
            self._timer = due
            self.heap.at(due, self._tick, self.life, due)

    def _tick(self, life: int, due: int) -> None:
        if life != self.life or self._timer != due:
            return
        if self.busy():
            self._timer = self.paused_until
            self.heap.at(self._timer, self._tick, life, self._timer)
            return
        self._timer = None
        deadline, now = self.scheduler.deadline(), self.heap.now
        if deadline is None or deadline * 1e9 > now:
            self._looked_at = now - LATE_NS
            self._set_timer()  # it was moved: nothing is due yet
        else:
            self._ticks = self._ticks + 1 if now < self._ticked_at + SPIN_NS else 0
            self._ticked_at = now
            if self._ticks > MAX_SPIN:
                violated("idle", f"the coordinator wants a Tick again and again: {deadline} s")
            self.take(Tick())

    def pause(self, for_ns: int, *, timer_first: bool = False) -> None:
        """See Receiver. timer_first: its timer is served before what waits in the socket."""
        if timer_first:
            until = max(self.paused_until, self.heap.now + for_ns)
            self.heap.at(until, self._tick_at_once, self.life)
        super().pause(for_ns)

    def _tick_at_once(self, life: int) -> None:
        if life == self.life and not self.busy():
            self.take(Tick())

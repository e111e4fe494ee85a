"""Owns a stage's decisions: which frames to refuse, run and pass on. Knows no tensor and no socket.

Frames in, actions out (`handle`). The driver performs the actions in order: the daemon's compute
thread, the simulator, or the replayer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TypeAlias

from pipeline.model import ModelInfo
from pipeline.slots import SlotTable
from transport.codec import MAX_STAGES
from transport.frame import (
    Copy,
    Forwarded,
    Frame,
    Free,
    LinkGap,
    Look,
    Measure,
    Measured,
    Ping,
    Refusal,
    Reject,
    RollCall,
    Run,
    Segment,
    StageEntry,
    Timing,
    Verdict,
    Wire,
)
from transport.quick import quick

MAX_WAITING = 4096  # frames behind a forward; the scheduler's window is about stages + 1 frames


@quick
@dataclass(frozen=True, slots=True)
class Send:
    """Push a frame to the next stage, or from the tail to the coordinator."""

    frame: Wire


@quick
@dataclass(frozen=True, slots=True)
class Forward:
    """Run the block over run.segments; answer with a Forwarded frame.

    rows: which [start, end) ranges of the payload's rows belong to the segments that were kept, or
    None when all of them do. histories: see StageModel.forward.
    """

    run: Run
    rows: tuple[tuple[int, int], ...] | None
    histories: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class CopyRows:
    """Copy KV rows [0, length) between slots and parked prefixes, before the next action."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class DropRows:
    """Give the memory of parked rows back."""

    parked: int


@dataclass(frozen=True, slots=True)
class Survey:
    """Find out what a Machine says; answer with a Measured frame.

    Trial forwards may write in [start, capacity) of the slot, behind what anybody reads.
    """

    asked: Measure
    slot: int
    start: int


Action: TypeAlias = Send | Forward | CopyRows | DropRows | Survey


class Stage:
    """One stage of one ring. At most one forward runs at a time; later frames wait in order."""

    def __init__(
        self, ring: str, name: str, incarnation: int, info: ModelInfo, park_bytes: int = 0
    ) -> None:
        """park_bytes: host memory that parked rows may take."""
        self.ring = ring
        self.name = name
        self.info = info
        park_rows = park_bytes // info.row_bytes if info.row_bytes else 0
        self.slots = SlotTable(
            info.slots, info.capacity, info.vocabulary, info.fingerprint, park_rows
        )
        self.epoch: int | None = None  # none before the first roll call
        self.dropped = 0  # frames that were not for this stage, or from an older epoch
        self._incarnation = incarnation
        self._park_bytes = park_bytes
        self._running: tuple[Run, float, float] | None = None  # frame, arrived, started
        self._waiting: deque[tuple[Frame, float]] = deque()
        self._marked: tuple[int, float] | None = None  # a link is being measured: number, since

    def handle(self, frame: Frame, now: float) -> list[Action]:
        """Take one frame; return what to do, in order. now: seconds on any monotonic clock."""
        actions: list[Action] = []
        if isinstance(frame, Forwarded):
            self._forwarded(frame, now, actions)
        elif isinstance(frame, Measured):
            measure = Measure(self.ring, frame.number, Look.MACHINES, frame.wide, frame.machines)
            actions.append(Send(measure))
        elif isinstance(frame, LinkGap):
            actions.append(self._lost(f"{frame.link}: frame {frame.got}, not {frame.expected}"))
        elif len(self._waiting) >= MAX_WAITING:
            actions.append(self._lost(f"more than {MAX_WAITING} frames wait"))
        elif self._running is None and not self._waiting:
            self._take(frame, now, now, actions)
        else:
            self._waiting.append((frame, now))
        while self._waiting and self._running is None:
            waiting, arrived = self._waiting.popleft()
            self._take(waiting, arrived, now, actions)
        return actions

    @property
    def running(self) -> Run | None:
        """The frame whose forward has not been answered."""
        return None if self._running is None else self._running[0]

    def deadline(self) -> float | None:
        """A stage never needs a Tick."""
        return None

    def check(self) -> None:
        """Assert the invariants that hold between any two frames."""
        self.slots.check()
        assert self._running is not None or not self._waiting, len(self._waiting)
        if self._running is not None:
            for segment in self._running[0].segments:
                assert self.slots.length(segment.slot) == segment.start, segment

    def _take(self, frame: Frame, arrived: float, now: float, actions: list[Action]) -> None:
        if getattr(frame, "ring", None) != self.ring or _passed(frame) >= MAX_STAGES:
            self.dropped += 1
        elif isinstance(frame, RollCall):
            self._roll_call(frame, actions)
        elif isinstance(frame, (Ping, Reject)):
            actions.append(Send(frame))
        elif isinstance(frame, Measure):
            self._measure(frame, arrived, actions)
        elif not isinstance(frame, (Run, Copy, Free)) or self._stale(frame.epoch):
            self.dropped += 1
        elif frame.epoch != self.epoch:
            detail = f"this stage is in epoch {self.epoch}, the frame in {frame.epoch}"
            actions.append(self._reject(frame, Refusal.EPOCH, detail))
        elif isinstance(frame, Run):
            self._run(frame, arrived, now, actions)
        elif isinstance(frame, Copy):
            self._copy(frame, actions)
        else:
            self.slots.free(frame.slot)
            if frame.slot >= len(self.slots):
                actions.append(DropRows(frame.slot))
            actions.append(Send(frame))

    def _stale(self, epoch: int) -> bool:
        return self.epoch is not None and epoch < self.epoch

    def _roll_call(self, frame: RollCall, actions: list[Action]) -> None:
        if self.epoch is not None and frame.epoch < self.epoch:
            # an old coordinator's, or a new one's whose clock went back: say where we are
            detail = f"this stage is in epoch {self.epoch}, the roll call in {frame.epoch}"
            actions.append(self._whole(self.epoch, Refusal.EPOCH, detail))
            return
        self.epoch = frame.epoch
        claims = tuple(claim for claim in frame.claims if self.slots.confirms(claim))
        for parked in self.slots.parked_beside(claims):
            self.slots.free(parked)
            actions.append(DropRows(parked))
        info = self.info
        entry = StageEntry(
            self.name,
            self._incarnation,
            info.layers,
            info.layers_total,
            info.fingerprint,
            info.slots,
            info.capacity,
            info.vocabulary,
            info.kernel,
            info.row_bytes,
            self._park_bytes,
        )
        actions.append(Send(replace(frame, claims=claims, entries=(*frame.entries, entry))))

    def _measure(self, frame: Measure, arrived: float, actions: list[Action]) -> None:
        if frame.look is Look.MACHINES:
            slot = min(range(len(self.slots)), key=self.slots.length)
            actions.append(Survey(frame, slot, self.slots.length(slot)))
        elif frame.look is Look.MARK:
            self._marked = frame.number, arrived
        else:
            number, since = self._marked or (None, 0.0)
            gap_ns = max(0, int((arrived - since) * 1e9)) if number == frame.number else 0
            self._marked = None
            actions.append(Send(Measure(frame.ring, frame.number, Look.MARK)))
            actions.append(Send(replace(frame, gaps_ns=(*frame.gaps_ns, gap_ns))))

    def _run(self, run: Run, arrived: float, now: float, actions: list[Action]) -> None:
        kept: list[Segment] = []
        rows: list[tuple[int, int]] = []
        slots: dict[int, None] = {}
        at = 0
        for segment in run.segments:
            refused = self.slots.refuses(segment)
            if refused is None and segment.slot in slots:
                refused = Refusal.RANGE, f"slot {segment.slot} twice in one frame"
            end = at + len(segment.tokens)
            if refused is None:
                kept.append(segment)
                slots[segment.slot] = None
                rows.append((at, end))
            else:
                actions.append(self._reject(run, *refused, segment))
            at = end
        wrong = self._payload_fault(run, at)
        if wrong is not None:
            actions.append(self._reject(run, Refusal.RANGE, wrong))
            kept.clear()
        if not kept:
            nothing = replace(run, segments=(), payload=None)
            actions.append(Send(self._outgoing(nothing, arrived, now, now, Forwarded(0, 0, None))))
            return
        for segment in kept:
            self.slots.begin(segment)
        whole = len(kept) == len(run.segments)
        accepted = run if whole else replace(run, segments=tuple(kept))
        self._running = accepted, arrived, now
        actions.append(Forward(accepted, None if whole else tuple(rows), self._histories(kept)))

    def _histories(self, segments: list[Segment]) -> tuple[tuple[int, ...], ...]:
        if not self.info.tail or not any(each.sampling.shaping for each in segments):
            return ()
        return tuple(self.slots.history(segment) for segment in segments)

    def _payload_fault(self, run: Run, rows: int) -> str | None:
        if not run.segments:
            return None
        if self.info.head:
            return "activations on the head's link" if run.payload is not None else None
        if run.payload is None:
            return "no activations"
        if not run.payload.shape or run.payload.shape[0] != rows:
            return f"activations of shape {run.payload.shape} for {rows} tokens"
        if self.info.activations is not None:
            dtype, length = self.info.activations
            if (run.payload.dtype, run.payload.shape[1:]) != (dtype, (length,)):
                found = f"{run.payload.dtype} {list(run.payload.shape)}"
                return f"activations {found}, not {dtype} [{rows}, {length}]"
        return None

    def _forwarded(self, done: Forwarded, now: float, actions: list[Action]) -> None:
        assert self._running is not None, done
        run, arrived, started = self._running
        assert (run.epoch, run.seq) == (done.epoch, done.seq), (run.epoch, run.seq, done)
        self._running = None
        for segment in run.segments:
            self.slots.finish(segment)
        actions.append(Send(self._outgoing(run, arrived, started, now, done)))

    def _outgoing(
        self, run: Run, arrived: float, started: float, now: float, done: Forwarded
    ) -> Run | Verdict:
        wait, forward = int((started - arrived) * 1e6), int((now - started) * 1e6)
        timings = (*run.timings, Timing(self.name, max(wait, 0), max(forward, 0)))
        if self.info.tail:
            return Verdict(run.ring, run.epoch, run.seq, done.results, timings)
        return Run(run.ring, run.epoch, run.seq, run.segments, done.payload, timings)

    def _copy(self, copy: Copy, actions: list[Action]) -> None:
        refused = self.slots.refuses_copy(copy)
        if refused is not None:
            actions.append(self._reject(copy, *refused))
            return
        self.slots.copy(copy.source, copy.target, copy.length)
        actions.append(CopyRows(copy.source, copy.target, copy.length))
        actions.append(Send(replace(copy, done=(*copy.done, self.name))))

    def _reject(
        self,
        frame: Run | Copy | Free,
        code: Refusal,
        detail: str,
        segment: Segment | None = None,
    ) -> Send:
        turn = segment.turn if segment else getattr(frame, "turn", None)
        slot = segment.slot if segment else getattr(frame, "target", None)
        return Send(Reject(self.ring, frame.epoch, frame.seq, self.name, code, detail, turn, slot))

    def _lost(self, detail: str) -> Send:
        return self._whole(self.epoch or 0, Refusal.LINK, detail)

    def _whole(self, epoch: int, code: Refusal, detail: str) -> Send:
        return Send(Reject(self.ring, epoch, 0, self.name, code, detail))


def _passed(frame: Frame) -> int:
    """How many stages a frame has met: there is room for MAX_STAGES of their marks."""
    match frame:
        case Run():
            return len(frame.timings)
        case RollCall():
            return len(frame.entries)
        case Copy():
            return len(frame.done)
        case Measure():
            return max(len(frame.machines), len(frame.gaps_ns))
    return 0

"""Owns verify mode: a share of the warm turns is run again cold in idle time, and compared.

Which turns is counted, not drawn. Knows no socket and no clock; the coordinator tells it every
frame and action, and asks for the next run. What it may push out: docs/residency.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from coord.actions import Action, Admitted, Failed, Finished, Send, Tokens
from coord.admission import choose
from coord.ring import PROBE_TURN
from coord.scheduler import Scheduler
from coord.turn import Turn
from coord.view import holdings
from transport.frame import Cancel, Copy, Drafted, Envelope, Frame, Reject, Run, Submit, Verdict
from transport.framelog import Direction, FrameLogWriter, LogHeader
from transport.recorder import SUFFIX

MAX_QUEUED = 8  # warm turns that wait to be run again, each at most max_model_len tokens
MAX_RECORDS = 2048  # frames kept of one turn; the oldest go first
MAX_WRITTEN = 20  # mismatches of one process whose frames are written: a disk is no place to flood
IDLE_S = 0.5  # of rest before a run begins: clients that follow up at once come first
INTERRUPTED = "verify interrupted"


@dataclass(frozen=True, slots=True)
class Record:
    """One frame as FrameLogWriter takes it."""

    mono_ns: int
    wall_ns: int
    direction: Direction
    link: str
    frame: Frame
    envelope: Envelope | None


@dataclass(slots=True)
class Watched:
    """A turn, what it was answered, and its frames."""

    submit: Submit
    warm: bool = False
    exact: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    frames: deque[Record] = field(default_factory=lambda: deque(maxlen=MAX_RECORDS))


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Warm and cold differ, first at `position` of the sequence. what: "tokens" or "logprobs"."""

    turn: int
    position: int
    what: str
    warm: Watched
    cold: Watched


class Verifier:
    """share: of the warm turns, in (0, 1]."""

    def __init__(self, share: float, scheduler: Scheduler) -> None:
        self.runs = 0  # cold runs that were compared
        self.mismatches = 0
        self.skipped = 0  # for want of a slot that nobody misses, of room in the queue, of an end
        self._share = share
        self._due = 0.0
        self._scheduler = scheduler
        self._live: dict[int, Watched] = {}  # clients' turns: bounded by the scheduler's queue
        self._queue: deque[Watched] = deque()
        self._running: tuple[Watched, Watched] | None = None  # warm, cold
        self._idle_since = 0.0

    # ---- what the coordinator tells ----

    def record(self, record: Record) -> None:
        """Keep a frame with the turns that it belongs to, as long as they may be compared."""
        if isinstance(record.frame, Submit) and not self._is_run(record.frame.turn):
            self._live[record.frame.turn] = Watched(record.frame)
        for turn in dict.fromkeys(_owners(record.frame)):
            watched = self._watched(turn)
            if watched is not None:
                watched.frames.append(record)

    def heard(self, action: Action, now: float) -> Mismatch | None:
        """Follow a turn; the difference when a cold run has ended with one."""
        if isinstance(action, Send):
            return None
        mine, watched = self._is_run(action.turn), self._watched(action.turn)
        if watched is None:
            return None
        match action:
            case Admitted():
                watched.warm = action.matched > 0 or (watched.warm and action.resumed)
                watched.exact = self._scheduler.rings[action.ring].exact
            case Tokens():
                watched.tokens += action.tokens
                watched.logprobs += action.logprobs
            case Finished() | Failed() if mine:
                self._idle_since = now
                return self._compare(action)
            case Finished():
                self._ended(action.turn, watched, now)
            case Failed():
                del self._live[action.turn]
        return None

    def _ended(self, turn: int, watched: Watched, now: float) -> None:
        self._idle_since = now
        del self._live[turn]
        if not watched.warm or not watched.tokens:
            return
        self._due += self._share
        if self._due < 1.0 - 1e-9:
            return
        self._due -= 1.0
        if len(self._queue) < MAX_QUEUED:
            self._queue.append(watched)
        else:
            self.skipped += 1

    # ---- cold runs ----

    def deadline(self) -> float | None:
        """When `next` wants to be asked (the driver's clock), None while there is nothing to do."""
        busy = self._running is not None or self._scheduler.turns
        return self._idle_since + IDLE_S if self._queue and not busy else None

    def next(self, turn: int, now: float) -> Submit | None:
        """The cold run to submit now as `turn`, if one is due and displaces nobody."""
        due = self.deadline()
        if due is None or now < due:
            return None
        warm = self._queue[0].submit
        budget = len(self._queue[0].tokens)
        submit = Submit(
            turn, warm.prompt, budget, warm.stops, warm.sampling, warm.salt, reuse=False
        )
        rings = self._scheduler.rings
        held = [each for ring in rings.values() for _, each in holdings(ring)]
        twins = [each.twin for each in held]
        choice = choose(Turn(submit, budget), {}, rings, now)
        for each, twin in zip(held, twins, strict=True):
            each.twin = twin  # only a frame may change the core, or its log could not be replayed
        if choice is None:  # no ring is ready
            self._idle_since = now
            return None
        slot = choice.ring.ledger.slots[choice.placement.slot]
        taken = slot.resident > 0 and (slot.proven or slot.keep_until > now)
        first = self._queue.popleft()
        if taken or choice.placement.dropped:
            self.skipped += 1
            return None
        self._running = first, Watched(submit)
        return submit

    def interrupt(self) -> Cancel | None:
        """A client's turn comes: what ends the cold run, which is tried again later."""
        if self._running is None:
            return None
        return Cancel(self._running[1].submit.turn, INTERRUPTED)

    def _is_run(self, turn: int) -> bool:
        return self._running is not None and self._running[1].submit.turn == turn

    def _watched(self, turn: int) -> Watched | None:
        if self._running is not None and self._is_run(turn):
            return self._running[1]
        return self._live.get(turn)

    def _compare(self, end: Finished | Failed) -> Mismatch | None:
        assert self._running is not None
        warm, cold = self._running
        self._running = None
        if isinstance(end, Failed):
            self.skipped += 1
            return None
        if end.reason == INTERRUPTED:
            self._queue.appendleft(warm)
            return None
        self.runs += 1
        what, at = "tokens", _first_difference(warm.tokens, cold.tokens)
        if at is None and warm.exact and cold.exact and warm.logprobs and cold.logprobs:
            what, at = "logprobs", _first_difference(warm.logprobs, cold.logprobs)
        if at is None:
            return None
        self.mismatches += 1
        return Mismatch(warm.submit.turn, len(warm.submit.prompt) + at, what, warm, cold)


def report(found: Mismatch, directory: Path | None, header: LogHeader) -> dict[str, object]:
    """What to log of a mismatch, once its frames are written (unless directory is None)."""
    said: dict[str, object] = {
        "turn": found.turn,
        "position": found.position,
        "what": found.what,
    }
    if directory is not None:
        try:
            said["files"] = [str(path) for path in write_logs(found, directory, header)]
        except OSError as error:
            said["not_written"] = str(error)
    return said


def write_logs(found: Mismatch, directory: Path, header: LogHeader) -> list[Path]:
    """Write both runs' frames as frame logs; returns the files. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind, watched in (("warm", found.warm), ("cold", found.cold)):
        name = f"verify-{found.turn}-{kind}"
        path = directory / f"{name}.{header.wall_ns:020d}.000000{SUFFIX}"
        own = LogHeader(header.role, name, header.incarnation, header.version, header.wall_ns, 0)
        with path.open("xb") as file:
            writer = FrameLogWriter(file, own)
            for each in watched.frames:
                writer.record(
                    each.mono_ns,
                    each.wall_ns,
                    each.direction,
                    each.link,
                    each.frame,
                    envelope=each.envelope,
                )
        paths.append(path)
    return paths


def _owners(frame: Frame) -> Iterator[int]:
    match frame:
        case Submit() | Cancel() | Drafted():
            yield frame.turn
        case Run():
            yield from (segment.turn for segment in frame.segments)
        case Verdict():
            yield from (result.turn for result in frame.results)
        case Copy():
            if frame.turn != PROBE_TURN:
                yield frame.turn
        case Reject():
            if frame.turn is not None:
                yield frame.turn


def _first_difference(one: list[int] | list[float], other: list[int] | list[float]) -> int | None:
    for at, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return at
    return min(len(one), len(other)) if len(one) != len(other) else None

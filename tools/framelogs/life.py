"""Owns what one coordinator's log tells of its turns and rings, frame by frame.

Derived from the frames alone, by the rules of docs/frames.md; shares no code with the scheduler.
State is that of live turns and frames in flight, whatever the length of the log.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from itertools import takewhile

from tools.framelogs.events import (
    Answered,
    Called,
    Copied,
    Ended,
    Event,
    Flight,
    Forked,
    Formed,
    How,
    Lost,
    Placed,
    Refused,
    Sent,
    Submitted,
)
from tools.framelogs.read import Entry
from transport.config import ConfigError, Limits, loads
from transport.frame import (
    Cancel,
    Copy,
    Frame,
    Free,
    Heartbeat,
    LinkGap,
    Ping,
    Refusal,
    Reject,
    RollCall,
    Run,
    Segment,
    StageLost,
    StageState,
    Submit,
    Verdict,
)
from transport.framelog import Direction

_WHOLE = (Refusal.EPOCH, Refusal.LINK)


@dataclass(slots=True)
class Live:
    """A turn that is not over, or has frames in flight. chain: known tokens, then drafts."""

    submit: Submit
    budget: int
    chain: list[int] = field(default_factory=list)
    known: int = 0
    ring: str | None = None
    slot: int | None = None
    next_how: How = How.ADMITTED
    guess: int = 0  # counts wrong drafts: what was sent before the latest one is void
    over: bool = False


@dataclass(slots=True)
class RingLife:
    """One ring. rows: resident in each slot or parked prefix, as the coordinator may believe."""

    epoch: int = -1
    claimed: int = 0  # by the last roll call
    formed: bool = False
    stages: dict[str, int] = field(default_factory=dict)  # incarnations
    heard: dict[str, int] = field(default_factory=dict)  # when each stage's last heartbeat came
    slots: int = 0
    capacity: int = 0
    flying: dict[int, Flight] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)


class Life:
    """Feed it the coordinator's entries in order; each returns what happened."""

    def __init__(self, config: str = "") -> None:
        """config: the recorder's ring.toml, if it is known: it bounds a turn's tokens."""
        self.turns: dict[int, Live] = {}
        self.rings: dict[str, RingLife] = {}
        self.stale = 0  # answers to frames that are not waited for
        self._limits: Limits | None = None
        if config:
            with contextlib.suppress(ConfigError):  # another version's: do without
                self._limits = loads(config).limits

    def take(self, entry: Entry) -> list[Event]:
        """What this frame of the coordinator's log says."""
        frame, at = entry.frame, entry.at_ns
        events: list[Event] = []
        self._overdue(at, events)
        if entry.record.direction in (Direction.OUT, Direction.UNSENT):
            crossed = entry.record.direction is Direction.OUT
            self._sent(frame, at, entry.envelope.number if crossed else None, events)
        else:
            self._heard(frame, at, events)
        return events

    # ---- what leaves ----

    def _sent(self, frame: Frame, at: int, number: int | None, events: list[Event]) -> None:
        if isinstance(frame, RollCall):
            ring = self._ring(frame.ring)
            if ring.formed:
                self._lose(frame.ring, "it was silent for too long", at, events)
            ring.epoch, ring.claimed = frame.epoch, len(frame.claims)
            events.append(Called(at, frame.ring, frame.epoch))
            return
        if not isinstance(frame, (Run, Copy, Free, Ping)):
            return
        ring = self._ring(frame.ring)
        ring.epoch = frame.epoch
        flight = ring.flying[frame.seq] = Flight(frame, at, number)
        if isinstance(frame, Run):
            self._run(ring, frame, flight, events)
        elif isinstance(frame, Copy):
            ring.rows[frame.target] = 0
            if frame.turn in self.turns:
                events.append(Forked(at, frame.turn, frame, flight))
        elif isinstance(frame, Free):
            ring.rows[frame.slot] = 0

    def _run(self, ring: RingLife, run: Run, flight: Flight, events: list[Event]) -> None:
        drafts, guesses = [], []
        for segment in run.segments:
            ring.rows[segment.slot] = min(ring.rows.get(segment.slot, 0), segment.start)
            turn = self.turns.get(segment.turn)
            if turn is None:  # the self-check's, or submitted before the log begins
                drafts.append(0)
                guesses.append(0)
                continue
            if turn.slot is None:
                self._place(turn, run.ring, segment, flight.sent_ns, events)
            del turn.chain[max(turn.known, segment.start) :]
            turn.chain += segment.tokens[max(0, len(turn.chain) - segment.start) :]
            count = min(len(segment.tokens), max(0, segment.end - turn.known))
            drafts.append(count)
            guesses.append(turn.guess)
            events.append(Sent(flight.sent_ns, segment.turn, segment, flight, count))
        flight.drafts, flight.guesses = tuple(drafts), tuple(guesses)

    def _place(self, turn: Live, ring: str, segment: Segment, at: int, events: list[Event]) -> None:
        turn.ring, turn.slot = ring, segment.slot
        number, how = turn.submit.turn, turn.next_how
        events.append(Placed(at, number, ring, segment.slot, segment.start, turn.known, how))

    # ---- what comes ----

    def _heard(self, frame: Frame, at: int, events: list[Event]) -> None:
        match frame:
            case Submit():
                budget = frame.budget
                if self._limits is not None:
                    budget = min(budget, self._limits.max_model_len - len(frame.prompt))
                live = Live(frame, budget, list(frame.prompt), len(frame.prompt))
                self.turns[frame.turn] = live
                events.append(Submitted(at, frame.turn, frame))
            case Cancel():
                turn = self.turns.get(frame.turn)
                if turn is not None and not turn.over:
                    self._end(turn, frame.reason, at, events)
            case Verdict():
                self._verdict(frame, at, events)
            case Copy() | Free() | Ping():
                flight = self._landed(frame.ring, frame.epoch, frame.seq)
                if flight is not None and isinstance(frame, Copy):
                    self._ring(frame.ring).rows[frame.target] = frame.length
                    if frame.turn in self.turns:
                        events.append(Copied(at, frame.turn, frame, flight))
            case Reject():
                self._reject(frame, at, events)
            case RollCall():
                self._answered(frame, at, events)
            case Heartbeat() | StageLost() | LinkGap():
                self._alive(frame, at, events)

    def _verdict(self, verdict: Verdict, at: int, events: list[Event]) -> None:
        flight = self._landed(verdict.ring, verdict.epoch, verdict.seq)
        if flight is None or not isinstance(flight.frame, Run):
            return
        found = {result.turn: result.tokens for result in verdict.results}
        rows = self._ring(verdict.ring).rows
        for segment, guess in zip(flight.frame.segments, flight.guesses, strict=True):
            turn, tokens = self.turns.get(segment.turn), found.get(segment.turn)
            if turn is None:
                continue
            told = at, segment.turn, segment, flight, verdict
            if tokens is None:
                events.append(Answered(*told, refused=True))
                self._start_over(turn, segment.slot)
            elif guess != turn.guess or turn.slot is None:
                events.append(Answered(*told, void=True))
            elif turn.over or not segment.want:
                rows[segment.slot] = max(rows[segment.slot], min(segment.end, turn.known))
                events.append(Answered(*told))
            else:
                self._commit(turn, tokens, told, events)
            self._forget(turn)

    def _commit(
        self,
        turn: Live,
        tokens: tuple[int, ...],
        told: tuple[int, int, Segment, Flight, Verdict],
        events: list[Event],
    ) -> None:
        """Picked tokens are known up to the first that no draft foresaw."""
        at, _, segment, flight, _ = told
        drafts = turn.chain[turn.known : segment.end + 1]
        taken, reason = 0, None
        for position, token in enumerate(tokens):
            right = position < len(drafts) and drafts[position] == token
            if not right:
                if turn.known < len(turn.chain):
                    turn.guess += 1
                    del turn.chain[turn.known :]
                turn.chain.append(token)
            turn.known += 1
            taken += 1
            if token in turn.submit.stops:
                reason = "stop"
            elif turn.known - len(turn.submit.prompt) >= turn.budget:
                reason = "length"
            if reason is not None or not right:
                break
        pairs = zip(drafts, tokens, strict=False)  # as the metrics count: also behind a stop
        accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        judged = min(len(drafts), segment.want)
        rows = self._ring(flight.frame.ring).rows
        rows[segment.slot] = segment.end - segment.want + taken
        events.append(Answered(*told, tokens[:taken], judged, accepted))
        if reason is not None:
            self._end(turn, reason, at, events)

    def _reject(self, reject: Reject, at: int, events: list[Event]) -> None:
        ring = self._ring(reject.ring)
        if reject.code in _WHOLE:
            if ring.formed and reject.epoch in (0, ring.epoch):
                why = f"stage {reject.stage} refuses ({reject.code}): {reject.detail}"
                self._lose(reject.ring, why, at, events)
            return
        flight = ring.flying.get(reject.seq) if reject.epoch == ring.epoch else None
        if flight is None:
            self.stale += 1
            return
        if reject.turn in self.turns:
            events.append(Refused(at, reject.turn, reject))
        if isinstance(flight.frame, Copy):
            del ring.flying[reject.seq]
            if reject.turn in self.turns:
                self._start_over(self.turns[reject.turn], flight.frame.target)

    def _start_over(self, turn: Live, slot: int) -> None:
        if turn.ring is not None:
            self._ring(turn.ring).rows[slot] = 0
        self._unplace(turn, How.RESTARTED)

    def _unplace(self, turn: Live, how: How) -> None:
        del turn.chain[turn.known :]
        turn.guess += 1
        turn.ring = turn.slot = None
        turn.next_how = how

    # ---- rings ----

    def _alive(self, frame: Heartbeat | StageLost | LinkGap, at: int, events: list[Event]) -> None:
        if isinstance(frame, LinkGap):
            name = frame.link.partition("/")[0]
            why = f"frames {frame.expected} to {frame.got} of {frame.link} were lost"
            if name in self.rings and self.rings[name].formed:
                self._lose(name, why, at, events)
            return
        ring = self._ring(frame.ring)
        if isinstance(frame, Heartbeat):
            ring.heard[frame.stage] = at
        if not ring.formed:
            return
        if isinstance(frame, StageLost):
            self._lose(frame.ring, f"stage {frame.stage}: {frame.detail}", at, events)
        elif frame.stage in ring.stages and frame.state is not StageState.READY:
            why = f"stage {frame.stage} is {frame.state}: {frame.detail}"
            self._lose(frame.ring, why, at, events)
        elif ring.stages.get(frame.stage, frame.incarnation) != frame.incarnation:
            self._lose(frame.ring, f"stage {frame.stage} was restarted", at, events)

    def _overdue(self, at: int, events: list[Event]) -> None:
        """Silence is no frame: it shows at the next one, if ring.toml says how long is too long."""
        if self._limits is None:
            return
        for name, ring in self.rings.items():
            if not ring.formed:
                continue
            for stage in ring.stages:
                silent_s = (at - ring.heard.get(stage, at)) / 1e9
                if ring.formed and silent_s >= self._limits.lost_after_s:
                    why = f"stage {stage} was not heard of for {silent_s:.1f} s"
                    self._lose(name, why, at, events)

    def _lose(self, name: str, why: str, at: int, events: list[Event]) -> None:
        ring = self._ring(name)
        frames = len(ring.flying)
        ring.flying.clear()
        ring.formed = False
        hit = [turn for turn in self.turns.values() if turn.ring == name]
        events.append(Lost(at, name, why, frames, tuple(t.submit.turn for t in hit if not t.over)))
        for turn in hit:
            self._unplace(turn, How.RESUMED)
            self._forget(turn)

    def _answered(self, call: RollCall, at: int, events: list[Event]) -> None:
        ring = self._ring(call.ring)
        if call.epoch != ring.epoch or not call.entries:
            self.stale += 1
            return
        ring.stages = {entry.name: entry.incarnation for entry in call.entries}
        ring.formed = True
        ring.slots, ring.capacity = call.entries[0].slots, call.entries[0].capacity
        ring.rows = dict.fromkeys(range(ring.slots), 0)
        ring.rows |= {claim.number: claim.length for claim in call.claims}
        events.append(Formed(at, call.ring, call, ring.claimed))

    # ---- small ----

    def _ring(self, name: str) -> RingLife:
        return self.rings.setdefault(name, RingLife())

    def _landed(self, ring: str, epoch: int, seq: int) -> Flight | None:
        life = self._ring(ring)
        flight = life.flying.get(seq)
        if flight is None or flight.frame.epoch != epoch:
            self.stale += 1
            return None
        return life.flying.pop(seq)

    def _end(self, turn: Live, reason: str, at: int, events: list[Event]) -> None:
        turn.over = True
        events.append(Ended(at, turn.submit.turn, reason))
        self._forget(turn)

    def _forget(self, turn: Live) -> None:
        """A turn is kept until it is over and its last frame has come back."""
        if not turn.over:
            return
        mine = turn.submit.turn
        for ring in self.rings.values():
            for flight in ring.flying.values():
                frame = flight.frame
                if isinstance(frame, Copy) and frame.turn == mine:
                    return
                if isinstance(frame, Run) and any(each.turn == mine for each in frame.segments):
                    return
        self.turns.pop(mine, None)

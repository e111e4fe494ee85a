"""Owns one ring as the coordinator sees it: heartbeats, roll call, self-check, frames in flight.

Knows which frame was sent when and whether the ring may be trusted; knows nothing of turns but the
segments inside a frame. Part of the scheduler core: no clock, no I/O.
"""

from __future__ import annotations

from enum import StrEnum
from math import inf

from coord.counters import Stats
from coord.draft import ROW_STEP, Bounds
from coord.inflight import InFlight, Numbered
from coord.ledger import MAX_PARKED, Holding, Ledger, Placement
from coord.rollcall import claims, faults, renewed
from transport.chain import Chain, root_hash
from transport.config import Limits
from transport.config import Ring as RingSpec
from transport.frame import (
    Copy,
    Free,
    Heartbeat,
    Kind,
    Ping,
    Refusal,
    Reject,
    Remembered,
    Result,
    RollCall,
    Run,
    Sampling,
    Segment,
    StageEntry,
    StageState,
    Verdict,
)

PROBE_TURN = 0  # turn id of the self-check; real turns count from 1
PROBE_TOKENS = (1, 2, 3, 0)
PROBE_SAMPLING = Sampling(logprobs=0)
MAX_WINDOW = 32  # frames; their activations are the ring's memory in flight
RATE_ROWS = 32  # a frame of fewer rows costs by the frame, not by the row
RATE_SHARE = 0.2  # of the newest measurement in a moving average
RETRY_S = 1.0  # between two roll calls that went unanswered
PING_S = 5.0  # between two pings of a ready ring
TRIAL_S = 60.0  # after so long without parking it is tried again: rates change


class Phase(StrEnum):
    """Life of a ring. Only a ready ring takes turns."""

    WAITING = "waiting"  # for stages to be loaded and alive
    FORMING = "forming"  # a roll call is going round
    PROBING = "probing"  # the self-check is going round
    READY = "ready"


WAITING, FORMING, PROBING, READY = Phase  # as in coord.turn


class Ring:
    """One ring's health and its frames in flight."""

    def __init__(self, spec: RingSpec, limits: Limits, first_epoch: int, vocabulary: int) -> None:
        self.spec = spec
        self.name = spec.name
        self.limits = limits
        self.verdict_link = f"{spec.name}/{spec.stages[-1].name}"  # the tail's name as a sender
        self.phase = WAITING
        self.detail = "no stage has been heard of"
        self.epoch = first_epoch
        self.entries: tuple[StageEntry, ...] = ()
        self.ledger = Ledger(0, 0)
        self.remembered: dict[int, Holding] = {}  # until the first roll call; at most MAX_PARKED
        self.fingerprint = b""
        self.reuse = False  # what the self-check saw
        self.exact = False  # the self-check's log probabilities were equal to the bit
        self.in_flight: dict[int, InFlight] = {}
        self.heartbeats: dict[str, tuple[Heartbeat, float]] = {}
        self.stats = Stats()
        self.bounds = Bounds()  # of drafts; set by the driver before the first frame
        self.row_s = 0.0  # seconds a row takes in the slowest stage, of prefill frames
        self.frame_s = 0.0  # seconds a small frame takes in the slowest stage
        self.copy_row_s = 0.0  # seconds a row takes from slot to slot, hops excluded
        self.park_row_s = 0.0  # and from a slot to the park or back
        self._park_tried_at = 0.0
        self.link_s = 0.0  # seconds of a round trip that no stage computes: the least seen
        self.busy: dict[str, float] = {}  # share of the last heartbeat interval spent in forwards
        self._forward_us: dict[str, int] = {}
        self._vocabulary = vocabulary
        self._seq = 0
        self._asked_at: float | None = None
        self._pinged_at = 0.0
        self._probe: Result | None = None
        self._probe_bare = False  # the self-check goes on in an empty slot
        self._fault = ""  # why the last roll call was not good enough
        self._whole_until = -inf  # until then, and the next heartbeat, no stage will be missing

    @property
    def vocabulary(self) -> int:
        """Token ids that the stages know."""
        return self.entries[0].vocabulary if self.entries else 0

    # ---- alive and trusted ----

    @property
    def formed(self) -> bool:
        """True when frames are on their way that a loss would void.

        Not while the roll is called: its answer comes behind whatever was lost before. The first
        frame that a new coordinator hears of a living tail is a gap, and then that answer.
        """
        return self.phase in (PROBING, READY)

    def remember(self, said: Remembered, now: float) -> None:
        """Note what an earlier coordinator knew; the first roll call proves it or not."""
        if self.entries or len(self.remembered) >= MAX_PARKED:
            return
        chain = Chain(root_hash(said.fingerprint, said.salt), said.tokens)
        keep_until = now + said.keep_s if said.keep_s else 0.0
        self.remembered[said.number] = Holding(
            chain,
            used=now - said.idle_s,
            hint=said.hint,
            proven=said.proven,
            keep_until=keep_until,
        )

    def heard(self, beat: Heartbeat, now: float) -> str | None:
        """Note a heartbeat; the reason when it shows that a formed ring is broken."""
        if all(beat.stage != stage.name for stage in self.spec.stages):
            return None  # not of this ring: nothing grows with what a peer makes up
        self._measure(beat.stage, now)
        self.heartbeats[beat.stage] = (beat, now)
        self._whole_until = -inf
        if self.phase is WAITING:
            return None
        if beat.state is not StageState.READY:
            return f"stage {beat.stage} is {beat.state.value}: {beat.detail}"
        if self.phase is FORMING:
            return None  # the entries are still those of the ring that was lost
        for entry in self.entries:
            if entry.name == beat.stage and entry.incarnation != beat.incarnation:
                return f"stage {beat.stage} was restarted"
        return None

    def _measure(self, stage: str, now: float) -> None:
        """Busy share of a stage between two heartbeats, from its timings in the verdicts."""
        if stage in self.heartbeats:
            total = self.stats.forward_us.get(stage, 0)
            passed = now - self.heartbeats[stage][1]
            if passed > 0:
                share = (total - self._forward_us.get(stage, 0)) / 1e6 / passed
                self.busy[stage] = round(min(1.0, share), 3)
            self._forward_us[stage] = total

    def missing(self, now: float) -> str | None:
        """What keeps the ring from a roll call, in words; None when every stage is ready."""
        if now < self._whole_until:
            return None  # every event asks
        faults = []
        for stage in self.spec.stages:
            beat, at = self.heartbeats.get(stage.name, (None, 0.0))
            if beat is None:
                faults.append(f"stage {stage.name} ({stage.address}) has not been heard of")
            elif beat.state is StageState.FAILED:  # its last word, however long ago
                faults.append(f"stage {stage.name} is failed: {beat.detail}")
            elif now >= at + self.limits.lost_after_s:  # the sum that deadline() gives
                # no running clock in the text: every change of it is logged
                silent_s = self.limits.lost_after_s
                faults.append(f"stage {stage.name} was last heard of over {silent_s:g} s ago")
            elif beat.state is not StageState.READY:
                faults.append(f"stage {stage.name} is {beat.state.value}: {beat.detail}")
        if not faults:
            first = min([at for _, at in self.heartbeats.values()])
            self._whole_until = first + self.limits.lost_after_s
        return "; ".join(faults) or None

    def forget(self, detail: str) -> None:
        """The ring can't be trusted: nothing in flight will be believed, a roll call must come."""
        if self.phase is READY:
            self.stats.lost += 1
        for record in self.in_flight.values():
            if isinstance(record.frame, Copy) and record.frame.turn == PROBE_TURN:
                self.ledger.forget(record.frame.target)  # nobody will say that it was parked
        self.phase = WAITING
        self.detail = detail
        self.in_flight.clear()
        self._probe, self._probe_bare = None, False

    def ask(self, now: float) -> RollCall | None:
        """The roll call to send now, if one is due."""
        if self.phase not in (WAITING, FORMING):
            return None
        if self._asked_at is not None and now < self._asked_at + RETRY_S:
            return None
        missing = self.missing(now)
        if missing is not None:
            self.phase, self.detail = WAITING, missing
            return None
        self.phase, self.detail = FORMING, self._fault or "calling the roll"
        self.epoch += 1
        self._asked_at = now
        return RollCall(self.name, self.epoch, claims(self._held()))

    def _held(self) -> dict[int, Holding]:
        return self.ledger.holdings() if self.entries else self.remembered

    def answered(self, call: RollCall, now: float) -> list[Run | Free]:
        """A roll call came round: the self-check's first frame, or none: it can't be trusted.

        Before it, a Free for each parked prefix that some stages keep and others do not have.
        """
        if self.phase is not FORMING or call.epoch != self.epoch:
            self.stats.stale += 1
            return []
        self._fault = faults(call.entries, self.spec, self.limits, self._vocabulary) or ""
        if self._fault:
            self.phase, self.detail = WAITING, self._fault
            return []
        same = [(entry.name, entry.incarnation) for entry in self.entries] == [
            (entry.name, entry.incarnation) for entry in call.entries
        ]
        reason = "refused" if same else "ring lost"
        self.ledger, orphans = renewed(self.ledger, self._held(), call, reason)
        self.remembered = {}
        self.fingerprint = call.entries[0].fingerprint
        self.entries = call.entries
        self.phase, self.detail = PROBING, "checking that a prefix can be reused"
        return [*(self.free(parked, now) for parked in orphans), self._probe_run(now)]

    # ---- self-check: is a reused prefix worth the same as a computed one? ----

    def _probe_run(self, now: float) -> Run:
        """Four rows behind what a slot holds, so that nothing is given up; then the last two again.

        The second run must find the first one's rows 0 and 1.
        """
        skip = 0
        if self._probe is not None:
            slot, start = self._probe.slot, self._probe.start + 1 - len(PROBE_TOKENS)
            skip = len(PROBE_TOKENS) // 2
        else:
            coldest = self.ledger.coldest(now)
            assert coldest is not None, "a ring that is not ready has no pinned slots"
            slot, start = coldest, self.ledger.slots[coldest].resident
            if self._probe_bare or start + len(PROBE_TOKENS) > self.ledger.capacity:
                self.ledger.give_up(slot, 0, "self-check")
                start = 0
        held = self.ledger.slots[slot].chain
        before = root_hash(self.fingerprint, b"") if held is None else held.hash_before(start)
        parent = Chain(before, PROBE_TOKENS).hash_before(skip)
        tokens = PROBE_TOKENS[skip:]
        segment = Segment(
            PROBE_TURN, slot, start + skip, tokens, Kind.PREFILL, parent, 1, PROBE_SAMPLING
        )
        return self.run((segment,), now, (0,))

    def probed(self, result: Result | None, now: float) -> Run | None:
        """The self-check's verdict: its second frame, or None when the check is over."""
        if result is None:
            self.forget("the self-check was refused")
            return None
        if self._probe is None:
            self._probe = result
            return self._probe_run(now)
        self.reuse = result.tokens == self._probe.tokens
        self.exact = self.reuse and result.logprobs == self._probe.logprobs
        self._probe = None
        if not self.reuse and result.start >= len(PROBE_TOKENS):
            # behind a real text two tokens may be as likely, which says nothing about reuse
            self._probe_bare = True
            return self._probe_run(now)
        self._probe_bare = False
        self.phase, self.detail = READY, ""
        self._pinged_at = now
        self.stats.formed += 1
        return None

    # ---- numbered frames ----

    def _number(self) -> int:
        self._seq += 1
        return self._seq

    def run(self, segments: tuple[Segment, ...], now: float, guesses: tuple[int, ...]) -> Run:
        """Number and note a compute frame; guesses: each segment's Turn.guess."""
        frame = Run(self.name, self.epoch, self._number(), segments)
        rows = sum([len(segment.tokens) for segment in segments])
        self.in_flight[frame.seq] = InFlight(frame, now, None, guesses, rows=rows)
        return frame

    def copy(
        self, turn: int, source: int, target: int, chain: Chain, length: int, now: float
    ) -> Copy:
        """Number and note the copy of `chain`'s first `length` rows between two holdings."""
        seq, digest = self._number(), chain.hash_before(length)
        frame = Copy(self.name, self.epoch, seq, turn, source, target, length, digest)
        self.in_flight[seq] = InFlight(frame, now, chain, alone=not self.in_flight)
        return frame

    def copied(self, record: InFlight, now: float) -> None:
        """A copy came back: what it took beyond the hops, unless it waited behind other frames."""
        copy, hop_s = record.frame, self.stats.hop_s
        assert isinstance(copy, Copy), record
        slots = len(self.ledger.slots)
        parking = copy.source >= slots or copy.target >= slots
        if parking:
            self._park_tried_at = now
        if not record.alone or hop_s is None or copy.length < RATE_ROWS:
            return
        row_s = max(1e-9, (now - record.sent_at - hop_s) / copy.length)
        if parking:
            self.park_row_s = _average(self.park_row_s, row_s)
        else:
            self.copy_row_s = _average(self.copy_row_s, row_s)

    def rows_in_flight(self) -> int:
        """Rows that were sent and are not acknowledged."""
        return sum([record.rows for record in self.in_flight.values()])

    def restore_pays(self, now: float) -> bool:
        """True when copying a row from the park takes less than prefilling it.

        True before both were measured, and once in a while: the rates may have changed.
        """
        if not self.park_row_s or not self.row_s or self.park_row_s < self.row_s:
            return True
        return now >= self._park_tried_at + TRIAL_S

    def copy_time(self, placement: Placement) -> float:
        """Seconds that a placement's copy is predicted to take; 0.0 before one was measured."""
        if placement.source is None:
            return 0.0
        parked = placement.source >= len(self.ledger.slots)
        return placement.matched * (self.park_row_s if parked else self.copy_row_s)

    def freeing(self, slot: int) -> bool:
        """True while a Free of the slot is on its way: another would only fill the window."""
        frames = [record.frame for record in self.in_flight.values()]
        return any(isinstance(frame, Free) and frame.slot == slot for frame in frames)

    def free(self, slot: int, now: float) -> Free:
        """Number and note the end of a slot's residency."""
        frame = Free(self.name, self.epoch, self._number(), slot)
        self.in_flight[frame.seq] = InFlight(frame, now)
        return frame

    def ping(self, now: float) -> Ping | None:
        """The ping to send now, if one is due: an idle, ready ring every PING_S seconds."""
        if self.phase is not READY or self.in_flight or now < self._pinged_at + PING_S:
            return None
        self._pinged_at = now
        frame = Ping(self.name, self.epoch, self._number())
        self.in_flight[frame.seq] = InFlight(frame, now)
        return frame

    def pinged(self, took_s: float) -> None:
        """A ping came back: nothing else was in flight, so this is what the links take."""
        self.stats.hop_s = self.link_s = took_s

    def settle(self, epoch: int, seq: int, kind: type[Numbered]) -> InFlight | None:
        """Take the frame that an answer belongs to; None (and counted) when there is none.

        kind: what an answer of its class can answer. One that names another class's number, or a
        frame before whose answer another's must come (a ring is a queue), is as good as none: it
        must not settle a frame whose own answer is still to come.
        """
        record = self.in_flight.get(seq) if epoch == self.epoch else None
        first = next(iter(self.in_flight), None)
        if record is None or seq != first or not isinstance(record.frame, kind):
            self.stats.stale += 1
            return None
        del self.in_flight[seq]
        return record

    @property
    def window(self) -> int:
        """Runs that may be in flight: stages + 1 keep the stages busy, more fill slow links.

        Of what is in flight: a long prompt's chunks take more time each, so fewer of them fill the
        same link, and a decode that comes then does not queue behind the others.
        """
        if self.limits.window_frames is not None:
            return self.limits.window_frames
        return min(MAX_WINDOW, self.pipe + 1)

    @property
    def pipe(self) -> int:
        """Frames like those in flight that the ring holds without one waiting for another."""
        stages = len(self.spec.stages)
        costs = [self._cost(record.rows) for record in self.in_flight.values()]
        cost = max(self.frame_s, sum(costs) / len(costs) if costs else 0.0)
        more = min(self.link_s / cost, MAX_WINDOW) if cost else 0.0  # a cost may be next to none
        return stages + int(more)

    def _cost(self, rows: int) -> float:
        """Seconds in the slowest stage; none of a frame without rows, which is no Run."""
        if rows <= ROW_STEP:
            return self.frame_s if rows else 0.0
        row_s = self.row_s or self.frame_s / ROW_STEP  # the worst, until a prefill was timed
        return self.frame_s + row_s * (rows - ROW_STEP)

    def room(self) -> bool:
        """True when another frame may be sent."""
        runs = sum([record.rows > 0 for record in self.in_flight.values()])
        few = runs <= len(self.spec.stages) < MAX_WINDOW and self.limits.window_frames is None
        return self.phase is READY and (few or runs < self.window)

    def room_to_guess(self) -> bool:
        """True when a frame of guesses would hold up nothing: the ring has an idle place."""
        if self.limits.window_frames is not None:
            return self.room()
        return self.room() and len(self.in_flight) < self.pipe

    def timed(self, run: Run, verdict: Verdict, took_s: float) -> None:
        """Add the stages' timings up; a prefill frame also tells the ring's rate."""
        self.stats.verdicts += 1
        rows = sum(len(segment.tokens) for segment in run.segments)
        times = [timing.forward_us / 1e6 for timing in verdict.timings]
        slowest = max(times, default=0.0)
        link_s = max(1e-6, took_s - sum(times))  # it may have queued: only less of it is news
        self.link_s = min(self.link_s or link_s, link_s)
        if rows >= RATE_ROWS:
            base_s = min(self.frame_s, slowest / 2)  # what a frame costs before its rows
            self.row_s = _average(self.row_s, (slowest - base_s) / rows)
        else:
            more_s = min(self.row_s * max(0, rows - ROW_STEP), slowest / 2)
            self.frame_s = _average(self.frame_s, slowest - more_s)
        for timing in verdict.timings:
            if timing.stage not in self.heartbeats:
                continue  # nonsense from the link must not become a counter
            for table, value in (
                (self.stats.wait_us, timing.wait_us),
                (self.stats.forward_us, timing.forward_us),
            ):
                table[timing.stage] = table.get(timing.stage, 0) + value

    def distrusts(self, reject: Reject) -> bool:
        """True when a refusal of a whole frame shows that a roll call is needed.

        Not while one is going round: it comes behind the refusal and sets everything right. A stage
        that is ahead (this coordinator's clock went back) tells the epoch to go on from.
        """
        if reject.code is Refusal.EPOCH and reject.epoch > self.epoch:
            self.epoch = reject.epoch
            return self.formed
        if not self.formed:
            return False
        if reject.code is Refusal.LINK:
            return reject.epoch in (0, self.epoch)
        return reject.epoch == self.epoch and reject.seq in self.in_flight

    # ---- time ----

    def overdue(self, now: float) -> str | None:
        """Why time itself says that a formed ring is broken, or None."""
        if not self.formed:
            return None  # `ask` calls the roll
        missing = self.missing(now)
        if missing is not None:
            return missing
        for record in self.in_flight.values():
            if now >= record.sent_at + self.limits.frame_timeout_s:  # as in deadline()
                return f"frame {record.frame.seq} had no answer for {now - record.sent_at:.1f} s"
            break  # frames are sent, and so noted, in order of time
        return None

    def deadline(self, now: float) -> float:
        """When this ring wants to be looked at again (seconds, the driver's clock)."""
        times = [at + self.limits.lost_after_s for _, at in self.heartbeats.values()]
        times = [time for time in times if time > now]
        if self.phase in (WAITING, FORMING):
            times.append(now + RETRY_S)
        if self.phase is READY and not self.in_flight:
            times.append(self._pinged_at + PING_S)
        for record in self.in_flight.values():
            times.append(record.sent_at + self.limits.frame_timeout_s)
            break
        if self.phase is READY and self.limits.idle_ttl_s:  # a lost ring frees nothing
            oldest = self.ledger.oldest_use()
            if oldest is not None:
                times.append(max(now, oldest + self.limits.idle_ttl_s) + 1e-3)
        return min(times, default=now + RETRY_S)

    def check(self) -> None:
        """Assert the invariants."""
        self.ledger.check()
        kinds = [type(record.frame) for record in self.in_flight.values()]
        slots = len(self.ledger.slots)
        assert kinds.count(Run) <= MAX_WINDOW, self.in_flight
        assert kinds.count(Copy) <= 2 * slots, self.in_flight  # to park what is there, and to fork
        assert kinds.count(Free) <= slots + MAX_PARKED, self.in_flight  # one for each at a time
        assert kinds.count(Ping) <= 1, self.in_flight
        assert self.phase is not WAITING or not self.in_flight, self.in_flight


def _average(old: float, new: float) -> float:
    return old + RATE_SHARE * (new - old) if old else new

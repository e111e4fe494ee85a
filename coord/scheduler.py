"""Owns the schedule: which turn runs where, which rows the next frame takes, what a verdict means.

The coordinator's core: frames in, actions out (`handle`). No clock, no I/O, no text. The driver is
the asyncio shell (coord.coordinator), the simulator, or the replayer.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from coord.actions import Action, Admitted, Failed, Finished, Send, Tokens
from coord.admission import Choice, choose, explain, leader, queue, round_of, waits_behind
from coord.batch import ahead, certain, cold_s
from coord.counters import Totals
from coord.draft import Acceptance, Drafter, Usual, accepted
from coord.draft_model import ModelDrafter, asked
from coord.inflight import InFlight, awaited, fits
from coord.ledger import Miss
from coord.placing import NO_TURN, carry_out, expire, free
from coord.ring import PROBE_TURN, READY, Ring
from coord.ring import Phase as RingPhase
from coord.turn import DRAINING, RECOVERING, RUNNING, WAITING, Turn
from transport.chain import root_hash
from transport.config import Limits
from transport.config import Ring as RingSpec
from transport.frame import (
    Cancel,
    Copy,
    Drafted,
    Frame,
    Free,
    FreeSlot,
    Heartbeat,
    KeepSlot,
    Kind,
    LinkGap,
    Ping,
    Refusal,
    Reject,
    Remembered,
    Result,
    RollCall,
    Run,
    Segment,
    StageLost,
    Submit,
    Verdict,
)

MAX_REFUSALS = 3  # of one turn's rows before it fails: a cold start can't be refused for content


class Scheduler:
    """All turns of all rings. `handle` is the only place where state changes."""

    def __init__(
        self,
        rings: tuple[RingSpec, ...],
        limits: Limits,
        *,
        first_epoch: int = 0,
        vocabulary: int = 0,
        drafter: Callable[[], Drafter] | None = None,
    ) -> None:
        """first_epoch: rings count on from it. vocabulary: ids that the tokenizer may give.

        drafter: makes each turn's drafter; None for no speculation.
        """
        self._drafter = drafter
        self.limits = limits
        self.rings = {spec.name: Ring(spec, limits, first_epoch, vocabulary) for spec in rings}
        self.turns: dict[int, Turn] = {}  # waiting, running and draining, in order of arrival
        self.totals = Totals()
        self.usual = Usual()
        self._round = 0  # of the turn that was admitted last
        self._now = 0.0
        self._lost_at = -inf  # when the last ring that served was lost

    def handle(self, frame: Frame, now: float) -> list[Action]:
        """Take one frame; return what to do, in order. now: seconds on any monotonic clock."""
        self._now = now
        actions: list[Action] = []
        match frame:
            case Verdict() | Heartbeat() | RollCall() | Reject() | Copy() | Free() | Ping():
                ring = self.rings.get(frame.ring)
                if ring is not None:
                    self._from_ring(ring, frame, now, actions)
            case Submit():
                self._submit(frame, now, actions)
            case Cancel():
                self._cancel(frame, now, actions)
            case FreeSlot():
                self._free_slot(frame, now, actions)
            case KeepSlot():
                self._keep_slot(frame, now)
            case Remembered():
                if frame.ring in self.rings:
                    self.rings[frame.ring].remember(frame, now)
            case Drafted():
                self._drafted(frame)
            case LinkGap():
                self._gap(frame, now)
            case StageLost():
                ring = self.rings.get(frame.ring)
                if ring is not None and ring.phase is not RingPhase.WAITING:
                    self._lose(ring, f"stage {frame.stage}: {frame.detail}", now)
        self._look_after_rings(now, actions)
        if self.turns:
            self._fail_stranded(now, actions)
            self._admit(now, actions)
            for ring in self.rings.values():
                self._fill(ring, now, actions)
            actions += asked(self.turns.values())
        return actions

    def deadline(self) -> float | None:
        """When a Tick is wanted, on the clock of `handle`."""
        times = [ring.deadline(self._now) for ring in self.rings.values()]
        if not self._any_ready():
            times += [
                turn.waiting_since + self.limits.resume_s
                for turn in self.turns.values()
                if turn.phase is WAITING
            ]
        return min(times, default=None)

    def check(self) -> None:
        """Assert every invariant; tests and the simulator call it after each event."""
        for ring in self.rings.values():
            ring.check()
            for index, slot in enumerate(ring.ledger.slots):
                if slot.turn is not None:
                    turn = self.turns[slot.turn]
                    assert (turn.ring, turn.slot) == (ring.name, index), (turn, index)
        records = [each for ring in self.rings.values() for each in ring.in_flight.values()]
        flying = awaited(records)
        for turn in self.turns.values():
            turn.check()
            assert turn.in_flight == flying.get(turn.id, 0), (turn, flying)
            if turn.slot is not None:
                assert turn.ring is not None, turn
                slot = self.rings[turn.ring].ledger.slots[turn.slot]
                assert slot.turn == turn.id, (slot, turn)
                assert slot.resident <= turn.sent or turn.phase is not RUNNING, (slot, turn)

    def waiting(self) -> int:
        """Turns in the queue."""
        return sum(turn.phase is WAITING for turn in self.turns.values())

    def running(self) -> int:
        """Turns that hold a slot for a client."""
        active = (RUNNING, RECOVERING)
        return sum(turn.phase in active for turn in self.turns.values())

    def _any_ready(self) -> bool:
        return any(ring.phase is READY for ring in self.rings.values())

    # ---- local inputs ----

    def _submit(self, submit: Submit, now: float, actions: list[Action]) -> None:
        assert submit.turn not in self.turns, submit.turn
        assert submit.turn != PROBE_TURN
        limit = self.limits.max_model_len
        prompt = len(submit.prompt)
        if not prompt:
            actions.append(Failed(submit.turn, 400, "empty_prompt", "the prompt has no tokens"))
        elif prompt + 1 > limit:
            text = f"the prompt has {prompt} tokens and the context limit is {limit}"
            actions.append(Failed(submit.turn, 400, "context_length_exceeded", text))
        elif submit.budget < 1:
            actions.append(Failed(submit.turn, 400, "invalid_value", "nothing to generate"))
        elif not self._any_ready() and now >= self._lost_at + self.limits.resume_s:
            text = "; ".join(f"{ring.name}: {ring.detail}" for ring in self.rings.values())
            actions.append(Failed(submit.turn, 503, "not_ready", f"no ring is ready ({text})"))
        elif self.waiting() >= self.limits.queue_turns:
            text = f"{self.limits.queue_turns} turns are waiting already"
            actions.append(Failed(submit.turn, 429, "queue_full", text))
        else:
            budget = min(submit.budget, limit - prompt)
            drafter = self._drafter() if self._drafter is not None else None
            self.turns[submit.turn] = Turn(
                submit,
                budget,
                drafter,
                acceptance=Acceptance(self.usual),
                waiting_since=now if self._any_ready() else self._lost_at,
                round=round_of(submit.salt, self.turns.values(), self._round),
            )

    def _cancel(self, cancel: Cancel, now: float, actions: list[Action]) -> None:
        turn = self.turns.get(cancel.turn)
        if turn is not None and turn.phase is not DRAINING:
            self._finish(turn, cancel.reason, now, actions)

    def _free_slot(self, request: FreeSlot, now: float, actions: list[Action]) -> None:
        ring = self.rings.get(request.ring)
        if ring is None or ring.phase is not READY:
            return
        if ring.freeing(request.slot):
            return
        if ring.ledger.has(request.slot) and ring.ledger.holding(request.slot).turn is None:
            actions.append(Send(free(ring, request.slot, "request", now)))

    def _keep_slot(self, request: KeepSlot, now: float) -> None:
        ring = self.rings.get(request.ring)
        if ring is not None and request.slot < len(ring.ledger.slots):
            ring.ledger.keep(request.slot, now + request.keep_s, now)

    def _drafted(self, frame: Drafted) -> None:
        turn = self.turns.get(frame.turn)  # None: it has ended
        if turn is not None and isinstance(turn.drafter, ModelDrafter):
            turn.drafter.drafted(frame.start, frame.tokens)

    def _gap(self, gap: LinkGap, now: float) -> None:
        for ring in self.rings.values():
            if gap.link == ring.verdict_link and ring.formed:
                self._lose(ring, f"verdicts {gap.expected} to {gap.got} were lost", now)

    # ---- from the ring ----

    def _from_ring(self, ring: Ring, frame: Frame, now: float, actions: list[Action]) -> None:
        match frame:
            case Heartbeat():
                broken = ring.heard(frame, now)
                if broken is not None:
                    self._lose(ring, broken, now)
            case RollCall():
                actions += [Send(asked) for asked in ring.answered(frame, now)]
            case Reject():
                self._reject(ring, frame, now, actions)
            case Verdict():
                record = ring.settle(frame.epoch, frame.seq, Run)
                if record is not None:
                    self._verdict(ring, record, frame, now, actions)
            case Copy():
                record = ring.settle(frame.epoch, frame.seq, Copy)
                if record is not None:
                    self._copied(ring, record, now, actions)
            case Ping():
                record = ring.settle(frame.epoch, frame.seq, Ping)
                if record is not None:
                    ring.pinged(now - record.sent_at)
            case Free():
                ring.settle(frame.epoch, frame.seq, Free)

    def _verdict(
        self, ring: Ring, record: InFlight, verdict: Verdict, now: float, actions: list[Action]
    ) -> None:
        assert isinstance(record.frame, Run), record
        ring.timed(record.frame, verdict, now - record.sent_at)
        results = {result.turn: result for result in verdict.results}
        for segment, guess in zip(record.frame.segments, record.guesses, strict=True):
            result = results.get(segment.turn)
            if result is not None and not fits(result, segment, ring.vocabulary):
                result = None  # nonsense: as good as no answer
            if segment.turn == PROBE_TURN:
                probe = ring.probed(result, now)
                if probe is not None:
                    actions.append(Send(probe))
                return
            turn = self.turns[segment.turn]
            turn.in_flight -= 1
            if result is None:
                self._refused(ring, turn)
            elif guess != turn.guess:
                self.totals.drafts_wasted += len(segment.tokens)
            elif turn.phase is not RECOVERING:
                reason = self._settled(ring, turn, segment, result, actions)
                if reason is not None:
                    self._finish(turn, reason, now, actions)
            self._drain(ring, turn, now, actions)

    def _settled(
        self, ring: Ring, turn: Turn, segment: Segment, result: Result, actions: list[Action]
    ) -> str | None:
        """A segment's rows are written on every stage; its tokens, as far as they hold, are next.

        Returns the finish reason when one of them ends the turn.
        """
        assert turn.slot == segment.slot, (turn, segment)
        assert turn.chain is not None
        if not turn.started:
            turn.started = True
            self.totals.prompt_tokens += len(turn.submit.prompt)
            if turn.submit.reuse:
                self.totals.prefix_cache_queries += len(turn.submit.prompt)
                self.totals.prefix_cache_hits += segment.start
        if not segment.want or turn.phase is DRAINING:
            known = min(segment.end, turn.known)
            if known > segment.start:
                ring.ledger.extend(segment.slot, turn.chain, known)
            return None
        turn.ahead -= 1
        assert segment.end - segment.want == turn.known - 1, (segment, turn)
        drafts = turn.chain.tokens(turn.known, min(len(turn.chain), segment.end + 1))
        right = accepted(drafts, result.tokens)
        if drafts:
            turn.acceptance.learn(len(drafts), right)
        else:
            turn.learn_from(result.tokens[0])
        wrong = min(len(drafts), segment.want) - right
        self.totals.drafts_accepted += right
        self.totals.drafts_rejected += wrong
        reason, count = None, 0
        for token in result.tokens[: right + 1]:
            reason = turn.commit(token)
            count += 1
            if reason is not None:
                break
        ring.ledger.extend(segment.slot, turn.chain, segment.end - segment.want + count)
        self.totals.generation_tokens += count
        tokens, logprobs, top = result.tokens[:count], result.logprobs[:count], result.top[:count]
        actions.append(Tokens(turn.id, tokens, logprobs, top, right, wrong))
        return reason

    def _copied(self, ring: Ring, record: InFlight, now: float, actions: list[Action]) -> None:
        copy = record.frame
        assert isinstance(copy, Copy), record
        assert record.chain is not None
        ring.copied(record, now)
        if copy.turn == NO_TURN:  # an eviction's rows are parked, unless they were dropped since
            if ring.ledger.has(copy.target):
                ring.ledger.extend(copy.target, record.chain, copy.length)
            return
        turn = self.turns[copy.turn]
        turn.in_flight -= 1
        if turn.phase is not RECOVERING:
            ring.ledger.extend(copy.target, record.chain, copy.length)
        self._drain(ring, turn, now, actions)

    def _reject(self, ring: Ring, reject: Reject, now: float, actions: list[Action]) -> None:
        ring.stats.refused += 1
        if reject.code in (Refusal.EPOCH, Refusal.LINK):
            if ring.distrusts(reject):
                self._lose(ring, f"stage {reject.stage}: {reject.detail}", now)
            return
        record = ring.in_flight.get(reject.seq) if reject.epoch == ring.epoch else None
        if record is None or isinstance(record.frame, Run):
            return  # a Run's Verdict still comes, without the refused segment
        if ring.settle(reject.epoch, reject.seq, type(record.frame)) is None:
            return
        if isinstance(record.frame, Copy):
            self._copy_refused(ring, record, record.frame, now, actions)

    def _copy_refused(
        self, ring: Ring, record: InFlight, copy: Copy, now: float, actions: list[Action]
    ) -> None:
        """A copy's source is not what the ledger said: give it up too, unless a turn writes there.

        Stages before the one that refused have made the copy: a turn overwrites it, a parked one
        is freed.
        """
        if copy.turn == NO_TURN:
            assert record.chain is not None
            ring.ledger.gone.add(record.chain, "refused")
            actions.append(Send(free(ring, copy.target, "refused", now)))
            return
        if ring.ledger.has(copy.source) and ring.ledger.holding(copy.source).turn is None:
            actions.append(Send(free(ring, copy.source, "refused", now)))
        turn = self.turns[copy.turn]
        turn.in_flight -= 1
        self._refused(ring, turn)
        self._drain(ring, turn, now, actions)

    def _refused(self, ring: Ring, turn: Turn) -> None:
        """The ledger was wrong about the turn's slot: forget it, start over there."""
        assert turn.slot is not None
        ring.ledger.give_up(turn.slot, 0, "refused")
        if turn.phase is RUNNING:
            turn.phase = RECOVERING
            turn.refusals += 1

    # ---- a turn's end ----

    def _finish(self, turn: Turn, reason: str, now: float, actions: list[Action]) -> None:
        actions.append(Finished(turn.id, reason))
        self._end(turn, now, actions)

    def _end(self, turn: Turn, now: float, actions: list[Action]) -> None:
        if turn.phase is WAITING:
            del self.turns[turn.id]
            return
        turn.phase = DRAINING
        assert turn.ring is not None
        self._drain(self.rings[turn.ring], turn, now, actions)

    def _drain(self, ring: Ring, turn: Turn, now: float, actions: list[Action]) -> None:
        """When the last of a turn's frames has come back, its slot is free (or is started over)."""
        if turn.in_flight:
            return
        assert turn.slot is not None
        if turn.phase is DRAINING:
            if turn.id in self.turns:
                ring.ledger.release(turn.slot, turn.id, now)
                if turn.submit.keep_s:
                    ring.ledger.keep(turn.slot, now + turn.submit.keep_s, now)
                del self.turns[turn.id]
        elif turn.phase is RECOVERING and turn.refusals <= MAX_REFUSALS:
            ring.ledger.claim(turn.slot, turn.submit.hint, proven=False)
            root = root_hash(ring.fingerprint, turn.submit.salt)
            turn.admit(ring.name, turn.slot, root, None, 0)
            actions.append(self._admitted(turn))

    # ---- a ring's end ----

    def _lose(self, ring: Ring, detail: str, now: float) -> None:
        """Void what is in flight; the ring's turns wait to be resumed at what they committed."""
        served = ring.phase is READY
        self._lost_at = now if served else self._lost_at
        ring.forget(detail)
        for turn in list(self.turns.values()):
            if turn.phase is WAITING and served:
                turn.waiting_since = now  # the time to come back counts from the loss
            if turn.ring != ring.name or turn.slot is None:
                continue
            ring.ledger.release(turn.slot, turn.id, now)
            if turn.phase is DRAINING:
                del self.turns[turn.id]
            else:
                turn.suspend()
                turn.waiting_since = now

    def _look_after_rings(self, now: float, actions: list[Action]) -> None:
        for ring in self.rings.values():
            broken = ring.overdue(now)
            if broken is not None:
                self._lose(ring, broken, now)
            frame = ring.ping(now) if ring.phase is READY else ring.ask(now)
            if frame is not None:
                actions.append(Send(frame))
            ttl = self.limits.idle_ttl_s
            if ttl and ring.phase is READY:
                actions += [Send(frame) for frame in expire(ring, now - ttl, now)]

    def _fail_stranded(self, now: float, actions: list[Action]) -> None:
        """A turn that lost its ring, or was refused too often, fails within a stated bound."""
        held_up = (WAITING, RECOVERING)
        stranded = [turn for turn in self.turns.values() if turn.phase in held_up]
        ready = not stranded or self._any_ready()
        for turn in stranded:
            late = now >= turn.waiting_since + self.limits.resume_s
            if turn.phase is WAITING and late and not ready:
                text = f"no ring was ready for {self.limits.resume_s:g} s"
                actions.append(Failed(turn.id, 503, "ring_lost", text))
                self._end(turn, now, actions)
            elif turn.phase is RECOVERING and turn.refusals > MAX_REFUSALS:
                text = f"the stages refused the turn's rows {turn.refusals} times"
                actions.append(Failed(turn.id, 500, "rows_refused", text))
                self._end(turn, now, actions)

    # ---- what to send ----

    def _admit(self, now: float, actions: list[Action]) -> None:
        """Give slots to waiting turns, in the queue's order, by what is resident now."""
        for turn in queue(self.turns.values()):
            if waits_behind(turn, self.turns, self.rings):
                continue
            found = choose(turn, self.turns, self.rings, now)
            if found is None:
                return
            turn.behind = leader(self.turns, found)
            if turn.behind is None:
                self._place(turn, found, now, actions)

    def _place(self, turn: Turn, choice: Choice, now: float, actions: list[Action]) -> None:
        """The turn takes its slot; the frames that prepare it go first."""
        miss = explain(choice, self.rings)
        resumed = turn.admitted_before
        self._round = max(self._round, turn.round)
        frames = carry_out(turn, choice, now)
        actions += [Send(frame) for frame in frames]
        if choice.placement.source is not None:
            self.totals.copied_rows += choice.placement.matched
        if resumed:
            self.totals.resumed += 1
        actions.append(self._admitted(turn, miss))

    def _admitted(self, turn: Turn, miss: Miss | None = None) -> Admitted:
        assert turn.ring is not None
        assert turn.slot is not None
        prompt, matched, again = len(turn.submit.prompt), turn.sent, turn.started
        cold = cold_s(self.rings[turn.ring], prompt, self.limits)
        return Admitted(turn.id, turn.ring, turn.slot, prompt, matched, again, miss, cold)

    def _fill(self, ring: Ring, now: float, actions: list[Action]) -> None:
        """While the ring has room: every ready decode segment, then prefill, then speculation."""
        mine = [turn for turn in self.turns.values() if turn.ring == ring.name]
        while mine and ring.room():
            segments = certain(ring, mine, self.limits) or ahead(ring, mine)
            if not segments:
                return
            for segment in segments:
                ring.ledger.truncate(segment.slot, segment.start)
                if segment.kind is Kind.PREFILL:
                    self.totals.prefilled_tokens += len(segment.tokens)
            guesses = tuple(self.turns[segment.turn].guess for segment in segments)
            actions.append(Send(ring.run(tuple(segments), now, guesses)))

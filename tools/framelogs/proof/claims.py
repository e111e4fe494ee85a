"""Owns the proof of one coordinator's life: it claims only rows that it knows to be there.

Rebuilt from what the coordinator was told and sent; shares no code with its ledger.
"""

from __future__ import annotations

from tools.framelogs.proof.rings import Copied, Number, RingProof, Sending
from tools.framelogs.proof.rows import Hasher, Tally, Violation
from tools.framelogs.proof.turns import Sent, Turn
from transport.frame import (
    Cancel,
    Copy,
    Envelope,
    Frame,
    Free,
    LinkGap,
    Ping,
    Refusal,
    Reject,
    Remembered,
    Result,
    RollCall,
    Run,
    Submit,
    Verdict,
)

MAX_TURNS = 4096  # the oldest idle one is let go: one that failed ends without a frame


class CoordinatorProof:
    """One life of a coordinator, fed with its frames in order.

    repeats: an answer may come twice (a simulator's doing); then it must not be used twice.
    """

    def __init__(
        self,
        tally: Tally,
        hasher: Hasher,
        *,
        whole: bool,
        max_model_len: int | None = None,
        repeats: bool = False,
    ) -> None:
        self._tally, self._hasher = tally, hasher
        self._max, self._repeats = max_model_len, repeats
        self.restart(whole=whole)

    def restart(self, *, whole: bool) -> None:
        """Forget everything: the coordinator has started, or records are missing."""
        self._whole = whole
        self._rings: dict[str, RingProof] = {}
        self._turns: dict[int, Turn] = {}
        self._over: set[int] = set()

    def _ring(self, name: str) -> RingProof:
        ring = self._rings.get(name)
        if ring is None:
            ring = RingProof(name, self._tally, self._hasher, whole=self._whole)
            ring.limit = self._max
            self._rings[name] = ring
        return ring

    # ---- what it is told ----

    def took(self, frame: Frame, envelope: Envelope | None) -> None:
        """A frame came in, or a local input."""
        match frame:
            case Submit():
                self._submit(frame)
            case Cancel():
                turn = self._turns.get(frame.turn)
                if turn is not None:
                    turn.cancelled = True
                    if turn.at is None:
                        del self._turns[frame.turn]
                        self._over.add(frame.turn)
            case LinkGap():
                for ring in self._rings.values():
                    if frame.link == ring.answers_from and not ring.forming:
                        ring.lost = True  # a roll call's answer comes behind what was lost
            case RollCall():
                self._ring(frame.ring).answered(frame)
            case Remembered():
                self._ring(frame.ring).remember(frame)
            case Verdict() | Copy() | Free() | Ping() | Reject():
                ring = self._ring(frame.ring)
                if envelope is not None:
                    ring.answers_from = envelope.sender
                self._answer(ring, frame)

    def _submit(self, frame: Submit) -> None:
        if frame.turn in self._turns or frame.turn in self._over:
            raise Violation("R4", f"turn {frame.turn} is submitted a second time")
        if len(self._turns) >= MAX_TURNS:
            idle = (each for each, turn in self._turns.items() if turn.at is None or turn.ended)
            self._turns.pop(next(idle, 0), None)
        self._turns[frame.turn] = Turn(frame, frame.budget)

    def _answer(self, ring: RingProof, frame: Verdict | Copy | Free | Ping | Reject) -> None:
        self._tally.answers += 1
        if isinstance(frame, Reject):
            self._rejected(ring, frame)
            return
        sending = self._paired(ring, frame)
        if sending is None:
            return
        self._tally.note("R4")
        if isinstance(frame, Verdict):
            self._verdict(ring, sending, frame)
        elif isinstance(frame, Copy):
            assert isinstance(sending.frame, Copy)
            ring.copied(sending, frame)

    def _paired(self, ring: RingProof, frame: Verdict | Copy | Free | Ping) -> Sending | None:
        """The frame that an answer belongs to; None where nobody may use it."""
        which = f"{type(frame).__name__} ({frame.epoch}, {frame.seq})"
        if ring.epoch is None or frame.epoch < ring.epoch or ring.lost or ring.forming:
            self._tally.stale += 1  # while the ring forms: to a coordinator before this one
            return None
        sending = ring.flying.get(frame.seq) if frame.epoch == ring.epoch else None
        kind = Run if isinstance(frame, Verdict) else type(frame)
        if sending is not None and isinstance(sending.frame, kind):
            del ring.flying[frame.seq]
            return sending
        if not ring.knows(frame.seq):
            self._tally.note("R4", known=False)
            return None
        if self._repeats and frame.epoch == ring.epoch and frame.seq <= ring.highest:
            self._tally.stale += 1
            return None
        raise Violation("R4", f"{which} answers no frame that waits for an answer")

    def _rejected(self, ring: RingProof, frame: Reject) -> None:
        if frame.epoch != ring.epoch:
            return
        sending = ring.flying.get(frame.seq)
        if sending is None or frame.code in (Refusal.EPOCH, Refusal.LINK):
            return
        if isinstance(sending.frame, Run):
            sending.refused.append(frame.turn)
            return
        del ring.flying[frame.seq]
        if isinstance(sending.frame, Copy):
            view = ring.view(sending.frame.target)
            view.sure, view.refused = 0, True
            turn = self._turns.get(sending.frame.turn)
            if turn is not None and turn.on(ring.name):
                turn.refused = True

    def _verdict(self, ring: RingProof, sending: Sending, verdict: Verdict) -> None:
        results: dict[int, Result] = {}
        for result in verdict.results:
            if result.turn in results or all(
                result.turn != each.segment.turn for each in sending.sent
            ):
                raise Violation("R4", f"a result for turn {result.turn}, which the frame has not")
            results[result.turn] = result
        for sent in sending.sent:
            self._settle(ring, sending, sent, results.get(sent.segment.turn))

    def _settle(self, ring: RingProof, sending: Sending, sent: Sent, result: Result | None) -> None:
        segment, view = sent.segment, ring.view(sent.segment.slot)
        turn = self._turns.get(segment.turn)
        if result is None:
            if segment.turn not in sending.refused and None not in sending.refused:
                raise Violation("R4", f"turn {segment.turn} has no result and was not refused")
            view.refused = True
            if segment.start <= view.sure:  # else what was refused was never acknowledged
                view.sure = 0
            if turn is not None and turn.on(ring.name):  # else it goes on in another ring
                turn.refused = True
            return
        wanted = segment.slot, segment.end - segment.want, segment.want
        if (result.slot, result.start, len(result.tokens)) != wanted:
            text = f"turn {segment.turn}: slot, start, tokens of the result are not {wanted}"
            raise Violation("R4", text)
        if turn is None:
            if segment.turn:
                view.sure = max(view.sure, min(segment.end, sent.low))
            return
        if not turn.on(ring.name):
            return  # it goes on in another ring since this one was lost
        ring.recent.append((turn, len(turn.text), turn.over))
        turn.answered(sent, result, ring.behind(sending, segment.turn))
        if not sent.void:
            recovering = turn.refused and not (turn.over or turn.cancelled)
            view.sure = max(view.sure, 0 if recovering else turn.holds(sent))

    # ---- what it sends ----

    def sent(self, frame: Frame) -> None:
        """A frame went to the head."""
        if isinstance(frame, RollCall):
            self._call(frame)
            return
        if not isinstance(frame, Number):
            raise Violation("R6", f"a coordinator sends no {type(frame).__name__}")
        ring = self._ring(frame.ring)
        sending = ring.number(frame)
        self._forget_turns(ring)
        if ring.blind:  # what those frames committed to cannot be told
            self._turns = {
                name: turn
                for name, turn in self._turns.items()
                if turn.at is not None and not turn.on(ring.name)
            }
        if isinstance(frame, Run):
            self._run(ring, frame, sending)
        elif isinstance(frame, Copy):
            self._copy(ring, frame)
        elif isinstance(frame, Free):
            self._owns(ring, frame.slot, None)
            ring.freed(frame.slot)

    def _call(self, frame: RollCall) -> None:
        ring = self._ring(frame.ring)
        for turn in self._turns.values():
            if turn.on(ring.name):
                ring.unsure(turn)
        ring.call(frame)

    def _forget_turns(self, ring: RingProof) -> None:
        """What was answered before this frame is sure; ended turns are let go."""
        for turn, *_ in ring.recent:
            name = turn.submit.turn
            if turn.ended and not ring.flies(name) and self._turns.pop(name, None) is not None:
                self._over.add(name)
        ring.recent.clear()

    def _run(self, ring: RingProof, run: Run, sending: Sending) -> None:
        slots = [segment.slot for segment in run.segments]
        if len(set(slots)) != len(slots):
            raise Violation("R5", "a slot is twice in one frame")
        for segment in run.segments:
            self._tally.segments += 1
            self._tally.rows += len(segment.tokens)
            if segment.turn in self._over:
                raise Violation("R4", f"turn {segment.turn} is over")
            ring.fits(segment)
            self._owns(ring, segment.slot, segment.turn)
            turn = self._known(ring, segment.turn)
            if turn is not None:
                self._goes(ring, turn, segment.turn, segment.slot)
                turn.sends(segment, ring.asked(segment.turn))
            ring.write(segment, None if turn is None else turn.text)
            sending.sent.append(Sent(segment, segment.end))
            self._tally.note("R4", known=turn is not None or segment.turn == 0)

    def _known(self, ring: RingProof, name: int) -> Turn | None:
        """A turn of which all is known; without the slots' capacity its end is not."""
        if ring.capacity is None:
            self._turns.pop(name, None)
        return self._turns.get(name)

    def _goes(self, ring: RingProof, turn: Turn, name: int, slot: int) -> None:
        """A turn stays where it is until its ring is lost."""
        if turn.at is not None and turn.at != (ring.name, slot):
            old = self._rings[turn.at[0]]
            if old is ring:
                raise Violation("R5", f"turn {name} is in slot {turn.at[1]}, and writes in {slot}")
            old.unsure(turn)
        if turn.at is None and ring.capacity is not None:
            turn.budget = min(turn.budget, max(1, ring.capacity - len(turn.submit.prompt)))
        turn.at = ring.name, slot

    def _owns(self, ring: RingProof, slot: int, who: int | None) -> None:
        """A slot that a turn writes in is nobody else's until its last answer has come."""
        owner = ring.flier(slot, who)
        if owner is not None:
            text = f"turn {owner} has frames in flight in slot {slot}"
            raise Violation("R5", text)
        view = ring.view(slot)
        turn = self._turns.get(view.owner) if view.owner not in (None, who) else None
        here = turn is not None and turn.at == (ring.name, slot)
        if turn is not None and here and not (turn.ended or turn.refused):
            raise Violation("R5", f"turn {view.owner} is running in slot {slot}")
        self._tally.note("R5")

    def _copy(self, ring: RingProof, copy: Copy) -> None:
        self._tally.copies += 1
        self._owns(ring, copy.target, copy.turn)
        turn = self._known(ring, copy.turn)
        if turn is not None:
            if turn.ended:
                raise Violation("R4", f"turn {copy.turn} is over")
            self._goes(ring, turn, copy.turn, copy.target)
            turn.refused = False
        if turn is None:
            ring.copy(Copied(copy, None, b""))
        else:
            ring.copy(Copied(copy, turn.text, turn.submit.salt))

"""Bugs of the cores that tests/mutations.py injects, one replaced method each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import pytest

import coord.admission
import coord.ring
import coord.scheduler
import pipeline.stage
from coord.inflight import InFlight
from coord.ledger import Ledger, Placement, Wanted
from coord.ring import READY, Ring
from coord.rollcall import claims, renewed
from coord.scheduler import Scheduler
from coord.turn import Turn
from pipeline.slots import SlotTable
from pipeline.stage import Forward, Stage
from transport.chain import Chain
from transport.frame import Copy, Free, Kind, Measure, Measured, Ping, RollCall, Run, Segment

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutation:
    """One bug. trouble: the kind of world that is tried first; "" where only kvring sim has it."""

    name: str
    patch: Patch
    trouble: str


MUTATIONS: list[Mutation] = []


def mutation(name: str, trouble: str = "none") -> Callable[[Patch], Patch]:
    def add(patch: Patch) -> Patch:
        MUTATIONS.append(Mutation(name, patch, trouble))
        return patch

    return add


# ---- the ledger ----------------------------------------------------------------------------------


@mutation("the ledger claims a row too many")
def _(patcher: pytest.MonkeyPatch) -> None:
    extend = Ledger.extend

    def one_more(self: Ledger, index: int, chain: Chain, end: int) -> None:
        extend(self, index, chain, min(end + 1, len(chain)))

    patcher.setattr(Ledger, "extend", one_more)


@mutation("the ledger claims a row too few")
def _(patcher: pytest.MonkeyPatch) -> None:
    extend = Ledger.extend

    def one_less(self: Ledger, index: int, chain: Chain, end: int) -> None:
        extend(self, index, chain, max(self.holding(index).resident, end - 1))

    patcher.setattr(Ledger, "extend", one_less)


@mutation("no truncation in the ledger")
def _(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(Ledger, "truncate", lambda self, index, length: None)


@mutation("rows are resident when they are sent", "gaps")
def _(patcher: pytest.MonkeyPatch) -> None:
    run, extend = Ring.run, Ledger.extend

    def early(
        self: Ring, segments: tuple[Segment, ...], now: float, guesses: tuple[int, ...]
    ) -> Run:
        for segment in segments:
            slot = self.ledger.slots[segment.slot]
            if segment.start == 0:
                slot.chain = Chain(segment.parent_hash)
            if slot.chain is not None and len(slot.chain) == segment.start:
                slot.chain.extend(segment.tokens)
        return run(self, segments, now, guesses)

    def late(self: Ledger, index: int, chain: Chain, end: int) -> None:
        if self.holding(index).resident < end:
            extend(self, index, chain, end)

    patcher.setattr(Ring, "run", early)
    patcher.setattr(Ledger, "extend", late)


@mutation("a pinned slot may be given up")
def _(patcher: pytest.MonkeyPatch) -> None:
    place = Ledger.place

    def blind(self: Ledger, wanted: Wanted, now: float) -> Any:
        pins = [slot.turn for slot in self.slots]
        for slot in self.slots:
            slot.turn = None
        found = place(self, wanted, now)
        for slot, pin in zip(self.slots, pins, strict=True):
            slot.turn = pin
        return found

    patcher.setattr(Ledger, "place", blind)


@mutation("the whole prompt is matched: no clamp")
def _(patcher: pytest.MonkeyPatch) -> None:
    def unclamped(packed: bytes, root: bytes, limit: int, *rest: Any) -> Wanted:
        return Wanted(packed, root, limit + 1, *rest)

    patcher.setattr(coord.admission, "Wanted", unclamped)


@mutation("a fork starts a row too late")
def _(patcher: pytest.MonkeyPatch) -> None:
    copy = Ring.copy

    def short(
        self: Ring, turn: int, source: int, target: int, chain: Chain, length: int, now: float
    ) -> Copy:
        return copy(self, turn, source, target, chain, max(1, length - 1), now)

    patcher.setattr(Ring, "copy", short)


@mutation("another salt matches")
def _(patcher: pytest.MonkeyPatch) -> None:
    place = Ledger.place

    def anyones(self: Ledger, wanted: Wanted, now: float) -> Placement | None:
        roots = [wanted.root, *(each.chain.root for each in self.slots if each.chain is not None)]
        found = [place(self, replace(wanted, root=root), now) for root in roots]
        placed = [each for each in found if each is not None]
        return max(placed, key=lambda each: each.matched, default=None)

    patcher.setattr(Ledger, "place", anyones)


@mutation("a dropped parked prefix is still offered")
def _(patcher: pytest.MonkeyPatch) -> None:
    forget = Ledger.forget

    def keep(self: Ledger, index: int) -> None:
        if index < len(self.slots):
            forget(self, index)

    patcher.setattr(Ledger, "forget", keep)


@mutation("a restarted stage's rows are still claimed", "restarts")
def _(patcher: pytest.MonkeyPatch) -> None:
    def all_of_it(ledger: Ledger, held: Any, call: RollCall, reason: str) -> Any:
        return renewed(ledger, held, replace(call, claims=claims(held)), reason)

    patcher.setattr(coord.ring, "renewed", all_of_it)


@mutation("a stage confirms what it does not hold", "successors")
def _(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(SlotTable, "confirms", lambda *_: True)


# ---- the turn ------------------------------------------------------------------------------------


@mutation("a resume forgets what was committed", "restarts")
def _(patcher: pytest.MonkeyPatch) -> None:
    admit = Turn.admit

    def from_0(self: Turn, *args: Any) -> None:
        if self.chain is not None:
            self.chain.truncate(len(self.submit.prompt))
        admit(self, *args)

    patcher.setattr(Turn, "admit", from_0)


@mutation("a resume repeats the last token", "restarts")
def _(patcher: pytest.MonkeyPatch) -> None:
    admit = Turn.admit

    def twice(self: Turn, *args: Any) -> None:
        if self.chain is not None and self.committed:
            self.chain.extend(self.chain.tokens(len(self.chain) - 1))
            self.known += 1
        admit(self, *args)

    patcher.setattr(Turn, "admit", twice)


@mutation("a resume gets a new budget", "restarts")
def _(patcher: pytest.MonkeyPatch) -> None:
    admit = Turn.admit

    def again(self: Turn, *args: Any) -> None:
        self.budget += self.committed
        admit(self, *args)

    patcher.setattr(Turn, "admit", again)


def segments(patcher: pytest.MonkeyPatch, change: Callable[[Turn, Segment], Segment]) -> None:
    following = Turn.next_segment

    def changed(self: Turn, limit: int) -> Segment | None:
        segment = following(self, limit)
        return None if segment is None else change(self, segment)

    patcher.setattr(Turn, "next_segment", changed)


@mutation("one verdict too many is wanted")
def _(patcher: pytest.MonkeyPatch) -> None:
    segments(patcher, lambda _, s: replace(s, want=min(s.want + 1, len(s.tokens))))


@mutation("no verdict is wanted of a last chunk")
def _(patcher: pytest.MonkeyPatch) -> None:
    segments(patcher, lambda _, s: replace(s, want=0) if s.kind is Kind.PREFILL else s)


@mutation("the parent hash is one position behind")
def _(patcher: pytest.MonkeyPatch) -> None:
    def behind(turn: Turn, segment: Segment) -> Segment:
        assert turn.chain is not None
        return replace(segment, parent_hash=turn.chain.hash_before(max(0, segment.start - 1)))

    segments(patcher, behind)


@mutation("a stop token goes unnoticed")
def _(patcher: pytest.MonkeyPatch) -> None:
    def deaf(self: Turn, token: int) -> str | None:
        assert self.chain is not None
        self.chain.extend((token,))
        return "length" if self.committed >= self.budget else None

    patcher.setattr(Turn, "commit", deaf)


# ---- drafts --------------------------------------------------------------------------------------


@mutation("every draft is accepted")
def _(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(coord.scheduler, "accepted", lambda drafts, tokens: len(tokens) - 1)


@mutation("what was sent behind a wrong draft is believed")
def _(patcher: pytest.MonkeyPatch) -> None:
    void = Turn.void

    def credulous(self: Turn) -> None:
        guess = self.guess
        void(self)
        self.guess = guess

    patcher.setattr(Turn, "void", credulous)


@mutation("rejected drafts stay resident")
def _(patcher: pytest.MonkeyPatch) -> None:
    settled, extend = Scheduler._settled, Ledger.extend

    def all_of_it(
        self: Scheduler, ring: Ring, turn: Turn, segment: Segment, *rest: Any
    ) -> str | None:
        assert turn.chain is not None
        sent = turn.chain.clone()
        reason = settled(self, ring, turn, segment, *rest)
        ring.ledger.forget(segment.slot)
        extend(ring.ledger, segment.slot, sent, segment.end)
        return reason

    patcher.setattr(Scheduler, "_settled", all_of_it)


@mutation("drafts run past the end of the turn")
def _(patcher: pytest.MonkeyPatch) -> None:
    speculate = Turn.speculate

    def further(self: Turn, count: int) -> int:
        self.budget += 3
        found = speculate(self, count)
        self.budget -= 3
        return found

    patcher.setattr(Turn, "speculate", further)


# ---- the scheduler -------------------------------------------------------------------------------


@mutation("a refused turn goes on where it was", "lies")
def _(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(Scheduler, "_refused", lambda self, ring, turn: None)


@mutation("a cancelled turn frees its slot at once")
def _(patcher: pytest.MonkeyPatch) -> None:
    drain = Scheduler._drain

    def now_already(self: Scheduler, ring: Ring, turn: Turn, now: float, actions: Any) -> None:
        flying, turn.in_flight = turn.in_flight, 0
        drain(self, ring, turn, now, actions)
        turn.in_flight = flying

    patcher.setattr(Scheduler, "_drain", now_already)


@mutation("an answer settles another frame", "restarts")
def _(patcher: pytest.MonkeyPatch) -> None:
    def oldest(self: Ring, epoch: int, seq: int, kind: Any) -> InFlight | None:
        for number, record in self.in_flight.items():
            if isinstance(record.frame, kind):
                return self.in_flight.pop(number)
        return None

    patcher.setattr(Ring, "settle", oldest)


@mutation("an answer's epoch is ignored", "")  # numbers start again with a coordinator
def _(patcher: pytest.MonkeyPatch) -> None:
    settle = Ring.settle

    def any_epoch(self: Ring, epoch: int, seq: int, kind: Any) -> InFlight | None:
        return settle(self, self.epoch, seq, kind)

    patcher.setattr(Ring, "settle", any_epoch)


@mutation("lost verdicts go unnoticed", "gaps")
def _(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(Scheduler, "_gap", lambda self, gap, now: None)


# ---- the stage -----------------------------------------------------------------------------------


@mutation("a stage refuses nothing", "lies")
def _(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(SlotTable, "refuses", lambda self, segment: None)


@mutation("a stage takes foreign content", "lies")
def _(patcher: pytest.MonkeyPatch) -> None:
    def only_length(self: SlotTable, slot: int, length: int, digest: bytes) -> Any:
        return None if length <= len(self._chain(slot)) else ("gap", "too short")

    patcher.setattr(SlotTable, "_holds", only_length)


@mutation("a copy is not checked", "lies")
def _(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(SlotTable, "refuses_copy", lambda self, copy: None)


@mutation("a stage does not truncate at start")
def _(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(SlotTable, "begin", lambda self, segment: None)


@mutation("rows behind a rewrite are still claimed")
def _(patcher: pytest.MonkeyPatch) -> None:
    begin, finish = SlotTable.begin, SlotTable.finish
    tails: dict[int, tuple[int, ...]] = {}

    def remember(self: SlotTable, segment: Segment) -> None:
        tails[segment.slot] = self.tokens(segment.slot)[segment.end :]
        begin(self, segment)

    def claim(self: SlotTable, segment: Segment) -> None:
        finish(self, segment)
        self._chains[segment.slot].extend(tails[segment.slot])

    patcher.setattr(SlotTable, "begin", remember)
    patcher.setattr(SlotTable, "finish", claim)


@mutation("a copy claims all of its source's rows")
def _(patcher: pytest.MonkeyPatch) -> None:
    copy = SlotTable.copy

    def whole(self: SlotTable, source: int, target: int, length: int) -> None:
        copy(self, source, target, len(self._chain(source)))

    patcher.setattr(SlotTable, "copy", whole)


@mutation("kept segments get the wrong activations", "lies")
def _(patcher: pytest.MonkeyPatch) -> None:
    def packed(run: Run, rows: tuple[tuple[int, int], ...] | None, _: object) -> Forward:
        if rows is None:
            return Forward(run, None)
        at, out = 0, []
        for start, end in rows:
            out.append((at, at + end - start))
            at += end - start
        return Forward(run, tuple(out))

    patcher.setattr(pipeline.stage, "Forward", packed)


@mutation("no refusal is told", "lies")
def _(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(Stage, "_reject", lambda self, *args: pipeline.stage.Send(_PING))


@mutation("a restarted stage works without a roll call", "restarts")
def _(patcher: pytest.MonkeyPatch) -> None:
    take = Stage._take

    def eager(self: Stage, frame: Any, *rest: Any) -> None:
        if self.epoch is None and isinstance(frame, (Run, Copy, Free)):
            self.epoch = frame.epoch
        take(self, frame, *rest)

    patcher.setattr(Stage, "_take", eager)


@mutation("a stage does not tell of lost frames", "gaps")
def _(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(Stage, "_lost", lambda self, detail: pipeline.stage.Send(_PING))


@mutation("a roll call leaves unknown parked rows", "gaps")
def _(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(SlotTable, "parked_beside", lambda self, known: [])


_PING = Ping("r", 0, 0)


@mutation("a measurement's trial writes over rows that are held", "")
def _(patcher: pytest.MonkeyPatch) -> None:
    survey = pipeline.stage.Survey

    def early(asked: Measure, slot: int, start: int) -> Any:
        return survey(asked, slot, max(0, start - 1))

    patcher.setattr(pipeline.stage, "Survey", early)


@mutation("a measurement meets a stage twice", "")
def _(patcher: pytest.MonkeyPatch) -> None:
    handle = Stage.handle

    def twice(self: Stage, frame: Any, now: float) -> Any:
        if isinstance(frame, Measured):
            frame = replace(frame, machines=(*frame.machines, frame.machines[-1]))
        return handle(self, frame, now)

    patcher.setattr(Stage, "handle", twice)


@mutation("a measurement goes no further than the head", "")
def _(patcher: pytest.MonkeyPatch) -> None:
    measure = Stage._measure

    def lost(self: Stage, frame: Measure, arrived: float, actions: list[Any]) -> None:
        if not frame.machines and not frame.gaps_ns and self.info.head:
            measure(self, frame, arrived, actions)

    patcher.setattr(Stage, "_measure", lost)


@mutation("a new turn is refused as soon as a ring is lost", "restarts")
def _(patcher: pytest.MonkeyPatch) -> None:
    lose = Scheduler._lose

    def forgetful(self: Scheduler, ring: Ring, detail: str, now: float) -> None:
        lose(self, ring, detail, now)
        self._lost_at = -inf

    patcher.setattr(Scheduler, "_lose", forgetful)


@mutation("a spare ring serves beside the others", "")
def _(patcher: pytest.MonkeyPatch) -> None:
    def all_of_them(rings: Any) -> list[Ring]:
        return [each for each in rings.values() if each.phase is READY]

    patcher.setattr(coord.admission, "_serving", all_of_them)

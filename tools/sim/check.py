"""Owns what must hold of a simulated world, judged from outside the cores as events happen.

Serial truth, no token lost or repeated, one end per turn, residency to the byte, true claims at
rest, bounded memory. Knows frames and actions, and computes hashes and tokens on its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, NoReturn

from coord.actions import Admitted, Draft, Failed, Finished, Tokens
from coord.ledger import GONE_TOKENS, MAX_PARKED
from coord.ring import MAX_WINDOW, PROBE_TOKENS
from coord.ring import Phase as RingPhase
from coord.scheduler import Scheduler
from coord.turn import Phase
from pipeline.model import TOY_FINGERPRINT
from pipeline.stage import Action, Forward, Send
from tools.sim.oracle import Oracle, Text
from tools.sim.script import Crash, Damage, Gap, Pause, Restart, Script, Stall
from transport.frame import (
    Copy,
    Frame,
    Free,
    Heartbeat,
    LinkGap,
    Refusal,
    Reject,
    Run,
    Segment,
    Submit,
)

if TYPE_CHECKING:
    from tools.sim.stage import StageProcess

EVERY = 10  # frames of one core between two checks of its invariants
SELDOM = 50  # and between two looks at what it keeps in memory
DISTURBING = (Stall, Crash, Gap, Pause, Restart)  # these may cost a ring, for a while


class ViolationError(AssertionError):
    """Something that must hold does not. name: which property, the same for each case of it."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name
        self.detail = detail


def violated(name: str, detail: object) -> NoReturn:
    """Raise the ViolationError."""
    raise ViolationError(name, str(detail))


class Named:
    """A text under one salt, sent by the coordinator; and those one token longer."""

    __slots__ = ("after", "digest", "text")

    def __init__(self, digest: bytes, text: Text) -> None:
        self.digest = digest
        self.text = text
        self.after: dict[int, Named] = {}


@dataclass(slots=True)
class Told:
    """One turn as its client sees it, beside what it should see."""

    submit: Submit
    truth: list[int]
    further: list[int]  # the truth and what serial decoding would say next
    got: list[int] = field(default_factory=list)
    admitted: list[Admitted] = field(default_factory=list)
    finished: str | None = None
    failed: Failed | None = None
    cancelled: bool = False
    cut: bool = False  # the coordinator died
    place: tuple[str, int] | None = None  # ring and epoch of the last admission
    refused: bool = False  # by a stage, since then
    drafted: int = 0  # tokens that the draft model was told

    @property
    def over(self) -> bool:
        """Nothing more may come."""
        return self.finished is not None or self.failed is not None or self.cut


class Checks:
    """All checkers of one world."""

    def __init__(self, script: Script, oracle: Oracle) -> None:
        self.frames = 0  # that reached a core
        self._oracle = oracle
        entries = script.entries
        self._damaged = any(isinstance(entry, Damage) for entry in entries)
        self.disturbed = any(isinstance(entry, DISTURBING) for entry in entries)
        self._names: dict[bytes, Named] = {}  # hash of a salted prefix -> what it is the hash of
        self._roots: dict[bytes, bytes] = {}
        self._said: dict[bytes, set[Text]] = {}  # under each root, every prefix of a reply
        self.turns: dict[int, Told] = {}  # of the present coordinator
        self.followed = False  # the world has healed: no failure is fair any more

    # ---- what clients see ----

    def submitted(self, submit: Submit, limit: int) -> Told:
        """A turn begins; limit: max_model_len."""
        budget = min(submit.budget, limit - len(submit.prompt))
        further = self._oracle.decode(
            submit.prompt, budget + 4, submit.stops, submit.sampling, beyond=True
        )
        ends = [at + 1 for at, token in enumerate(further) if token in submit.stops]
        truth = further[: min([budget, *ends])]
        told = self.turns[submit.turn] = Told(submit, truth, further)
        return told

    def heard(self, action: Admitted | Tokens | Finished | Failed, epoch: int) -> None:
        """The coordinator says something to a client; epoch: of the ring that it is about."""
        told = self.turns.get(action.turn)
        if told is None:
            violated("one end", f"{action} of no turn")
        if told.over:
            violated("one end", f"{action} after the end of its turn")
        match action:
            case Admitted():
                self._admitted(told, action, (action.ring, epoch))
            case Tokens():
                self._tokens(told, action)
            case Finished():
                self._finished(told, action)
            case Failed():
                told.failed = action
                self._say(told)
                self._failed(action)

    def _admitted(self, told: Told, action: Admitted, place: tuple[str, int]) -> None:
        told.admitted.append(action)
        submit = told.submit
        known = (*submit.prompt, *told.got)
        if told.place == place and not told.refused:
            violated("needless start", f"{action}: its ring was not lost, and no stage refused")
        told.place, told.refused = place, False
        if action.matched >= len(known):
            violated("clamp", f"{action}: all of {len(known)} tokens are to be reused")
        if action.matched and not submit.reuse and not action.resumed:
            violated("reuse off", action)
        if action.matched:
            named: Named | None = self._names[self._root(submit.salt)]
            for token in known[: action.matched]:
                named = named.after.get(token) if named is not None else None
            if named is None:
                violated("salt", f"{action}: its tenant never sent these rows")

    def _tokens(self, told: Told, action: Tokens) -> None:
        at = len(told.got)
        told.got += action.tokens
        wanted = told.truth[at : len(told.got)]
        if list(action.tokens) != wanted:
            violated(
                "serial truth", f"turn {action.turn} got {action.tokens} at {at}, not {wanted}"
            )
        if action.logprobs and len(action.logprobs) != len(action.tokens):
            violated("logprobs", action)

    def _finished(self, told: Told, action: Finished) -> None:
        told.finished = action.reason
        self._say(told)
        if action.reason == "cancelled":
            if not told.cancelled:
                violated("one end", f"nobody cancelled turn {action.turn}")
            return
        if told.got != told.truth:
            violated("tokens lost", f"turn {action.turn} ends with {told.got}, not {told.truth}")
        stopped = told.truth[-1] in told.submit.stops
        if action.reason != ("stop" if stopped else "length"):
            violated("finish reason", action)

    def _failed(self, action: Failed) -> None:
        fair = {
            "not_ready": self.disturbed,
            "ring_lost": self.disturbed,
            "rows_refused": self._damaged,
        }
        if self.followed or not fair.get(action.code, False):
            violated("unfair failure", action)

    def _say(self, told: Told) -> None:
        """A turn is over: this much of it may stay resident."""
        said = self._said.setdefault(self._root(told.submit.salt), set())
        text = self._oracle.root
        for token in (*told.submit.prompt, *told.got):
            text = text.after.get(token) or self._oracle.step(text, token)
            said.add(text)

    def asked(self, draft: Draft) -> Told:
        """The draft model is asked: it must have been told each token once."""
        told = self.turns[draft.turn]
        known = (*told.submit.prompt, *told.further)[draft.start : draft.known]
        if draft.start != told.drafted or draft.tokens != known:
            violated("draft request", f"{draft}, it knows {told.drafted} tokens")
        told.drafted = draft.known
        return told

    def restarted(self) -> None:
        """The coordinator died: its turns end for their clients."""
        for told in self.turns.values():
            told.cut = True
            self._say(told)
        self.turns = {}

    # ---- residency ----

    def _root(self, salt: bytes) -> bytes:
        root = self._roots.get(salt)
        if root is None:
            lengths = [len(part).to_bytes(8, "little") for part in (TOY_FINGERPRINT, salt)]
            data = lengths[0] + TOY_FINGERPRINT + lengths[1] + salt
            root = self._roots[salt] = blake2b(data, digest_size=16).digest()
            self._names[root] = Named(root, self._oracle.root)
        return root

    def sent(self, run: Run) -> None:
        """The coordinator sends rows: from now on their prefixes have names."""
        names, step = self._names, self._oracle.step
        for segment in run.segments:
            if not segment.start:
                self._root(segment.salt)
            named = names.get(segment.parent_hash)
            if named is None:
                continue  # a lie, or a bug: no stage may run it
            for token in segment.tokens:
                longer = named.after.get(token)
                if longer is None:
                    digest = _extend(named.digest, token)
                    longer = Named(digest, step(named.text, token))
                    names[digest] = named.after[token] = longer
                named = longer

    def reads(self, stage: StageProcess, run: Run) -> None:
        """A stage runs a frame: what is in its buffers is what each segment names."""
        for segment in run.segments:
            named = self._names.get(segment.parent_hash)
            if named is None:
                violated("residency", f"{stage.name} runs {_brief(segment)} of an unknown prefix")
            if segment.start and not self._holds(stage, segment.slot, segment.start, named.text):
                violated("residency", f"{stage.name} holds other rows before {_brief(segment)}")

    def _holds(self, stage: StageProcess, number: int, length: int, text: Text) -> bool:
        first, last = stage.model.info.layers
        buffers = stage.model.buffers.get(number)
        if buffers is None:
            return False
        read = [buffer.read(length) for buffer in buffers]
        return read == list(text.layers[first:last])

    # ---- the coordinator's claims ----

    def refused(self, reject: Reject, scheduler: Scheduler) -> None:
        """A refusal has come: only what was damaged, or is re-forming, is refused."""
        if reject.turn in self.turns:
            self.turns[reject.turn].refused = True
        ring = scheduler.rings[reject.ring]
        waited_for = reject.epoch == ring.epoch and reject.seq in ring.in_flight
        rows = reject.code not in (Refusal.EPOCH, Refusal.LINK)
        if not self._damaged and (not self.disturbed or (rows and waited_for)):
            violated("true claims", f"refused: {reject}")

    def at_rest(self, scheduler: Scheduler, stages: dict[str, list[StageProcess]]) -> None:
        """Nothing is in flight: what the ledgers claim is there, and nothing else is kept."""
        probe = Submit(0, PROBE_TOKENS, 1)
        self._say(Told(probe, [], []))
        for ring in scheduler.rings.values():
            ledger = ring.ledger
            for stage in stages[ring.name]:
                self._honest(stage)
            numbers = [*range(len(ledger.slots)), *ledger.parked]
            for stage in stages[ring.name]:
                held = sorted(stage.model.buffers)
                leaks = held != sorted(numbers)
                if self._damaged:
                    leaks = any(number not in numbers for number in held)
                if leaks:
                    violated("parked rows leak", f"{stage.name} has {held}, known are {numbers}")
            for number in numbers:
                chain = ledger.holding(number).chain
                if chain is not None:
                    self._claim(stages[ring.name], number, chain.tokens(), chain.root)

    def _claim(
        self, stages: Iterable[StageProcess], number: int, tokens: tuple[int, ...], root: bytes
    ) -> None:
        if root not in self._names:
            violated("true claims", f"slot {number} is claimed under an unknown salt")
        text = self._oracle.find(tokens)
        if text not in self._said[root]:
            violated("true claims", f"slot {number} is claimed to hold {tokens}: nobody said that")
        for stage in stages:
            said = stage.core.slots.tokens(number)[: len(tokens)] == tokens
            if not said and not self._damaged:
                violated("true claims", f"{stage.name} does not hold {tokens} as {number}")

    def _honest(self, stage: StageProcess) -> None:
        """What a stage says that it holds is in its buffers."""
        for number in stage.model.buffers:
            tokens = stage.core.slots.tokens(number)
            if tokens and not self._holds(stage, number, len(tokens), self._oracle.find(tokens)):
                violated("residency", f"{stage.name} says that {number} holds {tokens}")

    # ---- nothing is lost without a word ----

    def answered(self, stage: StageProcess, frame: Frame, actions: Sequence[Action]) -> None:
        """An idle stage has taken a frame: it is passed on, run, or refused, each part of it."""
        if len(actions) == 1 and isinstance(actions[0], Forward) and actions[0].rows is None:
            self._called(stage, actions[0].run)
            return
        sent = [action.frame for action in actions if isinstance(action, Send)]
        rejects = [each for each in sent if isinstance(each, Reject)]
        if isinstance(frame, LinkGap):
            if not rejects:
                violated("silence", f"{stage.name} does not tell of {frame}")
            return
        if not isinstance(frame, (Run, Copy, Free)):
            return
        epoch = stage.core.epoch
        if epoch is not None and frame.epoch < epoch:
            return  # of a coordinator, or a ring, that is no more
        runs = [action.run for action in actions if isinstance(action, Forward)]
        passed = [each for each in sent if not isinstance(each, (Reject, Heartbeat))]
        if isinstance(frame, Run):
            whole = any(each.turn is None for each in rejects)
            kept = sum([len(run.segments) for run in runs])
            if not whole and kept + len(rejects) != len(frame.segments):
                violated("silence", f"{stage.name} leaves out a part of {_run(frame)}")
            for run in runs:
                self._called(stage, run)
        if not runs and not passed and not rejects:
            violated("silence", f"{stage.name} does not answer {type(frame).__name__} {frame.seq}")

    def _called(self, stage: StageProcess, run: Run) -> None:
        if run.epoch != stage.called:
            violated("no roll call", f"{stage.name} runs {_run(run)}, knows {stage.called}")

    def gap(self, frame: LinkGap, scheduler: Scheduler) -> None:
        """Frames to the coordinator were lost: if they were a tail's, the roll must be called."""
        for ring in scheduler.rings.values():
            tail = f"{ring.name}/{ring.spec.stages[-1].name}"
            if frame.link == tail and ring.phase in (RingPhase.READY, RingPhase.PROBING):
                violated("silence", f"ring {ring.name} goes on after {frame}")

    # ---- bounds ----

    def stage(self, stage: StageProcess) -> None:
        """A stage's memory is bounded."""
        limits = stage.shape.limits
        most = MAX_WINDOW + 3 * limits.slots + MAX_PARKED + 8
        if len(stage.core._waiting) > most or len(stage.queue) > 4 * most:
            violated("bounded memory", f"{len(stage.queue)} frames wait at {stage.name}")
        parked = [buffers[0] for number, buffers in stage.model.buffers.items()]
        rows = sum([len(buffer.rows) for buffer in parked[limits.slots :]])
        if rows * stage.model.info.row_bytes > limits.park_bytes:
            violated("bounded memory", f"{rows} rows are parked at {stage.name}")
        longest = max([len(buffer.rows) for buffer in parked])
        if longest > limits.max_model_len:
            violated("bounded memory", f"a slot of {stage.name} has {longest} rows")

    def coordinator(self, scheduler: Scheduler) -> None:
        """The coordinator's memory is bounded."""
        for ring in scheduler.rings.values():
            gone, ledger = ring.ledger.gone, ring.ledger
            if gone.tokens > GONE_TOKENS or len(ledger.parked) > MAX_PARKED:
                violated("bounded memory", f"ring {ring.name}: {len(ledger.parked)} parked")
            if len(ring.heartbeats) > len(ring.spec.stages):
                violated("bounded memory", f"ring {ring.name} heeds {len(ring.heartbeats)} stages")
        for number, turn in scheduler.turns.items():
            if self.turns[number].over and turn.phase is not Phase.DRAINING:
                violated("turns leak", f"turn {number} is {turn.phase.value} without a client")


def _extend(digest: bytes, token: int) -> bytes:
    return blake2b(digest + token.to_bytes(4, "little"), digest_size=16).digest()


def _run(run: Run) -> str:
    return f"frame {run.seq} of epoch {run.epoch}"


def _brief(segment: Segment) -> str:
    return f"turn {segment.turn}'s rows [{segment.start}, {segment.end}) of slot {segment.slot}"

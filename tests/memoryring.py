"""A whole ring in memory: the real scheduler and stage cores over ToyModels, one event at a time.

Links are FIFO queues; which link (or which finished forward) comes next is the caller's choice, so
that a test can play any interleaving that a network could.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Self

from coord.actions import Action, Admitted, Draft, Failed, Finished, Send, Tokens
from coord.draft import Drafter, LookupDrafter
from coord.scheduler import Scheduler
from pipeline.forward import perform_forward
from pipeline.model import ToyModel
from pipeline.stage import CopyRows, DropRows, Forward, Stage
from pipeline.stage import Send as StageSend
from transport.chain import root_hash
from transport.codec import decode, encode
from transport.config import Limits
from transport.config import Ring as RingSpec
from transport.config import Stage as StageSpec
from transport.frame import (
    GREEDY,
    Cancel,
    Copy,
    Envelope,
    Frame,
    Free,
    Heartbeat,
    Kind,
    LinkGap,
    Refusal,
    Reject,
    Remembered,
    Run,
    Sampling,
    Segment,
    StageState,
    Submit,
    Tick,
    Verdict,
    Wire,
)

VOCABULARY = 64
LAYERS = 6


def limits(**changes: float | None) -> Limits:
    values: dict[str, float | None] = {
        "max_model_len": 256,
        "chunk_tokens": 16,
        "slots": 3,
        **changes,
    }
    return Limits(**values)  # type: ignore[arg-type]


def toy(
    layers: tuple[int, int], slots: int = 3, capacity: int = 256, total: int = LAYERS
) -> ToyModel:
    return ToyModel(layers, total, slots=slots, capacity=capacity, vocabulary=VOCABULARY)


def ring_spec(name: str, stages: int, total: int = LAYERS) -> RingSpec:
    """A ring of stages NAME0, NAME1, ... (s0, s1, ... for the ring "r") over `total` layers."""
    cuts = [total * i // stages for i in range(stages + 1)]
    prefix = "s" if name == "r" else name
    names = [f"{prefix}{i}" for i in range(stages)]
    return RingSpec(
        name=name,
        verdicts=f"tcp://{name}:1",
        stages=tuple(
            StageSpec(name=each, address=f"tcp://{each}:1", layers=(cuts[i], cuts[i + 1]))
            for i, each in enumerate(names)
        ),
    )


def serial(
    prompt: Sequence[int],
    count: int,
    stops: Sequence[int] = (),
    sampling: Sampling = GREEDY,
    *,
    beyond: bool = False,
) -> tuple[int, ...]:
    """The truth: one model, one slot, one token at a time. beyond: go on behind a stop token."""
    model = toy((0, LAYERS), slots=1)
    tokens = list(prompt)
    out: list[int] = []
    at = 0
    shaping = sampling.shaping
    since = None
    if shaping is not None:
        ends = tuple(stops) if shaping.min_tokens else ()
        shaping = replace(shaping, prompt=len(prompt), ends=ends)
        sampling, since = replace(sampling, shaping=shaping), shaping.since
    while len(out) < count:
        segment = Segment(
            1, 0, at, tuple(tokens[at : at + 1]), Kind.VERIFY, b"\0" * 16, 1, sampling
        )
        before = () if since is None else tuple(tokens[since:at])
        picked = model.forward([segment], None, [before]).results[0].tokens[0]
        at += 1
        if at == len(tokens):
            out.append(picked)
            tokens.append(picked)
            if picked in stops and not beyond:
                break
    return tuple(out)


@lru_cache(maxsize=4096)
def rows_of(tokens: tuple[int, ...]) -> tuple[bytes, ...]:
    """What a slot that holds these tokens has in its buffers, one item per layer."""
    model = toy((0, LAYERS), slots=1)
    if tokens:
        model.forward([Segment(1, 0, 0, tokens, Kind.PREFILL, b"\0" * 16, 0)], None)
    return tuple(model.rows(layer, 0, len(tokens)) for layer in range(LAYERS))


@dataclass
class Reply:
    """What a client saw."""

    admitted: list[Admitted] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finished: str | None = None
    failed: Failed | None = None

    @property
    def over(self) -> bool:
        return self.finished is not None or self.failed is not None


class MemoryRing:
    """One ring of `stages` stages. `pump` runs until nothing is left to do.

    With a `scheduler` of several rings, `tell` is whoever performs its actions (MemoryWorld);
    `layers` fewer than the default make a world faster, and so does `codec` off, where frames go
    from core to core as they are.
    """

    def __init__(
        self,
        stages: int = 3,
        *,
        bounds: Limits | None = None,
        slots: int = 3,
        tamper: Callable[[Frame], Frame] | None = None,
        drafter: Callable[[], Drafter] | None = LookupDrafter,
        name: str = "r",
        layers: int = LAYERS,
        scheduler: Scheduler | None = None,
        tell: Callable[[Frame], None] | None = None,
        codec: bool = True,
    ) -> None:
        self.limits = bounds or limits(slots=slots)
        self._spec = spec = ring_spec(name, stages, layers)
        self._drafter = drafter
        self.name = name
        self.names = [stage.name for stage in spec.stages]
        self.layers = [stage.layers for stage in spec.stages]
        self.slots = slots
        self.scheduler = scheduler or Scheduler((spec,), self.limits, drafter=drafter)
        self.links: list[deque[Frame]] = [deque() for _ in range(stages + 1)]
        self.forwards: list[Forward | None] = [None] * stages
        self.incarnations = list(range(1, stages + 1))
        self.models = [self._model(i) for i in range(stages)]
        self.stages = [self._stage(i) for i in range(stages)]
        self.replies: dict[int, Reply] = {}
        self.sent: list[Frame] = []
        self.answers: deque[Frame] = deque(maxlen=20)  # the last ones that settled a frame
        self.rejects: list[Reject] = []
        self.drafts: list[Draft] = []  # what was asked of the draft model
        self.believed: list[Reject] = []  # those of rows that the ledger was wrong about
        self.tamper = tamper or (lambda frame: frame)
        self.now = 0.0
        self._tell = tell
        self._codec = codec
        self._turn = 0

    def _model(self, index: int) -> ToyModel:
        total = self.layers[-1][1]
        return toy(self.layers[index], self.slots, self.limits.max_model_len, total)

    def _stage(self, index: int) -> Stage:
        info, park = self.models[index].info, self.limits.park_bytes
        return Stage(self.name, self.names[index], self.incarnations[index], info, park)

    # ---- clients -------------------------------------------------------------------------------

    def form(self) -> Self:
        for name, incarnation in zip(self.names, self.incarnations, strict=True):
            self.beat(name, incarnation)
        self.pump()
        return self

    def beat(self, name: str, incarnation: int) -> None:
        self.tell(Heartbeat(self.name, name, incarnation, StageState.READY, 1.0, "", 1, 1))

    def submit(
        self,
        prompt: Sequence[int],
        budget: int,
        stops: Sequence[int] = (),
        *,
        reuse: bool = True,
        salt: bytes = b"",
        sampling: Sampling = GREEDY,
    ) -> int:
        self._turn += 1
        self.replies[self._turn] = Reply()
        self.tell(Submit(self._turn, tuple(prompt), budget, tuple(stops), sampling, salt, reuse))
        return self._turn

    def ask(self, prompt: Sequence[int], budget: int, **options: object) -> Reply:
        turn = self.submit(prompt, budget, **options)  # type: ignore[arg-type]
        self.pump()
        return self.replies[turn]

    def cancel(self, turn: int) -> None:
        self.tell(Cancel(turn))

    def root(self, salt: bytes = b"") -> bytes:
        return root_hash(self.models[0].info.fingerprint, salt)

    # ---- events --------------------------------------------------------------------------------

    def tell(self, frame: Frame) -> None:
        """The coordinator's core takes a frame."""
        if isinstance(frame, (Verdict, Copy, Free)):
            self.answers.append(frame)
        if isinstance(frame, Reject):
            self.rejects.append(frame)
            ring = self.scheduler.rings[self.name]
            waited_for = frame.epoch == ring.epoch and frame.seq in ring.in_flight
            if waited_for and frame.code not in (Refusal.EPOCH, Refusal.LINK):
                self.believed.append(frame)
        if self._tell is not None:
            self._tell(frame)
            return
        for action in self.scheduler.handle(frame, self.now):
            self._perform(action)
        self.scheduler.check()

    def _perform(self, action: Action) -> None:
        match action:
            case Send():
                self.send(action.frame)
            case Admitted():
                self.replies[action.turn].admitted.append(action)
            case Tokens():
                assert not self.replies[action.turn].over
                self.replies[action.turn].tokens.extend(action.tokens)
            case Finished():
                assert not self.replies[action.turn].over
                self.replies[action.turn].finished = action.reason
            case Failed():
                assert not self.replies[action.turn].over
                self.replies[action.turn].failed = action
            case Draft():
                self.drafts.append(action)

    def send(self, wire: Wire) -> None:
        """A frame of the coordinator goes on the first link."""
        frame = self.tamper(wire)
        self.sent.append(frame)
        self.links[0].append(frame)

    def choices(self) -> list[int]:
        """Events that can happen now: 2k = link k delivers, 2k + 1 = stage k's forward is done."""
        found = [2 * k for k, link in enumerate(self.links) if link]
        return found + [2 * k + 1 for k, forward in enumerate(self.forwards) if forward]

    def happen(self, choice: int) -> None:
        self.now += 1e-4
        index = choice // 2
        if choice % 2:
            forward = self.forwards[index]
            assert forward is not None
            self.forwards[index] = None
            self._stage_takes(index, perform_forward(self.models[index], forward))
            return
        frame = self.links[index].popleft()
        if self._codec:
            frame, _ = decode(encode(frame, Envelope("x", 1, 0)))
        if index == len(self.stages):
            self.tell(frame)
        else:
            self._stage_takes(index, frame)

    def _stage_takes(self, index: int, frame: Frame) -> None:
        stage = self.stages[index]
        for action in stage.handle(frame, self.now):
            match action:
                case StageSend():
                    self.links[index + 1].append(action.frame)
                case Forward():
                    assert self.forwards[index] is None
                    self.forwards[index] = action
                case CopyRows():
                    self.models[index].copy(action.source, action.target, action.length)
                case DropRows():
                    self.models[index].drop(action.parked)
        stage.check()

    def pump(self, choose: Callable[[list[int]], int] | None = None, most: int = 100_000) -> None:
        """Let everything that can happen happen; in order of the ring unless told otherwise."""
        for _ in range(most):
            options = self.choices()
            if not options:
                return
            self.happen(choose(options) if choose else options[0])
        raise AssertionError("the ring does not come to rest")

    # ---- faults --------------------------------------------------------------------------------

    def restart(self, index: int, *, told: bool = True) -> None:
        """Stage `index` dies with all it held and is started again; its heartbeat may be late."""
        self.links[index].clear()
        self.forwards[index] = None
        self.incarnations[index] += 100
        self.models[index] = self._model(index)
        self.stages[index] = self._stage(index)
        if told:
            self.beat(self.names[index], self.incarnations[index])

    def recollection(self, salts: Iterable[bytes]) -> list[Remembered]:
        """What the coordinator would write down of its ledger now."""
        print_ = self.models[0].info.fingerprint
        roots = {self.root(salt): salt for salt in salts}
        return [
            Remembered(
                self.name,
                number,
                print_,
                roots[each.chain.root],
                each.chain.tokens(),
                each.hint,
                each.proven,
                max(0.0, self.now - each.used),
            )
            for number, each in self.scheduler.rings[self.name].ledger.holdings().items()
            if each.chain is not None
        ]

    def succeed(self, remembered: Sequence[Remembered], first_epoch: int) -> None:
        """The coordinator dies; its successor is told what was remembered, and forms the ring."""
        assert self._tell is None
        for turn, reply in self.replies.items():
            if not reply.over:
                reply.failed = Failed(turn, 503, "shutting_down", "")
        bounds = self.limits
        self.scheduler = Scheduler(
            (self._spec,), bounds, first_epoch=first_epoch, drafter=self._drafter
        )
        for each in remembered:
            self.tell(each)
        self.form()

    def lose(self, link: int, count: int) -> None:
        """The next `count` frames on a link are lost in one run; its receiver sees the jump."""
        lost = min(count, len(self.links[link]))
        if lost:
            sender = "coordinator" if link == 0 else f"r/{self.names[link - 1]}"
            for _ in range(lost):
                self.links[link].popleft()
            self.links[link].appendleft(LinkGap(sender, 0, lost))

    # ---- audit ---------------------------------------------------------------------------------

    def audit(self) -> None:
        """Whatever a stage's chain says of a slot or parked prefix is what its rows really hold."""
        for model, stage in zip(self.models, self.stages, strict=True):
            first, last = model.info.layers
            for number in (*range(self.slots), *stage.slots._parked):
                held = stage.slots.tokens(number)
                for layer, truth in enumerate(rows_of(held)[first:last]):
                    mine = model.rows(layer, number, len(held))
                    assert mine == truth, (stage.name, number, first + layer)

    def confront(self) -> None:
        """At rest: what the ledger claims is there on every stage."""
        ledger = self.scheduler.rings["r"].ledger
        for number in (*range(len(ledger.slots)), *ledger.parked):
            chain = ledger.holding(number).chain
            claimed = () if chain is None else chain.tokens()
            for stage in self.stages:
                held = stage.slots.tokens(number)[: len(claimed)]
                assert held == claimed, (stage.name, number, len(claimed), len(held))

    def wait(self, seconds: float) -> None:
        """Time passes; all stages are alive."""
        self.now += seconds
        for name, incarnation in zip(self.names, self.incarnations, strict=True):
            self.beat(name, incarnation)
        self.tell(Tick())

    # ---- what went over the first link ---------------------------------------------------------

    def segments(self, turn: int) -> list[Segment]:
        return [
            segment
            for frame in self.sent
            if isinstance(frame, Run)
            for segment in frame.segments
            if segment.turn == turn
        ]

    def prefilled(self, turn: int) -> int:
        return sum(len(s.tokens) for s in self.segments(turn) if s.kind is Kind.PREFILL)

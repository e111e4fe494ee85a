"""Owns a live ring of real cores that is told whatever decodes, and what must hold all the while.

Two stages of toys and a scheduler, joined by queues of encoded messages behind real Inboxes, as the
daemons join them. Honest turns run beside the hostile frames, so that these meet every state. Held
after each event: both cores' check(); no row is computed behind a prefix that the stage has not
computed itself; whatever a core sends decodes. At the end the stages are started anew, and every
turn must end, and a last one with the right tokens.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from random import Random

from bench.fuzz.frames import Hints
from coord.actions import Action, Admitted, Draft, Failed, Finished, Send, Tokens
from coord.draft import LookupDrafter
from coord.ring import Phase
from coord.scheduler import Scheduler
from pipeline.forward import perform_forward
from pipeline.model import ToyModel
from pipeline.stage import Action as StageAction
from pipeline.stage import CopyRows, DropRows, Forward, Stage, Survey
from transport.chain import Chain, root_hash
from transport.config import Limits
from transport.config import Ring as RingSpec
from transport.config import Stage as StageSpec
from transport.frame import (
    Buffer,
    Frame,
    Heartbeat,
    Kind,
    Measured,
    Run,
    Segment,
    StageState,
    Submit,
    Tick,
    Wire,
)
from transport.numbering import Inbox, Outbox

LAYERS, SLOTS, CAPACITY, VOCABULARY = 4, 3, 128, 64
LIMITS = Limits(
    slots=SLOTS, max_model_len=CAPACITY, chunk_tokens=16, shared_chunk_tokens=8, queue_turns=16,
    frame_timeout_s=3.0, resume_s=10.0, park_bytes=4096,
)  # fmt: skip
SPEC = RingSpec(
    "r", "tcp://r:1",
    (StageSpec("s0", "tcp://s0:1", (0, 2)), StageSpec("s1", "tcp://s1:1", (2, 4))),
)  # fmt: skip
COORDINATOR = len(SPEC.stages)  # the index of its link
BUDGET = 12
MAX_TURNS = 8  # honest ones at a time
DRAIN_STEPS = 120  # of half a second: far more than every timeout together


class World:
    """counts: what the cores did, by name. Everything follows from `random`."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.hints = Hints()
        self.counts: Counter[str] = Counter()
        self.scheduler = Scheduler((SPEC,), LIMITS, drafter=LookupDrafter)
        self.ring = self.scheduler.rings["r"]
        self.inboxes = [Inbox(name, None) for name in ("r/s0", "r/s1", "r")]
        self.now = 1.0
        self._turn = 0
        self._live: dict[int, list[int]] = {}  # turn -> tokens
        self._ended: dict[int, list[int]] = {}
        self._life = 0  # the stages' incarnation
        self._links: list[deque[list[Buffer]]] = [deque() for _ in range(COORDINATOR + 1)]
        self._outboxes: list[Outbox] = []
        self._beats: list[Outbox] = []
        self.start()

    def start(self) -> None:
        """All stages begin a new life."""
        self._life = self.hints.life = self.random.getrandbits(63)
        self.models = [
            ToyModel(spec.layers, LAYERS, slots=SLOTS, capacity=CAPACITY, vocabulary=VOCABULARY)
            for spec in SPEC.stages
        ]
        self.stages = [
            Stage("r", spec.name, self._life, model.info, LIMITS.park_bytes)
            for spec, model in zip(SPEC.stages, self.models, strict=True)
        ]
        self._held: list[dict[int, Chain]] = [{} for _ in self.stages]  # what was really computed
        self._outboxes = [Outbox("r/coordinator", self._life, 1 << 30)]
        self._outboxes += [Outbox(f"r/{s.name}", self._life, 1 << 30) for s in SPEC.stages]
        self._beats = [Outbox(f"r/{s.name}/control", self._life, 1 << 30) for s in SPEC.stages]
        self.beat()

    # ---- events ----

    def hostile(self, parts: Sequence[Buffer]) -> None:
        """A message from nobody knows where, on any link."""
        self._receive(self.random.randrange(len(self.inboxes)), parts)

    def honest(self) -> None:
        """What goes on beside: some deliveries, now and then a heartbeat, a turn, or time."""
        draw = self.random.random()
        if draw < 0.10:
            self.submit()
        elif draw < 0.16:
            self.beat()
        elif draw < 0.18:
            self.now += self.random.choice((0.1, 1.0, 1.0, 4.0))
            self.beat()
            self._tell(Tick())
        most = 5
        if self.ring.phase is not Phase.READY:  # most of the time it should be
            most = 12
            if draw > 0.8:
                self.now += 1.0
                self.beat()
                self._tell(Tick())
        for _ in range(self.random.randrange(most) if draw < 0.6 else 0):
            if not self.deliver():
                return

    def submit(self, prompt: Sequence[int] | None = None) -> int | None:
        """A client's turn; None while enough of them run."""
        if prompt is None and len(self._live) >= MAX_TURNS:
            return None
        if prompt is None:
            stem = self.random.randrange(3)
            prompt = [stem] * self.random.randrange(1, 40) + [self.random.randrange(64)]
        self._turn += 1
        self._live[self._turn] = []
        self._tell(Submit(self._turn, tuple(prompt), BUDGET))
        return self._turn

    def beat(self) -> None:
        """Every stage is alive."""
        for spec, outbox in zip(SPEC.stages, self._beats, strict=True):
            frame = Heartbeat("r", spec.name, self._life, StageState.READY, 1.0, "", 1, 1)
            self._send(outbox, COORDINATOR, frame)

    def deliver(self) -> bool:
        """The next message of some link; False when all are empty."""
        filled = [index for index, link in enumerate(self._links) if link]
        if not filled:
            return False
        index = self.random.choice(filled)
        before = self.inboxes[index].counts.undecodable
        self._receive(index, self._links[index].popleft())
        assert self.inboxes[index].counts.undecodable == before, "a core sent what is no frame"
        return True

    def look(self) -> None:
        """Bring the hints up to date."""
        hints, ring, r = self.hints, self.ring, self.random
        hints.epoch, hints.turn = ring.epoch, self._turn
        hints.seq = max(ring.in_flight, default=1)
        hints.entries = ring.entries or hints.entries
        hints.fingerprint = self.models[0].info.fingerprint
        flying = [record.frame for record in ring.in_flight.values()]
        hints.runs = [frame for frame in flying if isinstance(frame, Run)]
        hints.digests = [root_hash(hints.fingerprint, b"")]
        for held in self._held:
            for chain in held.values():
                hints.rows = len(chain)
                hints.digests.append(chain.hash_before(r.randrange(len(chain) + 1)))
                hints.digests.append(chain.hash_before(len(chain)))

    def end(self) -> None:
        """The hostility is over: every turn must end, and the ring must serve rightly again."""
        self._audit()
        for stage in self.stages:
            self.counts["frames that a stage dropped"] += stage.dropped
        self.counts["answers to nothing"] += self.ring.stats.stale
        self.start()
        self._settle()
        assert not self._live, (self._live, self.ring.phase, self.ring.detail)
        prompt = [self.random.randrange(VOCABULARY) for _ in range(20)]
        turn = self.submit(prompt)
        assert turn is not None
        self._settle()
        truth = serial(prompt, BUDGET)
        assert self._ended.get(turn) == truth, (self._ended.get(turn), truth, self.ring.detail)
        for link in self.inboxes:
            for name in ("undecodable", "local", "duplicates", "stale", "gaps"):
                self.counts[f"inbox: {name}"] += getattr(link.counts, name)

    def _settle(self) -> None:
        for _ in range(DRAIN_STEPS):
            self.now += 0.5
            self.beat()
            self._tell(Tick())
            while self.deliver():
                pass
            if not self._live and self.ring.phase is Phase.READY:
                return

    # ---- the shells' part ----

    def _receive(self, index: int, parts: Sequence[Buffer]) -> None:
        self.now += 1e-5
        for frame, _ in self.inboxes[index].take(parts):
            if index == COORDINATOR:
                self._tell(frame)
            else:
                self._stage_takes(index, frame)

    def _send(self, outbox: Outbox, index: int, frame: Wire) -> None:
        self._links[index].append(outbox.pack(frame))
        outbox.sent()

    def _tell(self, frame: Frame) -> None:
        for action in self.scheduler.handle(frame, self.now):
            self._perform(action)
        self.scheduler.check()

    def _perform(self, action: Action) -> None:
        match action:
            case Send():
                self._send(self._outboxes[0], 0, action.frame)
            case Tokens():
                self._live[action.turn] += action.tokens
                assert len(self._live[action.turn]) <= BUDGET, action
            case Finished() | Failed():
                self._ended[action.turn] = self._live.pop(action.turn)
                ended = "failed: " + action.code if isinstance(action, Failed) else "finished"
                self.counts[f"turns {ended}"] += 1
            case Admitted():
                assert action.turn in self._live, action
            case Draft():
                raise AssertionError(action)

    def _stage_takes(self, index: int, frame: Frame) -> None:
        stage, model = self.stages[index], self.models[index]
        actions: list[StageAction] = stage.handle(frame, self.now)
        for action in actions:  # grows while it is walked, as in the daemon
            match action:
                case Forward():
                    self._prove(index, action)
                    actions += stage.handle(perform_forward(model, action), self.now)
                case CopyRows():
                    held = self._held[index]
                    chain = Chain(held[action.source].root)
                    chain.extend_from(held[action.source], action.length)
                    held[action.target] = chain
                    model.copy(action.source, action.target, action.length)
                    self.counts["copies"] += 1
                case DropRows():
                    self._held[index].pop(action.parked, None)
                    model.drop(action.parked)
                case Survey():
                    asked = action.asked
                    found = Measured(asked.number, asked.wide, asked.machines)
                    actions += stage.handle(found, self.now)
                    self.counts["surveys"] += 1
                case _:
                    self._send(self._outboxes[index + 1], index + 1, action.frame)
        stage.check()

    def _prove(self, index: int, forward: Forward) -> None:
        """Each segment stands behind rows that this stage has computed itself."""
        root = self.models[index].info.fingerprint
        for segment in forward.run.segments:
            held = self._held[index]
            chain = held.get(segment.slot)
            if segment.start == 0:
                assert segment.parent_hash == root_hash(root, segment.salt), segment
                chain = held[segment.slot] = Chain(segment.parent_hash)
            assert chain is not None, segment
            assert len(chain) >= segment.start, segment
            assert chain.hash_before(segment.start) == segment.parent_hash, segment
            chain.truncate(segment.start)
            chain.extend(segment.tokens)
            self.counts["rows proved and computed"] += len(segment.tokens)

    def _audit(self) -> None:
        """The head's rows are those of the tokens that its chains name."""
        stage, model = self.stages[0], self.models[0]
        for number in range(SLOTS):
            tokens = stage.slots.tokens(number)
            if not tokens:
                continue
            fresh = ToyModel(model.info.layers, LAYERS, slots=1, capacity=CAPACITY)
            fresh.forward([Segment(1, 0, 0, tokens, Kind.PREFILL, bytes(16), 0)], None)
            for layer in range(*model.info.layers):
                mine = model.rows(layer, number, len(tokens))
                assert mine == fresh.rows(layer, 0, len(tokens)), (number, layer)


def serial(prompt: Sequence[int], count: int) -> list[int]:
    """The truth: one toy that holds all layers, one token at a time."""
    model = ToyModel((0, LAYERS), LAYERS, slots=1, capacity=CAPACITY, vocabulary=VOCABULARY)
    tokens, at = list(prompt), 0
    while len(tokens) < len(prompt) + count:
        segment = Segment(1, 0, at, tuple(tokens[at:]), Kind.PREFILL, bytes(16), 1)
        at = len(tokens)
        tokens += model.forward([segment], None).results[0].tokens
    return tokens[len(prompt) :]

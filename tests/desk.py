"""The scheduler core alone on a desk: the test plays the ring and reads every action.

Knows no model: a verdict's tokens are what the test says they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from coord.actions import Action, Admitted, Send
from coord.draft import Drafter
from coord.ring import Phase, Ring
from coord.scheduler import Scheduler
from transport.chain import Chain, root_hash
from transport.config import Limits
from transport.config import Ring as RingSpec
from transport.config import Stage as StageSpec
from transport.frame import (
    Cancel,
    Claim,
    Frame,
    Heartbeat,
    Kind,
    Result,
    RollCall,
    Run,
    Segment,
    StageEntry,
    StageState,
    Submit,
    Tick,
    Verdict,
)

PRINT = b"model-1"
SLOTS = 2
LIMITS = Limits(
    slots=SLOTS,
    max_model_len=32,
    chunk_tokens=4,
    shared_chunk_tokens=4,
    queue_turns=2,
    lost_after_s=5.0,
    frame_timeout_s=30.0,
    resume_s=60.0,
)


def spec(stages: int = 2, name: str = "r") -> RingSpec:
    """Stages s0, s1, ... of two layers each."""
    return RingSpec(
        name=name,
        verdicts="tcp://c:1",
        stages=tuple(
            StageSpec(name=f"s{i}", address=f"tcp://s{i}:1", layers=(2 * i, 2 * i + 2))
            for i in range(stages)
        ),
    )


def entry(index: int, stages: int = 2, slots: int = SLOTS) -> StageEntry:
    layers = (2 * index, 2 * index + 2)
    return StageEntry(f"s{index}", 10 + index, layers, 2 * stages, PRINT, slots, 32, 64, "toy")


def segment(
    turn: int, slot: int, before: Sequence[int], tokens: Sequence[int], kind: Kind, want: int
) -> Segment:
    """What the scheduler must send: `tokens` behind the turn's tokens `before`."""
    parent = Chain(root_hash(PRINT, b""), before).hash_before(len(before))
    return Segment(turn, slot, len(before), tuple(tokens), kind, parent, want)


def prefill(
    turn: int, slot: int, before: Sequence[int], tokens: Sequence[int], want: int = 0
) -> Segment:
    return segment(turn, slot, before, tokens, Kind.PREFILL, want)


def verify(turn: int, slot: int, before: Sequence[int], token: int) -> Segment:
    return segment(turn, slot, before, (token,), Kind.VERIFY, 1)


class Desk:
    """One ring named "r" of two stages (or more), at time 100."""

    def __init__(
        self,
        stages: int = 2,
        limits: Limits = LIMITS,
        *,
        slots: int = SLOTS,
        vocabulary: int = 0,
        drafter: Callable[[], Drafter] | None = None,
    ) -> None:
        self.stages = stages
        self.slots = slots
        self.core = Scheduler((spec(stages),), limits, vocabulary=vocabulary, drafter=drafter)
        self.now = 100.0
        self.claimed: tuple[Claim, ...] = ()  # in the last roll call

    @property
    def ring(self) -> Ring:
        return self.core.rings["r"]

    def tell(self, frame: Frame, after: float = 0.0) -> list[Action]:
        """The core takes a frame, `after` seconds from the last one; all invariants hold.

        Why a prompt missed is the ledger's subject: Admitted comes without it.
        """
        self.now += after
        actions = self.core.handle(frame, self.now)
        self.core.check()
        for action in actions:
            if isinstance(action, Send) and isinstance(action.frame, RollCall):
                self.claimed = action.frame.claims
        return [replace(a, miss=None) if isinstance(a, Admitted) else a for a in actions]

    def tick(self, after: float = 0.0) -> list[Action]:
        return self.tell(Tick(), after)

    def beat(
        self,
        index: int,
        state: StageState = StageState.READY,
        incarnation: int | None = None,
        detail: str = "",
    ) -> list[Action]:
        number = 10 + index if incarnation is None else incarnation
        return self.tell(Heartbeat("r", f"s{index}", number, state, 1.0, detail, 1, 1))

    def beats(self) -> list[Action]:
        return [action for index in range(self.stages) for action in self.beat(index)]

    def wait(self, seconds: float) -> list[Action]:
        """Time passes in steps of a second; every stage is heard of."""
        actions: list[Action] = []
        while seconds > 0:
            actions += self.tick(min(seconds, 1.0))
            actions += self.beats()
            seconds -= 1.0
        return actions

    def entries(self) -> tuple[StageEntry, ...]:
        return tuple(entry(index, self.stages, self.slots) for index in range(self.stages))

    def answer(
        self, entries: Sequence[StageEntry] | None = None, claims: Sequence[Claim] | None = None
    ) -> list[Action]:
        """The roll call of the current epoch comes round.

        claims: what the stages confirm; by default all, or nothing where they are others.
        """
        found = self.entries() if entries is None else tuple(entries)
        if claims is None:
            same = entries is None or found == self.ring.entries
            claims = self.claimed if same else ()
        return self.tell(RollCall("r", self.ring.epoch, tuple(claims), found))

    def probe(self, actions: list[Action]) -> list[Action]:
        """The self-check's two frames go round; what the second verdict made."""
        for _ in range(2):
            (run,) = runs(actions)
            segment = run.segments[0]
            result = Result(0, segment.slot, segment.end - 1, (5,), (-0.5,))
            actions = self.tell(Verdict("r", run.epoch, run.seq, (result,), ()))
        return actions

    def form(self) -> Desk:
        self.beats()
        assert self.probe(self.answer()) == []
        assert self.ring.phase is Phase.READY
        return self

    def reform(self) -> list[Action]:
        """After a loss: the ring comes back with the same stages; what it does first."""
        if self.ring.phase is Phase.WAITING:
            self.tick(1.0)
        actions = self.probe(self.answer())
        assert self.ring.phase is Phase.READY
        return actions

    def submit(
        self, turn: int, prompt: Sequence[int], budget: int = 3, **more: object
    ) -> list[Action]:
        return self.tell(replace(Submit(turn, tuple(prompt), budget), **more))  # type: ignore[arg-type]

    def cancel(self, turn: int) -> list[Action]:
        return self.tell(Cancel(turn))

    def verdict(self, run: Run, *tokens: int, refused: Sequence[int] = ()) -> list[Action]:
        """The ring's answer: `tokens` in order for the segments that want one."""
        left = list(tokens)
        results = tuple(
            Result(s.turn, s.slot, s.end - s.want, (left.pop(0),) if s.want else ())
            for s in run.segments
            if s.turn not in refused
        )
        assert not left, left
        return self.tell(Verdict("r", run.epoch, run.seq, results, ()))

    def resident(self, slot: int) -> tuple[int, ...]:
        chain = self.ring.ledger.slots[slot].chain
        return () if chain is None else chain.tokens()

    def run(self, seq: int, *segments: Segment, epoch: int = 1) -> Send:
        return Send(Run("r", epoch, seq, segments))


def runs(actions: Sequence[Action]) -> list[Run]:
    return [a.frame for a in actions if isinstance(a, Send) and isinstance(a.frame, Run)]


def slot_of(actions: Sequence[Action]) -> int:
    """Where a turn was placed: that is the ledger's policy, not these tests' subject."""
    (slot,) = [action.slot for action in actions if isinstance(action, Admitted)]
    return slot

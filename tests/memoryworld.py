"""One scheduler over one or two rings in memory, and checkers that share no code with the cores.

The simulator's Oracle computes tokens and KV rows on its own; `audit` compares every claim of the
ledger with every stage's chain and with the bytes that the toy really holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from coord.actions import Action, Admitted, Failed, Finished, Send, Tokens
from coord.draft import Drafter
from coord.ring import Phase
from coord.scheduler import Scheduler
from pipeline.model import ROW_BYTES
from tests.memoryring import VOCABULARY, MemoryRing, Reply, ring_spec
from tools.sim.oracle import Oracle
from transport.config import Limits
from transport.frame import (
    Cancel,
    Frame,
    Heartbeat,
    LinkGap,
    Reject,
    Sampling,
    StageState,
    Submit,
    Tick,
)


class HalfRight:
    """A drafter that knows the toy and is often right: lookup alone never is, on hashes."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._tokens: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens.extend(tokens)

    def propose(self, branch: Sequence[int], count: int) -> tuple[int, ...]:
        known = [*self._tokens, *branch]
        right = self._oracle.decode(known, min(count, 6))
        return tuple(t if (t + len(known)) % 5 else (t + 1) % VOCABULARY for t in right)


class MemoryWorld:
    """Rings r0, r1, ... under one scheduler; the caller chooses which event comes next."""

    def __init__(
        self,
        oracle: Oracle,
        bounds: Limits,
        *,
        stages: Sequence[int] = (2,),
        slots: int = 2,
        spares: Sequence[int] = (),
        codec: bool = False,
        check_every: int = 1,
        drafter: Callable[[], Drafter] | None = None,
    ) -> None:
        self.oracle = oracle
        self.limits = bounds
        self.now = 0.0
        specs = tuple(
            replace(ring_spec(f"r{i}", n, oracle.layers), spare=i in spares)
            for i, n in enumerate(stages)
        )
        self.check_every = check_every  # frames; its invariants don't heal, so a few suffice
        self._told = 0
        self.scheduler = Scheduler(specs, bounds, drafter=drafter)
        self.rings = [
            MemoryRing(
                n,
                bounds=bounds,
                slots=slots,
                name=f"r{i}",
                layers=oracle.layers,
                scheduler=self.scheduler,
                tell=self.tell,
                codec=codec,
            )
            for i, n in enumerate(stages)
        ]
        self.by_name = {ring.name: ring for ring in self.rings}
        self.replies: dict[int, Reply] = {}
        self.asked: dict[int, Submit] = {}
        self.truth: dict[int, list[int]] = {}
        self.damaged: dict[tuple[str, int], None] = {}  # holdings that a stage lost on its own
        self.said: dict[bytes, list[Sequence[int]]] = {}  # per salt, all that was ever resident
        self._last = 0

    # ---- clients and operators -----------------------------------------------------------------

    def form(self) -> MemoryWorld:
        for ring in self.rings:
            self.beat(ring)
        self.pump()
        assert all(each.phase is Phase.READY for each in self.scheduler.rings.values())
        return self

    def beat(self, ring: MemoryRing) -> None:
        for name, incarnation in zip(ring.names, ring.incarnations, strict=True):
            self.tell(Heartbeat(ring.name, name, incarnation, StageState.READY, 1.0, "", 1, 1))

    def submit(
        self,
        prompt: Sequence[int],
        budget: int,
        stops: Sequence[int] = (),
        *,
        salt: bytes = b"",
        reuse: bool = True,
        hint: str = "",
        keep_s: float = 0.0,
    ) -> int:
        self._last += 1
        turn, sampling = self._last, Sampling()
        submit = Submit(
            turn, tuple(prompt), budget, tuple(stops), sampling, salt, reuse, hint, keep_s
        )
        self.asked[turn], self.replies[turn] = submit, Reply()
        most = min(budget, self.limits.max_model_len - len(prompt))
        self.truth[turn] = self.oracle.decode(prompt, most, stops)
        self.tell(submit)
        return turn

    def ask(self, prompt: Sequence[int], budget: int, **options: object) -> Reply:
        turn = self.submit(prompt, budget, **options)  # type: ignore[arg-type]
        self.pump()
        reply = self.replies[turn]
        assert reply.over, "a turn never ends"
        return reply

    def cancel(self, turn: int) -> None:
        self.tell(Cancel(turn))

    # ---- events --------------------------------------------------------------------------------

    def tell(self, frame: Frame) -> None:
        if isinstance(frame, Reject):
            self.by_name[frame.ring].rejects.append(frame)
        for action in self.scheduler.handle(frame, self.now):
            self._perform(action)
        self._told += 1
        if self._told % self.check_every == 0:
            self.scheduler.check()

    def _perform(self, action: Action) -> None:
        if isinstance(action, Send):
            self.by_name[action.frame.ring].send(action.frame)
            return
        reply = self.replies[action.turn]
        assert not reply.over, action
        match action:
            case Admitted():
                reply.admitted.append(action)
                self._foreign(action)
            case Tokens():
                at = len(reply.tokens)
                reply.tokens.extend(action.tokens)
                assert list(action.tokens) == self.truth[action.turn][at : len(reply.tokens)], (
                    action,
                    self.truth[action.turn],
                )
            case Finished():
                reply.finished = action.reason
                if action.reason != "cancelled":
                    assert reply.tokens == self.truth[action.turn], action
                self._say(action.turn)
            case Failed():
                reply.failed = action
                self._say(action.turn)

    def _say(self, turn: int) -> None:
        submit = self.asked[turn]
        whole = (*submit.prompt, *self.replies[turn].tokens)
        self.said.setdefault(submit.salt, []).append(whole)

    def _foreign(self, admitted: Admitted) -> None:
        """What was matched was once said under the same salt, by this or an earlier turn."""
        submit = self.asked[admitted.turn]
        mine = submit.prompt + tuple(self.replies[admitted.turn].tokens)
        assert admitted.matched < len(mine)
        assert submit.reuse or not admitted.matched or admitted.resumed
        known = [
            (*self.asked[turn].prompt, *self.replies[turn].tokens)
            for turn in self.scheduler.turns
            if self.asked[turn].salt == submit.salt
        ]
        start = mine[: admitted.matched]
        said = self.said.get(submit.salt, ())
        assert any(tuple(each[: len(start)]) == start for each in (*known, *said)), admitted

    def choices(self) -> list[tuple[MemoryRing, int]]:
        if len(self.rings) == 1:
            return [(self.rings[0], each) for each in self.rings[0].choices()]
        return [(ring, each) for ring in self.rings for each in ring.choices()]

    def happen(self, ring: MemoryRing, choice: int) -> None:
        self.now += 1e-4
        ring.now = self.now
        ring.happen(choice)

    def pump(
        self,
        choose: Callable[[list[tuple[MemoryRing, int]]], tuple[MemoryRing, int]] | None = None,
        most: int = 20_000,
    ) -> None:
        """Let everything that can happen happen; in order of the rings unless told otherwise."""
        for _ in range(most):
            options = self.choices()
            if not options:
                return
            self.happen(*(choose(options) if choose else options[0]))
        raise AssertionError("the rings do not come to rest")

    # ---- faults --------------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for ring in self.rings:
            self.beat(ring)
        self.tell(Tick())

    def restart(self, ring: MemoryRing, index: int) -> None:
        ring.now = self.now
        ring.restart(index)
        for key in [key for key in self.damaged if key[0] == ring.name]:
            del self.damaged[key]  # the ledger starts anew

    def gap(self, ring: MemoryRing) -> None:
        """Verdicts are lost: the ring is called again, and keeps what it holds."""
        ring.links[-1].clear()
        self.tell(LinkGap(f"{ring.name}/{ring.names[-1]}", 1, 3))

    def damage(self, ring: MemoryRing, stage: int, number: int, length: int) -> None:
        """One stage forgets rows behind the ledger's back; what it still says, it holds."""
        table, forward = ring.stages[stage].slots, ring.forwards[stage]
        if forward and any(segment.slot == number for segment in forward.run.segments):
            return  # a stage writes there
        if number < len(table) or number in table._parked:
            table._chain(number).truncate(length)
            self.damaged[ring.name, number] = None

    # ---- checkers ------------------------------------------------------------------------------

    def audit(self) -> None:
        """Every claim of a ledger whose ring is at rest is true on every stage, to the byte."""
        for ring in self.rings:
            core = self.scheduler.rings[ring.name]
            if not ring.choices() and core.phase is Phase.READY and not core.in_flight:
                self._audit(ring)

    def _audit(self, ring: MemoryRing) -> None:
        ledger = self.scheduler.rings[ring.name].ledger
        numbers = [*range(len(ledger.slots)), *ledger.parked]
        for index, stage in enumerate(ring.stages):
            assert sorted(stage.slots._parked) == sorted(ledger.parked), (stage.name, "leaks")
            for rows in ring.models[index]._rows:
                assert sorted(rows) == sorted(numbers), (stage.name, "leaks rows")
        for number in numbers:
            chain = ledger.holding(number).chain
            if chain is None:
                continue
            length, whole = len(chain), True
            expected = self.oracle.rows(chain.tokens())
            for index, stage in enumerate(ring.stages):
                held = stage.slots._chain(number)
                if len(held) < length or held.hash_before(length) != chain.hash_before(length):
                    assert (ring.name, number) in self.damaged, (number, chain, held)
                    whole = False
                first = ring.layers[index][0]
                for layer, rows in enumerate(ring.models[index]._rows, first):
                    rest = expected[layer][: min(length, len(held)) * ROW_BYTES]
                    assert not whole or rows[number].startswith(rest), (number, layer, "stale KV")
            if whole:
                self.damaged.pop((ring.name, number), None)

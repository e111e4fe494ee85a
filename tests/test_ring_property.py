"""Two real cores joined in memory over the ToyModel: any schedule gives the serial tokens.

Safety: no turn ever gets a token that plain serial decoding would not have given, whatever is cold,
warm, forked, cancelled or lost (CASES 1, 2, 5, 10, 29, 31). Liveness: every turn ends, and a clean
follow-up turn reuses prompt + committed - 1 rows (DESIGN 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.memoryring import VOCABULARY, MemoryRing, limits, serial

COMMON = [7] * 30 + list(range(10, 30))  # a shared system prompt, repetitive at first


@dataclass
class Client:
    """One conversation: what it knows, and the turn it waits for."""

    history: list[int]
    turn: int | None = None
    prompt: tuple[int, ...] = ()
    budget: int = 0
    stops: tuple[int, ...] = ()
    truth: tuple[int, ...] = ()
    cancelled: bool = False


class Oracle:
    """A drafter that mostly proposes what serial decoding will pick, and sometimes something else.

    Each speculation of real drafters is a special case of it.
    """

    def __init__(self, truths: dict[tuple[int, ...], tuple[int, ...]], random: Random) -> None:
        self._truths, self._random = truths, random
        self._prompt: tuple[int, ...] = ()
        self._known = 0

    def extend(self, tokens: Sequence[int]) -> None:
        if not self._prompt:
            self._prompt = tuple(tokens)
        else:
            self._known += len(tokens)

    def propose(self, branch: Sequence[int], count: int) -> tuple[int, ...]:
        at = self._known + len(branch)
        found = list(self._truths.get(self._prompt, ())[at : at + count])
        if found and self._random.random() < 0.3:
            found[self._random.randrange(len(found))] ^= 1
        return tuple(found)


class World:
    """Clients that talk to one MemoryRing in an order drawn from one seed."""

    def __init__(
        self, seed: int, stages: int, slots: int, chunk: int, window: int | None, park: int
    ) -> None:
        self.random = Random(seed)
        bounds = limits(slots=slots, chunk_tokens=chunk, window_frames=window, park_bytes=park)
        self.truths: dict[tuple[int, ...], tuple[int, ...]] = {}
        drafters = Random(seed)
        self.ring = MemoryRing(
            stages, bounds=bounds, slots=slots, drafter=lambda: Oracle(self.truths, drafters)
        ).form()
        self.clients = [Client([]) for _ in range(4)]

    def speak(self, client: Client) -> None:
        draw = self.random
        roll = draw.random()
        if roll < 0.15 or len(client.history) > 180:
            client.history = COMMON[: draw.randrange(len(COMMON) + 1)]
        elif roll < 0.3:
            other = draw.choice(self.clients).history
            client.history = other[: draw.randrange(len(other) + 1)]  # a fork
        elif roll < 0.4:
            del client.history[draw.randrange(len(client.history) + 1) :]  # an edit
        client.history += [draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 20))]
        client.prompt = tuple(client.history)
        client.budget = draw.randrange(1, 60 if draw.random() < 0.2 else 12)
        client.stops = (draw.randrange(VOCABULARY),) if draw.random() < 0.3 else ()
        client.truth = serial(client.prompt, client.budget, client.stops)
        self.truths[client.prompt] = serial(client.prompt, client.budget)
        client.cancelled = False
        reuse = draw.random() < 0.9
        client.turn = self.ring.submit(client.prompt, client.budget, client.stops, reuse=reuse)

    def listen(self, client: Client) -> None:
        assert client.turn is not None
        reply = self.ring.replies[client.turn]
        truth = client.truth
        assert tuple(reply.tokens) == truth[: len(reply.tokens)]
        if not reply.over:
            return
        assert reply.failed is None or reply.failed.code in ("not_ready", "ring_lost"), reply
        if not client.cancelled and reply.failed is None:
            assert tuple(reply.tokens) == truth
            stopped = bool(truth) and truth[-1] in client.stops
            assert reply.finished == ("stop" if stopped else "length")
        client.history = [*client.prompt, *reply.tokens]
        client.turn = None

    def play(self, steps: int, *, faults: bool) -> None:
        draw = self.random
        for _ in range(steps):
            client = draw.choice(self.clients)
            roll = draw.random()
            if client.turn is None:
                if roll < 0.5:
                    self.speak(client)
            elif roll < 0.03:
                client.cancelled = True
                self.ring.cancel(client.turn)
            if faults and draw.random() < 0.01:
                self.ring.restart(draw.randrange(len(self.ring.stages)))
            if faults and draw.random() < 0.02:
                self.ring.wait(draw.choice((0.3, 1.1)))
            for _ in range(draw.randrange(6)):
                options = self.ring.choices()
                if options:
                    self.ring.happen(draw.choice(options))
            for each in self.clients:
                if each.turn is not None:
                    self.listen(each)

    def rest(self) -> None:
        """Faults are over: everything that was asked for must end."""
        for _ in range(4):
            self.ring.pump(self.random.choice)
            self.ring.wait(1.1)
        self.ring.pump()
        for client in self.clients:
            if client.turn is not None:
                self.listen(client)
                assert client.turn is None, "a turn never ends"
        assert not self.ring.scheduler.turns


WORLDS = {
    "seed": st.integers(0, 2**32),
    "stages": st.integers(1, 4),
    "slots": st.integers(1, 4),
    "chunk": st.sampled_from((1, 3, 8, 16, 64)),
    "window": st.sampled_from((None, 1, 2, 9)),
    "park": st.sampled_from((0, 2000, 20000)),
}


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(**WORLDS)
@example(seed=0, stages=3, slots=2, chunk=8, window=None, park=8000)
def test_any_interleaving_gives_the_serial_tokens(
    seed: int, stages: int, slots: int, chunk: int, window: int | None, park: int
) -> None:
    world = World(seed, stages, slots, chunk, window, park)
    world.play(120, faults=False)
    world.rest()
    assert not world.ring.rejects, "without faults the ledger never claims what a stage refuses"
    prompt = [*world.clients[0].history, 5]
    known = [*prompt, *world.ring.ask(prompt, 4).tokens]
    after = world.ring.ask([*known, 1, 2, 3], 3)
    if len(known) > 8 or after.admitted[0].matched:  # a shorter prefix is not worth a copy
        assert after.admitted[0].matched == len(known) - 1
    assert tuple(after.tokens) == serial([*known, 1, 2, 3], 3)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(**WORLDS)
@example(seed=1, stages=3, slots=2, chunk=8, window=None, park=8000)
def test_restarted_stages_cost_no_token(
    seed: int, stages: int, slots: int, chunk: int, window: int | None, park: int
) -> None:
    """CASES 28, 29, 32: a lost stage's turns resume at their committed length, same total."""
    world = World(seed, stages, slots, chunk, window, park)
    world.play(120, faults=True)
    world.rest()

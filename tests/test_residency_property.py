"""Residency under everything that can happen to it, over toy rings in memory.

Safety: never a token that serial decoding would not give; no ledger claims a row that a stage would
refuse or that is not in its KV; no tenant matches another's rows. Liveness: every turn ends, full
capacity comes back, and a clean follow-up turn reuses prompt + committed - 1 rows. (CASES 1-5, 8,
10, 13, 18, 25, 28, 29, 31.) `python -m tests.soak` runs more seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coord import ledger
from coord.ledger import FORK_ROWS
from coord.ring import Phase
from tests.memoryring import VOCABULARY, limits
from tests.memoryworld import HalfRight, MemoryWorld
from tools.sim.oracle import Oracle
from transport.frame import FreeSlot, KeepSlot

ORACLE = Oracle(2, VOCABULARY)
COMMON = [7] * 12 + list(range(10, 30))  # a shared system prompt, repetitive at first
LONGEST = 110  # tokens of a history; then the conversation starts anew
TTL_S = 3.0
SEEDS = 400  # of one test


@dataclass
class Client:
    """One conversation: what it knows, and the turn it waits for."""

    salt: bytes
    hint: str
    history: list[int]
    turn: int | None = None
    prompt: tuple[int, ...] = ()


class World:
    """Clients, operators and faults around one MemoryWorld, in an order drawn from `draw`."""

    def __init__(self, draw: Random) -> None:
        self.draw = draw
        self.faults = draw.random() < 0.3  # stages restart, verdicts are lost
        self.damages = draw.random() < 0.3  # a stage forgets rows on its own
        self.slots = draw.randrange(1, 5)
        park = draw.choice((0, 60, 600)) * 8
        bounds = limits(
            slots=self.slots,
            max_model_len=160,
            chunk_tokens=draw.choice((3, 8, 16, 64)),
            window_frames=draw.choice((None, None, 1, 9)),
            park_bytes=park,
            idle_ttl_s=draw.choice((0.0, TTL_S)),
            lost_after_s=1e5,
            frame_timeout_s=20.0,
        )
        stages = [draw.randrange(1, 3) for _ in range(draw.randrange(1, 3))]
        self.world = MemoryWorld(
            ORACLE,
            bounds,
            stages=stages,
            slots=self.slots,
            codec=draw.random() < 0.1,
            check_every=draw.choice((1, 5, 5, 5)),
            drafter=draw.choice((None, partial(HalfRight, ORACLE))),
        )
        self.world.form()
        self.clients = [
            Client(b"b" if i == 3 else b"", "" if i % 2 else f"c{i}", []) for i in range(5)
        ]

    def play(self, steps: int) -> None:
        draw, world = self.draw, self.world
        for _ in range(steps):
            client = draw.choice(self.clients)
            if client.turn is not None:
                self.listen(client)
            if client.turn is None:
                self.speak(client)
            elif draw.random() < 0.08:
                world.cancel(client.turn)
            if draw.random() < 0.15:
                self.meddle()
            for _ in range(draw.randrange(6)):
                options = world.choices()
                if not options:
                    break
                world.happen(*draw.choice(options))
            if draw.random() < 0.04:
                world.pump(draw.choice)
                world.audit()
            elif draw.random() < 0.1:
                world.audit()  # of a ring that happens to be at rest

    def speak(self, client: Client) -> None:
        draw = self.draw
        roll = draw.random()
        if roll < 0.15 or len(client.history) > LONGEST:
            client.history = COMMON[: draw.randrange(len(COMMON) + 1)]
        elif roll < 0.3:
            other = draw.choice(self.clients).history
            client.history = other[: draw.randrange(len(other) + 1)]  # a fork, or a foreign text
        elif roll < 0.4:
            del client.history[draw.randrange(len(client.history) + 1) :]  # an edit
        if roll < 0.95 or not client.history:  # else the same again
            client.history += [draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 14))]
        client.prompt = tuple(client.history)
        client.turn = self.world.submit(
            client.prompt,
            draw.randrange(1, 8),
            (draw.randrange(VOCABULARY),) if draw.random() < 0.3 else (),
            salt=client.salt,
            hint=client.hint,
            reuse=draw.random() < 0.95,
            keep_s=5.0 if draw.random() < 0.05 else 0.0,
        )

    def listen(self, client: Client) -> None:
        assert client.turn is not None
        reply = self.world.replies[client.turn]
        if reply.over:
            if reply.failed is not None:
                codes = ["not_ready", "ring_lost"] if self.faults else []
                codes += ["rows_refused"] if self.damages else []
                assert reply.failed.code in codes, reply
            client.history = [*client.prompt, *reply.tokens]
            client.turn = None

    def meddle(self) -> None:
        """Time, operators, and what goes wrong."""
        draw, world = self.draw, self.world
        ring = draw.choice(world.rings)
        parked = list(world.scheduler.rings[ring.name].ledger.parked)
        number = draw.choice([*range(self.slots), *parked])
        roll = draw.random()
        if roll < 0.35:
            world.wait(draw.choice((0.3, 1.1, TTL_S + 1.0)))
        elif roll < 0.45:
            world.tell(FreeSlot(ring.name, number))
        elif roll < 0.55:
            world.tell(KeepSlot(ring.name, number, draw.choice((0.0, 2.0))))
        elif roll < 0.75 and self.damages:
            world.damage(ring, draw.randrange(len(ring.stages)), number, draw.randrange(40))
        elif roll < 0.85 and self.faults:
            world.restart(ring, draw.randrange(len(ring.stages)))
        elif roll < 0.95 and self.faults:
            world.gap(ring)

    def rest(self) -> None:
        """Faults are over: everything that was asked for must end."""
        world = self.world
        for _ in range(3):
            world.pump(self.draw.choice)
            world.wait(1.1)
        world.pump()
        for client in self.clients:
            if client.turn is not None:
                assert world.replies[client.turn].over, "a turn never ends"
                self.listen(client)
        assert not world.scheduler.turns
        world.audit()
        assert all(ring.phase is Phase.READY for ring in world.scheduler.rings.values())
        if not self.faults and not self.damages:
            rejects = [reject for ring in world.rings for reject in ring.rejects]
            assert not rejects, "without faults the ledger never claims what a stage refuses"

    def capacity(self) -> None:
        """As many turns as there are slots run at once, whatever was cancelled or lost before."""
        world = self.world
        slots = self.slots * len(world.rings)
        turns = [world.submit([i, *range(20)], 8) for i in range(slots)]
        assert world.scheduler.running() == slots, "a slot is never given back"
        world.pump()
        assert all(world.replies[turn].finished for turn in turns)

    def follow_up(self) -> None:
        """A clean follow-up turn reuses all but its last committed token."""
        world, client = self.world, self.draw.choice(self.clients)
        prompt = [*client.history, 5]
        known = [*prompt, *world.ask(prompt, 4, salt=client.salt).tokens]
        after = world.ask([*known, 1, 2, 3], 3, salt=client.salt).admitted[0]
        if len(known) > FORK_ROWS or after.matched:  # less is not worth a copy
            assert after.matched == len(known) - 1, (after, len(known))
        world.audit()


def live(draw: Random, steps: int = 100) -> MemoryWorld:
    """One world from its beginning to its end."""
    with patch.object(ledger, "PARK_ROWS", 8):  # short conversations are parked too
        world = World(draw)
        world.play(steps)
        world.rest()
        world.capacity()
        world.follow_up()
    return world.world


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_residency_is_true_and_the_tokens_are_serial(draw: Random) -> None:
    live(draw, steps=60)  # fewer steps: this one shrinks what it finds


@pytest.mark.parametrize("first", range(0, 6 * SEEDS, SEEDS))
def test_residency_is_true_for_many_seeds(first: int) -> None:
    for seed in range(first, first + SEEDS):
        try:
            live(Random(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error

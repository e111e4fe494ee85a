"""A world drawn from one seed: clients that talk to a MemoryRing while things go wrong.

`visit` plays it and asserts everything that must hold; test_ring_property and mutations call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest

import coord.admission
import coord.ledger
from coord.actions import Draft
from coord.draft_model import ModelDrafter
from tests.memoryring import VOCABULARY, MemoryRing, limits, serial
from tools.sim.samplings import draw_sampling
from transport.chain import Chain
from transport.frame import GREEDY, Copy, Drafted, Frame, Remembered, Sampling

COMMON = [7] * 30 + list(range(10, 30))  # a shared system prompt, repetitive at first
SALTS = (b"", b"", b"", b"tenant")


@dataclass(frozen=True)
class Plan:
    """What a world is made of.

    rows: from how many rows on a prefix is worth a copy, or a place in the park. trouble: "none";
    "restarts" of stages, with stale answers repeated; "successors": the coordinator dies, and the
    next one is told what is right, old, cut or a lie, and stages restart now and then; "gaps":
    frames lost on links; "lies": the ledger claims what is not there, and stages lose rows.
    sampled: turns sample, with penalties, biases and filters of all kinds; else they are greedy.
    model: drafts come from a draft model whose answers are late, wrong, repeated or never given.
    """

    seed: int
    stages: int = 3
    slots: int = 2
    chunk: int = 8
    window: int | None = None
    park: int = 0
    rows: int = 4
    trouble: str = "none"
    sampled: bool = False
    model: bool = False


@dataclass
class Client:
    """One conversation: what it knows, and the turn it waits for."""

    history: list[int]
    salt: bytes = b""
    turn: int | None = None
    prompt: tuple[int, ...] = ()
    budget: int = 0
    stops: tuple[int, ...] = ()
    truth: tuple[int, ...] = ()
    cancelled: bool = False


class Oracle:
    """A drafter that mostly proposes what serial decoding will pick, and sometimes something else.

    Whatever a real drafter says is a special case of it.
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

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.random = Random(plan.seed)
        self.samplings = Random(plan.seed)  # its own: the schedule is the greedy world's
        bounds = limits(
            slots=plan.slots,
            chunk_tokens=plan.chunk,
            window_frames=plan.window,
            park_bytes=plan.park,
        )
        self.said: list[tuple[int, ...]] = []  # all that was ever prompted and replied
        self.truths: dict[tuple[int, ...], tuple[int, ...]] = {}
        drafters = Random(plan.seed)
        self.ring = MemoryRing(
            plan.stages,
            bounds=bounds,
            slots=plan.slots,
            drafter=ModelDrafter if plan.model else lambda: Oracle(self.truths, drafters),
        ).form()
        self.drafting = Random(plan.seed)
        self.texts: dict[int, tuple[int, ...]] = {}  # turn -> prompt and truth, a little beyond
        self.told: dict[int, int] = {}  # turn -> known tokens that the draft model was told
        self.asked: list[Draft] = []
        self.clients = [Client([]) for _ in range(4)]
        self.old: list[Remembered] = []  # what was once true
        self.succeeded = 0  # coordinators whose whole memory was right, and so was kept

    def edit(self, history: list[int]) -> list[int]:
        """What a client makes of its conversation before it goes on."""
        draw = self.random
        roll = draw.random()
        if roll < 0.15 or len(history) > 180:
            return COMMON[: draw.randrange(len(COMMON) + 1)]
        if roll < 0.3:
            other = draw.choice(self.clients).history
            return other[: draw.randrange(len(other) + 1)]  # a fork
        if roll < 0.4:
            return history[: draw.randrange(len(history) + 1)]
        if roll < 0.5 and history:
            at = draw.randrange(len(history))
            return [*history[:at], draw.randrange(VOCABULARY), *history[at + 1 :]]
        return history

    def speak(self, client: Client) -> None:
        draw = self.random
        client.history = list(self.edit(client.history))
        more = draw.randrange(1, 20)
        if client.history and draw.random() < 0.15:  # all of it may be resident: nothing is new
            more = 0
            del client.history[draw.randrange(len(client.history)) + 1 :]
        client.history += [draw.randrange(VOCABULARY) for _ in range(more)]
        client.prompt = tuple(client.history)
        client.budget = draw.randrange(1, 60 if draw.random() < 0.2 else 12)
        client.stops = (draw.randrange(VOCABULARY),) if draw.random() < 0.3 else ()
        sampling = self.sampling()
        if sampling.shaping is not None and client.stops:
            client.stops += tuple(self.samplings.choices(range(VOCABULARY), k=9))
        # drafts may go on where the turn ends
        further = serial(client.prompt, client.budget + 4, client.stops, sampling, beyond=True)
        ends = [at for at, token in enumerate(further) if token in client.stops]
        client.truth = further[: min([client.budget, *(at + 1 for at in ends)])]
        self.truths[client.prompt] = further
        client.cancelled = False
        client.salt = draw.choice(SALTS)
        if self.plan.trouble == "lies" and draw.random() < 0.4:
            self.lie(client)
        reuse = draw.random() < 0.9
        client.turn = self.ring.submit(
            client.prompt,
            client.budget,
            client.stops,
            reuse=reuse,
            salt=client.salt,
            sampling=sampling,
        )
        self.texts[client.turn] = (*client.prompt, *further)

    def draft(self) -> None:
        """The draft model answers one request, or none."""
        draw = self.drafting
        for each in self.ring.drafts:
            assert each.start == self.told.get(each.turn, 0), each
            assert each.tokens == self.texts[each.turn][each.start : each.known], each
            self.told[each.turn] = each.known
        self.asked += self.ring.drafts
        self.ring.drafts.clear()
        if not self.asked or draw.random() < 0.3:
            return
        request = draw.choice(self.asked[-6:])
        if draw.random() < 0.8:  # else it is answered again
            self.asked.remove(request)
        tokens = list(self.texts[request.turn][request.known :][: request.count])
        if tokens and draw.random() < 0.3:
            tokens[draw.randrange(len(tokens))] ^= 1
        self.ring.tell(Drafted(request.turn, request.known, tuple(tokens)))

    def sampling(self) -> Sampling:
        return draw_sampling(self.samplings, VOCABULARY) if self.plan.sampled else GREEDY

    def listen(self, client: Client) -> None:
        assert client.turn is not None
        reply = self.ring.replies[client.turn]
        truth = client.truth
        assert tuple(reply.tokens) == truth[: len(reply.tokens)]
        if not reply.over:
            return
        # a loss is ridden out, by new turns too: only a coordinator that is new has no ring yet
        fair = ["not_ready", "ring_lost", "shutting_down"] * (self.plan.trouble == "successors")
        fair += ["rows_refused"] * (self.plan.trouble == "lies")
        assert reply.failed is None or reply.failed.code in fair, reply
        if not client.cancelled and reply.failed is None:
            assert tuple(reply.tokens) == truth
            stopped = bool(truth) and truth[-1] in client.stops
            assert reply.finished == ("stop" if stopped else "length")
        client.history = [*client.prompt, *reply.tokens]
        self.said.append(tuple(client.history))
        client.turn = None

    # ---- trouble ----

    def disturb(self) -> None:
        draw, ring = self.random, self.ring
        match self.plan.trouble:
            case "restarts":
                if draw.random() < 0.02:
                    ring.restart(draw.randrange(self.plan.stages), told=draw.random() < 0.5)
                if draw.random() < 0.03 and ring.answers:
                    ring.tell(draw.choice(ring.answers))
            case "successors":
                if draw.random() < 0.01:
                    ring.restart(draw.randrange(self.plan.stages), told=draw.random() < 0.5)
                if draw.random() < 0.03:
                    self.succeed()
            case "gaps":
                links = [k for k, link in enumerate(ring.links) if link]
                copies = [k for k in links if is_copy(ring.links[k][0])]
                if copies and draw.random() < 0.2:
                    ring.lose(draw.choice(copies), 1)
                elif links and draw.random() < 0.02:
                    ring.lose(draw.choice(links), draw.randrange(1, 4))
            case "lies":
                index = draw.randrange(self.plan.stages)
                if draw.random() < 0.06 and ring.forwards[index] is None:
                    ring.stages[index].slots.free(draw.randrange(self.plan.slots))
        if self.plan.trouble != "none" and draw.random() < 0.02:
            ring.wait(draw.choice((0.3, 1.1)))

    def succeed(self) -> None:
        """Another coordinator goes on with what one before it wrote down, now or long ago."""
        draw, ring = self.random, self.ring
        core = ring.scheduler.rings["r"]
        truth = ring.recollection(SALTS)
        told = truth
        kind = draw.choice(("right", "right", "old", "cut", "lies", "nothing"))
        if kind == "old":
            told = self.old
        elif kind == "cut":
            told = [replace(r, tokens=r.tokens[: draw.randrange(len(r.tokens)) + 1]) for r in truth]
        elif kind == "lies":
            told = [self.distort(each) for each in truth]
        elif kind == "nothing":
            told = []
        alive = [entry.incarnation for entry in core.entries] == ring.incarnations
        if draw.random() < 0.5:
            ring.links[-1].clear()  # the last verdicts reached nobody
        epoch = core.epoch + draw.choice((0, 0, 1, 1000)) - draw.choice((0, 0, 0, 1))
        ring.succeed(told, max(0, epoch))
        for client in self.clients:
            if client.turn is not None:
                self.listen(client)
        self.old = truth
        kept = ring.recollection(SALTS)
        if core.epoch > epoch:
            ring.wait(1.1)  # it was refused as older than the stages are: another epoch, at once
            ring.pump()
            kept = ring.recollection(SALTS)
        if kind == "right" and alive:
            full = [r for r in truth if len(r.tokens) + 4 > ring.limits.max_model_len]
            assert [(r.number, r.tokens, r.salt) for r in kept] == [
                (r.number, r.tokens, r.salt) for r in truth
            ] or full, "what every stage holds was not believed"
            self.succeeded += 1

    def distort(self, said: Remembered) -> Remembered:
        draw = self.random
        tokens = list(said.tokens)
        tokens[draw.randrange(len(tokens))] ^= 1
        return draw.choice(
            (
                replace(said, tokens=tuple(tokens)),
                replace(said, tokens=(*said.tokens, 1)),
                replace(said, number=said.number + draw.randrange(1, 3)),
                replace(said, salt=draw.choice(SALTS)),
                replace(said, fingerprint=b"another model"),
            )
        )

    def lie(self, client: Client) -> None:
        """The ledger says that a free slot holds what the client asks for next, and more.

        About as many rows as the slot has, so that it is a gap or another text; often nothing else
        is claimed, so that the lie is what will be reused.
        """
        draw, ledger = self.random, self.ring.scheduler.rings["r"].ledger
        free = [index for index, slot in enumerate(ledger.slots) if slot.turn is None]
        if not free:
            return
        slot = draw.choice(free)
        rows = self.ring.stages[0].slots.length(slot) + draw.choice((0, 0, 1, 3))
        claimed = [*client.prompt[:rows], *([0] * draw.choice((0, 5)))]
        for index in free if draw.random() < 0.7 else [slot]:
            ledger.forget(index)
        if claimed:
            chain = Chain(self.ring.root(client.salt), claimed)
            ledger.extend(slot, chain, len(claimed))

    # ---- time ----

    def play(self, steps: int) -> None:
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
            self.disturb()
            for _ in range(draw.randrange(6)):
                options = self.ring.choices()
                if options:
                    self.ring.happen(draw.choice(options))
                if self.plan.model:
                    self.draft()
            if roll < 0.02:
                self.ring.audit()
            for each in self.clients:
                if each.turn is not None:
                    self.listen(each)

    def rest(self) -> None:
        """Trouble is over: everything that was asked for must end."""
        for _ in range(4):
            self.ring.pump(self.random.choice)
            self.ring.wait(1.1)
        self.ring.pump()
        for client in self.clients:
            if client.turn is not None:
                self.listen(client)
                assert client.turn is None, "a turn never ends"
        assert not self.ring.scheduler.turns
        assert not any(self.ring.scheduler.rings["r"].in_flight.values())
        self.ring.audit()
        ledger = self.ring.scheduler.rings["r"].ledger
        if self.plan.trouble != "lies":
            for each in (*ledger.slots, *ledger.parked.values()):
                rows = () if each.chain is None else each.chain.tokens()
                assert any(text[: len(rows)] == rows for text in self.said) or not rows, (
                    "rows that nobody said are resident",
                    rows,
                )
        for stage in self.ring.stages:
            assert stage.slots._parked.keys() <= ledger.parked.keys(), "rows without an owner"

    def follow_up(self) -> None:
        """A clean turn after a clean turn reuses prompt + committed - 1 rows (DESIGN 4)."""
        prompt = [*self.clients[0].history, 5]
        known = [*prompt, *self.ring.ask(prompt, 4).tokens]
        after = self.ring.ask([*known, 1, 2, 3], 3)
        if (
            len(known) > self.plan.rows or after.admitted[0].matched
        ):  # a shorter prefix is not worth a copy
            assert after.admitted[0].matched == len(known) - 1
        assert tuple(after.tokens) == serial([*known, 1, 2, 3], 3)


def is_copy(frame: Frame) -> bool:
    return isinstance(frame, Copy)


def visit(plan: Plan, steps: int = 120) -> None:
    """Play a world and assert all that must hold of it."""
    with pytest.MonkeyPatch.context() as patcher:
        patcher.setattr(coord.ledger, "FORK_ROWS", plan.rows)
        patcher.setattr(coord.admission, "FORK_ROWS", plan.rows)
        patcher.setattr(coord.ledger, "PARK_ROWS", plan.rows)
        _visit(plan, steps)


def _visit(plan: Plan, steps: int) -> None:
    world = World(plan)
    world.play(steps)
    world.rest()
    if plan.trouble != "lies":
        assert not world.ring.believed, "the ledger claimed what a stage refused"
        world.ring.confront()
    if plan.trouble == "none":
        assert not world.ring.rejects
        world.follow_up()

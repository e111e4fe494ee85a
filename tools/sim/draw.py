"""Owns how a script is drawn from one seed: one seed, one world, whatever else is played.

Each client and each fault has its own stream of choices, so that other faults leave the clients'
part of the script as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from tools.sim.samplings import draw_sampling
from tools.sim.script import (
    FAULTS,
    Ask,
    Confuse,
    Crash,
    Damage,
    Entry,
    Gap,
    Leave,
    Operate,
    Pause,
    Restart,
    Say,
    Script,
    Shape,
    Stale,
    Stall,
)
from tools.sim.toy import VOCABULARY
from transport.config import Limits
from transport.frame import GREEDY

COMMON = (*([7] * 12), *range(10, 60))  # a shared system prompt, repetitive at first
SECOND_US = 1_000_000


@dataclass(frozen=True, slots=True)
class Options:
    """What may be drawn; ranges include their ends."""

    faults: tuple[str, ...] = FAULTS
    stages: tuple[int, int] = (1, 6)
    rings: tuple[int, int] = (1, 3)
    clients: tuple[int, int] = (1, 16)


def draw(seed: int, options: Options) -> Script:
    """The world of a seed."""
    random = Random(f"{seed} shape")
    shape = _shape(seed, random, options)
    low, high = options.clients
    clients = min(high, max(low, random.choice((1, 2, 2, 3, 3, 4, 5, 6, 8, 16))))
    span_us = int(random.choice((0.5, 2.0, 4.0, 6.0)) * SECOND_US)
    entries: list[Entry] = []
    sampled, salted = random.random() < 0.04, random.random() < 0.3
    slow = "slow" in options.faults and random.random() < 0.3
    turns = max(1, random.randrange(4, 14) // clients)
    for client in range(clients):
        speech = _Speech(Random(f"{seed} client {client}"), client, clients, shape)
        speech.sampled, speech.salted, speech.slow = sampled, salted, slow
        entries += speech.says(turns, span_us)
    entries += _operators(Random(f"{seed} operator"), shape, span_us)
    entries += _surveys(Random(f"{seed} survey"), shape, span_us)
    kinds = [kind for kind in options.faults if kind in _DRAWN]
    most = random.choice((0, 1, 1, 2, 4, 8)) if kinds else 0
    busy_us = [entry.at_us for entry in entries if isinstance(entry, Say)]
    for number in range(most):
        fault = Random(f"{seed} fault {number}")
        at_us = int(fault.random() * span_us * 1.2)
        if fault.random() < 0.7:  # a turn has just begun
            at_us = fault.choice(busy_us) + int(fault.expovariate(10.0) * SECOND_US)
        (kind,) = fault.choices(kinds, [_OFTEN.get(kind, 2) for kind in kinds])
        entries += _DRAWN[kind](fault, shape, at_us, clients)
    entries.sort(key=lambda entry: entry.at_us)
    return Script(shape, tuple(entries), options.faults)


def _shape(seed: int, random: Random, options: Options) -> Shape:
    beside = Random(f"{seed} beside")  # of its own: the rest of a seed is as it was before
    low, high = options.rings
    rings = min(high, max(low, random.choice((1, 1, 1, 1, 2, 2, 3))))
    low, high = options.stages
    stages = [min(high, max(low, random.choice((1, 2, 2, 3, 3, 3, 4, 5, 6)))) for _ in range(rings)]
    heartbeat_s = random.choice((0.5, 1.0))
    limits = Limits(
        slots=random.choice((1, 2, 2, 3, 4, 4)),
        max_model_len=random.choice((192, 256)),
        chunk_tokens=random.choice((8, 16, 32, 64)),
        shared_chunk_tokens=random.choice((8, 8, 32)),
        window_frames=random.choice((None, None, None, 1, 2, 9)),
        heartbeat_s=heartbeat_s,
        lost_after_s=heartbeat_s * random.choice((2.0, 4.0)),
        frame_timeout_s=random.choice((1.0, 3.0, 6.0)),
        resume_s=random.choice((4.0, 20.0)),
        idle_ttl_s=random.choice((0.0, 0.0, 0.0, 2.0)),
        park_bytes=random.choice((0, 0, 0, 8 * 200, 8 * 2000)),
    )
    return Shape(
        seed,
        tuple(stages),
        limits,
        random.choice(("off", "lookup", "model", "model", "model")),
        random.choice((None, None, None, 1, 3)),
        random.choice((None, None, None, 3, 8)),
        link_us=random.choice((50, 1000, 1000, 10_000)),
        jitter_us=random.choice((0, 500, 5000)),
        frame_us=random.choice((200, 1000, 5000)),
        row_us=random.choice((5, 50)),
        draft_us=random.choice((0, 300, 3000, 50_000)),
        draft_right=random.choice((0.5, 0.9, 1.0)),
        codec=random.random() < 0.04,
        eager=random.random() < 0.25,
        spares=beside.randrange(rings) if beside.random() < 0.4 else 0,
        memory=beside.random() < 0.6,
    )


class _Speech:
    """One client's part of a script."""

    sampled = salted = slow = False

    def __init__(self, random: Random, client: int, clients: int, shape: Shape) -> None:
        self._random = random
        self._client, self._clients = client, clients
        self._long = shape.limits.park_bytes > 0 or random.random() < 0.1
        self._salt = b""

    def says(self, turns: int, span_us: int) -> Iterator[Say | Leave]:
        draw = self._random
        if self.salted and draw.random() < 0.4:
            self._salt = b"tenant"
        hint = f"c{self._client}" if draw.random() < 0.5 else ""
        together = draw.random() < 0.3  # with others that say the same
        for number in range(turns):
            at_us = 0 if together and not number else int(draw.random() * span_us)
            yield self._say(at_us, number == 0, together, hint)
            if draw.random() < 0.06:
                yield Leave(at_us + int(draw.expovariate(20.0) * SECOND_US), self._client)

    def _say(self, at_us: int, first: bool, together: bool, hint: str) -> Say:
        draw = self._random
        base, keep, edit = self._client, None, None
        more = [draw.randrange(VOCABULARY) for _ in range(draw.choice((1, 3, 12, 20)))]
        roll = draw.random()
        if first or roll < 0.08:
            keep = 0
            start = COMMON[: draw.choice((0, 14, 40, len(COMMON)))]
            if together and first:
                start, more = COMMON, []
            elif self._long:
                start = (*start, *(draw.randrange(VOCABULARY) for _ in range(70)))
            more = [*start, *more]
        elif roll < 0.22:
            base = draw.randrange(self._clients)  # a fork, or a foreign text
            keep = draw.choice((None, draw.randrange(120)))
        elif roll < 0.3:
            keep = draw.randrange(1, 120)
            more = more if draw.random() < 0.8 else []
        elif roll < 0.38:
            edit = draw.randrange(120), draw.randrange(VOCABULARY)
        elif roll < 0.44:
            more = []  # the same again
        side = draw.random() < 0.08  # a title: one short turn beside the conversation
        return Say(
            at_us,
            self._client,
            base,
            0 if side else keep,
            edit,
            tuple(more),
            draw.randrange(1, 40 if draw.random() < 0.25 else 10),
            stops=tuple(draw.sample(range(VOCABULARY), 12)) if draw.random() < 0.3 else (),
            sampling=draw_sampling(draw, VOCABULARY) if self.sampled else GREEDY,
            salt=self._salt,
            reuse=draw.random() < 0.95,
            hint=hint,
            keep_s=1.0 if draw.random() < 0.05 else 0.0,
            leave=draw.randrange(1, 6) if draw.random() < 0.08 else None,
            read_us=draw.choice((0, 5000, 100_000)) if self.slow else 0,
        )


def _operators(draw: Random, shape: Shape, span_us: int) -> Iterator[Operate]:
    for _ in range(draw.choice((0, 0, 0, 1, 3))):
        keep_s = draw.choice((None, None, 0.0, 2.0))
        ring = draw.randrange(len(shape.stages))
        yield Operate(int(draw.random() * span_us), ring, draw.randrange(6), keep_s)


def _surveys(draw: Random, shape: Shape, span_us: int) -> Iterator[Ask]:
    """While turns run, too, which a real coordinator refuses to begin but not to go on with."""
    for _ in range(draw.choice((0, 0, 0, 1, 2))):
        at_us, ring = int(draw.random() * span_us), draw.randrange(len(shape.stages))
        # shorter in all than the shortest frame_timeout_s: who measures must not lose a ring
        busy_us = draw.choice((0, 2000, 20_000))
        yield Ask(at_us, ring, draw.random() < 0.5, busy_us, draw.choice((1, 3)))


def _where(draw: Random, shape: Shape) -> tuple[int, int]:
    ring = draw.randrange(len(shape.stages))
    return ring, draw.randrange(shape.stages[ring])


def _stall(draw: Random, shape: Shape, at_us: int, _: int) -> list[Entry]:
    for_us = int(draw.choice((0.05, 0.5, 1.5, 5.0, 9.0)) * SECOND_US)
    return [Stall(at_us, *_where(draw, shape), for_us, draw.random() < 0.5)]


def _crash(draw: Random, shape: Shape, at_us: int, _: int) -> list[Entry]:
    down_us = int(draw.choice((0.01, 0.1, 1.0, 4.0)) * SECOND_US)
    load_us = int(draw.choice((0.0, 0.5)) * SECOND_US)
    return [Crash(at_us, *_where(draw, shape), down_us, load_us, draw.choice((0, 1, 9)))]


def _gap(draw: Random, shape: Shape, at_us: int, _: int) -> list[Entry]:
    ring = draw.randrange(len(shape.stages))
    link = draw.randrange(shape.stages[ring] + 1)
    return [Gap(at_us, ring, link, draw.choice((1, 1, 2, 5)), draw.random() < 0.5)]


def _stale(draw: Random, shape: Shape, at_us: int, _: int) -> list[Entry]:
    ring = draw.randrange(len(shape.stages))
    repeats = [at_us + n * draw.randrange(1, 40_000) for n in range(draw.choice((1, 4)))]
    return [Stale(at, ring, draw.randrange(20), draw.random() < 0.7) for at in repeats]


def _pause(draw: Random, _shape: Shape, at_us: int, _: int) -> list[Entry]:
    for_us = int(draw.choice((0.05, 1.0, 5.0, 15.0)) * SECOND_US)
    return [Pause(at_us, for_us, draw.random() < 0.5)]


def _restart(draw: Random, shape: Shape, at_us: int, _: int) -> list[Entry]:
    down_us = int(draw.choice((0.0, 0.001, 0.02, 1.0)) * SECOND_US)
    restart = Restart(at_us, down_us, draw.choice((0.0, 0.0, 3600.0, -3600.0)))
    confused = draw.randrange(len(shape.stages)) if draw.random() < 0.5 else None
    return [restart] if confused is None else [restart, Confuse(at_us + down_us + 1, confused)]


def _damage(draw: Random, shape: Shape, at_us: int, _: int) -> list[Entry]:
    ring, stage = _where(draw, shape)
    picks = draw.randrange(6), draw.randrange(6)
    return [Damage(at_us, ring, stage, *picks, draw.random() < 0.6)]


def _lie(draw: Random, shape: Shape, at_us: int, _: int) -> list[Entry]:
    ring = draw.randrange(len(shape.stages))
    picks = draw.randrange(6), draw.randrange(6)
    return [Damage(at_us, ring, 0, *picks, draw.random() < 0.6)]


def _storm(draw: Random, _shape: Shape, at_us: int, clients: int) -> list[Entry]:
    each = draw.choice((0, 0, 2000))
    return [Leave(at_us + n * each, n) for n in range(clients) if draw.random() < 0.8]


_OFTEN = {"gap": 4, "pause": 1, "damage": 1, "lie": 1}  # the others 2; they mask least
_DRAWN = {
    "stall": _stall,
    "crash": _crash,
    "gap": _gap,
    "stale": _stale,
    "pause": _pause,
    "restart": _restart,
    "damage": _damage,
    "lie": _lie,
    "storm": _storm,
}

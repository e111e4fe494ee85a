"""The simulator's toy and oracle against the plain ones: fast, and the same to the byte."""

from __future__ import annotations

from random import Random

from pipeline.model import Output, ToyModel
from tests.memoryring import LAYERS, VOCABULARY, rows_of, serial
from tools.sim.oracle import Oracle
from tools.sim.samplings import draw_sampling
from tools.sim.toy import VOCABULARY as TOY_VOCABULARY
from tools.sim.toy import Tree, TreeToy
from transport.frame import GREEDY, Kind, Segment

SLOTS, CAPACITY = 3, 64


def step(draw: Random, plain: ToyModel, tree: TreeToy, before: Output | None) -> Output:
    """The same thing happens to both: rows anywhere, stale and unwritten ones before them too."""
    slots = draw.sample(range(SLOTS), draw.randrange(1, SLOTS + 1))
    counts = [draw.randrange(1, 6) for _ in slots]
    segments = []
    for slot, count in zip(slots, counts, strict=True):
        start = draw.randrange(CAPACITY - count)
        tokens = tuple(draw.randrange(TOY_VOCABULARY) for _ in range(count))
        want = draw.randrange(count + 1)
        segments.append(Segment(1, slot, start, tokens, Kind.VERIFY, b"\0" * 16, want))
    payload = None if before is None else before.payload
    if payload is not None:
        segments = segments[:1]
        count = payload.shape[0]
        start = draw.randrange(CAPACITY - count)
        segments = [Segment(1, slots[0], start, (0,) * count, Kind.VERIFY, b"\0" * 16, count)]
    mine, theirs = tree.forward(segments, payload), plain.forward(segments, payload)
    assert mine == theirs
    for model in (plain, tree):
        model.copy(slots[0], SLOTS + 1, 9)
        model.copy(SLOTS + 1, slots[-1], 5)
        model.drop(SLOTS + 1)
    return theirs


def test_the_tree_answers_as_the_plain_toy_does() -> None:
    for seed in range(60):
        draw, memory = Random(seed), Tree(3)
        head = ToyModel((0, 1), 3, slots=SLOTS, capacity=CAPACITY)
        tail = ToyModel((1, 3), 3, slots=SLOTS, capacity=CAPACITY)
        heads = TreeToy((0, 1), memory, SLOTS, CAPACITY)
        tails = TreeToy((1, 3), memory, SLOTS, CAPACITY)
        for _ in range(8):
            out = step(draw, head, heads, None)
            step(draw, tail, tails, out)


def test_the_oracle_decodes_as_one_model_with_one_slot() -> None:
    oracle, draw = Oracle(LAYERS, VOCABULARY), Random(1)
    for number in range(40):
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 12))]
        stops = draw.sample(range(VOCABULARY), draw.choice((0, 9)))
        sampling = draw_sampling(draw, VOCABULARY) if number % 2 else GREEDY
        found = oracle.decode(prompt, 12, stops, sampling)
        assert tuple(found) == serial(prompt, 12, stops, sampling)
        assert tuple(oracle.rows(prompt)) == rows_of(tuple(prompt))

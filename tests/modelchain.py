"""Torch blocks one after the other in this process, and random schedules that change no bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from pipeline.torch_model import TorchModel
from pipeline.weights import Source
from transport.frame import GREEDY, Kind, Result, Sampling, Segment, Tensor

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 34, 35, 63, 64, 65, 66, 67, 97)
TOP = Sampling(logprobs=5)
PREFIX, ROWS = 498, 570  # rows 498 to 570 cross a key block


def segment(
    start: int,
    tokens: Sequence[int],
    *,
    slot: int = 0,
    want: int | None = None,
    sampling: Sampling = GREEDY,
) -> Segment:
    count = len(tokens) if want is None else want
    return Segment(slot, slot, start, tuple(tokens), Kind.PREFILL, b"", count, sampling)


@dataclass
class Chain:
    """Blocks run one after the other in this process: a ring without links."""

    blocks: list[TorchModel]

    def forward(self, *segments: Segment) -> tuple[Result, ...]:
        payload: Tensor | None = None
        for block in self.blocks:
            output = block.forward(segments, payload)
            payload = output.payload
        return output.results

    def copy(self, source: int, target: int, length: int) -> None:
        for block in self.blocks:
            block.copy(source, target, length)

    def greedy(
        self, prompt: Sequence[int], count: int, *, held: int = 0, chunk: int = 512
    ) -> list[int]:
        """`count` tokens behind a prompt of which `held` rows are in slot 0 already."""
        for at in range(held, len(prompt), chunk):
            piece = prompt[at : at + chunk]
            found = self.forward(segment(at, piece, want=int(at + chunk >= len(prompt))))[0]
        made = [found.tokens[0]]
        while len(made) < count:
            at = len(prompt) + len(made) - 1
            made.append(self.forward(segment(at, made[-1:]))[0].tokens[0])
        return made


def chain(
    source: Source,
    cuts: Sequence[int],
    *,
    slots: int = 2,
    capacity: int = 512,
    dtype: torch.dtype = torch.float32,
    exact: bool = True,
    weights: str = "dtype",
    activations: str = "dtype",
    kv: str = "dtype",
) -> Chain:
    return Chain(
        [
            TorchModel(
                source,
                cut,
                slots=slots,
                capacity=capacity,
                dtype=dtype,
                exact=exact,
                weights=weights,
                activations=activations,
                kv=kv,
            )
            for cut in pairwise(cuts)
        ]
    )


@torch.inference_mode()
def spoil(blocks: Chain, seed: int, slot: slice = slice(None), start: int = 0) -> None:
    """Fill KV rows from `start` on with large finite garbage."""
    generator = torch.Generator().manual_seed(seed)
    for block in blocks.blocks:
        for pair in block._caches.values():
            for rows in pair:
                tail = rows[slot, :, start:]
                tail.copy_(torch.randn(tail.shape, generator=generator) * 30)


def run_schedule(
    blocks: Chain, tokens: Sequence[int], start: int, rng: random.Random, vocabulary: int
) -> list[tuple[object, ...]]:
    """Write tokens [start, ...) to slot 1 in random pieces, beside others, with rejected drafts.

    Returns token, log probability and likeliest five of each row.
    """
    found: list[tuple[object, ...]] = []
    at, busy = start, 0
    while at < len(tokens):
        size = min(rng.choice(SIZES), len(tokens) - at)
        drafts: list[int] = []
        if rng.random() < 0.4:  # a wrong tail, overwritten by the next piece
            drafts = rng.choices(range(vocabulary), k=rng.choice((1, 2, 3, 8)))
        mine = segment(at, [*tokens[at : at + size], *drafts], slot=1, sampling=TOP)
        frame = [mine]
        for slot in (2, 3):
            if rng.random() < 0.5:
                count = rng.choice(SIZES)
                other = segment(busy, rng.choices(range(vocabulary), k=count), slot=slot, want=1)
                frame.insert(rng.randrange(len(frame) + 1), other)
                busy = (busy + count) % 400
        torch.set_num_threads(rng.choice((1, 1, 2)))
        rows = blocks.forward(*frame)[frame.index(mine)]
        found += list(zip(rows.tokens, rows.logprobs, rows.top, strict=True))[:size]
        at += size
    return found


def check_schedules(blocks: Chain, vocabulary: int, count: int, seed: int) -> None:
    """All schedules give the same bits, and those of tokens that come one at a time."""
    threads = torch.get_num_threads()
    try:
        rng = random.Random(seed)
        vocabulary = min(vocabulary, 1000)
        tokens = rng.choices(range(vocabulary), k=ROWS)
        spoil(blocks, seed)
        cold = run_schedule(blocks, tokens, 0, random.Random(seed), vocabulary)
        for number in range(count):
            spoil(blocks, number, slice(1, 2), PREFIX)
            again = random.Random(seed * 100 + number)
            found = run_schedule(blocks, tokens, PREFIX, again, vocabulary)
            assert found == cold[PREFIX:], (seed, number)
        # In a row over the edge of a key block, each on rows that came alone; then here and there.
        for at in [*range(506, 518), *sorted(rng.sample(range(1, ROWS), 8))]:
            rows = blocks.forward(segment(at, [tokens[at]], slot=1, sampling=TOP))[0]
            alone = (rows.tokens[0], rows.logprobs[0], rows.top[0])
            assert alone == cold[at], (seed, at)
        # A cold prefill in other pieces gives the same rows too.
        spoil(blocks, seed + 1)
        edge = 520
        again = random.Random(seed + 1)
        assert run_schedule(blocks, tokens[:edge], 0, again, vocabulary) == cold[:edge]
    finally:
        torch.set_num_threads(threads)

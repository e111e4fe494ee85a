"""Owns the start-up probe: which kernels and tiles keep a row's bits its own on this machine.

Weights and rows are random with a fixed seed, so all stages of one machine kind find the same.
Knows no file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pipeline.kernels import KEY_STEPS, KEYS, PLAIN, ROWS, TILES, Kernels, attend, spans
from pipeline.linears import Linear, can_pack

_PROBE_KEYS = 2 * KEYS


@dataclass(frozen=True, slots=True)
class Work:
    """What the layers of a whole model compute; all its stages must find the same tiles.

    linears and routers: [out, in] shapes. heads: query heads, key heads, head_dim. sinks: its
    attention has them.
    """

    linears: tuple[tuple[int, int], ...]
    routers: tuple[tuple[int, int], ...]
    heads: tuple[int, int, int]
    sinks: bool


def choose(
    work: Work, dtype: torch.dtype, device: torch.device, *, exact: bool, weights: str = "dtype"
) -> Kernels:
    """Find the largest tiles that keep rows bit-equal here; `exact` False: plain kernels.

    weights: see Kernels. Where even 8-row tiles fail the result has exact False and says why.
    """
    plain = replace(PLAIN, weights=weights)
    if not exact:
        return plain
    kernels = Kernels(True, can_pack(dtype, device), TILES[0], 0, weights=weights)
    generator = torch.Generator().manual_seed(1)
    tile = TILES[0]
    for shape in sorted(set(work.linears)):  # one weight at a time: a stage has little room
        linear = Linear(_weight(shape, dtype, device, generator), None, kernels)
        tile = next((n for n in TILES if n <= tile and linear_exact(linear, n)), 0)
        if not tile:
            return replace(plain, why_not="linears differ by row")
    for shape in sorted(set(work.routers)):
        weight = _weight(shape, dtype, device, generator)
        if not rows_exact(lambda x, w=weight: F.linear(x, w), weight, ROWS):  # type: ignore[misc]
            return replace(plain, why_not="routers differ by row")
    for rows in TILES:
        tried = replace(kernels, linear_rows=tile, attention_rows=rows)
        if _attention_exact(work, dtype, device, tried):
            steps = (replace(tried, keys=step) for step in KEY_STEPS)
            return next(each for each in steps if _keys_exact(work, dtype, device, each))
    return replace(plain, why_not="attention differs by row")


def _weight(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    weight: Tensor = torch.randn(shape, generator=generator) * float(shape[1]) ** -0.5
    return weight.to(dtype).to(device)


def linear_exact(linear: Linear, tile: int) -> bool:
    """True when every call of 8, 16, ... `tile` rows gives each row the bits of an 8-row call."""
    like = torch.empty(0, linear.width, dtype=linear.dtype, device=linear.device)
    return rows_exact(linear.call, like, tile)


def rows_exact(call: Callable[[Tensor], Tensor], like: Tensor, tile: int) -> bool:
    """linear_exact for any function of [1, rows, in]; like: [..., in] of the rows' dtype."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, tile + ROWS, like.shape[-1], generator=generator).to(like)
    single = torch.cat([call(part) for part in torch.split(x, ROWS, 1)], 1)
    # Starting at row 1 moves every row to another place among other neighbours.
    return all(
        torch.equal(call(x[:, 1 : 1 + n].contiguous()), single[:, 1 : 1 + n])
        for n in range(ROWS, tile + 1, ROWS)
    )


def _attention_exact(
    work: Work, dtype: torch.dtype, device: torch.device, kernels: Kernels
) -> bool:
    """True when chunks of many sizes give each row the bits it has alone, on wider views too."""
    start, last = KEYS - 40, KEYS + 40  # the chunks cross a key block
    random = _RandomAttention(work, dtype, device)

    def run(low: int, high: int) -> Tensor:
        return random.run(low, high, kernels)

    alone = torch.cat([run(at, at + 1) for at in range(start, last)], 1)
    chunks = [(start, start + n) for n in (2, 3, 4, 5, 7, 8, 9, 16, 17, 24, 31, 32, 33, 34, 35)]
    chunks += [(start + 5, start + 5 + n) for n in (36, 40, 48, 63, 64, 65, 67, 72)]
    chunks += [(start, last)]
    return all(
        torch.equal(run(low, high), alone[:, low - start : high - start]) for low, high in chunks
    )


def _keys_exact(work: Work, dtype: torch.dtype, device: torch.device, kernels: Kernels) -> bool:
    """True when views of every multiple of `kernels.keys` give the bits of whole key blocks."""
    if kernels.keys == KEYS:
        return True
    random = _RandomAttention(work, dtype, device)
    whole = replace(kernels, keys=KEYS)
    rows = [each for each in (1, 8, 16, 32, 64, 128) if each <= kernels.attention_rows]
    return all(
        torch.equal(random.run(end - n, end, kernels), random.run(end - n, end, whole))
        for end in range(kernels.keys, _PROBE_KEYS, kernels.keys)
        for n in rows
        if n <= end
    )


class _RandomAttention:
    """Attention over random queries, keys and values, always the same ones."""

    def __init__(self, work: Work, dtype: torch.dtype, device: torch.device) -> None:
        count, self.groups, self.size = work.heads
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype).to(device)

        self.query = random(count, _PROBE_KEYS, self.size)
        self.keys = random(self.groups, _PROBE_KEYS, self.size)
        self.values = random(self.groups, _PROBE_KEYS, self.size)
        self.sinks = random(count) if work.sinks else None

    def run(self, low: int, high: int, kernels: Kernels) -> Tensor:
        """The results of query rows [low, high), [heads, rows, head_dim]."""
        parts = [
            attend(
                self.query[:, s.start : s.end],
                self.keys,
                self.values,
                s,
                window=None,
                scaling=self.size**-0.5,
                sinks=self.sinks,
            )
            for s in spans(low, high, len(self.query) // self.groups, kernels)
        ]
        return torch.cat(parts, 1)

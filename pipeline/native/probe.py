"""Owns whether the native kernels serve a model here: found, right, and exact.

A compiler may be missing or wrong, a virtual machine may promise instructions that it does not
have: so products and attention of the model's widths are tried first. Knows no file.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pipeline.attention import Part, Plan, attention
from pipeline.kernels import PLAIN, Kernels, spans
from pipeline.linears import Linear
from pipeline.native.library import DTYPES, WIDTH, Library, NativeError, library
from pipeline.probe import Work

_OUTPUTS = WIDTH + 8  # a whole block and part of one
_ROWS = 40  # more than one tile of rows, and not a multiple of any
_KEYS = 512
# Of the largest value; a mistake is near 1. What quantising loses of random weights is counted.
_WRONG = {"dtype": 1e-4, "int8": 2e-2, "int4": 2e-1}
_WRONG_ATTENTION = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def find(work: Work, dtype: torch.dtype, device: torch.device, weights: str) -> Library:
    """The kernels, tried with random numbers of the model's widths. Raises NativeError."""
    if device.type != "cpu":
        raise NativeError(f"they run on a CPU, not on {device.type}")
    if dtype not in DTYPES:
        raise NativeError(f"there are none for {str(dtype).removeprefix('torch.')}")
    odd = next((width for _, width in work.linears if width % WIDTH), None)
    if odd is not None:
        raise NativeError(f"a product's {odd} inputs are not a multiple of {WIDTH}")
    if work.heads[2] % (WIDTH // 2):
        raise NativeError(f"a head's {work.heads[2]} numbers are not a multiple of {WIDTH // 2}")
    found = library()
    for width in sorted({width for _, width in work.linears}):
        _try_linear(replace(PLAIN, exact=True, weights=weights, native=found), width, dtype)
    _try_attention(found, work, dtype)
    return found


def _random(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def _try_linear(kernels: Kernels, width: int, dtype: torch.dtype) -> None:
    weight = _random(1, dtype, _OUTPUTS, width)
    x = _random(2, dtype, _ROWS, width)
    right = x.double() @ weight.double().T
    linear = Linear(weight, None, kernels, wide=True)
    made = linear(x)
    _compare(made, right, _WRONG[kernels.weights], f"a product of {width} inputs")
    for first, last in ((0, 1), (3, 5), (7, 20), (1, _ROWS)):
        if not torch.equal(linear(x[first:last]), made[first:last]):
            raise NativeError(f"a product of {width} inputs differs by row")


def _try_attention(native: Library, work: Work, dtype: torch.dtype) -> None:
    heads, groups, size = work.heads
    sinks = _random(6, dtype, heads) if work.sinks else None
    start, end = _KEYS // 2 - _ROWS, _KEYS // 2 + _ROWS  # over a block's end
    query = _random(3, dtype, heads, end - start, size)
    new = _random(4, dtype, 2, groups, end - start, size)
    old = _random(5, dtype, 2, 1, groups, _KEYS, size)

    def run(low: int, high: int, kernels: Library | None) -> Tensor:
        keys, values = old.clone()
        keys[0, :, start:low], values[0, :, start:low] = new[:, :, : low - start]
        cut = spans(low, high, heads // groups, PLAIN)
        plan = Plan([Part(0, low, high, 0, cut)], {0: (keys, values)}, kernels)
        part = slice(low - start, high - start)
        q, (k, v) = query[:, part], new[:, :, part]
        return attention(plan, 0, q, k, v, scaling=size**-0.5, window=None, sinks=sinks)

    made = run(start, end, native)
    _compare(made, run(start, end, None), _WRONG_ATTENTION[dtype], "attention")
    for low, high in ((start, start + 1), (start + 3, start + 20), (end - 33, end)):
        if not torch.equal(run(low, high, native), made[low - start : high - start]):
            raise NativeError("attention differs by row")


def _compare(made: Tensor, right: Tensor, allowed: float, what: str) -> None:
    off = (made.double() - right.double()).abs().max() / right.double().abs().max()
    if not bool(off <= allowed):  # NaN too
        raise NativeError(f"{what} is off by {float(off):.1e} of its largest value")

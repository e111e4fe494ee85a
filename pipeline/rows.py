"""Owns how one layer's keys and values lie in the slots: as the dtype has them, or in a byte each.

In "int8" and "fp8" attention reads every row back from its bytes, also those that it has just
written: a row is the same for the chunk that made it and for all later ones. Knows no frame.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pipeline.heap import zeros
from pipeline.narrow import FP8, SCALE_BYTES, narrowed, widen

NARROW = {"int8": torch.int8, "fp8": FP8}
# Each [slots, key heads, capacity, ...]: keys and values of the dtype, or a Narrow.
Held: TypeAlias = tuple[Tensor, ...]


class Narrow(NamedTuple):
    """Keys and values, int8 or fp8 [slots, key heads, capacity, head_dim], with a scale a row.

    Scales: float32 [slots, key heads, capacity, 1].
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor
    value_scales: Tensor


def make_rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, kv: str) -> Held:
    """Zeros: rows that were never written are masked, but must not be NaN.

    shape: of the keys. kv: "dtype", or as NARROW names.
    """
    if kv == "dtype":
        return zeros(shape, dtype, device), zeros(shape, dtype, device)
    number, scale = NARROW[kv], (*shape[:-1], 1)
    kinds = ((shape, number), (shape, number), (scale, torch.float32), (scale, torch.float32))
    return Narrow(*(zeros(size, kind, device) for size, kind in kinds))


def write(held: Held, slot: int, place: slice | Tensor, key: Tensor, value: Tensor) -> None:
    """Keys and values [key heads, rows, head_dim] to those rows of a slot.

    place: a tensor where it changes between replays of a recording.
    """
    rows: Held = (key, value)
    if isinstance(held, Narrow):
        keys, key_scales = narrowed(key, held.keys.dtype)
        values, value_scales = narrowed(value, held.values.dtype)
        rows = (keys, values, key_scales, value_scales)
    for each, new in zip(held, rows, strict=True):
        if isinstance(place, slice):
            each[slot][:, place] = new
        else:
            _indexed(each)[slot].index_copy_(1, place, _indexed(new))


def view(held: Held, slot: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A slot's keys and values [key heads, at least `count`, head_dim] in `dtype`, to be read.

    Of a Narrow: copies of its first `count` rows, the only ones that are ever wide.
    """
    if not isinstance(held, Narrow):
        keys, values = held
        return keys[slot], values[slot]
    both = ((held.keys, held.key_scales), (held.values, held.value_scales))
    made = []
    for numbers, scales in both:
        mine = numbers[slot, :, :count]
        wide = torch.empty(mine.shape, dtype=dtype, device=mine.device)
        widen(mine, scales[slot, :, :count], wide)
        made.append(wide)
    return made[0], made[1]


def row_bytes(key_heads: int, head_dim: int, itemsize: int, kv: str) -> int:
    """Of one row's keys and values in one layer; itemsize: of the dtype."""
    each = head_dim * itemsize if kv == "dtype" else head_dim + SCALE_BYTES
    return 2 * key_heads * each


def _indexed(tensor: Tensor) -> Tensor:
    """As index_copy_ takes it: it knows no float8."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor

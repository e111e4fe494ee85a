"""Owns how much memory a block of a model takes, told from the headers of its files alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transport.codec import ITEM_BYTES
from transport.config import Limits

if TYPE_CHECKING:
    from pipeline.weights import Source

KV_STEP = 512  # a slot's rows are rounded up to a multiple: docs/exactness.md


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes: of one layer's weights, of one KV row of it, and of what head and tail hold beside."""

    layers_total: int
    layer: int
    row: int
    embedding: int
    lm_head: int

    @property
    def whole(self) -> int:
        """All weights of a ring together."""
        return self.layers_total * self.layer + self.embedding + self.lm_head

    def block(self, layers: tuple[int, int], limits: Limits) -> int:
        """Weights and every slot's rows of layers [first, last)."""
        first, last = layers
        rows = limits.slots * KV_STEP * math.ceil(limits.max_model_len / KV_STEP)
        ends = self.embedding if first == 0 else 0
        ends += self.lm_head if last == self.layers_total else 0
        return (last - first) * (self.layer + rows * self.row) + ends


def need_of(source: Source, dtype: str, weights: str = "dtype", kv: str = "dtype") -> Need:
    """Of an opened model in a ring's precision; weights and kv: as in ring.toml's [model]."""
    from pipeline.linears import BYTES
    from pipeline.rows import row_bytes

    item, config = ITEM_BYTES[dtype], source.config
    heads = int(config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    shapes = [
        shape
        for layer in range(source.layers_total)
        for shape in source.layer_shapes(layer).values()
    ]
    small = sum(math.prod(shape) for shape in shapes if len(shape) < 2) * item
    large = sum(math.prod(shape) for shape in shapes if len(shape) >= 2) * BYTES.get(weights, item)
    layer = int(small + large) // source.layers_total  # in the mean, where they differ
    embedding = source.vocabulary * int(config.hidden_size) * item
    row = row_bytes(int(config.num_key_value_heads), size, item, kv)
    return Need(source.layers_total, layer, row, embedding, embedding)

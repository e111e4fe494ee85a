"""Owns llama-shaped models of any size without a file: for measuring, their text is noise."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch

from pipeline.families import family
from pipeline.weights import Source

# name -> hidden, intermediate, heads, key heads, layers, vocabulary; as published models have them
SHAPES = {
    "135m": (576, 1536, 9, 3, 30, 49152),
    "360m": (960, 2560, 15, 5, 32, 49152),
    "0.5b": (896, 4864, 14, 2, 24, 151936),
    "1b": (2048, 8192, 32, 8, 16, 128256),
}


class RandomSource(Source):
    """A llama of one of SHAPES, tied, with normal weights drawn when they are read."""

    def __init__(self, shape: str) -> None:
        hidden, intermediate, heads, groups, layers, vocabulary = SHAPES[shape]
        kind = family("llama")
        config = kind.config(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            num_hidden_layers=layers,
            vocab_size=vocabulary,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        )
        super().__init__(Path(f"random-{shape}"), kind, config, {}, tied=True)

    @cached_property
    def fingerprint(self) -> bytes:
        """See Source; of the shape alone."""
        return str(self.path).encode()[:16].ljust(16)

    def size(self, name: str) -> int:  # noqa: ARG002
        """See Source; of progress alone."""
        return 1

    def _check(self, layers: tuple[int, int]) -> None:
        """See Source; there is nothing to miss."""

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """See Source."""
        generator = torch.Generator().manual_seed(sum(name.encode()))
        hidden = int(self.config.hidden_size)
        if name.endswith("norm.weight"):
            return torch.ones(hidden, dtype=dtype)
        below = name.split(".", 3)[-1] if name.startswith("model.layers.") else None
        shape = self.layer_shapes(0)[below] if below else (self.vocabulary, hidden)
        weight = torch.empty(shape, dtype=dtype)
        return weight.normal_(0, float(shape[-1]) ** -0.5, generator=generator)

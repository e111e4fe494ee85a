"""Owns the list of model families a stage can run, and what transformers calls their parts.

Knows neither files nor devices. A family is here when its decoder layer takes
(hidden_states, position_embeddings=..., **kwargs) and its attention goes through
AttentionInterface; tests/test_torch_model.py checks each against the library's whole model.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

_PREFIXES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
FAMILIES = tuple(_PREFIXES)


@dataclass(frozen=True, slots=True)
class Family:
    """The transformers classes of one family (each an untyped class of the library)."""

    name: str
    config: Any
    layer: Any
    norm: Any
    rotary: Any


def family(name: str) -> Family:
    """Import one family's classes; KeyError for a name outside FAMILIES.

    Only this family's module is imported: 2.5 s of transformers' own start (measured), against
    4 s and more through its Auto classes.
    """
    prefix = _PREFIXES[name]
    configuration = import_module(f"transformers.models.{name}.configuration_{name}")
    modeling = import_module(f"transformers.models.{name}.modeling_{name}")
    return Family(
        name,
        getattr(configuration, f"{prefix}Config"),
        getattr(modeling, f"{prefix}DecoderLayer"),
        getattr(modeling, f"{prefix}RMSNorm"),
        getattr(modeling, f"{prefix}RotaryEmbedding"),
    )

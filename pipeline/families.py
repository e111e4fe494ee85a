"""Owns the list of model families a stage can run, and what transformers calls their parts.

Knows neither files nor devices. A family is here when its decoder layer takes
(hidden_states, position_embeddings=..., **kwargs), its attention goes through AttentionInterface,
and its experts, if it has any, are the library's stacked ones; tests/test_families.py checks each
against the library's whole model.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True)
class _Names:
    """module: of transformers.models. The others are class names, where they differ from a llama's.

    prefix: of the layer's, the norm's and the rotary module's.
    """

    module: str
    prefix: str
    config: str = ""
    embedding: str = ""


_FAMILIES = {
    "llama": _Names("llama", "Llama"),
    "mistral": _Names("mistral", "Mistral"),
    "qwen2": _Names("qwen2", "Qwen2"),
    "qwen3": _Names("qwen3", "Qwen3"),
    "gemma3_text": _Names("gemma3", "Gemma3", "Gemma3TextConfig", "Gemma3TextScaledWordEmbedding"),
    "phi3": _Names("phi3", "Phi3"),
    "qwen3_moe": _Names("qwen3_moe", "Qwen3Moe"),
    "mixtral": _Names("mixtral", "Mixtral"),
    "gpt_oss": _Names("gpt_oss", "GptOss"),
}
FAMILIES = tuple(_FAMILIES)


@dataclass(frozen=True, slots=True)
class Family:
    """The transformers classes of one family (each an untyped class of the library).

    embedding: None where it is a plain table.
    """

    name: str
    config: Any
    layer: Any
    norm: Any
    rotary: Any
    embedding: Any = None


def family(name: str) -> Family:
    """Import one family's classes; KeyError for a name outside FAMILIES.

    Only this family's module is imported: 2.5 s of transformers' own start (measured), against
    4 s and more through its Auto classes.
    """
    names = _FAMILIES[name]
    package = f"transformers.models.{names.module}"
    configuration = import_module(f"{package}.configuration_{names.module}")
    modeling = import_module(f"{package}.modeling_{names.module}")
    return Family(
        name,
        getattr(configuration, names.config or f"{names.prefix}Config"),
        getattr(modeling, f"{names.prefix}DecoderLayer"),
        getattr(modeling, f"{names.prefix}RMSNorm"),
        getattr(modeling, f"{names.prefix}RotaryEmbedding"),
        getattr(modeling, names.embedding) if names.embedding else None,
    )


def variant(config: Any, layer: int) -> bool:
    """Layers of one variant have tensors of the same names and shapes.

    Only qwen3_moe has two: layers with experts and layers without (its own condition).
    """
    if not hasattr(config, "decoder_sparse_step"):
        return False
    sparse = config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0
    return bool(sparse and layer not in config.mlp_only_layers)


def ropes(config: Any) -> dict[str, dict[str, Any]]:
    """The rope parameters of each layer type; under "" where all layers have the same."""
    found = getattr(config, "rope_parameters", None) or {}
    if found and all(isinstance(each, dict) for each in found.values()):
        return dict(found)
    return {"": found}

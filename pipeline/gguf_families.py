"""Owns what GGUF calls the families, their tensors and their config's values.

Names follow gguf's own tensor_mapping (tests/tinymodels.py writes files with it); values follow
llama.cpp's convert_hf_to_gguf.py, and its defaults where that writes none. Reads no bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Number = Callable[..., float]  # a key of this architecture, and its default

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
# What differs from the names above.
_OWN_NAMES = {
    "gemma3_text": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "gpt_oss": {
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
    },
}
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
}
_GEMMA_27B_LAYERS = 62  # llama.cpp knows the one that scales its queries otherwise by this


def family_of(architecture: object, experts: float) -> object:
    """The transformers name of a GGUF's architecture; that itself where there is none."""
    if architecture == "llama" and experts:
        return "mixtral"
    return _ARCHITECTURES.get(str(architecture), architecture)


def hf_name(family: str, name: str) -> str:
    """A tensor's Hugging Face name; its own where it has none."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return _NAMES.get(name, name)
    layer, stem, kind = match.groups()
    stem = _OWN_NAMES.get(family, {}).get(stem) or _LAYER_NAMES.get(stem, "")
    if not stem:
        return name
    whole = stem.endswith("sinks")  # a parameter of its own, not of a module's
    return f"model.layers.{layer}.{stem}" if whole else f"model.layers.{layer}.{stem}.{kind}"


def own_values(family: str, number: Number, layers: float, heads: float) -> dict[str, Any]:
    """Config values that only this family has, or has otherwise."""
    match family:
        case "gemma3_text":
            hidden = number("embedding_length")
            size = number("attention.key_length", hidden // heads)
            big = layers == _GEMMA_27B_LAYERS
            return {
                "sliding_window": number("attention.sliding_window"),
                "query_pre_attn_scalar": hidden // heads if big else size,
                "final_logit_softcapping": number("final_logit_softcapping", 0) or None,
                "sliding_window_pattern": number("attention.sliding_window_pattern", 6),
            }
        case "phi3":
            longest = number("context_length")
            return {
                "sliding_window": number("attention.sliding_window", 0) or None,
                "original_max_position_embeddings": number(
                    "rope.scaling.original_context_length", longest
                ),
            }
        case "mixtral":
            return _experts(number)
        case "qwen3_moe":
            inner = number("expert_feed_forward_length")
            # llama.cpp divides by the sum of the chosen ones' weights, whatever a file says
            return _experts(number) | {"moe_intermediate_size": inner, "norm_topk_prob": True}
        case "gpt_oss":
            inner = number("expert_feed_forward_length", number("feed_forward_length"))
            window = number("attention.sliding_window")
            return _experts(number) | {"intermediate_size": inner, "sliding_window": window}
    return {}


def _experts(number: Number) -> dict[str, Any]:
    return {
        "num_experts": number("expert_count"),
        "num_experts_per_tok": number("expert_used_count"),
    }

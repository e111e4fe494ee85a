"""Random tiny models of each family, as Hugging Face directories and GGUF files."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from pipeline.families import family

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Each case turns on what its family has of its own.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}),
}


def reference(case: str) -> Any:
    """The library's whole model of a case, float32, eager attention, random weights."""
    name, extra = CASES[case]
    kind = family(name)
    config = kind.config(**{"tie_word_embeddings": False, **SIZES, **extra})
    config._attn_implementation = "eager"
    module = import_module(f"transformers.models.{name}.modeling_{name}")
    torch.manual_seed(7)
    model = getattr(module, kind.config.__name__.removesuffix("Config") + "ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases: the default ones and zeros hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    return model.eval()


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """A model's tensors under their checkpoint names; no LM head where it is tied."""
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def write_directory(path: Path, model: Any, state: dict[str, torch.Tensor] | None = None) -> Path:
    """Write a model as a Hugging Face directory with one safetensors file."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(model.config.to_dict()))
    save_file(tensors(model) if state is None else state, path / "model.safetensors")
    return path


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def _gguf_name(name: str) -> str:
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    _, _, layer, rest = name.split(".", 3)
    stem, _, suffix = rest.rpartition(".")
    return f"blk.{layer}.{_GGUF_NAMES[stem]}.{suffix}"


def _permute(value: torch.Tensor, heads: Any) -> torch.Tensor:
    """llama.cpp's order of a llama's Q and K rows."""
    halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return halves.transpose(1, 2).reshape(value.shape)


def write_gguf(
    path: Path,
    model: Any,
    *,
    architecture: str | None = None,
    skip_key: str = "",
    skip_tensor: str = "",
    reshape: str = "",
) -> Path:
    """Write a model as float32 GGUF; the options break it in one place (names of the GGUF)."""
    config = model.config
    name = architecture or config.model_type.replace("mistral", "llama")
    writer = gguf.GGUFWriter(path, name)
    rope = config.rope_parameters["rope_theta"]
    integers = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
    }
    reals = {"rope.freq_base": rope, "attention.layer_norm_rms_epsilon": config.rms_norm_eps}
    for key, integer in integers.items():
        if key != skip_key:
            writer.add_uint32(f"{name}.{key}", integer)
    for key, real in reals.items():
        writer.add_float32(f"{name}.{key}", real)
    writer.add_token_list([f"t{i}" for i in range(VOCABULARY)])
    for full, value in tensors(model).items():
        target = _gguf_name(full)
        if target == skip_tensor:
            continue
        heads = {".q_proj.": config.num_attention_heads, ".k_proj.": config.num_key_value_heads}
        count = next((n for part, n in heads.items() if part in full), None)
        permute = name == "llama" and count is not None
        data = (_permute(value, count) if permute else value).numpy()
        writer.add_tensor(target, np.ascontiguousarray(data[1:] if target == reshape else data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

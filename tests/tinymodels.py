"""Random tiny models of each family, as Hugging Face directories and GGUF files.

GGUF names are those of gguf's own mapping, values those of llama.cpp's convert_hf_to_gguf.py.
"""

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
    "hidden_size": 96,
    "intermediate_size": 128,
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
LOCAL = {"rope_type": "default", "rope_theta": 100.0}
FULL = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
FACTORS = [1.0 + 0.1 * i for i in range(6)]
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75} | {
    "short_factor": FACTORS,
    "long_factor": [4 * each for each in FACTORS],
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "truncate": False} | {
    "original_max_position_embeddings": 64
}
EXPERTS = {"num_experts_per_tok": 3, "num_local_experts": 8}
# Each case turns on what its family has of its own.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}),
    "gemma3": (
        "gemma3_text",
        {"rope_parameters": {"full_attention": FULL, "sliding_attention": LOCAL}}
        | {"sliding_window": 20, "sliding_window_pattern": 3, "query_pre_attn_scalar": 16}
        | {"tie_word_embeddings": True, "final_logit_softcapping": 5.0},
    ),
    "phi3": ("phi3", {"hidden_size": 96, "sliding_window": 24}),
    "phi3long": (
        "phi3",
        {"hidden_size": 96, "rope_parameters": LONG, "max_position_embeddings": 4096}
        | {"original_max_position_embeddings": 1024},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts_per_tok": 3, "num_experts": 8, "moe_intermediate_size": 32}
        | {"mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "mixtral": ("mixtral", {"sliding_window": 24, **EXPERTS}),
    "gpt_oss": ("gpt_oss", {"rope_parameters": YARN, "sliding_window": 24, **EXPERTS}),
}


# What a GGUF has no key for: with these, a file holds all of the model.
GGUF_CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"use_sliding_window": False},
    "gemma3": {},
    "phi3": {},
    "phi3long": {},
    "qwen3_moe": {"mlp_only_layers": []},
    "mixtral": {"sliding_window": None},
    "gpt_oss": {},
}


def reference(case: str, changes: dict[str, Any] | None = None) -> Any:
    """The library's whole model of a case, float32, eager attention, random weights."""
    name, extra = CASES[case]
    extra = extra | (changes or {})
    kind = family(name)
    config = kind.config(**{"tie_word_embeddings": False, **SIZES, **extra})
    config._attn_implementation = config._experts_implementation = "eager"
    module = import_module(kind.layer.__module__)
    torch.manual_seed(7)
    model = getattr(module, kind.layer.__name__.replace("DecoderLayer", "ForCausalLM"))(config)
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


def published(model: Any) -> dict[str, torch.Tensor]:
    """The tensors as the hub has them: of qwen3_moe and mixtral, each expert by itself."""
    found: dict[str, torch.Tensor] = {}
    mixtral = model.config.model_type == "mixtral"
    for name, value in tensors(model).items():
        name = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name  # noqa: PLW2901
        stem, _, which = name.rpartition(".")
        if value.dim() < 3 or model.config.model_type == "gpt_oss":
            found[name] = value
            continue
        for number, expert in enumerate(value):
            parts = {"w2" if mixtral else "down_proj": expert}
            if which == "gate_up_proj":
                names = ("w1", "w3") if mixtral else ("gate_proj", "up_proj")
                parts = dict(zip(names, expert.chunk(2), strict=True))
            found |= {f"{stem}.{number}.{n}.weight": part.clone() for n, part in parts.items()}
    return found


def _permute(value: torch.Tensor, heads: Any) -> torch.Tensor:
    """llama.cpp's order of a llama's Q and K rows."""
    halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return halves.transpose(1, 2).reshape(value.shape)


_ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "gemma3_text": "gemma3",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
}


def _integers(config: Any) -> dict[str, int]:
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
    }
    if getattr(config, "num_experts", 0):
        found |= {"expert_count": config.num_experts}
        found |= {"expert_used_count": config.num_experts_per_tok}
    if config.model_type == "qwen3_moe":
        found |= {"expert_feed_forward_length": config.moe_intermediate_size}
    if config.model_type in ("gemma3_text", "phi3", "gpt_oss") and config.sliding_window:
        found |= {"attention.sliding_window": config.sliding_window}
    if config.model_type == "phi3":
        found["rope.dimension_count"] = int(
            config.head_dim * config.rope_parameters["partial_rotary_factor"]
        )
    return found


def _values(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    found: dict[str, Any] = {"attention.layer_norm_rms_epsilon": config.rms_norm_eps}
    if config.model_type == "gemma3_text":
        found |= {"rope.freq_base_swa": rope["sliding_attention"]["rope_theta"]}
        found |= {"final_logit_softcapping": config.final_logit_softcapping}
        found |= {"attention.sliding_window_pattern": 3}
        rope = rope["full_attention"]
    found["rope.freq_base"] = rope["rope_theta"]
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    first = rope.get("original_max_position_embeddings")
    return found if first is None else found | {"rope.scaling.original_context_length": first}


def _stored(model: Any) -> dict[str, torch.Tensor]:
    """The tensors as GGUF has them, under Hugging Face names that gguf's mapping knows."""
    kind, found = model.config.model_type, {}
    for name, value in tensors(model).items():
        heads = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}
        count = next((key for part, key in heads.items() if part in name), None)
        if kind in ("llama", "mistral", "mixtral") and count is not None:
            found[name] = _permute(value, getattr(model.config, count))
        elif kind == "gemma3_text" and name.endswith("norm.weight"):
            found[name] = value + 1
        elif name.endswith(".sinks"):
            found[f"{name}.weight"] = value
        elif ".experts." in name:
            found |= _stacked(name, value, turned=kind == "gpt_oss")
        else:
            found[name] = value
    return found


def _stacked(name: str, value: torch.Tensor, *, turned: bool) -> dict[str, torch.Tensor]:
    """A stack of experts with gate and up apart; turned: as gpt_oss has them."""
    bias = name.endswith("_bias")
    stem, which = name.removesuffix("_bias").rsplit(".", 1)
    suffix = "bias" if bias else "weight"
    if turned and not bias:
        value = value.transpose(1, 2)
    if which == "down_proj":
        return {f"{stem}.down_proj.{suffix}": value}
    gate, up = (value[:, ::2], value[:, 1::2]) if turned else value.chunk(2, dim=1)
    return {f"{stem}.gate_proj.{suffix}": gate, f"{stem}.up_proj.{suffix}": up}


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
    kind = _ARCHITECTURES.get(config.model_type, config.model_type)
    name = architecture or kind
    known = next(each for each, text in gguf.MODEL_ARCH_NAMES.items() if text == kind)
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, name)
    for key, integer in _integers(config).items():
        if key != skip_key:
            writer.add_uint32(f"{name}.{key}", integer)
    for key, value in _values(config).items():
        if isinstance(value, str):
            writer.add_string(f"{name}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{name}.{key}", value)
        else:
            writer.add_float32(f"{name}.{key}", value)
    writer.add_token_list([f"t{i}" for i in range(VOCABULARY)])
    for full, tensor in _stored(model).items():
        target = names.get_name(full, (".weight", ".bias"))
        assert target is not None, full
        if target == skip_tensor:
            continue
        data = tensor.numpy()
        writer.add_tensor(target, np.ascontiguousarray(data[1:] if target == reshape else data))
    if config.rope_parameters.get("rope_type") == "longrope":
        for size in ("short", "long"):
            factors = np.array(config.rope_parameters[f"{size}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{size}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks [..., groups, 16] and scales [..., groups] of values [..., 32 * groups], and what of
    the values is left: the nearest of sixteen times the power of two that the largest fits under.
    """
    groups = values.double().reshape(*values.shape[:-1], -1, 32)
    exponent = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    power = torch.exp2(exponent)[..., None]
    code = ((groups / power)[..., None] - E2M1).abs().argmin(-1)
    blocks = (code[..., ::2] | code[..., 1::2] << 4).to(torch.uint8)
    left = (E2M1[code] * power).flatten(-2)
    return blocks, (exponent + 127).to(torch.uint8), left.to(values.dtype)


def as_published_gpt_oss(model: Any) -> dict[str, torch.Tensor]:
    """A gpt_oss's tensors as the hub has them, in MXFP4; its own become what is left of them."""
    state: dict[str, torch.Tensor] = {}
    for name, value in tensors(model).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            state[name] = value
            continue
        blocks, scales, left = mxfp4(value.transpose(1, 2))
        value.copy_(left.transpose(1, 2))
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    model.config.quantization_config = {"quant_method": "mxfp4"}
    return state

"""Tiny models with random weights, as a Hugging Face folder or a GGUF file, and ways to break them.

A token is a byte, as for the toy, so no vocabulary has to be fetched.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from random import Random

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LAYERS = 4
HIDDEN, HEADS, KEY_HEADS, HEAD_DIM, INNER = 64, 4, 2, 16, 96
VOCABULARY = 257  # the bytes, and one merge
CONTEXT = 512
_LAYER_SHAPES = {
    "input_layernorm": (HIDDEN,),
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KEY_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KEY_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "post_attention_layernorm": (HIDDEN,),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_folder(folder: Path, *, seed: int = 0, missing: Collection[str] = ()) -> Path:
    """A llama of LAYERS layers; tensors named in `missing` are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{name}.weight": value
        for name, value in _weights(seed).items()
        if f"{name}.weight" not in missing
    }
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(
        models.BPE({text: byte for byte, text in enumerate(_alphabet())}, [("a", "b")])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_gguf(path: Path, *, seed: int = 0, missing: Collection[str] = ()) -> Path:
    """The same llama as a float32 GGUF file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(_alphabet())
    writer.add_token_merges(["a b"])
    for name, value in _weights(seed).items():
        known = f"{_gguf_name(name)}.weight"
        if known not in missing:
            writer.add_tensor(known, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def mutate(data: bytes, seed: int) -> bytes:
    """Some bytes of the first 8 KiB replaced: where a file says what it holds."""
    random = Random(seed)
    changed = bytearray(data)
    for _ in range(random.randrange(1, 5)):
        at = random.randrange(min(len(changed), 8192))
        changed[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
    return bytes(changed)


def _weights(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (VOCABULARY, HIDDEN),
        "model.norm": (HIDDEN,),
    }
    for layer in range(LAYERS):
        for name, shape in _LAYER_SHAPES.items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return {
        name: (1 + 0.1 * random.standard_normal(shape)).astype(np.float32)
        if len(shape) == 1
        else (0.1 * random.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def _gguf_name(name: str) -> str:
    if name == "model.embed_tokens":
        return "token_embd"
    if name == "model.norm":
        return "output_norm"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[rest]}"


def _alphabet() -> list[str]:
    """The byte-level alphabet in the order of bytes (GPT-2's encoder.py, bytes_to_unicode)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    odd = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(odd)) for byte in range(256)] + ["ab"]

"""Owns reading GGUF: the container (version 2 and 3, little endian) and its tensors as HF ones.

The header is parsed here rather than by gguf.GGUFReader, which makes several numpy views for each
token of the vocabulary: 4.8 s against 0.1 s for 49,152 tokens. Dequantisation is gguf's own.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from struct import Struct
from typing import Any, TypeAlias

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pipeline.weights import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    Entry,
    MappedFile,
    ModelError,
    Source,
    make_config,
    supported_family,
)

Scalar: TypeAlias = int | float | bool | str

_MAGIC = b"GGUF"
_U32, _U64 = Struct("<I"), Struct("<Q")
_SCALARS = {code: Struct("<" + letter) for code, letter in enumerate("BbHhIif?", start=0)} | {
    10: Struct("<Q"),
    11: Struct("<q"),
    12: Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
_DEFAULT_ALIGNMENT = 32
_CHUNK_ELEMENTS = 4 << 20  # dequantised at once: 16 MB of float32, not a whole embedding's 113 MB

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
}
_NAMES = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": FINAL_NORM,
    "output.weight": LM_HEAD,
}
_ROPE_DIVISORS = "rope_freqs.weight"  # llama 3.1's long-context rescaling, one per frequency
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Header:
    """What a GGUF file says of itself. arrays: key -> length (their contents are skipped).

    entries: by the file's own tensor names; each entry has its Hugging Face name.
    """

    metadata: dict[str, Scalar]
    arrays: dict[str, int]
    entries: dict[str, Entry]


class _Cursor:
    """Bounded reads from the start of a file; a read past its end is a ModelError."""

    def __init__(self, file: MappedFile) -> None:
        self.path = file.path
        self.data = file.data
        self.size = len(file.data)
        self.at = 0

    def take(self, layout: Struct) -> Any:
        start = self.at
        self.skip(layout.size)
        return layout.unpack_from(self.data, start)[0]

    def skip(self, count: int) -> None:
        if count > self.size - self.at:
            raise ModelError(f"{self.path}: truncated GGUF: the header runs past byte {self.size}")
        self.at += count

    def text(self) -> str:
        length = self.take(_U64)
        start = self.at
        self.skip(length)
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError:
            raise ModelError(f"{self.path}: broken GGUF: bad text at byte {start}") from None

    def value(self, code: int) -> Scalar:
        if code == _STRING:
            return self.text()
        layout = _SCALARS.get(code)
        if layout is None:
            raise ModelError(f"{self.path}: broken GGUF: value type {code} at byte {self.at}")
        scalar: Scalar = self.take(layout)
        return scalar

    def skip_array(self) -> int:
        """Step over an array and return its length."""
        code, length = self.take(_U32), self.take(_U64)
        layout = _SCALARS.get(code)
        if layout is not None:
            self.skip(layout.size * length)
        elif code == _STRING:
            self._skip_texts(length)
        else:
            raise ModelError(f"{self.path}: broken GGUF: array of type {code} at byte {self.at}")
        return int(length)

    def _skip_texts(self, count: int) -> None:
        # A tight loop: vocabularies and merges are 100,000 strings and more.
        unpack, data, at, last = _U64.unpack_from, self.data, self.at, self.size - _U64.size
        for _ in range(count):
            if at > last:
                break
            at += _U64.size + unpack(data, at)[0]
        else:
            self.skip(at - self.at)
            return
        self.skip(self.size)


def read_header(file: MappedFile) -> Header:
    """Parse and check a GGUF header; ModelError for a broken or truncated one."""
    cursor = _Cursor(file)
    if file.data[:4] != _MAGIC:
        raise ModelError(f"{file.path}: not a GGUF file")
    cursor.skip(4)
    version = cursor.take(_U32)
    if version not in (2, 3):
        raise ModelError(f"{file.path}: GGUF version {version} is not supported (2 and 3 are)")
    tensor_count, value_count = cursor.take(_U64), cursor.take(_U64)
    metadata: dict[str, Scalar] = {}
    arrays: dict[str, int] = {}
    for _ in range(value_count):
        key = cursor.text()
        code = cursor.take(_U32)
        if code == _ARRAY:
            arrays[key] = cursor.skip_array()
        else:
            metadata[key] = cursor.value(code)
    infos = [_read_info(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ModelError(f"{file.path}: broken GGUF: alignment {alignment!r}")
    base = -(-cursor.at // alignment) * alignment
    entries: dict[str, Entry] = {}
    for name, kind, shape, offset in infos:
        if name in entries:
            raise ModelError(f"{file.path}: broken GGUF: two tensors {name}")
        entries[name] = _entry(file, name, kind, shape, base + offset)
    return Header(metadata, arrays, entries)


def _read_info(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    name = cursor.text()
    dimensions = cursor.take(_U32)
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise ModelError(f"{cursor.path}: broken GGUF: tensor {name} has {dimensions} dimensions")
    shape = tuple(reversed([cursor.take(_U64) for _ in range(dimensions)]))
    return name, cursor.take(_U32), shape, cursor.take(_U64)


def _entry(file: MappedFile, name: str, kind: int, shape: tuple[int, ...], offset: int) -> Entry:
    try:
        quantization = GGMLQuantizationType(kind)
    except ValueError:
        raise ModelError(f"{file.path}: tensor {name} has the unknown type {kind}") from None
    block, block_bytes = GGML_QUANT_SIZES[quantization]
    if shape[-1] % block:
        raise ModelError(f"{file.path}: broken GGUF: tensor {name} is {list(shape)}")
    size = prod(shape) // block * block_bytes
    if offset + size > len(file.data):
        raise ModelError(
            f"{file.path}: truncated GGUF: tensor {name} ends at byte {offset + size}, "
            f"the file at {len(file.data)}"
        )
    return Entry(_hf_name(name), file, quantization.name, shape, offset, size)


class GgufSource(Source):
    """A GGUF file as Hugging Face tensors; see Source."""

    def __init__(self, path: Path) -> None:
        file = MappedFile(path)
        header = read_header(file)
        self._metadata = header.metadata
        self.path = path
        self._architecture = header.metadata.get("general.architecture")
        kind = supported_family(path, self._architecture)
        entries = {entry.name: entry for entry in header.entries.values()}
        self._divisors = entries.pop(_ROPE_DIVISORS, None)
        if EMBEDDING not in entries:
            raise ModelError(f"{path}: tensor {EMBEDDING} is missing")
        tied = LM_HEAD not in entries
        values = self._config_values(entries, tied)
        layers = values["num_hidden_layers"]
        config = make_config(kind, path, layers, lambda: kind.config(**values))
        super().__init__(path, kind, config, entries, tied)

    @property
    def rope_divisors(self) -> torch.Tensor | None:
        """See Source."""
        if self._divisors is None:
            return None
        return self._load(self._divisors, torch.float32)

    def _number(self, key: str, default: float | None = None) -> float:
        """A number of this architecture; a whole one stays an int."""
        full = f"{self._architecture}.{key}"
        value = self._metadata.get(full, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            what = "missing" if value is None else f"{value!r}, not a number"
            raise ModelError(f"{self.path}: {full} is {what}")
        return value

    def _config_values(self, entries: dict[str, Entry], tied: bool) -> dict[str, Any]:
        if self._number("expert_count", 0):
            raise ModelError(
                f"{self.path}: family {self._architecture!r} with experts is not supported"
            )
        heads, hidden = self._number("attention.head_count"), self._number("embedding_length")
        if heads < 1:
            raise ModelError(f"{self.path}: {self._architecture}.attention.head_count is {heads}")
        head_dim = self._number("attention.key_length", hidden // heads)
        return {
            "vocab_size": entries[EMBEDDING].shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self._number("context_length"),
            "rope_parameters": self._rope(head_dim),
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in entries,
            "tie_word_embeddings": tied,
            "sliding_window": None,
        }

    def _rope(self, head_dim: float) -> dict[str, Any]:
        rotated = self._number("rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise ModelError(f"{self.path}: rope over {rotated} of {head_dim} is not supported")
        rope = {
            "rope_type": "default",
            "rope_theta": float(self._number("rope.freq_base", 10000.0)),
        }
        scaling = self._metadata.get(f"{self._architecture}.rope.scaling.type", "none")
        if scaling == "linear":
            rope |= {"rope_type": "linear", "factor": float(self._number("rope.scaling.factor"))}
        elif scaling != "none":
            raise ModelError(f"{self.path}: rope scaling {scaling!r} is not supported")
        return rope

    def _load(self, entry: Entry, dtype: torch.dtype) -> torch.Tensor:
        rows = prod(entry.shape[:-1])
        raw = np.frombuffer(entry.file.data, np.uint8, entry.size, entry.offset)
        raw = raw.reshape(rows, entry.size // rows)
        kind = GGMLQuantizationType[entry.dtype]
        tensor = torch.empty(rows, entry.shape[-1], dtype=dtype)
        step = max(1, _CHUNK_ELEMENTS // entry.shape[-1])
        for start in range(0, rows, step):
            try:
                part = dequantize(raw[start : start + step], kind)
            except NotImplementedError:
                raise ModelError(
                    f"{self.path}: tensor {entry.name} has the unsupported type {entry.dtype}"
                ) from None
            tensor[start : start + step] = torch.from_numpy(part)
        tensor = tensor.reshape(entry.shape)
        if self._architecture == "llama":
            if ".q_proj." in entry.name:
                return _unpermute(tensor, self.config.num_attention_heads)
            if ".k_proj." in entry.name:
                return _unpermute(tensor, self.config.num_key_value_heads)
        return tensor


def _hf_name(name: str) -> str:
    match = _LAYER.fullmatch(name)
    if match is not None and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return _NAMES.get(name, name)


def _unpermute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of a llama's Q and K rows (pairs beside each other, not in halves)."""
    pairs = tensor.shape[0] // heads // 2
    halves = tensor.reshape(heads, pairs, 2, *tensor.shape[1:]).transpose(1, 2)
    return halves.reshape(tensor.shape)

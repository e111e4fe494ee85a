"""Owns reading GGUF: the container (version 2 and 3, little endian) and its tensors as HF ones.

The header is parsed here rather than by gguf.GGUFReader, which makes several numpy views for each
token of the vocabulary: 4.8 s against 0.1 s for 49,152 tokens. Dequantisation is gguf's own.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from struct import Struct
from typing import Any, TypeAlias

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pipeline.gguf_families import family_of, hf_name, own_values
from pipeline.model import ModelError
from pipeline.tensors import Entry, MappedFile
from pipeline.weights import EMBEDDING, LM_HEAD, Source, make_config, supported_family

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

_ROPE_DIVISORS = "rope_freqs.weight"  # llama 3.1's long-context rescaling, one per frequency
_LONG_ROPES = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
_ROPES = ("linear", "yarn")


@dataclass(frozen=True, slots=True)
class Header:
    """What a GGUF file says of itself. arrays: key -> length (their contents are skipped).

    entries: by the file's own tensor names.
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
    return Entry(name, file, quantization.name, shape, offset, size)


class GgufSource(Source):
    """A GGUF file as Hugging Face tensors; see Source."""

    def __init__(self, path: Path) -> None:
        file = MappedFile(path)
        header = read_header(file)
        self._metadata = header.metadata
        self.path = path
        self._architecture = header.metadata.get("general.architecture")
        experts = self._number("expert_count", 0)
        kind = supported_family(path, family_of(self._architecture, experts))
        entries = {}
        for each in header.entries.values():
            name = hf_name(kind.name, each.name)
            entries[name] = replace(each, name=name)
        self._divisors = entries.pop(_ROPE_DIVISORS, None)
        if EMBEDDING not in entries:
            raise ModelError(f"{path}: tensor {EMBEDDING} is missing")
        tied = LM_HEAD not in entries
        values = self._config_values(kind.name, entries, tied)
        layers = values["num_hidden_layers"]
        config = make_config(kind, path, layers, lambda: kind.config(**values))
        super().__init__(path, kind, config, entries, tied=tied)

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

    def _config_values(self, family: str, entries: dict[str, Entry], tied: bool) -> dict[str, Any]:
        if self._number("expert_count", 0) and family not in ("mixtral", "qwen3_moe", "gpt_oss"):
            raise ModelError(
                f"{self.path}: family {self._architecture!r} with experts is not supported"
            )
        heads, hidden = self._number("attention.head_count"), self._number("embedding_length")
        if heads < 1:
            raise ModelError(f"{self.path}: {self._architecture}.attention.head_count is {heads}")
        head_dim = self._number("attention.key_length", hidden // heads)
        layers = self._number("block_count")
        values = {
            "vocab_size": entries[EMBEDDING].shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self._number("context_length"),
            "rope_parameters": self._rope(family, head_dim) | self._long_rope(entries),
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in entries,
            "tie_word_embeddings": tied,
            "sliding_window": None,
            "pad_token_id": None,
        }
        return values | own_values(family, self._number, layers, heads)

    def _rope(self, family: str, head_dim: float) -> dict[str, Any]:
        rotated = self._number("rope.dimension_count", head_dim)
        rope: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": float(self._number("rope.freq_base", 10000.0)),
        }
        if family == "phi3" and rotated != head_dim:
            rope["partial_rotary_factor"] = rotated / head_dim
        elif rotated != head_dim:
            raise ModelError(f"{self.path}: rope over {rotated} of {head_dim} is not supported")
        scaling = self._metadata.get(f"{self._architecture}.rope.scaling.type", "none")
        if scaling in _ROPES:
            rope |= {"rope_type": scaling, "factor": float(self._number("rope.scaling.factor"))}
        elif scaling != "none":
            raise ModelError(f"{self.path}: rope scaling {scaling!r} is not supported")
        if scaling == "yarn":
            first = self._number("rope.scaling.original_context_length")
            rope |= {"original_max_position_embeddings": first, "truncate": family != "gpt_oss"}
        if family == "gemma3_text":  # llama.cpp scales its full layers only
            local = float(self._number("rope.freq_base_swa", 10000.0))
            near = {"rope_type": "default", "rope_theta": local}
            return {"full_attention": rope, "sliding_attention": near}
        return rope

    def _long_rope(self, entries: dict[str, Entry]) -> dict[str, Any]:
        """What phi3 needs beyond _rope where its context was lengthened."""
        if not all(name in entries for name in _LONG_ROPES.values()):
            return {}
        factors = {
            key: dequantize(self._bytes(entries[name]), GGMLQuantizationType[entries[name].dtype])
            for key, name in _LONG_ROPES.items()
        }
        first = self._number("rope.scaling.original_context_length")
        rope = {"rope_type": "longrope", "original_max_position_embeddings": first}
        return rope | {key: each.reshape(-1).tolist() for key, each in factors.items()}

    def _bytes(self, entry: Entry) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """As [rows, bytes of a row]."""
        rows = prod(entry.shape[:-1])
        raw = np.frombuffer(entry.file.data, np.uint8, entry.size, entry.offset)
        return raw.reshape(rows, entry.size // rows)

    def _rows(self, entry: Entry, start: int, into: torch.Tensor) -> None:
        raw = self._bytes(entry)[start : start + len(into)]
        try:
            part = dequantize(raw, GGMLQuantizationType[entry.dtype])
        except NotImplementedError:
            raise ModelError(
                f"{self.path}: tensor {entry.name} has the unsupported type {entry.dtype}"
            ) from None
        if self.family.name == "gemma3_text" and entry.name.endswith("norm.weight"):
            part = part - 1  # the converter adds what the library's norm adds
        into.copy_(torch.from_numpy(part))

    def _finish(self, entry: Entry, tensor: torch.Tensor) -> torch.Tensor:
        if self._architecture == "llama":
            if ".q_proj." in entry.name:
                return _unpermute(tensor, self.config.num_attention_heads)
            if ".k_proj." in entry.name:
                return _unpermute(tensor, self.config.num_key_value_heads)
        return tensor


def _unpermute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of a llama's Q and K rows (pairs beside each other, not in halves)."""
    pairs = tensor.shape[0] // heads // 2
    halves = tensor.reshape(heads, pairs, 2, *tensor.shape[1:]).transpose(1, 2)
    return halves.reshape(tensor.shape)

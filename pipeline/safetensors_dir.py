"""Owns reading a Hugging Face directory: config.json and safetensors, one file or sharded.

Only headers are read at opening; a tensor's bytes are copied from the mapped file when asked for.
A directory whose shards are not all here serves the layers that it has the shards of.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path
from struct import Struct
from typing import Any

import torch

from pipeline.families import Family
from pipeline.model import ModelError
from pipeline.tensors import Entry, MappedFile
from pipeline.weights import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    Source,
    make_config,
    supported_family,
)

_LENGTH = Struct("<Q")
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_MAX_DIMENSIONS = 8  # and so no product of a million numbers
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_BYTES = "U8"  # of quantised weights
_QUANTISED = ("quantization_config", "compression_config")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# How checkpoints call what the library's modules have under another name, in this order.
_RENAMED = (
    (re.compile(r"^(?:language_model\.model|model\.language_model)\."), "model."),
    (re.compile(r"^language_model\.lm_head\."), "lm_head."),
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"(\.experts\.\d+)\.w1\."), r"\1.gate_proj."),
    (re.compile(r"(\.experts\.\d+)\.w3\."), r"\1.up_proj."),
    (re.compile(r"(\.experts\.\d+)\.w2\."), r"\1.down_proj."),
)


class SafetensorsSource(Source):
    """A Hugging Face directory; see Source.

    revision and layers: where only the shards of these layers are here.
    """

    def __init__(
        self,
        path: Path,
        *,
        revision: str | None = None,
        layers: tuple[int, int] | None = None,
    ) -> None:
        kind, config = read_config(path)
        entries: dict[str, Entry] = {}
        for weights, names in _files(path, partly=revision is not None).items():
            if revision is not None and not weights.exists():
                continue
            found = read_header(MappedFile(weights))
            for name in found if names is None else names:
                if name not in found:
                    raise ModelError(f"{weights}: tensor {name} is missing")
                entries[hf_name(name)] = found[name]
        tied = bool(config.tie_word_embeddings)
        if tied:  # some exports carry a copy; the config says which one counts
            entries.pop(LM_HEAD, None)
        super().__init__(path, kind, config, entries, tied=tied, revision=revision, layers=layers)

    def _rows(self, entry: Entry, start: int, into: torch.Tensor) -> None:
        width, dtype = into.shape[1], _DTYPES[entry.dtype]
        stored = torch.frombuffer(
            entry.file.data,
            dtype=dtype,
            count=into.numel(),
            offset=entry.offset + start * width * dtype.itemsize,
        )
        into.copy_(stored.reshape(into.shape))


def hf_name(name: str) -> str:
    """A stored tensor's name as pipeline.tensors wants it."""
    for pattern, other in _RENAMED:
        name = pattern.sub(other, name)
    return name


def read_config(path: Path) -> tuple[Family, Any]:
    """A directory's family and its transformers config; of a gemma3 with pictures, the text's."""
    file = path / "config.json"
    values = _read_json(file)
    name = values.get("model_type")
    text = values.get("text_config")
    method = _quantised_by(values)
    if name == "gemma3" and isinstance(text, dict):
        values, name = text, "gemma3_text"
        method = method or _quantised_by(values)
    kind = supported_family(path, name)
    if method is not None and (method, kind.name) != ("mxfp4", "gpt_oss"):
        raise ModelError(
            f"{path}: a quantised checkpoint of {kind.name}, by {method}, is not supported "
            "(of such folders only gpt_oss by mxfp4 is)"
        )
    layers = values.get("num_hidden_layers")
    return kind, make_config(kind, file, layers, lambda: kind.config.from_dict(values))


def _quantised_by(values: dict[str, Any]) -> str | None:
    """The method of a config's quantisation; None where it has none."""
    found = next((values[key] for key in _QUANTISED if values.get(key) is not None), None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else None
    return str(method or "an unnamed method")


def shards_of(path: Path, layers: tuple[int, int]) -> list[str]:
    """The files that hold the tensors of the block [first, last), head and tail included.

    Told from the directory's config and index; ModelError for layers outside the model.
    """
    _, config = read_config(path)
    (first, last), total = layers, int(config.num_hidden_layers)
    if not 0 <= first < last <= total:
        raise ModelError(f"{path}: no layers [{first}, {last}) in a model of {total}")
    if not (path / INDEX).exists():
        return [SINGLE]
    wanted: dict[str, None] = {}
    for stored, file in weight_map(path / INDEX).items():
        name = hf_name(stored)
        match = _LAYER.match(name)
        if match is not None:
            need = first <= int(match[1]) < last
        elif name == EMBEDDING:
            need = first == 0 or (last == total and bool(config.tie_word_embeddings))
        else:
            need = last == total and name in (FINAL_NORM, LM_HEAD)
        if need:
            wanted[file] = None
    return list(wanted)


def read_header(file: MappedFile) -> dict[str, Entry]:
    """The tensors of one safetensors file by name."""
    size = len(file.data)
    length = _LENGTH.unpack_from(file.data)[0] if size >= _LENGTH.size else size
    base = _LENGTH.size + length
    if length > _MAX_HEADER_BYTES or base > size:
        raise ModelError(f"{file.path}: not a safetensors file, or truncated")
    table = _json_object(file.path, file.data[_LENGTH.size : base])
    table.pop("__metadata__", None)
    return {name: _entry(file, name, base, info) for name, info in table.items()}


def _entry(file: MappedFile, name: str, base: int, info: Any) -> Entry:
    try:
        stored, shape = str(info["dtype"]), tuple(info["shape"])
        start, end = info["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ModelError(f"{file.path}: broken header: tensor {name}") from None
    if len(shape) > _MAX_DIMENSIONS or any(type(n) is not int for n in (start, end, *shape)):
        raise ModelError(f"{file.path}: broken header: tensor {name}")
    packed = stored == _BYTES and name.endswith(("_blocks", "_scales"))
    if stored not in _DTYPES and not packed:
        raise ModelError(f"{file.path}: tensor {name} has the unsupported type {stored}")
    size = 1 if packed else _DTYPES[stored].itemsize
    if min((0, start, *shape)) < 0 or end - start != prod(shape) * size:
        raise ModelError(f"{file.path}: broken header: tensor {name}")
    if base + end > len(file.data):
        raise ModelError(
            f"{file.path}: truncated: tensor {name} ends at byte {base + end}, "
            f"the file at {len(file.data)}"
        )
    return Entry(name, file, stored, shape, base + start, end - start)


def _files(path: Path, *, partly: bool) -> dict[Path, list[str] | None]:
    """Files of the checkpoint, each with the tensors the index puts there (None: all it has)."""
    index = path / INDEX
    if not index.exists():
        if not (path / SINGLE).exists() and not partly:
            raise ModelError(f"{path}: neither {SINGLE} nor {INDEX} is there")
        return {path / SINGLE: None}
    files: dict[Path, list[str] | None] = {}
    for name, file in weight_map(index).items():
        names = files.setdefault(path / file, [])
        assert names is not None
        names.append(name)
    return files


def weight_map(index: Path) -> dict[str, str]:
    """Which file beside the index each tensor is in."""
    found = _read_json(index).get("weight_map")
    if not isinstance(found, dict):
        raise ModelError(f"{index}: no weight_map")
    for name, file in found.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(f"{index}: tensor {name} is in {file!r}, not a file beside the index")
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return _json_object(path, path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error


def _json_object(path: Path, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from None
    except RecursionError:
        raise ModelError(f"{path}: not JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value

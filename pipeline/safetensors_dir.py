"""Owns reading a Hugging Face directory: config.json and safetensors, one file or sharded.

Only headers are read at opening; a tensor's bytes are copied from the mapped file when asked for.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from struct import Struct
from typing import Any

import torch

from pipeline.weights import (
    LM_HEAD,
    Entry,
    MappedFile,
    ModelError,
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
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class SafetensorsSource(Source):
    """A Hugging Face directory; see Source."""

    def __init__(self, path: Path) -> None:
        values = _read_json(path / "config.json")
        kind = supported_family(path, values.get("model_type"))
        if "quantization_config" in values:
            raise ModelError(f"{path}: a quantised checkpoint is not supported")
        layers, file = values.get("num_hidden_layers"), path / "config.json"
        config = make_config(kind, file, layers, lambda: kind.config.from_dict(values))
        entries: dict[str, Entry] = {}
        for weights, names in _files(path).items():
            found = read_header(MappedFile(weights))
            for name in found if names is None else names:
                if name not in found:
                    raise ModelError(f"{weights}: tensor {name} is missing")
                entries[name] = found[name]
        tied = bool(config.tie_word_embeddings)
        if tied:  # some exports carry a copy; the config says which one counts
            entries.pop(LM_HEAD, None)
        super().__init__(path, kind, config, entries, tied)

    def _load(self, entry: Entry, dtype: torch.dtype) -> torch.Tensor:
        stored = torch.frombuffer(
            entry.file.data,
            dtype=_DTYPES[entry.dtype],
            count=prod(entry.shape),
            offset=entry.offset,
        )
        return stored.reshape(entry.shape).to(dtype, copy=True)


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
    if stored not in _DTYPES:
        raise ModelError(f"{file.path}: tensor {name} has the unsupported type {stored}")
    if min((0, start, *shape)) < 0 or end - start != prod(shape) * _DTYPES[stored].itemsize:
        raise ModelError(f"{file.path}: broken header: tensor {name}")
    if base + end > len(file.data):
        raise ModelError(
            f"{file.path}: truncated: tensor {name} ends at byte {base + end}, "
            f"the file at {len(file.data)}"
        )
    return Entry(name, file, stored, shape, base + start, end - start)


def _files(path: Path) -> dict[Path, list[str] | None]:
    """Files of the checkpoint, each with the tensors the index puts there (None: all it has)."""
    index = path / _INDEX
    if not index.exists():
        if not (path / _SINGLE).exists():
            raise ModelError(f"{path}: neither {_SINGLE} nor {_INDEX} is there")
        return {path / _SINGLE: None}
    files: dict[Path, list[str] | None] = {}
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index}: no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(f"{index}: tensor {name} is in {file!r}, not a file beside the index")
        names = files.setdefault(path / file, [])
        assert names is not None
        names.append(name)
    return files


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

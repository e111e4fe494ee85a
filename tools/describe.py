"""Owns what `kvring up` must know of a model before any stage has opened it.

Reads metadata only, and imports no torch: that alone would cost as long as a stage takes to load.
Whether the file is whole and the family is supported is for the stages to say.
"""

from __future__ import annotations

import json
from pathlib import Path

from coord.vocabulary import read_metadata
from pipeline.load import TOY_CONTEXT, TOY_LAYERS
from tools.errors import USAGE, ToolError
from transport.config import TOY


def describe(path: str) -> tuple[int, int]:
    """Layers and longest context (tokens) of "toy", a GGUF file or a Hugging Face directory.

    Raises ToolError where they can't be read.
    """
    if path == TOY:
        return TOY_LAYERS, TOY_CONTEXT
    try:
        found = _from_directory(Path(path)) if Path(path).is_dir() else _from_gguf(Path(path))
    except (OSError, ValueError) as error:
        raise ToolError(str(error), code=USAGE) from None
    if not all(isinstance(number, int) and number > 0 for number in found):
        raise ToolError(f"{path}: names no number of layers or no context length", code=USAGE)
    return found


def _from_gguf(path: Path) -> tuple[int, int]:
    fields = read_metadata(path)
    family = fields.get("general.architecture")
    return fields.get(f"{family}.block_count", 0), fields.get(f"{family}.context_length", 0)


def _from_directory(path: Path) -> tuple[int, int]:
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path}: no config.json in it")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: not a JSON object")
    return config.get("num_hidden_layers", 0), config.get("max_position_embeddings", 0)

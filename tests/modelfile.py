"""Where the embedded default model lies."""

from __future__ import annotations

from pathlib import Path

import pytest


def default_model() -> Path:
    """The default model's GGUF file; fails the test where it was not fetched."""
    root = Path(__file__).resolve().parent.parent
    path = root / "models" / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.is_file():
        pytest.fail(f"{path} is missing: run `make setup`")
    return path

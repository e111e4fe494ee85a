"""Where the embedded default model lies."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def default_model() -> Path:
    """The default model's GGUF file; fails the test where it was not fetched."""
    if not MODEL.is_file():
        pytest.fail(f"{MODEL.relative_to(ROOT)} is missing: run `make setup`")
    return MODEL

"""Where the tests find the embedded default model."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_file() -> Path:
    """Path of the SmolLM2-135M GGUF; fails the test where it was not fetched."""
    if not MODEL.exists():
        pytest.fail(f"{MODEL.relative_to(ROOT)} is not there: run `make setup`")
    return MODEL

"""What a fork by Copy costs against prefilling the same rows, on the real model in one process.

    python -m bench.fork [--model smollm2-135m] [--rows 1500] [--repeats 5]

Both are done again and again in turn, so that they see the same machine. Prints a table and JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from bench.floor import CHUNK_TOKENS, _forward
from pipeline.model import StageModel
from pipeline.torch_model import TorchModel
from pipeline.weights import open_model
from tools.pull import resolve_model

SLOTS = 2


def load(name: str, threads: int, rows: int) -> StageModel:
    """The whole model as one block with two slots."""
    source = open_model(resolve_model(name, Path("models")))
    layers = (0, source.layers_total)
    return TorchModel(source, layers, slots=SLOTS, capacity=rows, threads=threads)


def prefill(model: StageModel, rows: int) -> None:
    """Rows [0, rows) of slot 0, in chunks."""
    for start in range(0, rows, CHUNK_TOKENS):
        _forward(model, start, min(CHUNK_TOKENS, rows - start))


def milliseconds(work: Callable[[], None]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    wanted = parser.parse_args()
    model = load(wanted.model, wanted.threads, wanted.rows)
    prefill(model, 256)  # warm up
    cold, forked = [], []
    for _ in range(wanted.repeats):
        cold.append(milliseconds(lambda: prefill(model, wanted.rows)))
        forked.append(milliseconds(lambda: model.copy(0, 1, wanted.rows)))
    ratio = median(forked) / median(cold)
    print(f"prefill of {wanted.rows} rows  median {median(cold):9.2f} ms")
    print(f"fork by Copy               median {median(forked):9.2f} ms  {ratio:.2%} of it")
    result = {"rows": wanted.rows, "prefill_ms": cold, "fork_ms": forked, "ratio": ratio}
    print(json.dumps(result))


if __name__ == "__main__":
    main()

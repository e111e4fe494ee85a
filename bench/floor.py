"""How long the suffix of a follow-up turn takes in one process: the floor of a cached turn.

The whole model as one block, no ring, no HTTP, as many threads as the stages have together:
prefill `--resident` tokens, then time the forward of `--suffix` more, again and again. Prints JSON:

    python bench/floor.py --model smollm2-135m --resident 1500 --suffix 80
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median

from pipeline.model import StageModel, ToyModel
from tools.errors import ToolError
from tools.pull import resolve_model
from transport.chain import DIGEST_BYTES
from transport.frame import Kind, Segment

CHUNK_TOKENS = 512
REPEATS = 5


def suffix_ms(model: StageModel, resident: int, suffix: int) -> list[float]:
    """Milliseconds of REPEATS forwards of `suffix` tokens at row `resident` of slot 0.

    Every forward writes the same rows again, as a stage does after a truncation.
    """
    for start in range(0, resident, CHUNK_TOKENS):
        _forward(model, start, min(CHUNK_TOKENS, resident - start))
    times = []
    for _ in range(REPEATS + 1):  # the first one warms up
        began = time.perf_counter()
        _forward(model, resident, suffix)
        times.append((time.perf_counter() - began) * 1e3)
    return times[1:]


def _forward(model: StageModel, start: int, count: int) -> None:
    vocabulary = model.info.vocabulary
    tokens = tuple((start + i) * 7919 % vocabulary for i in range(count))  # varied, reproducible
    segment = Segment(0, 0, start, tokens, Kind.PREFILL, bytes(DIGEST_BYTES), want=1)
    model.forward([segment], None)


def load(path: Path, threads: int, capacity: int) -> StageModel:
    """The whole model as one block with one slot."""
    if path == Path("toy"):
        return ToyModel((0, 3), 3, slots=1, capacity=capacity)
    from pipeline.torch_model import TorchModel
    from pipeline.weights import open_model

    source = open_model(path)
    layers = (0, source.layers_total)
    return TorchModel(source, layers, slots=1, capacity=capacity, threads=threads)


def main() -> None:
    """Parse, load, time, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--resident", type=int, default=1500)
    parser.add_argument("--suffix", type=int, default=80)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    rows = options.resident + options.suffix
    try:
        path = resolve_model(options.model, options.models)
    except ToolError as error:
        sys.exit(f"floor.py: {error.message}")
    model = load(path, options.threads, capacity=-(-rows // CHUNK_TOKENS) * CHUNK_TOKENS)
    times = suffix_ms(model, options.resident, options.suffix)
    result = {
        "resident": options.resident,
        "suffix": options.suffix,
        "threads": options.threads,
        "forward_ms": median(times),
        "all_ms": times,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

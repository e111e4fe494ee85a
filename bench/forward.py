"""Milliseconds per forward of a whole model by rows: plain and exact, float32 and bfloat16.

python -m bench.forward MODEL [--threads N] [--context ROWS] [--repeats N] [--kv KIND ...]
Variants take turns within each repeat, so that a busy machine slows all of them alike; the
smallest time of each is printed.
"""

import argparse
import time

import torch

from pipeline.torch_model import TorchModel
from pipeline.weights import open_model
from transport.config import KV
from transport.frame import Kind, Segment

ROWS = (1, 8, 16, 32, 64, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kv", nargs="+", choices=KV, default=["dtype"])
    options = parser.parse_args()
    source = open_model(options.model)
    models = {
        (dtype, exact, kv): TorchModel(
            source,
            (0, source.layers_total),
            slots=1,
            capacity=options.context + max(ROWS),
            dtype=dtype,
            exact=exact,
            kv=kv,
            threads=options.threads,
        )
        for dtype in (torch.float32, torch.bfloat16)
        for exact in (False, True)
        for kv in options.kv
    }
    best: dict[tuple[torch.dtype, bool, str, int], float] = {}
    for _ in range(options.repeats):
        for rows in ROWS:
            tokens = tuple((at * 7919) % source.vocabulary for at in range(rows))
            segment = Segment(0, 0, options.context, tokens, Kind.VERIFY, b"", 1)
            for variant, model in models.items():
                start = time.perf_counter()
                model.forward([segment], None)
                took = (time.perf_counter() - start) * 1000
                key = (*variant, rows)
                best[key] = min(best.get(key, took), took)
    print(f"ms per forward, context {options.context}, {options.threads} threads")
    print("| | " + " | ".join(f"n={rows}" for rows in ROWS) + " |")
    print("|---" * (len(ROWS) + 1) + "|")
    for dtype, exact, kv in models:
        name = f"{str(dtype).removeprefix('torch.')} {'exact' if exact else 'plain'}"
        name += "" if kv == "dtype" else f", {kv} KV"
        cells = " | ".join(f"{best[dtype, exact, kv, rows]:.0f}" for rows in ROWS)
        print(f"| {name} | {cells} |")
    for model in models.values():
        print(model.info.kernel)


if __name__ == "__main__":
    main()

"""Parking and restoring rows against prefilling them, on the real model in one process.

    python -m bench.park [--model smollm2-135m] [--rows 500 1500 3000] [--repeats 3]

Per length, in turn: prefill, copy to the park, copy back, drop. Prints a table and JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from statistics import median

from bench.fork import SLOTS, load, milliseconds, prefill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, nargs="+", default=[500, 1500, 3000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    wanted = parser.parse_args()
    model = load(wanted.model, wanted.threads, max(wanted.rows))
    prefill(model, 256)  # warm up
    park, results = SLOTS, []
    print("  rows  prefill ms  park ms  restore ms  park + restore / prefill")
    for rows in wanted.rows:
        cold, parked, restored = [], [], []
        for _ in range(wanted.repeats):
            cold.append(milliseconds(lambda rows=rows: prefill(model, rows)))  # type: ignore[misc]
            parked.append(milliseconds(lambda rows=rows: model.copy(0, park, rows)))  # type: ignore[misc]
            restored.append(milliseconds(lambda rows=rows: model.copy(park, 1, rows)))  # type: ignore[misc]
            model.drop(park)
        both = median(parked) + median(restored)
        result = {
            "rows": rows,
            "prefill_ms": round(median(cold), 2),
            "park_ms": round(median(parked), 2),
            "restore_ms": round(median(restored), 2),
            "ratio": round(both / median(cold), 4),
        }
        results.append(result)
        print(
            f"{rows:6}  {result['prefill_ms']:10}  {result['park_ms']:7}  "
            f"{result['restore_ms']:10}  {result['ratio']:.2%}"
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()

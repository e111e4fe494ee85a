"""More seeds of tests/test_residency_property.py: `python -m tests.soak --seeds 20000`."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from random import Random

from tests.test_residency_property import live


def main() -> int:
    """Run the seeds; the exit code is 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--stop-after", type=int, default=5, help="failures")
    wanted = parser.parse_args()
    failed, began, cpu = 0, time.perf_counter(), time.process_time()
    for done, seed in enumerate(range(wanted.first, wanted.first + wanted.seeds), 1):
        try:
            live(Random(seed), wanted.steps)
        except Exception:
            failed += 1
            _say(f"seed {seed} failed\n{traceback.format_exc()}")
            if failed >= wanted.stop_after:
                break
        if done % 500 == 0 or done == wanted.seeds:
            passed, used = time.perf_counter() - began, time.process_time() - cpu
            _say(
                f"{done} worlds, {failed} failed, {done / passed * 60:.0f} a minute "
                f"({done / used * 60:.0f} a minute of processor time)"
            )
    return 1 if failed else 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

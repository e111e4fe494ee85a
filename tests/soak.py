"""More seeds of tests/test_residency_property.py: `python -m tests.soak --seeds 20000`.

`--sessions 5000` instead: as many unique sessions, each one turn, and what they leave in memory.
`--recorded 100` instead: as many seeds of each of tests/test_log_check.py's kinds of worlds.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from random import Random

import psutil

from tests.memoryring import VOCABULARY, limits
from tests.memoryworld import MemoryWorld
from tests.test_log_check import TROUBLES, sound
from tests.test_residency_property import live
from tools.sim.oracle import Oracle


def main() -> int:
    """Run the seeds; the exit code is 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--stop-after", type=int, default=5, help="failures")
    parser.add_argument("--sessions", type=int, default=0)
    parser.add_argument("--recorded", type=int, default=0)
    wanted = parser.parse_args()
    if wanted.sessions:
        sessions(wanted.sessions)
        return 0
    if wanted.recorded:
        recorded(wanted.first, wanted.recorded)
        return 0
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


def recorded(first: int, count: int) -> None:
    """The frames of worlds, proved; raises where there is an alarm."""
    for trouble in TROUBLES:
        for seed in range(first, first + count):
            sound(seed, trouble)
        _say(f"{count} worlds of {trouble}: no alarm")


def sessions(count: int) -> None:
    """Unique sessions over one toy ring with parking; the harness' own memory is let go."""
    bounds = limits(slots=4, max_model_len=256, park_bytes=400 * 16, lost_after_s=1e5)
    world = MemoryWorld(Oracle(2, VOCABULARY), bounds, stages=[1], slots=4, check_every=100).form()
    ring, core, process = world.rings[0], world.scheduler.rings["r0"], psutil.Process()
    for session in range(1, count + 1):
        prompt = [session % 64, session // 64 % 64, session // 4096, *range(60), *range(20)]
        world.ask(prompt, 2)
        for held in (ring.sent, world.replies, world.asked, world.truth, world.said):
            held.clear()
        world.oracle = Oracle(2, VOCABULARY)
        if session % (count // 10 or 1) == 0:
            chains = [each.chain for each in (*core.ledger.slots, *core.ledger.parked.values())]
            rows = sum(len(chain) for chain in chains if chain is not None)
            _say(
                f"{session:6} sessions  ledger {rows} rows, {len(core.ledger.parked)} parked, "
                f"{len(core.ledger.gone.prefixes)} given up, {core.ledger.gone.tokens} tokens  "
                f"RSS {process.memory_info().rss / 1e6:.1f} MB"
            )


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

"""How long the ledger takes to place a prompt among 100 resident conversations of 8,000 tokens.

    python -m bench.ledger_match [--resident 100] [--tokens 8000] [--parked 400]

`shared` is the length of a system prompt that all have in common. Prints medians and p99 in ms of
processor time of
match + place + explain (what one admission costs), then JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from coord.ledger import Ledger, Wanted
from transport.chain import Chain, pack_tokens

ROOT = b"r" * 16
REPEATS = 60


def fill(resident: int, tokens: int, shared: int, parked: int) -> tuple[Ledger, list[list[int]]]:
    """A full ledger, and what each of its conversations says."""
    draw = random.Random(shared)
    system = [draw.randrange(50_000) for _ in range(shared)]
    ledger = Ledger(resident, 2 * tokens, parked * tokens)
    chats = []
    for index in range(resident + parked):
        chat = system + [draw.randrange(50_000) for _ in range(tokens - shared)]
        if index < resident:
            ledger.extend(index, Chain(ROOT, chat), tokens)
            ledger.slots[index].used, ledger.slots[index].proven = float(index), True
        else:
            ledger.reserve(index, ledger.slots[0])
            ledger.extend(index, Chain(ROOT, chat), tokens)
        chats.append(chat)
    return ledger, chats


def timed(ledger: Ledger, prompts: list[list[int]]) -> list[float]:
    """Milliseconds of each admission's look-ups."""
    took = []
    for prompt in prompts:
        wanted = Wanted(pack_tokens(prompt), ROOT, len(prompt) - 1, True)
        began = time.process_time()
        placement = ledger.place(wanted, 1000.0)
        assert placement is not None
        ledger.explain(wanted, placement.matched)
        took.append((time.process_time() - began) * 1e3)
    return sorted(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--resident", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--parked", type=int, default=400)
    wanted = parser.parse_args()
    draw = random.Random(0)
    rows = []
    for shared in (0, 3000):
        for parked in (0, wanted.parked):
            ledger, chats = fill(wanted.resident, wanted.tokens, shared, parked)
            new = [draw.randrange(50_000) for _ in range(wanted.tokens)]
            kinds = {
                "follow-up": [[*draw.choice(chats), 1, 2, 3] for _ in range(REPEATS)],
                "fork": [[*draw.choice(chats)[:5000], 1, 2, 3] for _ in range(REPEATS)],
                "new": [[i, *new] for i in range(REPEATS)],
            }
            for kind, prompts in kinds.items():
                took = timed(ledger, prompts)
                row = {
                    "shared": shared,
                    "parked": parked,
                    "prompt": kind,
                    "median_ms": round(statistics.median(took), 3),
                    "p99_ms": round(took[int(len(took) * 0.99)], 3),
                }
                rows.append(row)
                print("  ".join(f"{key} {value:>9}" for key, value in row.items()))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()

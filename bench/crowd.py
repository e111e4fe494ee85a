"""Tokens per second of 1 to 32 turns at once, with and without lookup, in virtual time.

    python -m bench.crowd [--classes chat,quote] [--delays-ms 0,20]

As bench.controller, but many turns: three stages with a processor each, and three stages that share
two. Counted is the time while all turns decode. Exit code 1 where lookup is under 0.94 of off.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product

from bench.controller import IDLE_S, scripts
from bench.virtual import Costs, Script, VirtualRing
from coord.draft import LookupDrafter

TURNS = (1, 2, 4, 8, 16, 32)
REPLY = 96
LEAST = 0.94


def crowd(text_class: str, count: int, reply: int, first: int = 1) -> list[Script]:
    """So many turns of a class, each with another first token, so that none shares a prefix."""
    base = scripts(text_class)
    some = [base[index % len(base)] for index in range(count)]
    return [
        Script((first + index, *each.prompt), each.reply[:reply]) for index, each in enumerate(some)
    ]


def steady(costs: Costs, text_class: str, count: int, *, lookup: bool) -> float:
    """Tokens per second while all of `count` turns decode, after two turns and a rest."""
    ring = VirtualRing(costs, LookupDrafter if lookup else None, slots=max(TURNS))
    ring.rest(IDLE_S)
    ring.run(crowd(text_class, 2, 60))
    ring.rest(IDLE_S)
    turns = crowd(text_class, count, REPLY, 100)
    ring.run(turns)
    start, end = max(turn.times[0] for turn in turns), min(turn.times[-1] for turn in turns)
    return sum(start < at <= end for turn in turns for at in turn.times) / (end - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--classes", default="chat,quote")
    parser.add_argument("--delays-ms", default="0,20")
    options = parser.parse_args()
    worst = 10.0
    delays = [float(each) for each in options.delays_ms.split(",")]
    for name, delay_ms, shared in product(options.classes.split(","), delays, (None, 2)):
        processors = "a processor each" if shared is None else f"{shared} processors"
        print(f"\n{name}, {delay_ms:g} ms one way, {processors}: turns, off, lookup, ratio")
        costs = Costs(delay_s=delay_ms / 1e3, processors=shared)
        for count in TURNS:
            off, on = (steady(costs, name, count, lookup=lookup) for lookup in (False, True))
            worst = min(worst, on / off)
            print(f"{count:4}{off:8.0f}{on:8.0f}{on / off:8.2f}")
    print(f"\nworst: {worst:.2f}")
    return int(worst < LEAST)


if __name__ == "__main__":
    sys.exit(main())

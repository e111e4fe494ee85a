"""Injected bugs of the cores, and what notices each: `python -m tests.mutations [NAME ...]`.

`--sim`: the first seed of `kvring sim` that each fails, and the property that it violates;
`--shrink` also prints that seed's shrunk script.

Each mutation of tests/bugs.py replaces one method while worlds are played; one that no world of
WORLDS notices, or none of 2,000 simulated ones, is a hole in our checks. Left out, because no world
could notice them:

- "the ledger is not truncated when a frame is sent": it was when the turn was placed, and what is
  resident ends before the last committed token, from where wrong drafts are sent again;
- "a stage runs frames of an older epoch": on one link nothing older follows a roll call
  (test_stage has it);
- "a refused turn trusts later verdicts": a stage that takes a later segment has proved its whole
  prefix, so that what is believed is true;
- "a fork is resident when its copy is sent": frames that use it come behind the copy, a refused
  copy gives it up, and after a loss the stages strike the claim out;
- "the source of a refused copy stays claimed": costs prefills, never a token
  (test_scheduler_faults has it).
"""

from __future__ import annotations

import argparse
import sys

import pytest

from tests.bugs import MUTATIONS, Mutation
from tests.world import Plan, visit
from tools.sim.draw import Options, draw
from tools.sim.hunt import Failure, minimal, play

SEEDS = 2000  # of the simulator, in which a bug must be noticed

WORLDS = [
    Plan(seed, 3, slots, chunk, window, park, trouble=trouble)
    for seed, slots, chunk, window, park in (
        (1, 2, 8, 1, 0),
        (2, 3, 3, 2, 20000),
        (3, 2, 16, 9, 800),
        (4, 1, 8, None, 8000),
        (5, 3, 8, 1, 0),
        (6, 2, 1, None, 400),
        (7, 4, 3, None, 20000),
        (8, 2, 8, 9, 1600),
    )
    for trouble in ("none", "lies", "gaps", "restarts", "successors")
] + [  # the tail's link loses verdicts
    Plan(103, 3, 2, 1, None, 0, trouble="gaps"),
    Plan(116, 3, 2, 8, None, 0, trouble="gaps"),
]


def noticed(mutant: Mutation) -> tuple[Plan, str] | None:
    """The first world that ends in an error with the bug in, and the error; None: it survives."""
    plans = sorted(WORLDS, key=lambda plan: plan.trouble != mutant.trouble)
    with pytest.MonkeyPatch.context() as patcher:
        mutant.patch(patcher)
        for plan in plans:
            try:
                visit(plan)
            except Exception as error:  # any failure at all is a bug noticed
                return plan, f"{type(error).__name__}: {error!s:.100}".splitlines()[0]
    return None


def hunted(mutant: Mutation, seeds: range) -> Failure | None:
    """The first failing seed of the simulator with the bug in, and why; None: it survives."""
    with pytest.MonkeyPatch.context() as patcher:
        mutant.patch(patcher)
        for seed in seeds:
            failure, _ = play(draw(seed, Options()))
            if failure is not None:
                return failure
    return None


def shrunk(mutant: Mutation, failure: Failure) -> list[str]:
    """The lines of a failing seed's shrunk script."""
    with pytest.MonkeyPatch.context() as patcher:
        mutant.patch(patcher)
        script, _ = minimal(failure, Options())
    return list(script.lines())


def main() -> int:
    """Print what notices each mutation; the number of survivors."""
    parser = argparse.ArgumentParser(description="Injected bugs and what notices them.")
    parser.add_argument("names", nargs="*", help="parts of their names; none for all")
    parser.add_argument("--sim", action="store_true", help="hunt them with the simulator")
    parser.add_argument("--shrink", action="store_true", help="print the shrunk scripts")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    wanted = parser.parse_args()
    survivors = 0
    for mutant in MUTATIONS:
        if wanted.names and not any(name in mutant.name for name in wanted.names):
            continue
        if wanted.sim:
            failure = hunted(mutant, range(wanted.seeds))
            said = None if failure is None else f"seed {failure.seed:<4} {failure.name}"
        elif mutant.trouble:
            failure, found = None, noticed(mutant)
            said = None if found is None else f"{found[0]} {found[1]}"
        else:
            continue
        survivors += said is None
        _say(f"{mutant.name:52} {said or 'SURVIVES'}")
        if wanted.shrink and failure is not None:
            _say(f"  {failure.detail}")
            for line in shrunk(mutant, failure):
                _say(f"  {line}")
    return survivors


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

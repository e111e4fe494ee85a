"""Injected bugs of the cores, and which world notices each: `python -m tests.mutations [NAME ...]`.

Each mutation replaces one method while worlds are played; one that no world of WORLDS notices is a
hole in our checks. Left out, because no world could notice them:

- "the ledger is not truncated when a frame is sent": it was when the turn was placed, and what is
  resident ends before the last committed token, from where wrong drafts are sent again;
- "an answer's epoch is ignored": numbers never repeat in one coordinator's life, so that the epoch
  only matters against frames of an earlier one (test_scheduler_faults has it);
- "a stage runs frames of an older epoch": on one link nothing older follows a roll call
  (test_stage has it);
- "a refused turn trusts later verdicts": a stage that takes a later segment has proved its whole
  prefix, so that what is believed is true;
- "the source of a refused copy stays claimed": costs prefills, never a token
  (test_scheduler_faults has it).
"""

from __future__ import annotations

import sys

import pytest

from tests.bugs import MUTATIONS, Mutation
from tests.world import Plan, visit

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
    for trouble in ("none", "lies", "gaps", "restarts")
] + [  # the tail's link loses verdicts
    Plan(103, 3, 2, 1, None, 0, trouble="gaps"),
    Plan(114, 3, 2, 8, None, 0, trouble="gaps"),
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


def main(names: list[str]) -> int:
    """Print what notices each mutation; the number of survivors."""
    survivors = 0
    for mutant in MUTATIONS:
        if names and not any(name in mutant.name for name in names):
            continue
        found = noticed(mutant)
        survivors += found is None
        print(f"{mutant.name}: {'SURVIVES' if found is None else f'{found[0]} {found[1]}'}")  # noqa: T201
    return survivors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

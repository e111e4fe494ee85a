"""Injected bugs are noticed: each of tests/mutations.py ends some world in an error.

A mutation that survives is a hole in the checks, not in the cores.
"""

from __future__ import annotations

import pytest

from tests.bugs import MUTATIONS, Mutation
from tests.mutations import WORLDS, noticed
from tests.world import Plan, visit

OF_WORLDS = [mutant for mutant in MUTATIONS if mutant.trouble]  # the others: test_sim


@pytest.mark.parametrize("plan", WORLDS, ids=lambda plan: f"{plan.seed}-{plan.trouble}")
def test_the_worlds_are_clean_without_a_bug(plan: Plan) -> None:
    visit(plan)


@pytest.mark.parametrize("mutant", OF_WORLDS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_bug_is_noticed(mutant: Mutation) -> None:
    assert noticed(mutant) is not None, "it survives every world"


def test_there_are_enough_of_them() -> None:
    names = [mutant.name for mutant in MUTATIONS]
    assert len(names) == len(set(names)) >= 30

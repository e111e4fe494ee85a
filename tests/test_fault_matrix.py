"""Every stage lost in every phase: equal streams or one error event, and the next request works.

A selection of the matrix; all of it: `python -m tests.faults` (docs/reliability.md). CASES 22, 28
to 32, 41.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import processes
from tests.faultcases import COORDINATOR, PHASES, RETURNS, STAGES, STAYS, Case, selection
from tests.faults import Stands


@pytest.fixture(scope="module")
def stands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stands]:
    folder = tmp_path_factory.mktemp("faults")
    with processes.fleet(folder / "processes") as fleet:
        yield Stands(fleet, folder)


def test_the_selection_meets_every_stage_phase_and_fault() -> None:
    chosen = selection()
    stages = [case for case in chosen if case.victim in STAGES]
    assert {(case.victim, case.phase) for case in stages} == {
        (victim, phase) for victim in STAGES for phase in PHASES
    }
    assert {(case.victim, case.fault) for case in stages} == {
        (victim, fault) for victim in STAGES for fault in (*RETURNS, *STAYS)
    }
    assert [case.phase for case in chosen if case.victim == COORDINATOR] == list(PHASES)


@pytest.mark.parametrize("case", selection(), ids=str)
def test_a_fault(case: Case, stands: Stands) -> None:
    stands.play(case)

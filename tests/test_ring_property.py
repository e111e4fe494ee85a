"""Two real cores joined in memory over the ToyModel: any schedule gives the serial tokens.

Safety: no turn ever gets a token that plain serial decoding would not have given, whatever is cold,
warm, forked, parked, cancelled or lost (CASES 1, 2, 5, 10, 19, 29, 31), and no stage's chain ever
says more of its rows than is true. Liveness: every turn ends, and a clean follow-up turn reuses
prompt + committed - 1 rows (DESIGN 4).
"""

from __future__ import annotations

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.world import Plan, visit


def plans(trouble: str) -> st.SearchStrategy[Plan]:
    return st.builds(
        Plan,
        seed=st.integers(0, 2**32),
        stages=st.integers(1, 4),
        slots=st.integers(1, 4),
        chunk=st.sampled_from((1, 3, 8, 16, 64)),
        window=st.sampled_from((None, 1, 2, 9)),
        park=st.sampled_from((0, 800, 2000, 20000)),
        rows=st.sampled_from((1, 4, 8, 64)),
        trouble=st.just(trouble),
        sampled=st.booleans(),
        model=st.booleans(),
    )


RANDOMLY = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))


@RANDOMLY
@given(plans("none"))
@example(Plan(0, park=8000))
@example(Plan(0, park=8000, sampled=True))
@example(Plan(0, park=8000, model=True))
def test_any_interleaving_gives_the_serial_tokens(plan: Plan) -> None:
    """Without trouble the ledger never claims what a stage refuses."""
    visit(plan)


@RANDOMLY
@given(plans("restarts"))
@example(Plan(1, park=8000, trouble="restarts"))
@example(Plan(1, park=8000, trouble="restarts", sampled=True))
def test_restarted_stages_cost_no_token(plan: Plan) -> None:
    """CASES 28, 29, 32: a lost stage's turns resume at their committed length, same total."""
    visit(plan)


@RANDOMLY
@given(plans("successors"))
@example(Plan(4, park=8000, trouble="successors"))
@example(Plan(5, park=8000, trouble="successors", model=True))
def test_a_successors_memory_costs_no_token(plan: Plan) -> None:
    """CASES 8, 22: another coordinator believes of its memory what all stages hold, all of it."""
    visit(plan)


@RANDOMLY
@given(plans("gaps"))
@example(Plan(2, park=8000, trouble="gaps"))
def test_lost_frames_cost_no_token(plan: Plan) -> None:
    """CASES 29, 31: a run of frames lost on any link; what was acknowledged stays resident."""
    visit(plan)


@RANDOMLY
@given(plans("lies"))
@example(Plan(3, park=8000, trouble="lies"))
def test_a_wrong_ledger_costs_no_token(plan: Plan) -> None:
    """CASES 8: the ledger is a hint, the stages are the authority."""
    visit(plan)

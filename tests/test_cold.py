"""What a cold prefill would take, as predicted from the ring's rates, against what one takes."""

from __future__ import annotations

from random import Random

import pytest

from bench.virtual import Costs, Script, VirtualRing
from coord.batch import cold_s


def novel(ring: VirtualRing, rows: int) -> float:
    """Seconds until the first token of a prompt that shares nothing with any other."""
    started, seed = ring.now, int(ring.now * 1e6)
    turn = Script(tuple(Random(seed).sample(range(1 << 19), rows)), (5, 6))
    ring.run([turn])
    return turn.times[0] - started


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_the_prediction_is_near_what_a_cold_prompt_takes(stages: int, delay_s: float) -> None:
    ring = VirtualRing(Costs(delay_s=delay_s), None, stages=stages)
    assert cold_s(ring.ring, 1000, ring.limits) is None, "nothing was timed"
    for rows in (500, 1000, 700):
        novel(ring, rows)
    for rows in (64, 300, 1000, 4000):
        predicted = cold_s(ring.ring, rows, ring.limits)
        assert predicted == pytest.approx(novel(ring, rows), rel=0.25), rows

"""A picked token is a function of (logits, sampling, position), and a fair draw."""

import math

import numpy as np
import pytest
import torch

from pipeline.sample import best, gumbel, pick
from transport.frame import GREEDY, Sampling

LOGITS = torch.tensor([1.0, 3.0, 2.0, 3.0, -1.0, 0.5])
NOISE_42_7 = [0.8400811553001404, 2.101264238357544, 0.5258191823959351]


def draws(logits: torch.Tensor, sampling: Sampling, count: int) -> np.ndarray:
    picked = [pick(logits, sampling, position).token for position in range(count)]
    return np.bincount(picked, minlength=len(logits))


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    assert pick(LOGITS, GREEDY, 5).token == 1
    many = torch.zeros(50_000)
    many[[40_000, 123, 49_999]] = 7.0
    assert pick(many, GREEDY, 0).token == 123


def test_noise_is_fixed_for_ever() -> None:
    # Literal values: a change of these changes every seeded reply.
    assert gumbel(42, 7, 3).tolist() == pytest.approx(NOISE_42_7, abs=0)
    assert np.array_equal(gumbel(1, 2, 10), gumbel(1, 2, 50_000)[:10])
    assert not np.array_equal(gumbel(1, 2, 10), gumbel(2, 1, 10))
    assert np.isfinite(gumbel(2**63 - 1, 2**31, 50_000)).all()


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(0))
    first = [pick(logits, Sampling(1.0, seed=9), p).token for p in range(20)]
    assert first == [pick(logits.clone(), Sampling(1.0, seed=9), p).token for p in range(20)]
    assert first != [pick(logits, Sampling(1.0, seed=10), p).token for p in range(20)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_chi_square_over_positions(temperature: float) -> None:
    expected = torch.softmax(LOGITS.double() / temperature, 0).numpy() * 4000
    counts = draws(LOGITS, Sampling(temperature, seed=3), 4000)
    assert chi_square(counts, expected) < 20.5  # 5 degrees of freedom: p = 0.001


def test_chi_square_over_seeds() -> None:
    picked = [pick(LOGITS, Sampling(1.0, seed=seed), 11).token for seed in range(4000)]
    expected = torch.softmax(LOGITS.double(), 0).numpy() * 4000
    assert chi_square(np.bincount(picked, minlength=6), expected) < 20.5


def test_top_k() -> None:
    counts = draws(LOGITS, Sampling(1.0, top_k=2, seed=1), 400)
    assert set(np.flatnonzero(counts)) == {1, 3}
    assert draws(LOGITS, Sampling(5.0, top_k=1, seed=1), 50)[1] == 50


def test_top_p() -> None:
    # Chances: 0.371, 0.371, 0.137, 0.05, 0.03, 0.007
    assert set(np.flatnonzero(draws(LOGITS, Sampling(1.0, top_p=0.8, seed=1), 600))) == {1, 2, 3}
    assert draws(LOGITS, Sampling(1.0, top_p=0.0, seed=1), 50)[1] == 50
    expected = torch.softmax(LOGITS.double()[1:4], 0).numpy() * 3000
    counts = draws(LOGITS, Sampling(1.0, top_p=0.8, seed=2), 3000)
    assert chi_square(counts[1:4], expected) < 13.8  # 2 degrees of freedom: p = 0.001


def test_min_p() -> None:
    assert set(np.flatnonzero(draws(LOGITS, Sampling(1.0, min_p=0.3, seed=1), 600))) == {1, 2, 3}
    assert set(np.flatnonzero(draws(LOGITS, Sampling(1.0, min_p=1.0, seed=1), 60))) == {1, 3}


def test_filters_apply_in_order() -> None:
    # top-k leaves 1 and 3 with a half each, so top-p 0.4 leaves only the first.
    sampling = Sampling(1.0, top_k=2, top_p=0.4, seed=1)
    assert draws(LOGITS, sampling, 50)[1] == 50


def test_filters_do_not_move_the_noise() -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(4))
    for position in range(50):
        free = pick(logits, Sampling(1.0, seed=5), position).token
        rank = best(logits, 1000).index(free)
        assert pick(logits, Sampling(1.0, top_k=rank + 1, seed=5), position).token == free


def test_logprobs_are_of_the_model_not_of_the_filters() -> None:
    choice = pick(LOGITS, Sampling(0.3, top_k=1, seed=1, logprobs=3), 0)
    logs = torch.log_softmax(LOGITS.double(), 0).tolist()
    assert choice.token == 1
    assert choice.logprob == pytest.approx(logs[1], abs=1e-12)
    assert [i for i, _ in choice.top] == [1, 3, 2]
    assert [x for _, x in choice.top] == pytest.approx([logs[1], logs[3], logs[2]], abs=1e-12)
    assert pick(LOGITS, Sampling(logprobs=0), 0).top == ()
    assert len(pick(LOGITS, Sampling(logprobs=20), 0).top) == 6
    assert math.isclose(sum(math.exp(x) for _, x in pick(LOGITS, Sampling(logprobs=6), 0).top), 1.0)

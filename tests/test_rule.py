"""The sampling rule: what each setting does, fair draws at the toy's tail, and numpy agreeing.

Chi-square limits are those of p = 0.001; all seeds are fixed, so a test never fails by chance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from pipeline import rule, sample
from pipeline.model import ToyModel, toy_logits
from pipeline.rule import Tally, allowed, pick, shaped
from tools.sim.samplings import draw_sampling, draw_shaping
from transport.frame import GREEDY, Kind, Sampling, Segment, Shaping

VOCABULARY = 16
LIMITS = {  # chi-square at p = 0.001 by degrees of freedom
    1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5, 7: 24.3, 8: 26.1, 9: 27.9, 10: 29.6,
    11: 31.3, 12: 32.9, 13: 34.5, 14: 36.1, 15: 37.7,
}  # fmt: skip
PROMPT = (1, 2, 3, 2)
SAID = (5, 5, 7, 2)  # generated so far
MANY, SOME = 100_000, 20_000
SHAPING = Shaping(1.4, 0.5, 0.3, ((9, 2.0), (5, 1.0)), 6, len(PROMPT), (11,))


def segment(tokens: Sequence[int], start: int, want: int, sampling: Sampling) -> Segment:
    return Segment(1, 0, start, tuple(tokens), Kind.VERIFY, bytes(16), want, sampling)


def chances(logits: Sequence[float], sampling: Sampling) -> dict[int, float]:
    """By the definitions, step by step: the distribution over what the filters leave."""
    left = dict(enumerate(value / sampling.temperature for value in logits))

    def normal() -> dict[int, float]:
        total = sum(math.exp(value) for value in left.values())
        return {token: math.exp(value) / total for token, value in left.items()}

    best = sorted(left, key=lambda token: (-left[token], token))
    if sampling.top_k:
        best = best[: sampling.top_k]
        left = {token: left[token] for token in best}
    mass = 0.0
    kept: list[int] = []
    for token in best:
        if kept and mass >= sampling.top_p and sampling.top_p < 1:
            break
        kept.append(token)
        mass += normal()[token]
    left = {token: left[token] for token in kept}
    largest = max(normal().values())
    left = {t: left[t] for t, chance in normal().items() if chance >= sampling.min_p * largest}
    return normal()


def expected_logits(logits: Sequence[float], shaping: Shaping) -> list[float]:
    """By the definitions, token by token, after PROMPT and SAID."""
    row = []
    for token, raw in enumerate(logits):
        seen = shaping.repetition if token in PROMPT + SAID else 1.0
        value = raw / seen if raw > 0 else raw * seen
        off = shaping.presence * (token in SAID) + shaping.frequency * SAID.count(token)
        row.append(value - off + dict(shaping.bias).get(token, 0.0))
    for token in shaping.ends if len(SAID) < shaping.min_tokens else ():
        row[token] = -math.inf
    return row


def chi_square(counts: Counter[int], expected: dict[int, float]) -> tuple[float, int]:
    """The statistic and its degrees of freedom; cells that expect less than 5 are one."""
    total = counts.total()
    cells = [(counts[t], p * total) for t, p in expected.items() if p * total >= 5]
    rare = [(counts[t], p * total) for t, p in expected.items() if 0 < p * total < 5]
    if sum(e for _, e in rare) >= 5:
        cells.append((sum(n for n, _ in rare), sum(e for _, e in rare)))
    return sum((n - e) ** 2 / e for n, e in cells), len(cells) - 1


@pytest.mark.parametrize(
    ("sampling", "draws"),
    [
        (Sampling(1.0), MANY),
        (Sampling(2.0, 8, 0.9, 0.05, shaping=SHAPING), MANY),
        (Sampling(0.7), SOME),
        (Sampling(1.5, top_k=5), SOME),
        (Sampling(1.5, top_p=0.8), SOME),
        (Sampling(2.0, min_p=0.2), SOME),
        (Sampling(1.5, shaping=Shaping(repetition=1.8, prompt=len(PROMPT))), SOME),
        (Sampling(1.5, shaping=replace(SHAPING, repetition=1.0)), SOME),
    ],
)
def test_chi_square_at_the_toys_tail(sampling: Sampling, draws: int) -> None:
    """The last of four rows of a verify segment, as a draft's would be; one seed for each draw."""
    model = ToyModel((0, 1), 1, slots=1, capacity=16, vocabulary=VOCABULARY)
    before, drafts = (*PROMPT, *SAID[:1]), SAID[1:]
    model.forward([segment(before, 0, 0, GREEDY)], None)
    inner = ToyModel((0, 1), 2, slots=1, capacity=16, vocabulary=VOCABULARY)
    payload = inner.forward([segment((*before, *drafts), 0, 0, GREEDY)], None).payload
    assert payload is not None
    logits = toy_logits(bytes(payload.data[-8:]), VOCABULARY)
    shaping = sampling.shaping
    history: Sequence[int] = ()
    if shaping is not None and shaping.since is not None:
        history = before[shaping.since :]
    counts: Counter[int] = Counter()
    for seed in range(draws):
        one = segment(drafts, len(before), 1, replace(sampling, seed=seed))
        counts[model.forward([one], None, [history]).results[0].tokens[0]] += 1
    row = logits if shaping is None else expected_logits(logits, shaping)
    expected = chances(row, sampling)
    assert set(counts) <= {token for token, chance in expected.items() if chance > 0}
    found, freedom = chi_square(counts, expected)
    assert freedom >= 2
    assert found < LIMITS[freedom]


# ---- definitions --------------------------------------------------------------------------------


def counted(shaping: Shaping) -> dict[int, int]:
    tokens = (*PROMPT, *SAID)
    wanted = replace(GREEDY, shaping=replace(shaping, prompt=len(PROMPT)))
    since = wanted.shaping.since if wanted.shaping else None
    history = () if since is None else tokens[since:6]
    return dict(Tally(segment(tokens[6:], 6, 2, wanted), history).before(8))


def test_repetition_counts_the_prompt_and_the_others_do_not() -> None:
    assert counted(Shaping(repetition=2.0)) == {1: 0, 2: 1, 3: 0, 5: 2, 7: 1}
    assert counted(Shaping(presence=2.0)) == {5: 2, 7: 1, 2: 1}
    assert counted(Shaping(frequency=2.0)) == {5: 2, 7: 1, 2: 1}
    assert counted(Shaping(bias=((1, 1.0),))) == {}


def test_a_tally_grows_with_the_position_across_the_prompts_end() -> None:
    tokens = (*PROMPT, *SAID)
    shaping = Shaping(repetition=2.0, prompt=len(PROMPT))
    tally = Tally(segment(tokens, 0, 8, replace(GREEDY, shaping=shaping)), ())
    for position in range(1, 9):
        counts = {t: tokens[4:position].count(t) for t in tokens[:position]}
        assert tally.before(position) == counts


def test_shaping_by_hand() -> None:
    logits = [2.0, -2.0, 1.0, 0.0]
    counts = {0: 0, 1: 2}
    assert shaped(logits, Shaping(repetition=2.0), 9, counts) == [1.0, -4.0, 1.0, 0.0]
    assert shaped(logits, Shaping(presence=0.5), 9, {1: 2}) == [2.0, -2.5, 1.0, 0.0]
    assert shaped(logits, Shaping(frequency=0.5), 9, {1: 2}) == [2.0, -3.0, 1.0, 0.0]
    both = Shaping(2.0, 0.5, 0.25, ((1, 3.0), (3, -1.0)))
    assert shaped(logits, both, 9, counts) == [1.0, -2.0, 1.0, -1.0]
    ends = Shaping(min_tokens=2, prompt=8, ends=(0, 2))
    assert shaped(logits, ends, 9, {}) == [-math.inf, -2.0, -math.inf, 0.0]
    assert shaped(logits, ends, 10, {}) == logits


def test_logprobs_are_of_the_raw_logits() -> None:
    shaping = Shaping(bias=((3, 100.0),))
    choice = pick([0.0, 1.0, 2.0, 0.0], Sampling(logprobs=2, shaping=shaping), 0, {})
    total = math.log(2 + math.exp(1) + math.exp(2))
    assert choice.token == 3
    assert choice.logprob == pytest.approx(-total)
    assert [token for token, _ in choice.top] == [2, 1]
    assert [value for _, value in choice.top] == pytest.approx([2 - total, 1 - total])


def test_when_every_token_is_banned_the_lowest_id_is_picked() -> None:
    ends = Shaping(min_tokens=1, ends=(0, 1, 2))
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, 2, 0.5, 0.1)):
        wanted = replace(sampling, shaping=ends)
        assert pick([3.0, 2.0, 1.0], wanted, 0, {}).token == 0
        assert sample.pick(torch.tensor([3.0, 2.0, 1.0]), wanted, 0).token == 0


# ---- the same by numpy --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_numpy_does_what_plain_python_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shaped rows to the bit, the same ids left by the filters, the same token on equal noise."""
    draw = Random(seed)
    size = draw.choice((8, 200, 3000))
    logits = [draw.gauss(0, draw.choice((0.3, 4))) for _ in range(size)]
    if draw.random() < 0.3:
        logits = [round(value) * 1.0 for value in logits]  # many equals
    row = torch.tensor(logits)
    logits = row.tolist()
    sampling = draw_sampling(draw, size)
    shaping = replace(draw_shaping(draw, size), prompt=5, ends=(1, 2))
    sampling = replace(sampling, shaping=shaping)
    counts = {draw.randrange(size): draw.randrange(3) for _ in range(draw.choice((0, 5, 50)))}
    position = draw.randrange(5, 12)
    mine = shaped(logits, shaping, position, counts)
    assert sample.shaped(row.double().numpy(), shaping, position, counts).tolist() == mine
    scaled = [value / max(sampling.temperature, 0.1) for value in mine]
    left = sample._allowed(np.array(scaled), sampling)
    found = range(size) if left is None else [int(i) for i in left]
    assert sorted(found) == sorted(allowed(scaled, sampling))
    noise = rule.gumbel(sampling.seed, position, size)
    monkeypatch.setattr(sample, "gumbel", lambda *_: np.array(noise))
    one = pick(logits, sampling, position, counts)
    other = sample.pick(row, sampling, position, counts)
    assert other.token == one.token
    assert other.logprob == pytest.approx(one.logprob)
    assert [token for token, _ in other.top] == [token for token, _ in one.top]


def test_top_p_ranks_all_ids_where_the_first_have_too_little_mass() -> None:
    flat = np.zeros(5 * sample.FIRST_RANKED)
    left = sample._allowed(flat, Sampling(1.0, top_p=0.5))
    assert left is not None
    assert left.tolist() == list(range(len(flat) // 2))

"""Owns the sampling rule in plain Python: logits, settings, position and sequence in, a token out.

The ToyModel picks by it; pipeline.sample does the same on long rows by numpy, and is tested against
it. Knows no slot and no model. docs/sampling.md says the rule in words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import shake_128
from struct import unpack

from transport.frame import Result, Sampling, Segment, Shaping

GREEDY_BELOW = 1e-5  # of the temperature: logits divided by less could overflow


@dataclass(frozen=True, slots=True)
class Choice:
    """A picked token; its natural-log probability and the likeliest ones where asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Tally:
    """How often each token came before a position of one segment; positions ascend.

    history: the tokens right before the segment, from shaping.since on.
    """

    def __init__(self, segment: Segment, history: Sequence[int]) -> None:
        shaping = segment.sampling.shaping
        assert shaping is not None, segment
        since = shaping.since
        self._first = segment.start - len(history)
        known = since is None or self._first <= since or since >= segment.start
        assert known, (segment, len(history))
        self._tokens = (*history, *segment.tokens)
        self._prompt = shaping.prompt
        self._next = None if since is None else max(since, self._first)
        self._counts: dict[int, int] = {}

    def before(self, position: int) -> Mapping[int, int]:
        """Token -> how often it was generated before `position`; 0: it is in the prompt only."""
        if self._next is None:
            return self._counts
        counts, first = self._counts, self._first
        if self._next < self._prompt:  # thousands of tokens, at C's speed
            end = min(position, self._prompt)
            counts.update(dict.fromkeys(self._tokens[self._next - first : end - first], 0))
            self._next = end
        for token in self._tokens[self._next - first : position - first]:
            counts[token] = counts.get(token, 0) + 1
        self._next = position
        return counts


def pick(
    logits: Sequence[float], sampling: Sampling, position: int, counts: Mapping[int, int]
) -> Choice:
    """Pick the token at absolute `position`. counts: see Tally; {} without shaping."""
    row = list(logits)
    if sampling.shaping is not None:
        row = shaped(row, sampling.shaping, position, counts)
    if sampling.temperature < GREEDY_BELOW:
        token = max(range(len(row)), key=row.__getitem__)  # the first of equals
    else:
        scaled = [value / sampling.temperature for value in row]
        ids = allowed(scaled, sampling)
        noise = gumbel(sampling.seed, position, len(row), ids)
        values = [scaled[i] + more for i, more in zip(ids, noise, strict=True)]
        best = max(values)
        token = min([i for i, value in zip(ids, values, strict=True) if value == best])
    if sampling.logprobs is None:
        return Choice(token)
    peak = max(logits)
    total = peak + math.log(sum([math.exp(value - peak) for value in logits]))
    likely = ranked(logits)[: sampling.logprobs] if sampling.logprobs else []
    top = tuple([(i, min(0.0, logits[i] - total)) for i in likely])
    return Choice(token, min(0.0, logits[token] - total), top)


def shaped(
    logits: Sequence[float], shaping: Shaping, position: int, counts: Mapping[int, int]
) -> list[float]:
    """The logits after penalties, then bias, then the ban of stop tokens."""
    row = list(logits)
    for token, times in counts.items():
        value = row[token]
        if shaping.repetition != 1.0:
            value = value / shaping.repetition if value > 0 else value * shaping.repetition
        if times:
            value -= shaping.presence + shaping.frequency * times
        row[token] = value
    for token, bias in shaping.bias:
        row[token] += bias
    if position < shaping.prompt + shaping.min_tokens:
        for token in shaping.ends:
            row[token] = -math.inf
    return row


def allowed(scaled: Sequence[float], sampling: Sampling) -> list[int]:
    """Ids that top-k, top-p and min-p leave; what is ranked goes by value, equals by id."""
    if not sampling.top_k and sampling.top_p >= 1 and not sampling.min_p:
        return list(range(len(scaled)))
    ids = ranked(scaled)
    if 0 < sampling.top_k < len(ids):
        ids = ids[: sampling.top_k]
    peak = scaled[ids[0]]
    if peak == -math.inf:
        return ids[:1]
    weights = [math.exp(scaled[i] - peak) for i in ids]
    if sampling.top_p < 1:
        enough = sampling.top_p * sum(weights)
        before, kept = weights[0], 1
        while kept < len(ids) and before < enough:
            before += weights[kept]
            kept += 1
        ids = ids[:kept]
    if sampling.min_p > 0:
        ids = [i for i, weight in zip(ids, weights, strict=False) if weight >= sampling.min_p]
    return ids


def ranked(values: Sequence[float]) -> list[int]:
    """Ids by falling value, equals by id."""
    return sorted(range(len(values)), key=values.__getitem__, reverse=True)  # stable in reverse too


def gumbel(seed: int, position: int, count: int, among: Sequence[int] | None = None) -> list[float]:
    """Standard Gumbel noise for `count` ids: SHAKE-128 of (seed, position) as uniforms in (0, 1).

    Or for those `among` them only. Not the noise of pipeline.sample, made for rows of 100,000.
    """
    data = shake_128(seed.to_bytes(8, "little") + position.to_bytes(8, "little")).digest(8 * count)
    log = math.log
    words = unpack(f"<{count}Q", data)
    if among is not None:
        words = tuple([words[i] for i in among])  # few, where the rest is filtered out
    return [-log(-log(((word >> 11) + 0.5) * 2.0**-53)) for word in words]


def result(segment: Segment, choices: Sequence[Choice]) -> Result:
    """The answer for one segment, from its wanted positions' choices in order."""
    tokens = tuple(choice.token for choice in choices)
    start = segment.end - segment.want
    if segment.sampling.logprobs is None:
        return Result(segment.turn, segment.slot, start, tokens)
    logprobs = tuple(choice.logprob for choice in choices if choice.logprob is not None)
    top = tuple(choice.top for choice in choices) if segment.sampling.logprobs else ()
    return Result(segment.turn, segment.slot, start, tokens, logprobs, top)

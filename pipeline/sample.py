"""Owns picking a token from one long row of logits: pipeline.rule's rule, by numpy.

A function of (logits, sampling, position) and, with shaping, of the tokens before: nothing here
sees another row, a batch or a generator's state, so a draft is right exactly when it is the token
that would have been picked (Gumbel-max: argmax(logits / T + noise) is a draw from
softmax(logits / T)). Knows no slot and no model.

Noise of token id i at position p: word i of numpy's Philox4x64-10 stream with key (seed, p) and
counter 0 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), its upper 53 bits
plus a half over 2^53 as a uniform in (0, 1), then -log(-log(u)) in float64 rounded to float32. The
words and uniforms are integer arithmetic and equal on every machine; the rounding hides the
last-bit differences of logarithms between math libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.rule import GREEDY_BELOW, Choice
from transport.frame import Sampling, Shaping

Row: TypeAlias = npt.NDArray[np.float64]
Ids: TypeAlias = npt.NDArray[np.int64]
FIRST_RANKED = 1024  # ids sorted for top-p; all of them only where these have too little mass
NOTHING: Mapping[int, int] = MappingProxyType({})
_WORD = 2**64 - 1


def pick(
    logits: Tensor, sampling: Sampling, position: int, counts: Mapping[int, int] = NOTHING
) -> Choice:
    """Pick the token at absolute `position` from its row of logits, float32 [vocabulary].

    counts: see rule.Tally. Shaped logits are divided by T, then filtered by top-k, top-p and min-p
    in this order, each on what the one before left; at least one token stays. Temperature 0 takes
    the largest logit, the lowest id among equals. Log probabilities are of the model's own
    distribution: log_softmax of the raw logits, in float64.
    """
    assert logits.dim() == 1, logits.shape
    assert logits.dtype == torch.float32, logits.dtype
    greedy, shaping = sampling.temperature < GREEDY_BELOW, sampling.shaping
    if greedy and shaping is None and sampling.logprobs is None:
        return Choice(int(torch.argmax(logits)))  # documented: the first of equal maxima
    # By numpy from here: torch sums one long row in as many parts as it has threads.
    raw: Row = logits.double().cpu().numpy()
    row = raw if shaping is None else shaped(raw, shaping, position, counts)
    token = int(np.argmax(row)) if greedy else _draw(row, sampling, position)
    if sampling.logprobs is None:
        return Choice(token)
    peak = raw.max()
    logs = np.minimum(raw - (peak + np.log(np.exp(raw - peak).sum())), 0.0)
    top = tuple((int(i), float(logs[i])) for i in best(raw, sampling.logprobs))
    return Choice(token, float(logs[token]), top)


def shaped(row: Row, shaping: Shaping, position: int, counts: Mapping[int, int]) -> Row:
    """A new row: see rule.shaped, whose operations these are, in the same order."""
    row = row.copy()
    if counts:
        ids = np.fromiter(counts.keys(), np.int64, len(counts))
        times = np.fromiter(counts.values(), np.float64, len(counts))
        values = row[ids]
        if shaping.repetition != 1.0:
            lower, higher = values / shaping.repetition, values * shaping.repetition
            values = np.where(values > 0, lower, higher)
        off = shaping.presence + shaping.frequency * times
        row[ids] = values - np.where(times > 0, off, 0.0)
    for token, bias in shaping.bias:
        row[token] += bias
    if position < shaping.prompt + shaping.min_tokens:
        row[list(shaping.ends)] = -np.inf
    return row


def gumbel(seed: int, position: int, vocabulary: int) -> npt.NDArray[np.float32]:
    """Standard Gumbel noise for every token id, float32 [vocabulary]."""
    stream = np.random.Philox(key=[seed & _WORD, position & _WORD], counter=0)
    words = stream.random_raw(vocabulary)
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return (-np.log(-np.log(uniform))).astype(np.float32)


def best(row: Row | Tensor, count: int) -> list[int]:
    """The `count` largest values' indices, best first, the lowest index first among equals."""
    return [int(i) for i in _ranked(np.asarray(row), count)]


def _ranked(row: Row, count: int) -> Ids:
    count = min(count, len(row))
    if count == 0:
        return np.empty(0, np.int64)
    # A partition leaves the order of equals open: it only finds the threshold.
    threshold = np.partition(row, len(row) - count)[len(row) - count]
    ids = np.flatnonzero(row >= threshold)
    return ids[np.argsort(-row[ids], kind="stable")[:count]]


def _draw(row: Row, sampling: Sampling, position: int) -> int:
    scaled = row / sampling.temperature
    ids = _allowed(scaled, sampling)
    noise = gumbel(sampling.seed, position, len(row)).astype(np.float64)
    if ids is None:
        return int(np.argmax(scaled + noise))
    return int(ids[np.argmax(scaled[ids] + noise[ids])])


def _allowed(scaled: Row, sampling: Sampling) -> Ids | None:
    """Ids that top-k, top-p and min-p leave; None when they leave all."""
    few = 0 < sampling.top_k < len(scaled)
    if not few and sampling.top_p >= 1 and not sampling.min_p:
        return None
    peak = scaled.max()
    if peak == -np.inf:
        return np.zeros(1, np.int64)
    weights = np.exp(scaled - peak)
    ids = _ranked(scaled, sampling.top_k) if few else None
    if sampling.top_p < 1:
        enough = sampling.top_p * (weights if ids is None else weights[ids]).sum()
        if ids is None:
            ids = _ranked(scaled, FIRST_RANKED)
            if weights[ids].sum() < enough:
                ids = _ranked(scaled, len(scaled))
        mass = np.cumsum(weights[ids])
        ids = ids[: int(np.searchsorted(mass, enough)) + 1]
    if sampling.min_p > 0:
        ids = np.arange(len(scaled)) if ids is None else ids
        ids = ids[weights[ids] >= sampling.min_p]
    return ids

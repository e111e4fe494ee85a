"""Owns picking a token from one row of logits: a function of (logits, sampling, position) alone.

Nothing here sees another row, a batch or a generator's state, so a draft is right exactly when it
is the token that would have been picked (Gumbel-max: argmax(logits / T + noise) is a draw from
softmax(logits / T)). Knows no slot and no model.

Noise of token id i at position p: word i of numpy's Philox4x64-10 stream with key (seed, p) and
counter 0 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), its upper 53 bits
plus a half over 2^53 as a uniform in (0, 1), then -log(-log(u)) in float64 rounded to float32. The
words and uniforms are integer arithmetic and equal on every machine; the rounding hides the
last-bit differences of logarithms between math libraries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transport.frame import Sampling

_WORD = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Choice:
    """A picked token; its natural-log probability and the likeliest ones where asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def pick(logits: Tensor, sampling: Sampling, position: int) -> Choice:
    """Pick the token at absolute `position` from its row of logits, float32 [vocabulary].

    Temperature 0 takes the largest logit, the lowest id among equals. Otherwise the logits are
    divided by T, then filtered by top-k, top-p and min-p in this order (as Hugging Face's
    generate does), each on what the one before left; at least one token stays. Log probabilities
    are of the model's own distribution: log_softmax of the raw logits, in float64.
    """
    assert logits.dim() == 1, logits.shape
    assert logits.dtype == torch.float32, logits.dtype
    if sampling.temperature == 0:
        token = int(torch.argmax(logits))  # documented: the first of equal maxima
    else:
        token = _draw(logits, sampling, position)
    if sampling.logprobs is None:
        return Choice(token)
    # By numpy: torch sums one long row in as many parts as it has threads.
    exact = logits.double().cpu().numpy()
    peak = exact.max()
    logs = exact - (peak + np.log(np.exp(exact - peak).sum()))
    top = tuple((i, float(logs[i])) for i in best(logits, sampling.logprobs))
    return Choice(token, float(logs[token]), top)


def gumbel(seed: int, position: int, vocabulary: int) -> npt.NDArray[np.float32]:
    """Standard Gumbel noise for every token id, float32 [vocabulary]."""
    stream = np.random.Philox(key=[seed & _WORD, position & _WORD], counter=0)
    words = stream.random_raw(vocabulary)
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return (-np.log(-np.log(uniform))).astype(np.float32)


def best(logits: Tensor, count: int) -> list[int]:
    """The `count` most likely token ids, best first, the lowest id first among equals."""
    count = min(count, len(logits))
    if count == 0:
        return []
    # topk leaves the order of equals open: it only finds the threshold.
    threshold = torch.topk(logits, count).values[-1]
    ids = torch.nonzero(logits >= threshold).flatten()
    order = torch.sort(logits[ids], descending=True, stable=True).indices[:count]
    return [int(i) for i in ids[order]]


def _draw(logits: Tensor, sampling: Sampling, position: int) -> int:
    scaled = logits.double() / sampling.temperature
    ids = _allowed(scaled, sampling)
    noise = torch.from_numpy(gumbel(sampling.seed, position, len(logits))).double()
    if ids is None:
        return int(torch.argmax(scaled + noise))
    return int(ids[torch.argmax(scaled[ids] + noise[ids])])


def _allowed(scaled: Tensor, sampling: Sampling) -> Tensor | None:
    """Ids that top-k, top-p and min-p leave, best first; None when they leave all."""
    ids: Tensor | None = None
    if 0 < sampling.top_k < len(scaled):
        ids = torch.tensor(best(scaled, sampling.top_k))
    elif sampling.top_p < 1 or sampling.min_p > 0:
        ids = torch.sort(scaled, descending=True, stable=True).indices
    if ids is None:
        return None
    if sampling.top_p < 1:
        chances = torch.softmax(scaled[ids], 0)
        before = torch.cumsum(chances, 0) - chances
        ids = ids[: max(1, int((before < sampling.top_p).sum()))]
    if sampling.min_p > 0:
        chances = torch.softmax(scaled[ids], 0)
        ids = ids[: max(1, int((chances >= sampling.min_p * chances[0]).sum()))]
    return ids

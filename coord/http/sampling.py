"""Owns what a request's sampling parameters are to the tail: transport.frame.Sampling.

Knows no tokenizer and no ring; the scheduler adds what belongs to the turn.
"""

from __future__ import annotations

import secrets

from coord.http.schema import MAX_CHOICES, ChatRequest, CompletionRequest
from transport.frame import Sampling, Shaping

I63_MASK = (1 << 63) - 1


def seeds_of(wanted: ChatRequest | CompletionRequest) -> list[int]:
    """One seed for each choice: the given one or a drawn one, and those after it.

    A drawn one has 53 bits: it is reported, and JavaScript must be able to send it back.
    """
    drawn = secrets.randbelow((1 << 53) - MAX_CHOICES)
    first = drawn if wanted.seed is None else wanted.seed
    return [(first + index) & I63_MASK for index in range(wanted.n)]


def sampling_of(wanted: ChatRequest | CompletionRequest, seed: int) -> Sampling:
    """The settings of one choice; shaping only where something is to be shaped."""
    shaping = Shaping(
        repetition=float(wanted.repetition_penalty),
        presence=float(wanted.presence_penalty),
        frequency=float(wanted.frequency_penalty),
        bias=tuple((int(token), float(bias)) for token, bias in wanted.logit_bias.items()),
        min_tokens=wanted.min_tokens,
    )
    return Sampling(
        temperature=wanted.temperature,
        top_k=max(wanted.top_k, 0),
        top_p=wanted.top_p,
        min_p=wanted.min_p,
        seed=seed,
        logprobs=wanted.wanted_logprobs,
        shaping=None if shaping == Shaping() else shaping,
    )

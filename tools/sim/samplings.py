"""Draws sampling settings of every kind from a Random, strong enough that a slip changes tokens."""

from __future__ import annotations

from random import Random

from transport.frame import Sampling, Shaping


def draw_sampling(draw: Random, vocabulary: int) -> Sampling:
    """Settings of every kind, strong enough that a slip changes tokens."""
    return Sampling(
        temperature=draw.choice((0.0, 0.5, 1.0, 2.0)),
        top_k=draw.choice((0, 0, 1, 5, 40)),
        top_p=draw.choice((1.0, 1.0, 0.9, 0.3)),
        min_p=draw.choice((0.0, 0.0, 0.05, 0.5)),
        seed=draw.getrandbits(63),
        logprobs=draw.choice((None, None, 0, 3)),
        shaping=draw_shaping(draw, vocabulary) if draw.random() < 0.6 else None,
    )


def draw_shaping(draw: Random, vocabulary: int) -> Shaping:
    """Penalties and biases of every kind."""
    biased = draw.sample(range(vocabulary), draw.choice((0, 0, 3)))
    return Shaping(
        repetition=draw.choice((1.0, 1.0, 1.3, 4.0, 0.5)),
        presence=draw.choice((0.0, 0.0, 2.0, -2.0)),
        frequency=draw.choice((0.0, 0.0, 1.5, -1.0)),
        bias=tuple((token, draw.uniform(-9.0, 9.0)) for token in biased),
        min_tokens=draw.choice((0, 0, 1, 5)),
    )

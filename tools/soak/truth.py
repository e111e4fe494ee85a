"""Owns what a toy ring must answer: the oracle's tokens, cut and spelled as a client gets them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from pipeline.load import TOY_LAYERS, TOY_VOCABULARY
from tools.client import Json
from tools.sim.oracle import Oracle
from tools.soak.record import Wanted
from transport.frame import GREEDY, Sampling, Shaping

MAX_PROMPTS = 512  # spellings of one conversation that are tried


@dataclass(frozen=True, slots=True)
class Expected:
    """A reply that serial decoding gives. tokens: all, those of a stop included.

    count: completion_tokens; None where a stop string cut the text, and on how. stopped: the last
    token is a stop token, which is no part of the text.
    """

    tokens: tuple[int, ...]
    text: str
    finish: str
    count: int | None
    stopped: bool = False


class Toy:
    """Serial decoding. Any thread may call it."""

    def __init__(self, layers: int = TOY_LAYERS) -> None:
        self._oracle = Oracle(layers, TOY_VOCABULARY)
        self._lock = threading.Lock()

    def expect(self, body: Json, prompt: bytes, index: int) -> Expected:
        """Choice `index` of a request whose prompt has these tokens (a toy's token is a byte)."""
        ends = tuple(sorted(set(body.get("stop_token_ids", ()))))
        sampling = _sampling(body, index)
        with self._lock:
            tokens = tuple(self._oracle.decode(prompt, body["max_tokens"], ends, sampling))
        stopped = tokens[-1] in ends
        said = bytes(tokens[:-1] if stopped else tokens).decode("utf-8", "replace")
        cut = min((at for at in map(said.find, body.get("stop", ())) if at >= 0), default=None)
        if cut is not None:
            return Expected(tokens, said[:cut], "stop", None)
        return Expected(tokens, said, "stop" if stopped else "length", len(tokens), stopped)


def prompts(wanted: Wanted, length: int | None) -> Iterator[bytes]:
    """The prompts that the server may have made of a request, of `length` tokens where known.

    A reply in a chat's history is spliced in as it was generated; where a killed coordinator did
    not come to write it down, its text is tokenised like any other.
    """
    for count, parts in enumerate(product(*wanted.parts)):
        if count >= MAX_PROMPTS:
            return
        prompt = b"".join(parts)
        if length is None or len(prompt) == length:
            yield prompt


def _sampling(body: Json, index: int) -> Sampling:
    """The settings of a request's choice, as docs/sampling.md says."""
    shaping = Shaping(
        repetition=body.get("repetition_penalty", 1.0),
        presence=body.get("presence_penalty", 0.0),
        frequency=body.get("frequency_penalty", 0.0),
        min_tokens=body.get("min_tokens", 0),
    )
    if body["temperature"] == 0 and shaping == Shaping():
        return GREEDY
    return Sampling(
        temperature=body["temperature"],
        top_k=body.get("top_k", 0),
        top_p=body.get("top_p", 1.0),
        min_p=body.get("min_p", 0.0),
        seed=body.get("seed", 0) + index,
        shaping=None if shaping == Shaping() else shaping,
    )

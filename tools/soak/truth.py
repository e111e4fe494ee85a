"""Owns the serial truth of a toy ring: one model, one sequence, one token at a time.

Computed here from the toy's definition, with no slot, frame or ledger; only the sampling rule and
the toy's logits are the product's own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import product

from pipeline.load import TOY_LAYERS, TOY_VOCABULARY
from pipeline.model import ROW_BYTES, likeliest, toy_logits
from pipeline.rule import pick
from tools.client import Json
from tools.soak.record import Wanted
from transport.frame import GREEDY, Sampling, Shaping

STRIDE = 64  # tokens between two remembered prefixes
MAX_REMEMBERED = 4096  # prefixes; some 2 KB each
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
        self._layers = layers
        self._known: OrderedDict[bytes, tuple[tuple[blake2b, ...], bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def expect(self, body: Json, prompt: bytes, index: int) -> Expected:
        """Choice `index` of a request whose prompt has these tokens (a toy's token is a byte)."""
        ends = tuple(sorted(set(body.get("stop_token_ids", ()))))
        sampling = _sampling(body, index, len(prompt), ends)
        tokens: list[int] = []
        for token in self._decode(prompt, sampling):
            tokens.append(token)
            if token in ends or len(tokens) >= body["max_tokens"]:
                break
        ended = tokens[-1] in ends
        said = bytes(tokens[:-1] if ended else tokens).decode("utf-8", "replace")
        stops = body.get("stop", ())
        cut = min((at for at in map(said.find, stops) if at >= 0), default=None)
        if cut is not None:
            return Expected(tuple(tokens), said[:cut], "stop", None)
        finish = "stop" if ended else "length"
        return Expected(tuple(tokens), said, finish, len(tokens), ended)

    def _decode(self, prompt: bytes, sampling: Sampling) -> Iterator[int]:
        states, out = self._read(prompt)
        shaping, position = sampling.shaping, len(prompt)
        counts: dict[int, int] = {}
        if shaping is not None and shaping.repetition != 1.0:
            counts = dict.fromkeys(prompt, 0)
        counted = shaping is not None and shaping.since is not None
        while True:
            if sampling == GREEDY:
                token = likeliest(out, TOY_VOCABULARY)
            else:
                token = pick(toy_logits(out, TOY_VOCABULARY), sampling, position, counts).token
            yield token
            if counted:
                counts[token] = counts.get(token, 0) + 1
            position += 1
            out = _step(states, token)

    def _read(self, prompt: bytes) -> tuple[list[blake2b], bytes]:
        """Each layer's state after the prompt, and its last output row."""
        at, out = 0, b""
        states = [blake2b(digest_size=ROW_BYTES) for _ in range(self._layers)]
        with self._lock:
            for length in range(len(prompt) // STRIDE * STRIDE, 0, -STRIDE):
                found = self._known.get(prompt[:length])
                if found is not None:
                    self._known.move_to_end(prompt[:length])
                    at, states, out = length, [state.copy() for state in found[0]], found[1]
                    break
        for end, token in enumerate(prompt[at:], at + 1):
            out = _step(states, token)
            if end % STRIDE == 0:
                with self._lock:
                    self._known[prompt[:end]] = tuple(state.copy() for state in states), out
                    if len(self._known) > MAX_REMEMBERED:
                        self._known.popitem(last=False)
        return states, out


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


def _step(states: list[blake2b], token: int) -> bytes:
    """One more token through all layers; the last one's output row."""
    value = token.to_bytes(ROW_BYTES, "little")
    for layer, state in enumerate(states):
        row = blake2b(layer.to_bytes(4, "little") + value, digest_size=ROW_BYTES).digest()
        state.update(row)
        value = state.digest()
    return value


def _sampling(body: Json, index: int, prompt: int, ends: Sequence[int]) -> Sampling:
    """The settings of a request's choice, as docs/sampling.md says."""
    shaping = Shaping(
        repetition=body.get("repetition_penalty", 1.0),
        presence=body.get("presence_penalty", 0.0),
        frequency=body.get("frequency_penalty", 0.0),
        bias=tuple((int(token), bias) for token, bias in body.get("logit_bias", {}).items()),
        min_tokens=body.get("min_tokens", 0),
    )
    greedy = body["temperature"] == 0
    if shaping != Shaping():
        banned = tuple(ends) if shaping.min_tokens else ()
        return _draw(body, index, _of_turn(shaping, prompt, banned))
    return GREEDY if greedy else _draw(body, index, None)


def _of_turn(shaping: Shaping, prompt: int, ends: tuple[int, ...]) -> Shaping:
    return Shaping(
        shaping.repetition,
        shaping.presence,
        shaping.frequency,
        shaping.bias,
        shaping.min_tokens,
        prompt,
        ends,
    )


def _draw(body: Json, index: int, shaping: Shaping | None) -> Sampling:
    return Sampling(
        temperature=body["temperature"],
        top_k=body.get("top_k", 0),
        top_p=body.get("top_p", 1.0),
        min_p=body.get("min_p", 0.0),
        seed=body.get("seed", 0) + index,
        shaping=shaping,
    )

"""Owns the truth: what plain serial decoding of the toy gives, and what each layer then holds.

Shares no code with the cores under test. Every prefix is computed once and remembered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipeline.model import ROW_BYTES, likeliest, toy_logits
from pipeline.rule import pick
from tools.sim.toy import VOCABULARY, Prefix, Tree
from transport.frame import GREEDY, Sampling

MAX_TEXTS = 200_000  # of the oracle's memory: about 200 MB


class Text:
    """One sequence of tokens: the prefix that it is in each layer, and what comes out on top."""

    __slots__ = ("after", "layers", "out")

    def __init__(self, layers: tuple[Prefix, ...], out: bytes) -> None:
        self.layers = layers
        self.out = out
        self.after: dict[int, Text] = {}


class Oracle:
    """Plain serial decoding."""

    def __init__(self, layers: int, vocabulary: int = VOCABULARY) -> None:
        self.layers = layers
        self.vocabulary = vocabulary
        self.texts = 0
        self._start()

    def _start(self) -> None:
        self.tree = Tree(self.layers)
        self.root = Text(tuple(layer.root for layer in self.tree.layers), b"")

    def step(self, text: Text, token: int) -> Text:
        """The text one token longer."""
        found = text.after.get(token)
        if found is not None:
            return found
        self.texts += 1
        value = token.to_bytes(ROW_BYTES, "little")
        prefixes = []
        for layer, before in zip(self.tree.layers, text.layers, strict=True):
            prefix = before.after.get(value) or layer.grow(before, value)
            prefixes.append(prefix)
            value = prefix.out
        made = text.after[token] = Text(tuple(prefixes), value)
        return made

    def find(self, tokens: Sequence[int]) -> Text:
        """The text of these tokens."""
        text = self.root
        for token in tokens:
            text = text.after.get(token) or self.step(text, token)
        return text

    def decode(
        self,
        prompt: Sequence[int],
        count: int,
        stops: Sequence[int] = (),
        sampling: Sampling = GREEDY,
        *,
        beyond: bool = False,
    ) -> list[int]:
        """The tokens that one slot and one token at a time would give.

        beyond: go on behind a stop token.
        """
        if self.texts > MAX_TEXTS:
            self.texts = 0
            self._start()
        text = self.find(prompt)
        out: list[int] = []
        picked = (
            self._greedy(text)
            if sampling == GREEDY
            else self._sampled(text, prompt, stops, sampling)
        )
        for token in picked:
            if len(out) >= count:
                break
            out.append(token)
            if token in stops and not beyond:
                break
        return out

    def _greedy(self, text: Text) -> Iterator[int]:
        while True:
            token = likeliest(text.out, self.vocabulary)
            yield token
            text = self.step(text, token)

    def _sampled(
        self, text: Text, prompt: Sequence[int], stops: Sequence[int], sampling: Sampling
    ) -> Iterator[int]:
        counts: dict[int, int] = {}
        position, shaping = len(prompt), sampling.shaping
        counted = False
        if shaping is not None:
            ends = tuple(stops) if shaping.min_tokens else ()
            shaping = replace(shaping, prompt=position, ends=ends)
            sampling = replace(sampling, shaping=shaping)
            if shaping.repetition != 1.0:
                counts = dict.fromkeys(prompt, 0)
            counted = bool(counts or shaping.presence or shaping.frequency)
        while True:
            logits = toy_logits(text.out, self.vocabulary)
            token = pick(logits, sampling, position, counts).token
            yield token
            if counted:
                counts[token] = counts.get(token, 0) + 1
            position += 1
            text = self.step(text, token)

    def rows(self, tokens: Sequence[int]) -> list[bytes]:
        """Per layer, the KV bytes of a slot that holds `tokens`."""
        text, out = self.root, [b""] * self.layers
        value = b""
        for token in tokens:
            value = token.to_bytes(ROW_BYTES, "little")
            text = self.step(text, token)
            for number, layer in enumerate(self.tree.layers):
                out[number] += layer.row(value)
                value = text.layers[number].out
        return out

"""What a client asks a ring of toys, and what the toy must answer: plain serial decoding."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from pipeline.model import ToyModel
from tests.processes import NO_TLS, TOY_LAYERS, post
from transport.frame import Kind, Sampling, Segment

TIMEOUT_S = 60.0


def truth(prompt: Sequence[int], count: int, layers: int = TOY_LAYERS) -> list[int]:
    """The tokens after `prompt`: one model that holds all layers, one token at a time."""
    model = ToyModel((0, layers), layers, slots=1, capacity=len(prompt) + count)
    tokens, at = list(prompt), 0
    while len(tokens) < len(prompt) + count:
        new = tuple(tokens[at:])
        segment = Segment(1, 0, at, new, Kind.PREFILL, bytes(16), 1, Sampling())
        tokens += model.forward([segment], None).results[0].tokens
        at += len(new)
    return tokens[len(prompt) :]


@dataclass(frozen=True, slots=True)
class Answer:
    """One reply: its token ids, text, and accounting."""

    tokens: list[int]
    text: str
    finish: str
    usage: dict[str, Any]
    kvring: dict[str, Any]

    @property
    def cached(self) -> int:
        """Prompt tokens that were not computed again."""
        found = self.usage["prompt_tokens_details"]["cached_tokens"]
        assert isinstance(found, int)
        return found


def complete(url: str, prompt: Sequence[int] | str, count: int, **options: Any) -> Answer:
    """POST /v1/completions, not streamed."""
    answer = post(f"{url}/v1/completions", json=request(prompt, count, options))
    assert answer.status_code == 200, answer.text
    body = answer.json()
    choice = body["choices"][0]
    tokens = ids(choice["logprobs"])
    return Answer(tokens, choice["text"], choice["finish_reason"], body["usage"], body["kvring"])


class Stream:
    """A streamed completion that is being read."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self.tokens: list[int] = []
        self.text = ""
        self.finishes: list[str] = []
        self.last: dict[str, Any] = {}
        self.done = False

    def step(self) -> bool:
        """Read one event; False after [DONE]. An error event is an AssertionError."""
        for line in self._lines:
            if line == "data: [DONE]":
                self.done = True
            elif self.done:
                assert not line, f"after [DONE]: {line}"
            elif line.startswith("data: "):
                self._take(json.loads(line.removeprefix("data: ")))
                return True
        assert self.done, "the stream ended without [DONE]"
        return False

    def read(self, count: int) -> None:
        """Read until at least `count` tokens are here."""
        while len(self.tokens) < count:
            assert self.step(), (count, len(self.tokens))

    def rest(self) -> Answer:
        """Read to the end."""
        while self.step():
            pass
        assert len(self.finishes) == 1, self.finishes
        usage, kvring = self.last["usage"], self.last["kvring"]
        return Answer(self.tokens, self.text, self.finishes[0], usage, kvring)

    def _take(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        self.last = event
        for choice in event["choices"]:
            self.text += choice["text"]
            self.tokens += ids(choice["logprobs"])
            if choice["finish_reason"] is not None:
                self.finishes.append(choice["finish_reason"])


@contextmanager
def streaming(
    url: str, prompt: Sequence[int] | str, count: int, **options: Any
) -> Iterator[Stream]:
    """POST /v1/completions as a stream; leaving the block early closes the connection."""
    body = request(prompt, count, options)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with (
        httpx.Client(timeout=TIMEOUT_S, verify=NO_TLS) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        yield Stream(answer.iter_lines())


def stream(url: str, prompt: Sequence[int] | str, count: int, **options: Any) -> Answer:
    """A streamed completion, read to its end."""
    with streaming(url, prompt, count, **options) as reading:
        return reading.rest()


def request(prompt: Sequence[int] | str, count: int, options: dict[str, Any]) -> dict[str, Any]:
    text = prompt if isinstance(prompt, str) else list(prompt)
    return {"prompt": text, "max_tokens": count, "temperature": 0, "logprobs": 0, **options}


def ids(logprobs: dict[str, Any] | None) -> list[int]:
    """Token ids from their spelling: a toy's token is a byte."""
    if logprobs is None:
        return []
    return [
        int(token.removeprefix("bytes:\\x"), 16) if len(token) > 1 else ord(token)
        for token in logprobs["tokens"]
    ]

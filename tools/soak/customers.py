"""Owns the mixed load: customers that talk, fork, edit, ask aside, cancel and dawdle, by a seed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from coord.history import spelling
from coord.tokenizer import ByteTokenizer
from tools.client import Json
from tools.soak.record import CHAT, COMPLETIONS, Outcome, Reading, Record, Wanted
from tools.soak.truth import Toy, prompts

TEXT = (
    "the river boat oak winter morning quiet market seven letters harbour stone lantern a road and "
    "north bread copper under bridge field of garden clock singing paper window slow cloud to in"
)
WORDS = tuple(TEXT.split())
PAUSES_S = (0.0, 0.0, 0.1, 0.5)  # of a reader's thought between two turns
AGAIN_S = 0.4  # until a client that was refused asks again
LEAST_ASCII = 4  # characters of a reply that goes into a history: no other reply is the same
TENANTS = ("ann", "bob")


@dataclass(frozen=True, slots=True)
class Shape:
    """How large requests are, least and most. words: of a message; long_words: of an opening.

    tokens: of a reply; long_tokens: of one in eight, which a fault will rather hit.
    """

    words: tuple[int, int]
    long_words: tuple[int, int]
    tokens: tuple[int, int]
    long_tokens: tuple[int, int]
    most_turns: int
    context: int  # tokens that a conversation may have


TOY_SHAPE = Shape((2, 20), (20, 120), (8, 48), (150, 400), 5, 1800)
MODEL_SHAPE = Shape((3, 20), (20, 80), (4, 16), (30, 60), 3, 900)


class Customer:
    """One client; runs in a thread. toy: None for a real model, of which no token is foreseen."""

    def __init__(
        self,
        ask: Callable[[Wanted], Record],
        seed: str,
        shape: Shape,
        toy: Toy | None,
        stop: threading.Event,
    ) -> None:
        self._send, self._shape, self._toy, self._stop = ask, shape, toy, stop
        self._random = Random(seed)
        self._name = seed

    def run(self) -> None:
        """Ask until stopped."""
        sessions = (self._talk, self._talk, self._talk, self._together, self._complete)
        while not self._stop.is_set():
            self._random.choice((*sessions, self._complete, self._choices))()
            self._stop.wait(self._random.choice(PAUSES_S))

    # ---- sessions ------------------------------------------------------------------------------

    def _talk(self) -> None:
        """A conversation; on its way forks, edits, side requests, and replies that are given up."""
        talk = Talk(
            self._random.choice(TENANTS), self._salt(), f"{self._name} {self._random.random()}"
        )
        talk.say("system", self._words(self._shape.long_words))
        for _ in range(self._random.randint(2, self._shape.most_turns)):
            talk.say("user", self._words(self._shape.words))
            if self._stop.is_set() or talk.size > self._shape.context:
                return
            draw = self._random.random()
            if draw < 0.12:  # asked again below
                self._ask(self._chat("given up", talk, self._odd_reading()))
            elif draw < 0.24:
                self._fork(talk)
            elif draw < 0.34:
                self._side(talk)
            record = self._ask(self._chat("chat", talk, self._reading()))
            if draw > 0.88:
                talk.edit(self._words(self._shape.words))
                record = self._ask(self._chat("edit", talk, Reading.WHOLE))
            if record.outcome is not Outcome.COMPLETE or not talk.hear(record, self._toy):
                return
            self._stop.wait(self._random.choice(PAUSES_S))

    def _fork(self, talk: Talk) -> None:
        """Two more ends of the same history at once."""
        wanted = []
        for _ in range(2):
            branch = talk.copy()
            branch.edit(self._words(self._shape.words))
            wanted.append(self._chat("fork", branch, Reading.WHOLE))
        self._at_once(wanted)

    def _side(self, talk: Talk) -> None:
        side = Talk(talk.tenant, None, "")
        side.say("user", f"a title for: {self._words((3, 6))}")
        self._ask(self._chat("side", side, Reading.WHOLE))

    def _together(self) -> None:
        """The same cold prompt several times at once: prefilled once."""
        talk = Talk(self._random.choice(TENANTS), self._salt(), "")
        talk.say("user", self._words(self._shape.long_words))
        first = self._chat("together", talk, Reading.WHOLE)
        self._at_once([first] * self._random.randint(2, 4))

    def _complete(self) -> None:
        """A completion of token ids or of text."""
        ids = list(self._words(self._shape.long_words).encode())
        prompt: Any = ids
        if self._random.random() < 0.3:
            prompt = bytes(ids).decode()
        body = {"prompt": prompt, **self._settings()}
        parts = ((bytes(ids),),)
        reading = self._reading()
        self._ask(self._wanted("completion", COMPLETIONS, body, TENANTS[0], reading, parts))

    def _choices(self) -> None:
        talk = Talk(self._random.choice(TENANTS), None, "")
        talk.say("user", self._words(self._shape.long_words))
        wanted = self._chat("choices", talk, Reading.WHOLE)
        body = {**wanted.body, "n": self._random.randint(2, 3), "temperature": 1.0}
        self._ask(replace(wanted, body={**body, "seed": self._random.getrandbits(40)}))

    # ---- requests ------------------------------------------------------------------------------

    def _ask(self, wanted: Wanted) -> Record:
        record = self._send(wanted)
        if record.outcome in (Outcome.REFUSED, Outcome.UNREACHABLE):
            self._stop.wait(AGAIN_S)
        return record

    def _at_once(self, wanted: Sequence[Wanted]) -> None:
        with ThreadPoolExecutor(len(wanted)) as pool:
            list(pool.map(self._ask, wanted))

    def _chat(self, kind: str, talk: Talk, reading: Reading) -> Wanted:
        body: Json = {"messages": list(talk.messages), **self._settings()}
        if talk.salt is not None:
            body["cache_salt"] = talk.salt
        if talk.session and self._random.random() < 0.5:
            body["prompt_cache_key"] = talk.session
        return self._wanted(kind, CHAT, body, talk.tenant, reading, talk.spellings())

    def _wanted(
        self,
        kind: str,
        path: str,
        body: Json,
        tenant: str,
        reading: Reading,
        parts: tuple[tuple[bytes, ...], ...],
    ) -> Wanted:
        needs_stream = reading in (Reading.SLOW, Reading.CANCEL)
        body = {**body, "stream": needs_stream or self._random.random() < 0.7}
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        if self._random.random() < 0.4:
            body["logprobs"] = True if path == CHAT else 0
        after = self._random.randint(0, 6)
        return Wanted(kind, path, body, tenant, reading, parts, after)

    def _settings(self) -> Json:
        """Sampling of every kind; greedy half of the time."""
        random = self._random
        count = self._shape.long_tokens if random.random() < 1 / 8 else self._shape.tokens
        body: Json = {"max_tokens": random.randint(*count), "temperature": 0}
        if random.random() < 0.5:
            body |= {"temperature": random.choice((0.5, 1.0, 2.0)), "seed": random.getrandbits(40)}
            body |= random.choice(({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05}))
        if random.random() < 0.15:
            body |= random.choice(
                ({"presence_penalty": 1.5}, {"repetition_penalty": 1.3}, {"frequency_penalty": 1.0})
            )
        draw = random.random()
        if draw < 0.15:
            body["stop"] = random.choice((["e"], ["th", "q"], ["~", "1"]))
        elif draw < 0.25 and self._toy is not None:
            body["stop_token_ids"] = random.sample(range(256), 8)
            body["min_tokens"] = random.choice((0, 4))
        return body

    def _reading(self) -> Reading:
        return self._odd_reading() if self._random.random() < 0.15 else Reading.WHOLE

    def _odd_reading(self) -> Reading:
        return self._random.choice((Reading.SLOW, Reading.LEAVE, Reading.CANCEL))

    def _salt(self) -> str | None:
        return self._random.choice((None, None, "salt a", "salt b"))

    def _words(self, count: tuple[int, int]) -> str:
        words = self._random.choices(WORDS, k=self._random.randint(*count))
        return " ".join([str(self._random.randint(0, 99)), *words])


class Talk:
    """One conversation: its messages, and of each the spellings that its tokens may have."""

    def __init__(self, tenant: str, salt: str | None, session: str) -> None:
        self.tenant, self.salt, self.session = tenant, salt, session
        self.messages: list[Json] = []
        self._parts: list[tuple[bytes, ...]] = []

    @property
    def size(self) -> int:
        """Bytes; of a toy, tokens."""
        return sum(max(map(len, parts)) for parts in self._parts)

    def copy(self) -> Talk:
        """The same so far."""
        other = Talk(self.tenant, self.salt, self.session)
        other.messages, other._parts = list(self.messages), list(self._parts)
        return other

    def say(self, role: str, text: str) -> None:
        """One more message of the client's."""
        self.messages.append({"role": role, "content": text})
        self._parts.append((f"{role}: {text}\n".encode(),))

    def edit(self, text: str) -> None:
        """Another last message."""
        self.messages.pop()
        self._parts.pop()
        self.say("user", text)

    def hear(self, record: Record, toy: Toy | None) -> bool:
        """Take a reply into the history; False where its text is too plain to be told apart."""
        text = record.choices[0].text
        if sum(character < "\x80" for character in text) < LEAST_ASCII:
            return False
        spellings = [text.encode()]
        if toy is not None:
            for prompt in prompts(record.wanted, record.usage.get("prompt_tokens")):
                expected = toy.expect(record.wanted.body, prompt, 0)
                if expected.text == text:
                    ids = expected.tokens[: -1 if expected.stopped else None]
                    found = spelling(ByteTokenizer(), ids, text, strip=True)
                    spellings.insert(0, bytes(found[0]) if found else spellings[0])
                    break
        self.messages.append({"role": "assistant", "content": text})
        self._parts.append(
            tuple(dict.fromkeys(b"assistant: " + each + b"\n" for each in spellings))
        )
        return True

    def spellings(self) -> tuple[tuple[bytes, ...], ...]:
        """The parts of the prompt."""
        return (*self._parts, (b"assistant: ",))

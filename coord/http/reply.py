"""Owns one running reply: a turn's events in, text with its accounting out.

Knows tokens, text and time; no HTTP, no JSON. The numbers are the same for a stream and for a whole
answer because both read them here (cases 23, 24).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from coord.actions import Admitted, Failed, Finished, Tokens, TurnError
from coord.http.metrics import Metrics
from coord.http.miss import explain
from coord.text import StopScanner
from coord.tokenizer import Tokenizer
from coord.toolcalls import Calling, CallParser, Part, contents, new_call_id

Event: TypeAlias = Admitted | Tokens | Finished | Failed
_FINISH = {
    "token": "stop",
    "string": "stop",
    "call": "stop",
    "cancelled": "stop",
    "length": "length",
}
_DEADLINE = "deadline"


class TurnStream(Protocol):
    """One turn's events in order: Admitted, Tokens, ..., and last Finished or Failed."""

    @property
    def turn(self) -> int:
        """The turn's number."""

    def __aiter__(self) -> AsyncIterator[Event]:
        """The events; consumed once, and dropped before the end after a cancel."""

    def cancel(self, reason: str) -> None:
        """End the turn; its Finished carries the reason. Idempotent, and harmless after the end."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One token with its log probability (natural) and the most likely tokens at its place.

    offset: characters of the answer's text before it.
    """

    data: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What became certain: text, and the tokens whose text is out. index: of the choice.

    parts: of the text, what is content and what are calls; None where calls are not looked for.
    """

    text: str
    scored: tuple[Scored, ...] = ()
    index: int = 0
    parts: tuple[Part, ...] | None = None

    @property
    def empty(self) -> bool:
        """True where there is nothing to tell a client."""
        return not (self.scored or (self.text if self.parts is None else self.parts))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the request asked of its answer.

    stops: token ids that end it, never part of its text. strip: see Tokenizer.decoder. reuse: it
    may use what is resident. other_salt: its session's last request had another cache_salt.
    min_tokens: so many tokens are not searched for stop strings. index: of the choice. forced: the
    prompt's last tokens are the answer's first. calling: tool calls to look for, None for none.
    """

    prompt: Sequence[int]
    stops: frozenset[int]
    stop_strings: tuple[str, ...]
    logprobs: bool
    strip: bool
    seed: int
    timeout_s: float
    reuse: bool = True
    other_salt: bool = False
    min_tokens: int = 0
    index: int = 0
    forced: tuple[int, ...] = ()
    calling: Calling | None = None


class Reply:
    """Iterate deltas() once; then finish_reason, usage() and report() are final."""

    def __init__(
        self,
        stream: TurnStream,
        tokenizer: Tokenizer,
        wanted: Wanted,
        metrics: Metrics,
        on_close: Callable[[], None],
    ) -> None:
        self._stream = stream
        self._tokenizer = tokenizer
        self._wanted = wanted
        self._metrics = metrics
        self._on_close = on_close
        self._decoder = tokenizer.decoder(strip=wanted.strip)
        self._scanner = StopScanner(wanted.stop_strings)
        self._decoded = 0  # characters that came out of the decoder
        self._released = 0  # characters that went to the client
        self._waiting: list[tuple[Scored, int]] = []  # scored tokens, and where their text ends
        # The last one that was no resume: a resumed one counts the turn's own work (case 22).
        self._admitted: Admitted | None = None
        self._corrected = False  # the stages refused what was matched at first
        self._tokens = list(wanted.forced)  # and what was generated, the stop token excepted
        self._text: list[str] = []  # what went to the client
        self._place: Admitted | None = None  # the latest: where it runs now
        self._submitted_at = time.monotonic()
        self._admitted_at: float | None = None
        self._first_at: float | None = None
        self._first_count = 0  # tokens that came first together
        self._last_at: float | None = None
        self._accepted = self._rejected = 0  # drafts
        self._closed = False
        self._calls = CallParser(wanted.calling, new_call_id) if wanted.calling else None
        self._said: list[Part] = []  # what calls and content were found so far
        self._parts: list[Part] = []  # of it, what is not released
        forced = b"".join(map(tokenizer.token_bytes, wanted.forced))
        self._forced = self._decoder.feed(forced)  # not yet released
        self._decoded += len(self._forced)
        self._look(self._forced)
        self.index = wanted.index
        self.prompt_tokens = len(wanted.prompt)
        self.completion_tokens = 0
        self.ended_by: str | None = None

    @property
    def finish_reason(self) -> str:
        """OpenAI's. A turn ended by POST /v1/cancel counts as stopped; so does half a call."""
        assert self.ended_by is not None
        called = self._calls is not None and self._calls.calls and not self._calls.unfinished
        if called and self.ended_by in ("token", "string", "call"):
            return "tool_calls"
        return _FINISH[self.ended_by]

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Text as it becomes certain. TurnError where the turn failed."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._wanted.timeout_s, self._stream.cancel, _DEADLINE)
        try:
            async for event in self._stream:
                if isinstance(event, Tokens):
                    delta = self._take(event)
                    if not delta.empty:
                        yield delta
                elif isinstance(event, Admitted):
                    self._admit(event)
                else:
                    self._end(event)
                if self.ended_by in ("string", "call") or isinstance(event, Finished):
                    break
            if self.ended_by is None:
                raise TurnError(500, "internal_error", "the turn ended without a result")
            delta = self._rest()
            if not delta.empty:
                yield delta
            self._metrics.ended(self.finish_reason, self._now() - self._submitted_at)
            self._closed = True
        finally:
            timer.cancel()
            self.close()

    def cancel(self) -> None:
        """End the turn early on request; what came so far is the answer."""
        self._stream.cancel("cancelled")

    def close(self) -> None:
        """Nobody reads any more: give the turn up unless it has ended. Idempotent."""
        if not self._closed:
            self._closed = True
            self._stream.cancel("cancelled")
            self._metrics.ended("abort", self._now() - self._submitted_at)
        self._on_close()

    def usage(self) -> dict[str, object]:
        """OpenAI's usage object. A stop token counts, as it was generated; cut text's do too."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._matched},
        }

    def report(self) -> dict[str, object]:
        """The `kvring` object."""
        place, first, last = self._place, self._first_at, self._last_at
        decode_s = last - first if first is not None and last is not None else 0.0
        later = self.completion_tokens - self._first_count
        return {
            "turn": self._stream.turn,
            "ring": place.ring if place else None,
            "slot": place.slot if place else None,
            "matched": self._matched,
            "prefilled": len(self._wanted.prompt) - self._matched if place else 0,
            "miss": self._miss(),
            "queue_ms": self._since_submit(self._admitted_at),
            "ttft_ms": self._since_submit(first),
            "decode_ms": round(decode_s * 1e3, 3),
            "tokens_per_s": round(later / decode_s, 3) if decode_s else None,
            "cold_ms": self._cold_ms(),
            "drafts_accepted": self._accepted,
            "drafts_rejected": self._rejected,
            "seed": self._wanted.seed,
            "ended_by": self.ended_by,
        }

    @property
    def slot_s(self) -> float | None:
        """For how long it has had a slot by now; None if it never got one."""
        return None if self._admitted_at is None else self._now() - self._admitted_at

    @property
    def spoken(self) -> tuple[list[int], str]:
        """The ids that were generated, without a stop token, and the text that the client has."""
        return self._tokens, "".join(self._text)

    @property
    def called(self) -> tuple[str, list[tuple[str, str]]] | None:
        """The content, and the calls as (name, arguments); None where there are no calls.

        Nor where what was generated is cut behind the only call that was wanted: the model would
        find a list of calls without its end.
        """
        if self._calls is None or self.ended_by is None:
            return None
        if not self._calls.calls or self._calls.torn:
            return None
        return contents(self._said)

    def _miss(self) -> dict[str, object] | None:
        if self._admitted is None:
            return None
        return explain(
            self._admitted,
            self._wanted.prompt,
            self._tokenizer,
            reuse=self._wanted.reuse,
            corrected=self._corrected,
            other_salt=self._wanted.other_salt,
        )

    @property
    def _matched(self) -> int:
        return self._admitted.matched if self._admitted else 0

    def _cold_ms(self) -> float | None:
        cold_s = self._admitted.cold_s if self._admitted else None
        return None if cold_s is None else round(cold_s * 1e3, 3)

    def _since_submit(self, at: float | None) -> float | None:
        return None if at is None else round((at - self._submitted_at) * 1e3, 3)

    @staticmethod
    def _now() -> float:
        return time.monotonic()

    def _admit(self, event: Admitted) -> None:
        self._place = event
        if event.resumed:
            return
        if self._admitted is None:
            self._admitted_at = self._now()
        else:
            self._corrected = True
        self._admitted = event

    def _count_prompt(self) -> None:
        """Once what was reused is certain: no refusal can come after the first token."""
        if self._admitted is not None:
            self._metrics.admitted(self._admitted.prompt, self._admitted.matched)

    def _end(self, event: Finished | Failed) -> None:
        if isinstance(event, Failed):
            self._closed = True
            self._metrics.failed(event.code)
            raise TurnError(event.status, event.code, event.message)
        if event.reason == _DEADLINE:
            self._closed = True
            self._metrics.failed("deadline_exceeded")
            text = f"the turn was not over after {self._wanted.timeout_s:g} s"
            raise TurnError(504, "deadline_exceeded", text)
        self.ended_by = {"stop": "token", "length": "length"}.get(event.reason, "cancelled")

    def _take(self, event: Tokens) -> Delta:
        now = self._now()
        self._accepted += event.accepted
        self._rejected += event.rejected
        text: list[str] = []
        before = self.completion_tokens
        for index, token in enumerate(event.tokens):
            self.completion_tokens += 1
            if token in self._wanted.stops:
                break  # the scheduler ends the turn here and says so
            self._tokens.append(token)
            piece = self._decoder.feed(self._tokenizer.token_bytes(token))
            start = self._decoded
            self._decoded += len(piece)
            if self._wanted.logprobs:
                self._waiting.append((self._score(event, index, start), self._decoded))
            scanned = self.completion_tokens > self._wanted.min_tokens
            text.append(self._scanner.feed(piece) if scanned else piece)
            self._look(text[-1])
            if self._scanner.stopped:
                # Later tokens of this event were drafted ahead; a serial run has none (case 24).
                self.ended_by = "string"
                self._stream.cancel("stop")
                break
            if self._calls is not None and self._calls.done:
                self.ended_by = "call"
                self._stream.cancel("stop")
                break
        self._clock(self.completion_tokens - before, now)
        return self._release("".join(text))

    def _clock(self, count: int, now: float) -> None:
        if not count:
            return
        if self._first_at is None:
            self._count_prompt()
            self._first_at, self._first_count = now, count
            self._metrics.first_tokens(count, now - self._submitted_at)
        elif self._last_at is not None:
            self._metrics.more_tokens(count, now - self._last_at)
        self._last_at = now

    def _score(self, event: Tokens, index: int, offset: int) -> Scored:
        spell = self._tokenizer.token_bytes
        top = event.top[index] if event.top else ()
        return Scored(
            spell(event.tokens[index], special=True),
            event.logprobs[index],
            tuple((spell(token, special=True), logprob) for token, logprob in top),
            offset,
        )

    def _look(self, text: str) -> None:
        if self._calls is not None:
            self._parts += self._calls.feed(text)

    def _release(self, text: str) -> Delta:
        text, self._forced = self._forced + text, ""
        self._released += len(text)
        self._text.append(text)
        ready = 0
        while ready < len(self._waiting) and self._waiting[ready][1] <= self._released:
            ready += 1
        scored = tuple(entry for entry, _ in self._waiting[:ready])
        del self._waiting[:ready]
        parts = None if self._calls is None else tuple(self._parts)
        self._said += self._parts
        self._parts = []
        return Delta(text, scored, self.index, parts)

    def _rest(self) -> Delta:
        """What was withheld; of a cut answer, the token that the cut goes through."""
        text = ""
        if not self._scanner.stopped:
            text = self._scanner.feed(self._decoder.flush()) + self._scanner.flush()
            if self._scanner.stopped:
                self.ended_by = "string"
        self._look(text)
        if self._calls is not None:
            self._parts += self._calls.flush()
        delta = self._release(text)
        through = [entry for entry, _ in self._waiting if entry.offset < self._released]
        self._waiting.clear()
        return replace(delta, scored=(*delta.scored, *through))

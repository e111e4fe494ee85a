"""Owns the tools' HTTP client: readiness, the ring's state, and streamed chat replies.

Knows the API of docs/api.md and nothing of terminals. Every failure is a ToolError with the words
to print; missing keys in an answer are None, so that an older server can be shown too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from tools.errors import USAGE, ToolError

Json = dict[str, Any]
CONNECT_S = 5.0
SILENCE_S = 180.0  # a prefilling server sends a comment line every few seconds
POLL_S = 0.3  # between two looks at /ready


class ServerError(ToolError):
    """The server answered, with an error: its HTTP status (or 0 inside a stream) and message."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message, kind=code)
        self.status = status
        self.error_code = code


@dataclass(frozen=True, slots=True)
class Readiness:
    """What GET /ready says. progress is 0..1 or unknown; detail is for a person."""

    ready: bool
    detail: str
    progress: float | None
    body: Json = field(default_factory=dict)  # each ring's stages by name

    def __str__(self) -> str:
        # all is loaded: what is awaited has no share
        done = self.progress is None or self.progress >= 1.0
        share = "" if done else f" {self.progress:.0%}"
        return f"{self.detail or ('ready' if self.ready else 'not ready')}{share}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a streamed reply; usage and kvring (ring, matched, …) come once, at the end.

    id: what Client.cancel wants; of the first one, which has nothing else.
    """

    text: str
    finish_reason: str | None
    usage: Json | None
    kvring: Json | None
    id: str | None = None


@dataclass(slots=True)
class Reply:
    """A reply as far as it has come. Times in seconds by this client's clock, from the request."""

    id: str | None = None  # as soon as the server has taken the request
    text: str = ""
    pieces: int = 0
    finish_reason: str | None = None  # None: stopped before its end
    ttft_s: float | None = None  # to the first piece of text
    total_s: float = 0.0
    usage: Json = field(default_factory=dict)
    kvring: Json = field(default_factory=dict)

    def read(self, chunks: Generator[Chunk, None, None], on_text: Callable[[str], None]) -> None:
        """Take a stream to its end. An exception on the way (Ctrl-C) closes it: the turn ends."""
        started = time.monotonic()
        try:
            for chunk in chunks:
                self.id = chunk.id or self.id
                if chunk.text:
                    if self.ttft_s is None:
                        self.ttft_s = time.monotonic() - started
                    self.text += chunk.text
                    self.pieces += 1
                    on_text(chunk.text)
                self.finish_reason = chunk.finish_reason or self.finish_reason
                self.usage = chunk.usage or self.usage
                self.kvring = chunk.kvring or self.kvring
        finally:
            self.total_s = time.monotonic() - started
            chunks.close()

    @property
    def tokens(self) -> int:
        """Generated tokens; of a stopped reply the pieces seen."""
        return integer(self.usage.get("completion_tokens")) or self.pieces

    @property
    def stopped(self) -> bool:
        """It was ended by a cancel, or cut."""
        return self.finish_reason is None or self.kvring.get("ended_by") == "cancelled"

    @property
    def prompt_tokens(self) -> int | None:
        """All tokens of the prompt, resident or not."""
        return integer(self.usage.get("prompt_tokens"))

    @property
    def cached(self) -> int | None:
        """Prompt tokens that were resident."""
        details = self.usage.get("prompt_tokens_details")
        return integer(details.get("cached_tokens")) if isinstance(details, dict) else None

    @property
    def prefilled(self) -> int | None:
        """Prompt tokens that had to be computed."""
        told = integer(self.kvring.get("prefilled"))
        if told is not None or self.prompt_tokens is None or self.cached is None:
            return told
        return self.prompt_tokens - self.cached

    @property
    def tokens_per_s(self) -> float | None:
        """Decode speed: the server's number, else tokens after the first over their time."""
        told = number(self.kvring.get("tokens_per_s"))
        if told is not None:
            return told
        if self.ttft_s is None or self.tokens < 2 or self.total_s <= self.ttft_s:
            return None
        return (self.tokens - 1) / (self.total_s - self.ttft_s)


def integer(value: object) -> int | None:
    """A JSON integer, or None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: object) -> float | None:
    """A JSON number, or None for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return None


class Client:
    """A server at `url`. Raises ToolError (unreachable, bad URL) or ServerError everywhere."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = _checked(url)
        # as bytes: a key may hold any character, and the HTTP library takes only ASCII as text
        headers = {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
        timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
        # A proxy named in the environment has no business between us and a ring on this network.
        many = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout, trust_env=False, limits=many
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ready(self) -> Readiness:
        """GET /ready, whether it says yes or no."""
        with self._failures():
            answer = self._http.get("/ready", timeout=CONNECT_S)
        body = _json(answer)
        if answer.status_code not in {200, 503}:
            raise _error(answer.status_code, body, answer.text)
        return Readiness(
            ready=answer.status_code == 200,
            detail=_detail(body),
            progress=_progress(body),
            body=body,
        )

    def wait_ready(
        self, show: Callable[[Readiness], None], *, alive: Callable[[], None] | None = None
    ) -> None:
        """Return when the server is ready; `show` is told of every look that says no.

        With `alive` (which raises when waiting is in vain) an unreachable server is waited for too:
        it is being started. Without it that is an error at once.
        """
        while True:
            try:
                state = self.ready()
            except ServerError:
                raise
            except ToolError:
                if alive is None:
                    raise
                alive()
                state = Readiness(ready=False, detail="starting", progress=None)
            if state.ready:
                return
            show(state)
            time.sleep(POLL_S)

    def get(self, path: str, timeout_s: float = SILENCE_S) -> Json:
        """GET a JSON object."""
        with self._failures():
            answer = self._http.get(path, timeout=httpx.Timeout(timeout_s, connect=CONNECT_S))
        return self._object(answer)

    def text(self, path: str, timeout_s: float = SILENCE_S) -> str:
        """GET a page of plain text."""
        with self._failures():
            answer = self._http.get(path, timeout=httpx.Timeout(timeout_s, connect=CONNECT_S))
        if answer.status_code != 200:
            raise _error(answer.status_code, _json(answer), answer.text)
        return answer.text

    def post(self, path: str, body: Json) -> Json:
        """POST a JSON object, get one back."""
        with self._failures():
            answer = self._http.post(path, json=body)
        return self._object(answer)

    def change(
        self, method: str, path: str, query: dict[str, str], body: Json | None = None
    ) -> Json:
        """DELETE or PUT something; the server's JSON object."""
        with self._failures():
            answer = self._http.request(method, path, json=body, params=query)
        return self._object(answer)

    def first_model(self) -> str:
        """The name to ask for when the user named none."""
        models = self.get("/v1/models").get("data") or []
        if not models or not isinstance(models[0].get("id"), str):
            raise ServerError(200, f"{self.url}/v1/models lists no model")
        return str(models[0]["id"])

    def chat(self, body: Json) -> Generator[Chunk, None, None]:
        """POST /v1/chat/completions as a stream. Closing the iterator cancels the turn."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with (
            self._failures(),
            self._http.stream("POST", "/v1/chat/completions", json=body) as answer,
        ):
            if answer.status_code != 200:
                answer.read()
                raise _error(answer.status_code, _json(answer), answer.text)
            yield Chunk("", None, None, None, answer.headers.get("x-request-id"))
            for event in _events(answer.iter_lines()):
                yield _chunk(event)

    def cancel(self, reply_id: str, timeout_s: float) -> None:
        """End a reply that is being streamed: its stream then ends with what the turn cost."""
        with self._failures():
            answer = self._http.post(f"/v1/cancel/{reply_id}", timeout=timeout_s)
        self._object(answer)

    def _object(self, answer: httpx.Response) -> Json:
        body = _json(answer)
        if answer.status_code != 200:
            raise _error(answer.status_code, body, answer.text)
        return body

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn the HTTP library's exceptions into words."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ToolError(
                f"no server at {self.url} ({error or 'timed out'}); start one with: kvring up"
            ) from error
        except httpx.TimeoutException as error:
            raise ToolError(f"{self.url} is connected but silent; see: kvring status") from error
        except httpx.HTTPError as error:
            raise ToolError(f"lost the connection to {self.url}: {error}") from error


def _checked(url: str) -> str:
    """The server's root: http:// is understood, a trailing slash or /v1 is taken off."""
    full = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    try:
        parsed = httpx.URL(full)
    except httpx.InvalidURL as error:
        raise ToolError(f"--url {url}: {error}", code=USAGE) from error
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise ToolError(f"--url {url}: must be http://HOST:PORT", code=USAGE)
    return full


def _json(answer: httpx.Response) -> Json:
    try:
        body = answer.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _detail(body: Json) -> str:
    """What a person should read in an answer of /ready or in an error."""
    error = body.get("error")
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])
    for key in ("missing", "detail", "message", "status"):
        if isinstance(body.get(key), str):
            return str(body[key])
    return ""


def _progress(body: Json) -> float | None:
    """How far loading is: told as such, else the mean over the stages of all rings."""
    told = number(body.get("progress"))
    if told is not None:
        return told
    rings = [ring for ring in body.values() if isinstance(ring, dict)]
    stages = [stage for ring in rings for stage in ring.values() if isinstance(stage, dict)]
    shares = [number(stage.get("progress")) or 0.0 for stage in stages]
    return sum(shares) / len(shares) if shares else None


def _error(status: int, body: Json, text: str) -> ServerError:
    message = _detail(body) or " ".join(text.split())[:200] or "no message"
    error = body.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    prefix = f"the server says {status}: " if status else "the server ended the reply: "
    return ServerError(status, prefix + message, code if isinstance(code, str) else None)


def _events(lines: Iterator[str]) -> Iterator[Json]:
    """The JSON objects of an SSE stream up to [DONE]; an error object raises ServerError."""
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif line == "" and data:
            text, data = "\n".join(data), []
            if text == "[DONE]":
                return
            try:
                event = json.loads(text)
            except ValueError:
                raise ServerError(0, f"not JSON in the stream: {text[:80]!r}") from None
            if not isinstance(event, dict) or "error" in event:
                raise _error(0, event if isinstance(event, dict) else {}, text)
            yield event
    raise ServerError(0, "the stream ended before it was finished")


def _chunk(event: Json) -> Chunk:
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    kvring = event.get("kvring") or choices[0].get("kvring")
    return Chunk(
        text=delta.get("content") or "",
        finish_reason=choices[0].get("finish_reason"),
        usage=event.get("usage"),
        kvring=kvring if isinstance(kvring, dict) else None,
    )

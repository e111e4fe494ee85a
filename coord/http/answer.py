"""Owns the JSON of answers: OpenAI's objects for whole answers and for chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from coord.http.choices import Choices
from coord.http.reply import Delta, Reply, Scored
from coord.toolcalls import Begin, Part, contents

_FLOOR = -9999.0  # JSON has no -infinity; OpenAI writes this for impossible tokens


class Answer(Protocol):
    """How one of the two APIs words its objects."""

    id: str

    def opening(self, count: int) -> list[dict[str, Any]]:
        """Chunks before any text of `count` choices."""

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """One piece of a stream."""

    def closing(self, reply: Reply) -> dict[str, Any]:
        """The chunk with a choice's finish_reason."""

    def whole(self, choices: Choices, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The answer in one object."""

    def usage_chunk(self, choices: Choices) -> dict[str, Any]:
        """The last chunk, only on include_usage (case 42)."""


class _Base:
    """id, created and model are equal in all chunks of a stream.

    null_usage: with include_usage every earlier chunk says usage: null.
    """

    def __init__(
        self, id_: str, created: int, model: str, *, logprobs: bool, null_usage: bool
    ) -> None:
        self.id = id_
        self._created = created
        self._model = model
        self._logprobs = logprobs
        self._null_usage = null_usage

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _piece(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self._null_usage else {}
        return {**self._object(kind, choices), **usage}


class ChatAnswer(_Base):
    """chat.completion and chat.completion.chunk."""

    _CHUNK = "chat.completion.chunk"

    def opening(self, count: int) -> list[dict[str, Any]]:
        """See Answer."""
        role = {"role": "assistant", "content": ""}
        return [self._delta(index, role, None, None) for index in range(count)]

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """See Answer."""
        told = {"content": delta.text} if delta.parts is None else _told(delta.parts)
        return self._delta(delta.index, told, self._scores(delta.scored), None)

    def closing(self, reply: Reply) -> dict[str, Any]:
        """See Answer."""
        chunk = self._delta(reply.index, {}, None, reply.finish_reason)
        return {**chunk, "kvring": reply.report()}

    def usage_chunk(self, choices: Choices) -> dict[str, Any]:
        """See Answer."""
        chunk = self._object(self._CHUNK, [])
        return {**chunk, "usage": choices.usage(), "kvring": choices.report()}

    def whole(self, choices: Choices, deltas: Sequence[Delta]) -> dict[str, Any]:
        """See Answer."""
        answer = self._object(
            "chat.completion", [self._choice(reply, deltas) for reply in choices.replies]
        )
        return {**answer, "usage": choices.usage(), "kvring": choices.report()}

    def _choice(self, reply: Reply, deltas: Sequence[Delta]) -> dict[str, Any]:
        text, scored = _joined(deltas, reply.index)
        mine = [
            part for delta in deltas if delta.index == reply.index for part in delta.parts or ()
        ]
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if any(delta.parts is not None for delta in deltas):
            message |= _spoken(mine)
        return {
            "index": reply.index,
            "message": message,
            "logprobs": self._scores(scored),
            "finish_reason": reply.finish_reason,
        }

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        finish: str | None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._piece(self._CHUNK, [choice])

    def _scores(self, scored: Sequence[Scored]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return {"content": [_chat_score(entry) for entry in scored], "refusal": None}


class TextAnswer(_Base):
    """text_completion, whole and in chunks."""

    _KIND = "text_completion"

    def opening(self, count: int) -> list[dict[str, Any]]:  # noqa: ARG002
        """See Answer: this API has no role to announce."""
        return []

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """See Answer."""
        return self._piece(self._KIND, [self._choice(delta.index, delta.text, delta.scored, None)])

    def closing(self, reply: Reply) -> dict[str, Any]:
        """See Answer."""
        choice = {"index": reply.index, "text": "", "logprobs": None}
        choice["finish_reason"] = reply.finish_reason
        return {**self._piece(self._KIND, [choice]), "kvring": reply.report()}

    def usage_chunk(self, choices: Choices) -> dict[str, Any]:
        """See Answer."""
        return {
            **self._object(self._KIND, []),
            "usage": choices.usage(),
            "kvring": choices.report(),
        }

    def whole(self, choices: Choices, deltas: Sequence[Delta]) -> dict[str, Any]:
        """See Answer."""
        found = [
            self._choice(reply.index, *_joined(deltas, reply.index), reply.finish_reason)
            for reply in choices.replies
        ]
        answer = self._object(self._KIND, found)
        return {**answer, "usage": choices.usage(), "kvring": choices.report()}

    def _choice(
        self, index: int, text: str, scored: Sequence[Scored], finish: str | None
    ) -> dict[str, Any]:
        logprobs = _text_scores(scored) if self._logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _told(parts: Sequence[Part]) -> dict[str, Any]:
    """A delta: content, and for each call what became known of it."""
    told: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, str):
            told["content"] = told.get("content", "") + part
        elif isinstance(part, Begin):
            function = {"name": part.name, "arguments": ""}
            begun = {"index": part.index, "id": part.id, "type": "function", "function": function}
            calls[part.index] = begun
        else:
            more = {"index": part.index, "function": {"arguments": ""}}
            calls.setdefault(part.index, more)["function"]["arguments"] += part.text
    return {**told, "tool_calls": list(calls.values())} if calls else told


def _spoken(parts: Sequence[Part]) -> dict[str, Any]:
    """Content and calls of a whole message: equal to its deltas put together."""
    content, calls = contents(parts)
    if not calls:
        return {"content": content}
    ids = [part.id for part in parts if isinstance(part, Begin)]
    return {
        "content": content or None,
        "tool_calls": [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id_, (name, arguments) in zip(ids, calls, strict=True)
        ],
    }


def _joined(deltas: Sequence[Delta], index: int) -> tuple[str, list[Scored]]:
    mine = [delta for delta in deltas if delta.index == index]
    return "".join(delta.text for delta in mine), [one for delta in mine for one in delta.scored]


def _chat_score(entry: Scored) -> dict[str, Any]:
    top = [_chat_token(data, logprob) for data, logprob in entry.top]
    return {**_chat_token(entry.data, entry.logprob), "top_logprobs": top}


def _chat_token(data: bytes, logprob: float) -> dict[str, Any]:
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": max(logprob, _FLOOR),
        "bytes": list(data),
    }


def _text_scores(scored: Sequence[Scored]) -> dict[str, Any]:
    return {
        "tokens": [_spelled(entry.data) for entry in scored],
        "token_logprobs": [max(entry.logprob, _FLOOR) for entry in scored],
        "top_logprobs": [
            {_spelled(data): max(logprob, _FLOOR) for data, logprob in entry.top}
            for entry in scored
        ],
        "text_offset": [entry.offset for entry in scored],
    }


def _spelled(data: bytes) -> str:
    """A token's text; of one that is no text by itself OpenAI's spelling, "bytes:" and hex."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

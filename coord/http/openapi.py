"""Owns the API's description in OpenAPI 3.1: paths, request bodies, and the statuses of answers.

Made of the same classes that check requests, so that it can't say something else. Answers are only
described as far as every client relies on them; docs/api.md has the words.
"""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from coord.http.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    KeepRequest,
    TokenizeRequest,
)
from coord.http.strict import Strict

_JSON = "application/json"
_OF_BODIES = (408, 413)
_OF_TURNS = (429, 503, 504)
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "description": "What is wrong.",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string", "description": "For a person."},
                "type": {"type": "string", "description": "The kind, as OpenAI names them."},
                "param": {
                    "type": ["string", "null"],
                    "description": "The path of the field that is wrong, where one is.",
                },
                "code": {"type": "string", "description": "For a program; docs/api.md, Errors."},
                "doc": {
                    "type": "string",
                    "description": "Where docs/troubleshooting.md has more, of errors it knows.",
                },
            },
        }
    },
}
_STATUSES = {
    400: "a bad value, or a parameter that is not supported",
    401: "no valid API key",
    403: "not with this API key",
    404: "there is no such thing",
    408: "the body did not arrive in time",
    409: "not now",
    413: "the body is too large",
    429: "the queue is full; Retry-After says when to come again",
    503: "no ring is ready, or the turn's ring was lost",
    504: "the turn took too long",
}
_REQUESTS: tuple[type[Strict], ...] = (
    ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, KeepRequest,
)  # fmt: skip


def _object(**fields: str) -> dict[str, Any]:
    """An answer with at least these fields, and what they say."""
    properties = {name: {"description": text} for name, text in fields.items()}
    return {"type": "object", "required": list(fields), "properties": properties}


_ANSWER = _object(
    id="What POST /v1/cancel/{id} wants; also the header x-request-id.",
    object="`chat.completion`, `text_completion`; of a stream's chunks `chat.completion.chunk`.",
    created="Unix time in seconds.",
    model="The model's name.",
    choices="As OpenAI's: `message` or `text`, `finish_reason`, `logprobs`.",
    usage="Tokens; `prompt_tokens_details.cached_tokens` of them were resident.",
    kvring="Where the turn ran, what it prefilled, and how long it took; docs/api.md.",
)
_READY = _object(
    ready="A token has been round the ring.", missing="What the ring waits for, in words."
)
_SLOT = {
    "name": "number",
    "in": "path",
    "required": True,
    "description": "The slot, as GET /ring numbers it; parked prefixes count on behind.",
    "schema": {"type": "integer"},
}
_RING = {
    "name": "ring",
    "in": "query",
    "description": "Whose slot, where there are several rings.",
    "schema": {"type": "string"},
}
_WIDE = {
    "name": "wide",
    "in": "query",
    "description": "1: every pair of stages, not only neighbours.",
    "schema": {"type": "string"},
}


def _path(name: str, text: str) -> dict[str, Any]:
    schema = {"type": "string"}
    return {"name": name, "in": "path", "required": True, "description": text, "schema": schema}


def _operation(
    text: str,
    answer: dict[str, Any],
    *errors: int,
    body: type[Strict] | None = None,
    kind: str = _JSON,
    stream: bool = False,
    parameters: tuple[dict[str, Any], ...] = (),
    keyless: bool = False,
) -> dict[str, Any]:
    content: dict[str, Any] = {kind: {"schema": answer}}
    if stream:
        content["text/event-stream"] = {}  # 3.1 can't say what one event is
    responses: dict[str, Any] = {"200": {"description": "OK", "content": content}}
    failure = {"schema": {"$ref": "#/components/schemas/Error"}}
    everywhere = () if keyless else (401,)
    for status in sorted({*everywhere, *errors, *((400, *_OF_BODIES) if body is not None else ())}):
        responses[str(status)] = {"description": _STATUSES[status], "content": {_JSON: failure}}
    found: dict[str, Any] = {"summary": text, "responses": responses}
    if parameters:
        found["parameters"] = list(parameters)
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        found["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    return found


def document() -> dict[str, Any]:
    """The whole description, JSON-able."""
    _, schemas = models_json_schema(
        [(each, "validation") for each in _REQUESTS], ref_template="#/components/schemas/{model}"
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvring", "version": "1"},
        "paths": {**_of_completions(), **_of_ring()},
        "components": {"schemas": {**schemas["$defs"], "Error": _ERROR}},
    }


def _of_completions() -> dict[str, Any]:
    chat = _operation(
        "answer a conversation", _ANSWER, 404, *_OF_TURNS, body=ChatRequest, stream=True
    )
    complete = _operation(
        "continue a text", _ANSWER, 404, *_OF_TURNS, body=CompletionRequest, stream=True
    )
    models = _object(object="`list`.", data="A card of each name.")
    card = _object(id="The name; beside it `max_model_len`, the context length.")
    tokens = _object(tokens="The ids.", count="How many; beside it `max_model_len`.")
    ended = _object(id="The reply that was ended.")
    text = _object(prompt="The text, control tokens spelled out.")
    reply, name = _path("id", "The answer's `id`."), _path("name", "The model.")
    return {
        "/v1/chat/completions": {"post": chat},
        "/v1/completions": {"post": complete},
        "/v1/cancel/{id}": {
            "post": _operation("end a running reply", ended, 404, parameters=(reply,))
        },
        "/v1/models": {"get": _operation("what is served", models)},
        "/v1/models/{name}": {"get": _operation("one model", card, 404, parameters=(name,))},
        "/tokenize": {"post": _operation("text to ids", tokens, 404, body=TokenizeRequest)},
        "/detokenize": {"post": _operation("ids to text", text, 404, body=DetokenizeRequest)},
    }


def _of_ring() -> dict[str, Any]:
    ready = _operation("whether a token has been round the ring", _READY, keyless=True)
    ready["responses"]["503"] = {
        "description": "not ready; how far loading is",
        "content": {_JSON: {"schema": _READY}},
    }
    slot = (_SLOT, _RING)
    text = {"type": "string"}
    status = _object(status="`ok`.")
    rings = _object(rings="Each ring's stages, slots, parked prefixes and figures; docs/api.md.")
    evicted = _object(evicted="Rows that were given up.")
    kept = _object(keep_s="For how long.")
    measured = _object(
        stages="Each machine's devices, memory, clock, and forward times.",
        links="Round trip and bandwidth from one process to the next.",
    )
    return {
        "/health": {"get": _operation("this process answers", status, keyless=True)},
        "/ready": {"get": ready},
        "/metrics": {"get": _operation("Prometheus text", text, 403, kind="text/plain")},
        "/ring": {"get": _operation("stages, slots and residency", rings)},
        "/ring/events": {
            "get": _operation(
                "what GET /ring says, as it changes", text, 503, kind="text/event-stream"
            )
        },
        "/ring/measure": {
            "post": _operation(
                "measure machines and links",
                measured,
                400,
                403,
                404,
                409,
                503,
                parameters=(_RING, _WIDE),
            )
        },
        "/": {"get": _operation("the page", text, kind="text/html", keyless=True)},
        "/ring/slots/{number}": {
            "delete": _operation(
                "give a slot up", evicted, 400, 403, 404, 409, 503, parameters=slot
            ),
            "put": _operation(
                "keep a slot", kept, 403, 404, 409, body=KeepRequest, parameters=slot
            ),
        },
    }

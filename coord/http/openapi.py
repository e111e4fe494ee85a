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
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
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


def _object(*names: str) -> dict[str, Any]:
    return {"type": "object", "required": list(names)}


_ANSWER = _object("id", "object", "created", "model", "choices", "usage", "kvring")
_SLOT = {"name": "number", "in": "path", "required": True, "schema": {"type": "integer"}}
_RING = {"name": "ring", "in": "query", "schema": {"type": "string"}}
_WIDE = {"name": "wide", "in": "query", "schema": {"type": "string"}}


def _path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _operation(
    text: str,
    answer: dict[str, Any],
    *errors: int,
    body: type[Strict] | None = None,
    kind: str = _JSON,
    stream: bool = False,
    parameters: tuple[dict[str, Any], ...] = (),
) -> dict[str, Any]:
    content: dict[str, Any] = {kind: {"schema": answer}}
    if stream:
        content["text/event-stream"] = {}  # 3.1 can't say what one event is
    responses: dict[str, Any] = {"200": {"description": "OK", "content": content}}
    failure = {"schema": {"$ref": "#/components/schemas/Error"}}
    for status in sorted({401, *errors, *((400, *_OF_BODIES) if body is not None else ())}):
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
    ready = _operation("a token has been round the ring", _object("ready", "missing"))
    ready["responses"]["503"] = {
        "description": "not ready; how far loading is",
        "content": {_JSON: {"schema": _object("ready", "missing")}},
    }
    chat = _operation(
        "answer a conversation", _ANSWER, 404, *_OF_TURNS, body=ChatRequest, stream=True
    )
    complete = _operation(
        "continue a text", _ANSWER, 404, *_OF_TURNS, body=CompletionRequest, stream=True
    )
    slot = (_SLOT, _RING)
    models = _object("object", "data")
    text = {"type": "string"}
    paths = {
        "/v1/chat/completions": {"post": chat},
        "/v1/completions": {"post": complete},
        "/v1/cancel/{id}": {
            "post": _operation("end a running reply", _object("id"), 404, parameters=(_path("id"),))
        },
        "/v1/models": {"get": _operation("what is served", models)},
        "/v1/models/{name}": {
            "get": _operation("one of them", _object("id"), 404, parameters=(_path("name"),))
        },
        "/tokenize": {
            "post": _operation("text to ids", _object("tokens", "count"), 404, body=TokenizeRequest)
        },
        "/detokenize": {
            "post": _operation("ids to text", _object("prompt"), 404, body=DetokenizeRequest)
        },
        "/health": {"get": _operation("this process answers", _object("status"))},
        "/ready": {"get": ready},
        "/metrics": {"get": _operation("Prometheus text", text, 403, kind="text/plain")},
        "/ring": {"get": _operation("stages, slots and residency", _object("rings"))},
        "/ring/events": {
            "get": _operation("the same, as it changes", text, 503, kind="text/event-stream")
        },
        "/ring/measure": {
            "post": _operation(
                "measure machines and links",
                _object("stages", "links"),
                400,
                403,
                404,
                409,
                503,
                parameters=(_RING, _WIDE),
            )
        },
        "/": {"get": _operation("the page", text, kind="text/html")},
        "/ring/slots/{number}": {
            "delete": _operation(
                "give a slot up", _object("evicted"), 400, 403, 404, 409, 503, parameters=slot
            ),
            "put": _operation(
                "keep a slot", _object("keep_s"), 403, 404, 409, body=KeepRequest, parameters=slot
            ),
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvring", "version": "1"},
        "paths": paths,
        "components": {"schemas": {**schemas["$defs"], "Error": _ERROR}},
    }

"""What the HTTP API refuses, and that it always says so in the same words (case 43)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import structlog

from coord.actions import TurnError
from coord.gateway import Settings, build_app
from coord.http.errors import sse_error
from coord.http.keys import hold
from coord.http.sse import encode_event, encode_named
from coord.tokenizer import ByteTokenizer
from tests.fake_engine import FakeEngine, fails, says

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
Headers = list[tuple[bytes, bytes]]


def send(
    method: str,
    path: str,
    content: bytes | AsyncIterator[bytes] | None = None,
    headers: Headers | None = None,
    engine: FakeEngine | None = None,
    **settings: Any,
) -> httpx.Response:
    async def main() -> httpx.Response:
        app = build_app(engine or FakeEngine(says("x")), ByteTokenizer(), Settings(**settings))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, content=content, headers=headers)

    return asyncio.run(main())


def refused(response: httpx.Response) -> dict[str, Any]:
    """The error object; asserts the one envelope."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) - {"doc"} == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    return {**body["error"], "status": response.status_code}


def post(path: str, body: object, **more: Any) -> dict[str, Any]:
    return refused(send("POST", path, json.dumps(body).encode(), **more))


# ---- one envelope -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/health/", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("POST", "/v1/cancel/chatcmpl-1", 404, "reply_not_found"),
        ("POST", "/tokenize", 400, "invalid_json"),
    ],
)
def test_case_43_one_envelope_on_every_path(method: str, path: str, status: int, code: str) -> None:
    error = refused(send(method, path))
    assert (error["status"], error["code"]) == (status, code)
    assert error["type"] == "invalid_request_error"


def test_a_405_says_what_is_allowed() -> None:
    assert send("GET", CHAT).headers["allow"] == "POST"


class Broken(FakeEngine):
    """An engine with a bug."""

    def describe(self) -> dict[str, object]:
        raise RuntimeError("secret detail")

    def counters(self) -> dict[str, float]:
        return {"not a metric name": 1.0}


def test_a_bug_is_a_500_in_the_envelope_and_in_the_log_only() -> None:
    with structlog.testing.capture_logs() as logs:
        error = refused(send("GET", "/ring", engine=Broken()))
    assert (error["status"], error["code"], error["type"]) == (
        500,
        "internal_error",
        "server_error",
    )
    assert "secret" not in error["message"]
    assert (logs[0]["event"], logs[0]["path"]) == ("request failed", "/ring")


def test_a_bug_inside_a_stream_ends_it_with_an_error_event() -> None:
    engine = FakeEngine([*says("Hel")[:-1], "nonsense"])  # type: ignore[list-item]
    with structlog.testing.capture_logs() as logs:
        response = send("POST", CHAT, json.dumps(HI | {"stream": True}).encode(), engine=engine)
    assert response.text.endswith("data: [DONE]\n\n")
    assert "internal_error" in response.text
    assert any(entry["log_level"] == "error" for entry in logs)
    assert engine.streams[0].cancelled == ["cancelled"]


# ---- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"messages": None}, "missing_parameter", "messages"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [{"role": "user"}]}, "missing_parameter", "messages.0.content"),
        ({"messages": [{"role": "boss", "content": ""}]}, "invalid_value", "messages.0.role"),
        ({"messages": [{"role": "user", "content": 1}]}, "invalid_value", "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "invalid_value",
            "messages.0.content.0.type",
        ),
        ({"messages": [{"role": "user", "content": "", "x": 1}]}, "unknown_parameter", None),
        ({"temperature": -0.1}, "invalid_value", "temperature"),
        ({"temperature": 2.1}, "invalid_value", "temperature"),
        ({"temperature": "1"}, "invalid_value", "temperature"),
        ({"temperature": True}, "invalid_value", "temperature"),
        ({"temperature": float("nan")}, "invalid_value", "temperature"),
        ({"top_p": 1.5}, "invalid_value", "top_p"),
        ({"top_k": -2}, "invalid_value", "top_k"),
        ({"min_p": 2}, "invalid_value", "min_p"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_tokens": 1.5}, "invalid_value", "max_tokens"),
        ({"max_completion_tokens": -1}, "invalid_value", "max_completion_tokens"),
        ({"seed": 1 << 63}, "invalid_value", "seed"),
        ({"seed": 10**100}, "invalid_value", "seed"),
        ({"stop": ""}, "invalid_value", "stop"),
        ({"stop": [""]}, "invalid_value", "stop.0"),
        ({"stop": ["a"] * 17}, "invalid_value", "stop"),
        ({"stop": "a" * 257}, "invalid_value", "stop"),
        ({"stop_token_ids": [256]}, "invalid_value", "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "invalid_value", "stop_token_ids.0"),
        ({"top_logprobs": 21, "logprobs": True}, "invalid_value", "top_logprobs"),
        ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
        ({"logprobs": 2}, "invalid_value", "logprobs"),
        ({"stream": "yes"}, "invalid_value", "stream"),
        ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "unknown_parameter", "stream_options.x"),
        ({"kvring": {"reuse": "no"}}, "invalid_value", "kvring.reuse"),
        ({"kvring": {"turbo": True}}, "unknown_parameter", "kvring.turbo"),
        ({"cache_salt": ""}, "invalid_value", "cache_salt"),
        ({"user": "u" * 513}, "invalid_value", "user"),
        ({"turbo": 1}, "unknown_parameter", "turbo"),
        ({"turbo": None}, "unknown_parameter", "turbo"),
        ({"n": 9}, "invalid_value", "n"),
        ({"n": 0}, "invalid_value", "n"),
        ({"n": True}, "invalid_value", "n"),
        ({"best_of": 2}, "unsupported_parameter", "best_of"),
        ({"frequency_penalty": 2.1}, "invalid_value", "frequency_penalty"),
        ({"presence_penalty": -2.1}, "invalid_value", "presence_penalty"),
        ({"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": True}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"05": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"hello": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"256": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "invalid_value", "logit_bias"),
        ({"min_tokens": -1}, "invalid_value", "min_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "invalid_value", "min_tokens"),
        ({"guided_json": {}}, "unsupported_parameter", "guided_json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "unsupported_parameter",
            "response_format",
        ),
        ({"tools": [{"type": "function"}]}, "missing_parameter", "tools.0.function"),
        ({"tools": [{"type": "code"}]}, "invalid_value", "tools.0.type"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "invalid_value",
            "tools.0.function.name",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]},
            "unsupported_parameter",
            "strict",
        ),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tool_choice": "often"}, "invalid_value", "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "invalid_value",
            "tool_choice",
        ),
        ({"messages": [{"role": "tool", "content": "1"}]}, "invalid_value", "messages.0"),
        (
            {"messages": [{"role": "user", "content": "1", "tool_call_id": "x"}]},
            "invalid_value",
            "messages.0",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x", "function": {}}]}]},
            "missing_parameter",
            "messages.0.tool_calls.0.function.name",
        ),
        ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
        ({"echo": True}, "unsupported_parameter", "echo"),
    ],
)
def test_bad_values_name_their_parameter(
    change: dict[str, Any], code: str, param: str | None
) -> None:
    error = post(CHAT, HI | change)
    assert (error["status"], error["code"]) == (400, code)
    if param is not None:
        assert error["param"] == param
        assert param in error["message"]


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ("", "empty_prompt"),
        ([], "empty_prompt"),
        ([[]], "empty_prompt"),
        (["a", "b"], "unsupported_value"),
        ([256], "invalid_value"),
        ([-1], "invalid_value"),
        ([1 << 40], "invalid_value"),
        ([1, "a"], "invalid_value"),
        ([1.5], "invalid_value"),
        ({}, "invalid_value"),
        ([["a"]], "invalid_value"),
    ],
)
def test_bad_prompts(prompt: object, code: str) -> None:
    error = post(TEXT, {"prompt": prompt})
    assert (error["status"], error["code"]) == (400, code)
    assert error["param"].startswith("prompt")


def test_a_million_bad_tokens_make_one_error() -> None:
    error = post(TEXT, {"prompt": ["a", *([-1] * 100_000)]})
    assert error["code"] == "invalid_value"
    assert len(error["message"]) < 200


def test_an_unknown_model_is_a_404() -> None:
    error = post(CHAT, HI | {"model": "gpt-4"})
    assert (error["status"], error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "toy" in error["message"]


@pytest.mark.parametrize("body", [{"prompt": "a", **HI}, {}, {"tokens": [1]}])
def test_tokenize_wants_one_of_both(body: dict[str, Any]) -> None:
    assert post("/tokenize", body)["status"] == 400


def test_detokenize_wants_ids() -> None:
    assert post("/detokenize", {"tokens": [999]})["param"] == "tokens"


# ---- the context length -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "limit", "counts"),
    [(512, None, ("512", "513")), (600, None, ("512", "600")), (500, 13, ("512", "500", "13"))],
)
def test_the_context_length_error_has_the_counts(
    prompt: int, limit: int | None, counts: tuple[str, ...]
) -> None:
    error = post(TEXT, {"prompt": "a" * prompt, "max_tokens": limit})
    assert (error["status"], error["code"]) == (400, "context_length_exceeded")
    assert all(count in error["message"] for count in counts)


def test_the_context_may_be_filled_to_the_last_token() -> None:
    engine = FakeEngine(says("x"))
    body = json.dumps({"prompt": "a" * 500, "max_tokens": 12}).encode()
    assert send("POST", TEXT, body, engine=engine).status_code == 200
    assert engine.submitted[0].budget == 12


# ---- bodies -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"seed": ' + b"9" * 100_000 + b"}",
        b"null",
        b"[]",
        b'"text"',
    ],
)
def test_case_46_a_body_that_is_no_request_is_a_400(body: bytes) -> None:
    error = refused(send("POST", CHAT, body))
    assert (error["status"], error["type"]) == (400, "invalid_request_error")
    assert error["code"] in ("invalid_json", "invalid_value")
    assert len(error["message"]) < 300


@pytest.mark.parametrize("value", [b"-1", b"+5", b"five", b"1e3", b"", b"\xb2", b"9" * 30])
def test_case_46_a_content_length_that_is_no_count(value: bytes) -> None:
    error = refused(send("POST", CHAT, b"{}", [(b"content-length", value)]))
    assert (error["status"], error["code"]) == (400, "invalid_content_length")


@pytest.mark.parametrize("declared", [b"1", b"100"])
def test_case_46_a_content_length_that_lies(declared: bytes) -> None:
    body = json.dumps(HI).encode()
    error = refused(send("POST", CHAT, body, [(b"content-length", declared)]))
    assert (error["status"], error["code"]) == (400, "invalid_content_length")


def test_case_46_a_body_too_large_is_refused_unread() -> None:
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 1
            yield b" " * 1000

    declared = send("POST", CHAT, endless(), [(b"content-length", b"50000000")])
    assert refused(declared)["code"] == "body_too_large"
    assert read == 0
    response = send("POST", CHAT, endless(), body_limit_bytes=5000)
    assert refused(response)["status"] == 413
    assert response.headers["connection"] == "close"
    assert read == 6


def test_a_body_that_does_not_come_is_a_408() -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(30)

    assert refused(send("POST", CHAT, slow(), body_timeout_s=0.05))["code"] == "body_timeout"


# ---- keys ---------------------------------------------------------------------------------------


def bearer(value: bytes) -> Headers:
    return [(b"authorization", value)]


KEYS = ("key-1", "schlüssel")
HELD = tuple(hold("tenant", key) for key in KEYS)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer(b""),
        bearer(b"Bearer"),
        bearer(b"Bearer wrong"),
        bearer(b"Basic key-1"),
        bearer(b"key-1"),
        bearer(b"Bearer \xff\xfe\x00"),
        bearer(b"Bearer schlussel"),
        bearer("Bearer schlüssel".encode("latin-1")),
        bearer("Bearer 键".encode()),
        [*bearer(b"Bearer key-1"), *bearer(b"Bearer key-1")],
    ],
)
def test_case_45_a_wrong_key_is_a_401_and_no_crash(headers: Headers) -> None:
    response = send("POST", CHAT, json.dumps(HI).encode(), headers, api_keys=HELD)
    error = refused(response)
    assert (error["status"], error["code"]) == (401, "invalid_api_key")
    assert error["type"] == "authentication_error"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", KEYS)
def test_a_right_key_is_let_in(key: str) -> None:
    headers = bearer(b"bearer " + key.encode())
    assert send("POST", CHAT, json.dumps(HI).encode(), headers, api_keys=HELD).status_code == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [("/health", 200), ("/ready", 200), ("/metrics", 401), ("/ring", 401), ("/nowhere", 401)],
)
def test_only_probes_need_no_key(path: str, status: int) -> None:
    assert send("GET", path, api_keys=HELD).status_code == status


def test_a_refused_client_sends_no_body() -> None:
    read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal read
        read += 1
        yield b"{}"

    assert send("POST", CHAT, body(), api_keys=HELD).status_code == 401
    assert read == 0


# ---- the engine's refusals ----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (429, "queue_full", "rate_limit_error"),
        (503, "not_ready", "server_error"),
        (400, "context_length_exceeded", "invalid_request_error"),
    ],
)
def test_the_engines_refusal_has_its_status(
    status: int, code: str, kind: str, stream: bool
) -> None:
    engine = FakeEngine(refusal=TurnError(status, code, "in words"))
    body = json.dumps(HI | {"stream": stream}).encode()
    response = send("POST", CHAT, body, engine=engine, retry_after_s=3)
    error = refused(response)
    assert (error["status"], error["code"], error["type"]) == (status, code, kind)
    assert response.headers.get("retry-after") == ("3" if status in (429, 503) else None)


def test_a_turn_that_fails_has_its_status() -> None:
    error = post(CHAT, HI, engine=FakeEngine(fails(503, "ring_lost", "Hel")))
    assert (error["status"], error["code"]) == (503, "ring_lost")


def test_a_turn_that_never_ends_is_a_504() -> None:
    engine = FakeEngine([*says("x")[:-1], 30.0])
    error = post(CHAT, HI, engine=engine, deadline_s=0.05)
    assert (error["status"], error["code"]) == (504, "deadline_exceeded")
    assert engine.streams[0].cancelled[0] == "deadline"


def test_an_engine_that_just_stops_is_a_500() -> None:
    engine = FakeEngine(says("x")[:-1])
    assert post(CHAT, HI, engine=engine)["status"] == 500


# ---- what readers of lines see ------------------------------------------------------------------

LINE_ENDS = "".join(map(chr, (*range(0x20), 0x7F, 0x85, 0x2028, 0x2029)))


def test_an_event_is_one_line_to_every_reader() -> None:
    """httpx and str.splitlines end lines at more characters than an event stream does."""
    said = {"text": f"a{LINE_ENDS}b", LINE_ENDS: 1}
    refused = sse_error(TurnError(400, "invalid_value", f"no {LINE_ENDS} here"))
    for sent in (encode_event(said), encode_named("ring", said), refused):
        lines = list(httpx.Response(200, stream=httpx.ByteStream(sent)).iter_lines())
        (data, *_) = [line for line in lines if line.startswith("data: ")]
        assert len(lines) == sent.count(b"\n")
        found = json.loads(data.removeprefix("data: "))
        assert found == said or LINE_ENDS in found["error"]["message"]

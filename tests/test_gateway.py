"""The HTTP API's answers against a scripted engine: shapes, counts, streams."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
import structlog
from fastapi import FastAPI

from coord.actions import Admitted, Finished, Tokens
from coord.gateway import Settings, build_app
from coord.http.engine import Engine
from coord.http.keys import derive_salt, hold
from coord.tokenizer import ByteTokenizer
from tests.fake_engine import FakeEngine, Step, fails, says

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT: dict[str, Any] = {"prompt": "once"}
EOS = 0


def app_of(engine: Engine, **settings: Any) -> FastAPI:
    return build_app(engine, ByteTokenizer([EOS]), Settings(**settings))


def ask(
    engine: FakeEngine, method: str, path: str, body: object = None, **settings: Any
) -> httpx.Response:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app_of(engine, **settings))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, json=body)

    return asyncio.run(main())


def post(engine: FakeEngine, path: str, body: object, **settings: Any) -> dict[str, Any]:
    response = ask(engine, "POST", path, body, **settings)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def stream(engine: FakeEngine, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream; asserts that it ends with [DONE]."""
    response = ask(engine, "POST", path, {**body, "stream": True})
    assert response.headers["content-type"] == "text/event-stream"
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    assert response.text.count("[DONE]") == 1
    return [json.loads(line.split("data: ", 1)[1]) for line in lines[:-1]]


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)


def finishes(chunks: list[dict[str, Any]]) -> list[str]:
    found = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
    return [reason for reason in found if reason is not None]


# ---- whole answers ------------------------------------------------------------------------------


def test_a_chat_answer_has_openais_shape_and_the_rings_report() -> None:
    engine = FakeEngine(says("Hel", "lo", stop=EOS, matched=4, prompt=20))
    answer = post(engine, CHAT, HI)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "toy"
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    report = answer["kvring"]
    assert (report["turn"], report["ring"], report["slot"]) == (1, "r0", 0)
    assert (report["matched"], report["prefilled"], report["ended_by"]) == (4, 16, "token")
    assert {"queue_ms", "ttft_ms", "decode_ms", "tokens_per_s", "seed"} <= set(report)


def test_a_text_answer_has_openais_shape() -> None:
    answer = post(FakeEngine(says(" upon", reason="length")), TEXT, PROMPT)
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": " upon", "logprobs": None, "finish_reason": "length"}
    ]


@pytest.mark.parametrize("prompt", ["once", [111, 110, 99, 101], ["once"], [[111, 110, 99, 101]]])
def test_a_prompt_is_text_or_ids(prompt: object) -> None:
    engine = FakeEngine(says("x"))
    post(engine, TEXT, {"prompt": prompt})
    assert bytes(engine.submitted[0].prompt) == b"once"


def test_messages_may_be_parts_and_come_from_a_developer() -> None:
    engine = FakeEngine(says("x"))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    history = {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None}
    messages = [{"role": "developer", "content": parts}, history]
    post(engine, CHAT, {"messages": messages})
    assert bytes(engine.submitted[0].prompt) == b"system: a\nb\nassistant: c\nassistant: "


def test_sampling_reaches_the_engine() -> None:
    engine = FakeEngine(says("x"))
    body = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "seed": 7,
        "stop_token_ids": [9],
        "kvring": {"reuse": False},
        "max_tokens": 5,
    }
    answer = post(engine, CHAT, HI | body)
    turn = engine.submitted[0]
    sampling = turn.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 0)
    assert (sampling.min_p, sampling.seed, sampling.logprobs) == (0.1, 7, None)
    assert (turn.budget, turn.stops, turn.reuse) == (5, (EOS, 9), False)
    assert answer["kvring"]["seed"] == 7
    post(engine, CHAT, HI | {"ignore_eos": True, "seed": -1})
    assert engine.submitted[1].stops == ()
    assert 0 <= engine.submitted[1].sampling.seed < 1 << 63


def test_defaults_are_openais_and_a_seed_is_drawn_and_reported() -> None:
    engine = FakeEngine(says("x"))
    answers = [post(engine, CHAT, HI) for _ in range(2)]
    turn = engine.submitted[0]
    assert (turn.sampling.temperature, turn.reuse, turn.salt) == (1.0, True, b"")
    assert turn.budget == 512 - len(turn.prompt)
    assert answers[0]["kvring"]["seed"] == turn.sampling.seed
    assert answers[0]["kvring"]["seed"] != answers[1]["kvring"]["seed"]


def test_case_44_null_is_unset_and_both_token_limits_are_honoured() -> None:
    engine = FakeEngine(says("x"))
    names = (
        "model max_tokens max_completion_tokens temperature top_p seed stop stream stream_options "
        "logprobs top_logprobs tools tool_choice n user logit_bias response_format metadata "
        "frequency_penalty kvring cache_salt stop_token_ids"
    )
    post(engine, CHAT, HI | dict.fromkeys(names.split()))
    post(engine, CHAT, HI | {"max_tokens": 9})
    post(engine, CHAT, HI | {"max_completion_tokens": 8})
    post(engine, CHAT, HI | {"max_tokens": 9, "max_completion_tokens": 7})
    assert [turn.budget for turn in engine.submitted[1:]] == [9, 8, 7]


def test_unsupported_parameters_with_neutral_values_are_accepted() -> None:
    neutral = {
        "n": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "store": False,
    }
    post(FakeEngine(says("x")), CHAT, HI | neutral)


# ---- counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), [(CHAT, HI), (TEXT, PROMPT)])
@pytest.mark.parametrize("matched", [0, 3])
def test_cases_23_and_24_usage_is_the_same_everywhere_and_equals_the_ids(
    path: str, body: dict[str, Any], matched: int
) -> None:
    engine = FakeEngine(says("Hel", "lo", stop=EOS, matched=matched))
    whole = post(engine, path, body)["usage"]
    last = stream(engine, path, body | {"stream_options": {"include_usage": True}})[-1]
    prompt = len(engine.submitted[0].prompt)
    assert whole == last["usage"]
    assert whole == {
        "prompt_tokens": prompt,
        "completion_tokens": 6,  # five letters and the stop token
        "total_tokens": prompt + 6,
        "prompt_tokens_details": {"cached_tokens": matched},
    }


def test_case_22_work_redone_after_a_resume_is_no_hit() -> None:
    script: list[Step] = [
        Admitted(1, "r0", 0, 20, 4),
        Tokens(1, (65,)),
        Admitted(1, "r1", 2, 20, 20, resumed=True),
        Tokens(1, (66,)),
        Finished(1, "length"),
    ]
    answer = post(FakeEngine(script), CHAT, HI)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    report = answer["kvring"]
    assert (report["matched"], report["ring"], report["slot"]) == (4, "r1", 2)
    assert answer["choices"][0]["message"]["content"] == "AB"


def test_case_17_the_report_shows_where_the_prompt_left_what_was_resident() -> None:
    messages = [{"role": "system", "content": "It is 12:03:55 now. Be kind."}, *HI["messages"]]
    engine = FakeEngine(says("x", matched=14, prompt=54))
    with structlog.testing.capture_logs() as logs:
        report = post(engine, CHAT, {"messages": messages})["kvring"]
    assert report["miss"] == {
        "position": 14,
        "reason": "new",
        "text": "12:03:55",
        "resident_text": None,
    }
    assert "12:03" not in str(logs)


def test_an_answer_may_be_empty() -> None:
    """Case 34: the first token is the end of the sequence."""
    answer = post(FakeEngine(says(stop=EOS)), CHAT, HI)
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["kvring"]["tokens_per_s"] is None
    chunks = stream(FakeEngine(says(stop=EOS)), CHAT, HI)
    assert (text_of(chunks), finishes(chunks)) == ("", ["stop"])


# ---- stop strings -------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["wor", ["zzz", "wor", "orl"]])
@pytest.mark.parametrize("pieces", [["Hello world"], ["Hello w", "or", "ld"], list("Hello world")])
def test_case_35_a_stop_string_cuts_the_same_in_every_splitting(
    stop: object, pieces: list[str]
) -> None:
    whole_engine, stream_engine = FakeEngine(says(*pieces)), FakeEngine(says(*pieces))
    answer = post(whole_engine, CHAT, HI | {"stop": stop})
    options = {"stop": stop, "stream_options": {"include_usage": True}}
    chunks = stream(stream_engine, CHAT, HI | options)
    assert answer["choices"][0]["message"]["content"] == "Hello "
    assert (text_of(chunks), finishes(chunks)) == ("Hello ", ["stop"])
    # Tokens drafted past the stop do not count, so the count does not depend on the splitting.
    assert answer["usage"]["completion_tokens"] == 9
    assert chunks[-1]["usage"] == answer["usage"]
    assert answer["kvring"]["ended_by"] == "string"
    assert whole_engine.streams[0].cancelled[0] == "stop"
    assert stream_engine.streams[0].cancelled[0] == "stop"


def test_text_withheld_for_a_stop_string_comes_at_the_end() -> None:
    chunks = stream(FakeEngine(says("ab", "c", reason="length")), CHAT, HI | {"stop": "bcd"})
    assert [text_of([chunk]) for chunk in chunks] == ["", "a", "bc", ""]
    assert finishes(chunks) == ["length"]


def test_characters_that_span_tokens_come_whole() -> None:
    data = "aé😀".encode()
    script = says(*[data[i : i + 1] for i in range(len(data))], reason="length")
    chunks = stream(FakeEngine(script), TEXT, PROMPT)
    assert [text_of([chunk]) for chunk in chunks] == ["a", "é", "😀", ""]
    cut_short = says(data[:2], reason="length")
    assert post(FakeEngine(cut_short), TEXT, PROMPT)["choices"][0]["text"] == "a\ufffd"


# ---- logprobs -----------------------------------------------------------------------------------


def test_chat_logprobs() -> None:
    engine = FakeEngine(says("é", stop=EOS, logprobs=True))
    options = {"logprobs": True, "top_logprobs": 2}
    answer = post(engine, CHAT, HI | options)
    assert engine.submitted[0].sampling.logprobs == 2
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
    assert content[0]["logprob"] == pytest.approx(-1.95)
    assert content[0]["top_logprobs"][1] == {"token": "A", "logprob": -0.2, "bytes": [65]}
    chunks = stream(engine, CHAT, HI | options)
    streamed = [c["choices"][0]["logprobs"] for c in chunks]
    assert [e for part in streamed if part for e in part["content"]] == content


def test_text_logprobs_and_their_offsets() -> None:
    engine = FakeEngine(says("aé", "bX!", reason="length", logprobs=True))
    options = {"logprobs": 2, "stop": "X"}
    answer = post(engine, TEXT, PROMPT | options)
    logprobs = answer["choices"][0]["logprobs"]
    assert answer["choices"][0]["text"] == "aéb"
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert logprobs["top_logprobs"][0] == {"a": -0.1, "A": -0.2}
    parts = [c["choices"][0]["logprobs"] for c in stream(engine, TEXT, PROMPT | options)]
    for key, value in logprobs.items():
        assert [item for part in parts if part for item in part[key]] == value


def test_an_impossible_tokens_logprob_is_a_number() -> None:
    script: list[Step] = [
        Admitted(1, "r0", 0, 4, 0),
        Tokens(1, (65,), (-float("inf"),)),
        Finished(1, "length"),
    ]
    answer = post(FakeEngine(script), TEXT, PROMPT | {"logprobs": 0})
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{}]


# ---- streams ------------------------------------------------------------------------------------


def test_case_41_a_stream_has_a_role_one_finish_reason_and_done() -> None:
    chunks = stream(FakeEngine(says("Hel", "lo", stop=EOS)), CHAT, HI)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [text_of([chunk]) for chunk in chunks] == ["", "Hel", "lo", ""]
    assert finishes(chunks) == ["stop"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["kvring"]["matched"] == 0
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


def test_case_42_a_usage_chunk_comes_only_on_request_and_has_no_choices() -> None:
    engine = FakeEngine(says("x", reason="length"))
    assert not any("usage" in chunk for chunk in stream(engine, CHAT, HI))
    chunks = stream(engine, CHAT, HI | {"stream_options": {"include_usage": True}})
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 1
    assert chunks[-1]["kvring"]["turn"] == 2


def test_case_41_an_error_ends_a_stream_as_an_error_event() -> None:
    response = ask(FakeEngine(fails(after="Hel")), "POST", CHAT, HI | {"stream": True})
    assert response.status_code == 200
    events = response.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert events[-2].startswith("event: error\ndata: ")
    error = json.loads(events[-2].split("data: ")[1])["error"]
    assert (error["code"], error["type"]) == ("ring_lost", "server_error")
    assert 'finish_reason":"' not in response.text


def test_case_40_a_silent_stream_is_kept_alive() -> None:
    engine = FakeEngine([0.25, *says("x", reason="length")])
    response = ask(engine, "POST", CHAT, HI | {"stream": True}, keep_alive_s=0.05)
    assert 2 <= response.text.count(": keep-alive\n\n") <= 6
    assert response.text.endswith("data: [DONE]\n\n")


# ---- the other endpoints ------------------------------------------------------------------------


def test_models() -> None:
    engine = FakeEngine()
    card = ask(engine, "GET", "/v1/models").json()["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("toy", "model", 512)
    assert ask(engine, "GET", "/v1/models/toy").json()["id"] == "toy"
    served = ask(engine, "GET", "/v1/models", served_models=("org/a", "b")).json()
    assert [model["id"] for model in served["data"]] == ["org/a", "b"]
    named = ask(engine, "GET", "/v1/models/org/a", served_models=("org/a", "b"))
    assert named.json()["id"] == "org/a"


def test_tokenize_and_detokenize() -> None:
    engine = FakeEngine()
    body = post(engine, "/tokenize", {"prompt": "hé"})
    assert body == {"tokens": [104, 195, 169], "count": 3, "max_model_len": 512}
    assert bytes(post(engine, "/tokenize", HI)["tokens"]) == b"user: hi\nassistant: "
    assert post(engine, "/detokenize", {"tokens": [104, 195, 169]}) == {"prompt": "hé"}


def test_case_27_liveness_is_not_readiness() -> None:
    engine = FakeEngine(is_ready=(False, "stage s1 is loading"))
    assert ask(engine, "GET", "/health").json() == {"status": "ok"}
    response = ask(engine, "GET", "/ready")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["missing"] == "stage s1 is loading"
    assert response.json()["stages"][0]["progress"] == 0.5
    assert ask(FakeEngine(), "GET", "/ready").json()["ready"] is True


def test_the_ring_is_described() -> None:
    [ring] = ask(FakeEngine(), "GET", "/ring").json()["rings"]
    assert (ring["name"], ring["stages"]) == ("r0", [])


def test_metrics_have_vllms_stems_and_the_engines_values() -> None:
    values = {
        "num_requests_running": 2.0,
        'stage_busy_seconds_total{stage="s0"}': 1.5,
        'stage_busy_seconds_total{stage="s1"}': 2.5,
        "prompt_tokens_total": 99.0,  # the gateway's own count stands
    }
    engine = FakeEngine(says("Hel", "lo", stop=EOS, matched=4, prompt=20), values=values)

    async def main() -> str:
        transport = httpx.ASGITransport(app_of(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await client.post(CHAT, json=HI)
            return (await client.get("/metrics")).text

    page = asyncio.run(main()).splitlines()
    for line in (
        "kvring:num_requests_running 2.0",
        "# TYPE kvring:num_requests_running gauge",
        'kvring:stage_busy_seconds_total{stage="s0"} 1.5',
        'kvring:stage_busy_seconds_total{stage="s1"} 2.5',
        "kvring:prefix_cache_queries_total 20.0",
        "kvring:prefix_cache_hits_total 4.0",
        "kvring:prompt_tokens_total 20.0",
        "kvring:generation_tokens_total 6.0",
        'kvring:request_success_total{finished_reason="stop"} 1.0',
        "kvring:time_to_first_token_seconds_count 1.0",
        "kvring:inter_token_latency_seconds_count 3.0",
        "kvring:e2e_request_latency_seconds_count 1.0",
    ):
        assert line in page


# ---- tenants ------------------------------------------------------------------------------------


def test_cases_19_and_20_salts_keep_tenants_apart() -> None:
    salts = [
        derive_salt(b"", None),
        derive_salt(b"org_1", "2345"),
        derive_salt(b"org_12345", None),
        derive_salt(b"", "org_12345"),
        derive_salt(b"org_1", None),
    ]
    assert salts[0] == b""
    assert len(set(salts)) == len(salts)
    assert derive_salt(b"org_1", "2345") == salts[1]
    assert all(len(salt) <= 64 for salt in salts)


def test_the_salt_reaches_the_engine_with_the_key_in_it() -> None:
    engine = FakeEngine(says("x"))

    async def main() -> None:
        transport = httpx.ASGITransport(
            app_of(engine, api_keys=(hold("a", "one"), hold("b", "two")))
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for key, salt in (("one", None), ("two", None), ("one", "s"), ("one", None)):
                headers = {"authorization": f"Bearer {key}"}
                await client.post(CHAT, json=HI | {"cache_salt": salt}, headers=headers)

    asyncio.run(main())
    one, two, salted, again = [turn.salt for turn in engine.submitted]
    assert len({one, two, salted}) == 3
    assert one == again

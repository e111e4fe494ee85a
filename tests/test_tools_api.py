"""Tools at the HTTP API, against a scripted engine: shapes, choices, and what is no call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coord.actions import Finished, Tokens
from coord.arguments import dump, read_arguments
from coord.history import History
from coord.toolcalls import sent_back
from tests.fake_engine import FakeEngine, says
from tests.modelfile import default_model
from tests.test_gateway import CHAT, EOS, HI, finishes, post, stream
from tests.test_tool_loop import TOOLS, together

ARGS = '{"b": 1,"a":"\\u00e9"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGS}}}\n</tool_call>'
ASKED: dict[str, Any] = HI | {"tools": TOOLS}


def in_bytes(text: str, **options: Any) -> FakeEngine:
    """An engine that says a text one character after another."""
    return FakeEngine(says(*text, stop=EOS, **options))


def test_a_call_has_openais_shape() -> None:
    answer = post(in_bytes("See: " + CALL), CHAT, ASKED)
    [choice] = answer["choices"]
    [call] = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "See:", "refusal": None}
    assert choice["finish_reason"] == "tool_calls"
    assert call.pop("id").isalnum()
    assert call == {"type": "function", "function": {"name": "weather", "arguments": ARGS}}
    assert answer["kvring"]["ended_by"] == "token"


def test_a_stream_gives_the_name_first_and_arguments_as_they_come() -> None:
    chunks = stream(in_bytes(CALL), CHAT, ASKED)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["function"] == {"name": "weather", "arguments": "{"}
    assert len(calls) == len(ARGS)
    assert all(set(call) == {"index", "function"} for call in calls[1:])
    assert finishes(chunks) == ["tool_calls"]


TEXTS = [
    CALL,
    f"{CALL}\n{CALL}",
    f"One. {CALL} Two.",
    "No call at all, 1 < 2.",
    '<tool_call>{"name": "weather", "arguments": 3}</tool_call>',
    "<tool_call>\n{not JSON}\n</tool_call>\n",
    '<tool_call>{"name": "weather", "arg',
    '<tool_call>{"name": "weather", "arguments": {"a": "b',
    "<tool_call>",
    "é <tool_",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_deltas_put_together_are_the_whole_message(text: str, size: int) -> None:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    engine = FakeEngine(says(*pieces, stop=EOS))
    whole = post(engine, CHAT, ASKED)["choices"][0]
    chunks = stream(engine, CHAT, ASKED)
    streamed = together(chunks)
    for message in (whole["message"], streamed):
        for call in message.get("tool_calls", ()):
            call.pop("id")
    assert streamed == whole["message"]
    assert finishes(chunks) == [whole["finish_reason"]]
    if "tool_calls" not in streamed:
        assert streamed["content"] == text


def test_half_a_call_is_not_said_to_be_one() -> None:
    """Whoever runs calls on "tool_calls" would run it."""
    cut = CALL[: CALL.index("1")]
    for reason, finish in (("length", "length"), ("stop", "stop")):
        [choice] = post(FakeEngine(says(cut, reason=reason)), CHAT, ASKED)["choices"]
        assert choice["finish_reason"] == finish
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"b": '


def test_without_tools_or_with_none_nothing_is_looked_for() -> None:
    for body in (HI, ASKED | {"tool_choice": "none"}):
        engine = in_bytes(CALL)
        [choice] = post(engine, CHAT, body)["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
        assert (b"tools: " in bytes(engine.submitted[0].prompt)) == ("tools" in body)


def test_definitions_reach_the_template_as_they_came() -> None:
    engine = in_bytes("x")
    function = {"parameters": {"type": "object", "z": 1, "a": 2}, "name": "f"}
    tool = {"function": function, "type": "function"}
    post(engine, CHAT, HI | {"tools": [tool]})
    assert f"tools: {json.dumps([tool])}\n".encode() in bytes(engine.submitted[0].prompt)


def test_one_call_ends_the_turn_where_no_second_is_wanted() -> None:
    """As a serial run: tokens drafted behind the call's end are not counted."""
    engine = FakeEngine([*says(CALL)[:2], Tokens(1, tuple(b"\n" + CALL.encode())), 30.0])
    body = ASKED | {"parallel_tool_calls": False}
    answer = post(engine, CHAT, body)
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens"] == len(CALL)
    assert answer["kvring"]["ended_by"] == "call"
    assert engine.streams[0].cancelled
    both = in_bytes(f"{CALL}\n{CALL}")
    assert len(post(both, CHAT, ASKED)["choices"][0]["message"]["tool_calls"]) == 2


def test_a_forced_call_counts_as_prompt_and_shows_as_reply() -> None:
    begun = '<tool_call>\n{"name": "weather", "arguments":'
    engine = in_bytes(CALL[len(begun) :])
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = post(engine, CHAT, ASKED | {"tool_choice": choice})
    assert bytes(engine.submitted[0].prompt).endswith(f"assistant: {begun}".encode())
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": ARGS}
    assert answer["usage"]["completion_tokens"] == len(CALL) - len(begun)


def test_a_forced_beginning_that_leads_nowhere_is_content() -> None:
    for text in ("", " I'd rather not."):
        engine = FakeEngine(says(text, stop=EOS))
        [choice] = post(engine, CHAT, ASKED | {"tool_choice": "required"})["choices"]
        assert choice["message"]["content"] == '<tool_call>\n{"name":' + text
        assert choice["finish_reason"] == "stop"


def test_every_choice_has_its_own_calls() -> None:
    answer = post(in_bytes(CALL), CHAT, ASKED | {"n": 2})
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]}
    assert len(ids) == 2


def test_logprobs_cover_a_calls_tokens() -> None:
    engine = in_bytes(CALL, logprobs=True)
    body = ASKED | {"logprobs": True}
    [choice] = post(engine, CHAT, body)["choices"]
    assert "".join(each["token"] for each in choice["logprobs"]["content"]) == CALL
    chunks = stream(engine, CHAT, body)
    found = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    tokens = [each["token"] for one in found if one for each in one["content"]]
    assert "".join(tokens) == CALL
    assert together(chunks)["tool_calls"][0]["function"]["arguments"] == ARGS


def test_a_stop_string_ends_a_call_too() -> None:
    [choice] = post(in_bytes(CALL), CHAT, ASKED | {"stop": "\\u"})["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"b": 1,"a":"'
    assert choice["finish_reason"] == "stop"


def test_a_cancelled_call_is_not_run() -> None:
    engine = FakeEngine([*says(CALL)[:-1], Finished(1, "cancelled")])
    [choice] = post(engine, CHAT, ASKED)["choices"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.model
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": TOOLS}, "tools"),
        ({"tools": TOOLS, "tool_choice": "none"}, "tools"),
        ({"messages": [{"role": "tool", "content": "1", "tool_call_id": "a"}]}, "messages"),
    ],
)
def test_a_template_without_tools_says_so(change: dict[str, Any], param: str) -> None:
    from fastapi.testclient import TestClient

    from coord.gateway import Settings, build_app
    from coord.tokenizer import load_tokenizer

    app = build_app(FakeEngine(says("x")), load_tokenizer(default_model()), Settings())
    response = TestClient(app).post(CHAT, json=HI | change)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "tools_not_supported")
    assert error["param"] == param


# ---- the parts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "shown"),
    [('{"b":1,\n"a":2.50}', None), ("", "{}"), ('{"a": ', None), ("[1]", None), ("3", None)],
)
def test_arguments_are_printed_as_they_came_wherever_they_stand(
    raw: str, shown: str | None
) -> None:
    arguments, shown = read_arguments(raw), raw if shown is None else shown
    assert dump(arguments) == str(arguments) == shown
    assert dump(arguments, 4) == shown
    assert dump({"name": "f", "arguments": arguments}) == f'{{"name": "f", "arguments": {shown}}}'
    nested = dump([{"é": arguments}, "x"])
    assert nested == f'[{{"é": {shown}}}, "x"]'
    if isinstance(arguments, dict) and raw:
        assert list(arguments.items()) == list(json.loads(raw).items())


def test_deep_arguments_are_text() -> None:
    assert dump(read_arguments('{"a":' * 100_000)) == '{"a":' * 100_000


def test_meanings_are_bounded_apart_by_salt_and_survive_a_restart() -> None:
    written: dict[bytes, bytes] = {}
    history = History(limit_bytes=20_000, write=written.__setitem__)
    for number in range(50):
        history.mean(b"one", sent_back("", [("f", str(number))]), f"text {number}")
    assert history.meaning(b"one", sent_back("", [("f", "49")])) == "text 49"
    assert history.meaning(b"two", sent_back("", [("f", "49")])) is None
    assert history.meaning(b"one", sent_back("", [("f", "0")])) is None
    after = History(decode=str)
    assert all(after.restore(key, body) for key, body in written.items())
    assert after.meaning(b"one", sent_back("", [("f", "7")])) == "text 7"
    assert after.recall(b"one", "text 7") == ()

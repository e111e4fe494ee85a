"""A tool loop through the API on a real ring: a call comes back, and all of it is resident.

Cases 11 and 12: the ids that the model said a call with are not the ones that the tokenizer would
choose, and its JSON is not the one that a template would write.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from coord.tokenizer import TextTokenizer
from coord.toolcalls import Style
from tests.localring import Call, LocalRing, play
from tests.toolmodels import Scripted, family, oddly

CHAT = "/v1/chat/completions"
# Names in no order, odd spacing, an escape that needs none, a float that would be written anew.
ARGS = '{"when":"now",  "city" : "K\\u00f6ln", "depth": 1.50, "list": [1,2 ,{}]}'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Looks out of the window.",
            "parameters": {
                "type": "object",
                "properties": {"when": {"type": "string"}, "city": {"type": "string"}},
            },
        },
    }
]
SAID = {
    Style.HERMES: "Let me look.\n<tool_call>\n"
    f'{{"name": "weather", "arguments": {ARGS}}}\n</tool_call>',
    Style.LLAMA3: f'{{"name": "weather", "parameters": {ARGS}}}',
    Style.MISTRAL: f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGS}}}]',
}  # fmt: skip


def ring_of(tokenizer: TextTokenizer) -> list[Scripted]:
    return [Scripted(tokenizer, index) for index in range(2)]


async def ask(call: Call, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The message as a client puts it together, the usage, and the finish_reason."""
    response = await call("POST", CHAT, body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        answer = response.json()
        [choice] = answer["choices"]
        return choice["message"], answer["usage"], choice["finish_reason"]
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: {")]
    chunks = [json.loads(line[6:]) for line in lines]
    return together(chunks), chunks[-1]["usage"], chunks[-2]["choices"][0]["finish_reason"]


def together(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    content, calls = "", list[dict[str, Any]]()
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            for more in delta.get("tool_calls", ()):
                if more["index"] == len(calls):
                    assert more["type"] == "function"
                    calls.append({"id": more["id"], "type": "function", "function": {}})
                    calls[-1]["function"] = {"name": more["function"]["name"], "arguments": ""}
                calls[more["index"]]["function"]["arguments"] += more["function"]["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": content or None, "refusal": None}
    return {**message, "tool_calls": calls} if calls else {**message, "content": content}


def result_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": each["id"], "content": '"rain"'}
        for each in message["tool_calls"]
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("style", Style)
def test_all_that_is_known_is_resident_in_every_round(style: Style, stream: bool) -> None:
    tokenizer = family(style)
    models = ring_of(tokenizer)
    script = oddly(tokenizer, SAID[style])
    assert tokenizer.encode(SAID[style], special=False) != script, "it would pass without splicing"

    async def scene(ring: LocalRing, call: Call) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather?"}]
        body: dict[str, Any] = {"tools": TOOLS, "stream": stream, "max_tokens": 300}
        body |= {"stream_options": {"include_usage": True}} if stream else {}
        known = 0
        for _ in range(3):
            models[-1].say(script)
            message, usage, reason = await ask(call, body | {"messages": messages})
            [made] = message["tool_calls"]
            assert made["function"] == {"name": "weather", "arguments": ARGS}
            assert message["content"] == ("Let me look." if style is Style.HERMES else None)
            assert reason == "tool_calls"
            # The end token's row is there too where it was drafted ahead: the text is a repetition.
            assert usage["prompt_tokens_details"]["cached_tokens"] - known in (0, bool(known))
            assert usage["completion_tokens"] == len(script) + 1
            known = usage["prompt_tokens"] + len(script)
            messages += [message, *result_of(message)]
        models[-1].say(oddly(tokenizer, "It rains in Cologne."))
        message, usage, reason = await ask(call, body | {"messages": messages})
        assert (message["content"], reason) == ("It rains in Cologne.", "stop")
        assert usage["prompt_tokens_details"]["cached_tokens"] - known in (0, 1)
        assert "tool_calls" not in message

    play(scene, tokenizer=tokenizer, models=models)


@pytest.mark.parametrize("style", Style)
def test_what_the_model_never_said_keeps_the_clients_bytes(style: Style) -> None:
    """A conversation from elsewhere: its text is what the client sent, to the byte."""
    tokenizer = family(style)
    function = {"name": "weather", "arguments": ARGS}
    called = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": function}]}  # fmt: skip
    messages = [{"role": "user", "content": "?"}, called, *result_of(called)]

    async def scene(ring: LocalRing, call: Call) -> None:
        tokens = (await call("POST", "/tokenize", {"messages": messages, "tools": TOOLS})).json()
        text = tokenizer.decode(tokens["tokens"], special=True)
        assert text.count(ARGS) == 1
        assert json.dumps(TOOLS[0]["function"]) in text or style is Style.LLAMA3
        models[-1].say(oddly(tokenizer, "Rain."))
        _, usage, _ = await ask(call, {"messages": messages, "tools": TOOLS})
        assert usage["prompt_tokens"] == tokens["count"]

    models = ring_of(tokenizer)
    play(scene, tokenizer=tokenizer, models=models)


@pytest.mark.parametrize("change", ["arguments", "name", "content", "id"])
def test_a_changed_call_is_the_clients_and_a_changed_id_is_not_a_change(change: str) -> None:
    tokenizer = family(Style.HERMES)
    models = ring_of(tokenizer)
    script = oddly(tokenizer, SAID[Style.HERMES])

    async def scene(ring: LocalRing, call: Call) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
        models[-1].say(script)
        message, usage, _ = await ask(call, {"messages": messages, "tools": TOOLS})
        made = message["tool_calls"][0]
        if change in ("arguments", "name"):
            made["function"][change] = made["function"][change].replace("e", "3", 1)
        elif change == "content":
            message["content"] = "Let me not look."
        else:
            made["id"] = "call_of_the_client"
        known = usage["prompt_tokens"] + len(script)
        models[-1].say(oddly(tokenizer, "Rain."))
        messages += [message, *result_of(message)]
        _, usage, _ = await ask(call, {"messages": messages, "tools": TOOLS})
        assert (usage["prompt_tokens_details"]["cached_tokens"] == known) == (change == "id")

    play(scene, tokenizer=tokenizer, models=models)


@pytest.mark.parametrize("style", Style)
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_forced_call_is_part_of_the_reply_and_hits(style: Style, choice: Any) -> None:
    """The prompt ends with the call's beginning; the model has written what follows it."""
    tokenizer = family(style)
    models = ring_of(tokenizer)
    said = SAID[style].removeprefix("Let me look.\n")
    name = None if choice == "required" else "weather"
    begun = style.beginning(name)
    assert said.startswith(begun)

    async def scene(ring: LocalRing, call: Call) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
        body: dict[str, Any] = {"messages": messages, "tools": TOOLS}
        plain = (await call("POST", "/tokenize", body)).json()["count"]
        rest = oddly(tokenizer, said[len(begun) :])
        for stream in (False, True):
            models[-1].say(rest)
            asked = body | {"tool_choice": choice, "stream": stream}
            asked |= {"stream_options": {"include_usage": True}} if stream else {}
            message, usage, reason = await ask(call, asked)
            assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": ARGS}
            assert (message["content"], reason) == (None, "tool_calls")
            forced = tokenizer.encode(begun, special=False)
            assert usage["prompt_tokens"] == plain + len(forced)
        # A named call ends with its own end: without the end token that a free one ends with.
        ended = usage["completion_tokens"] - len(rest)
        assert ended == (1 if name is None else 0)
        messages += [message, *result_of(message)]
        models[-1].say(oddly(tokenizer, "Rain."))
        known = usage["prompt_tokens"] + usage["completion_tokens"] - 1
        _, usage, _ = await ask(call, body)
        assert usage["prompt_tokens_details"]["cached_tokens"] - known in (0, 1)

    play(scene, tokenizer=tokenizer, models=models)


def test_two_calls_come_back_though_the_template_would_refuse_them() -> None:
    tokenizer = family(Style.LLAMA3)
    models = ring_of(tokenizer)
    script = oddly(tokenizer, f"{SAID[Style.LLAMA3]}; {SAID[Style.LLAMA3]}")

    async def scene(ring: LocalRing, call: Call) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
        models[-1].say(script)
        message, usage, _ = await ask(call, {"messages": messages, "tools": TOOLS})
        assert len(message["tool_calls"]) == 2
        known = usage["prompt_tokens"] + len(script)
        messages += [message, *result_of(message)]
        models[-1].say(oddly(tokenizer, "Rain."))
        _, usage, _ = await ask(call, {"messages": messages, "tools": TOOLS})
        assert usage["prompt_tokens_details"]["cached_tokens"] - known in (0, 1)
        message["tool_calls"][0]["function"]["arguments"] = "{}"
        refused = await call("POST", CHAT, {"messages": messages, "tools": TOOLS})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "template_error")

    play(scene, tokenizer=tokenizer, models=models)


def test_a_mark_in_a_question_costs_a_miss_and_no_more() -> None:
    tokenizer = family(Style.MISTRAL)
    models = ring_of(tokenizer)

    async def scene(ring: LocalRing, call: Call) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "What is [TOOL_CALLS]?"}]
        models[-1].say(oddly(tokenizer, SAID[Style.MISTRAL]))
        message, _, _ = await ask(call, {"messages": messages, "tools": TOOLS})
        messages += [message, *result_of(message)]
        body = {"messages": messages, "tools": TOOLS}
        models[-1].say(oddly(tokenizer, "Rain."))
        answer, usage, _ = await ask(call, body)
        assert answer["content"] == "Rain."
        assert usage["prompt_tokens"] == (await call("POST", "/tokenize", body)).json()["count"]

    play(scene, tokenizer=tokenizer, models=models)

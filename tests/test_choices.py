"""n choices of one request, and sampling parameters over HTTP: on a ring, on a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from coord.actions import TurnError
from coord.http.reply import TurnStream
from tests.fake_engine import FakeEngine, Step, fails, says
from tests.localring import Call, LocalRing, play
from tests.test_gateway import CHAT, EOS, HI, PROMPT, TEXT, ask, finishes, post
from transport.frame import Shaping

LONG: dict[str, Any] = {"prompt": [1 + i % 200 for i in range(300)], "max_tokens": 8}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: {")]
    assert response.text.endswith("data: [DONE]\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def texts_of(chunks: list[dict[str, Any]], count: int) -> list[str]:
    texts = [""] * count
    for chunk in chunks:
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            texts[choice["index"]] += piece
    return texts


def test_choices_prefill_their_prompt_once_and_are_the_single_answers() -> None:
    """CASE 18: the sum of prefilled rows is one prompt; each choice is what its seed gives."""

    async def scene(ring: LocalRing, call: Call) -> None:
        many = LONG | {"n": 4, "seed": 40, "temperature": 1.5}
        whole = (await call("POST", TEXT, many)).json()
        first = sum(ring.prefilled())
        assert first <= 300 + 3  # and for each fork its prompt's last token
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
        assert [r["seed"] for r in whole["kvring"]["choices"]] == [40, 41, 42, 43]
        usage = whole["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (300, 32)
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
        assert usage["total_tokens"] == 332
        texts = [choice["text"] for choice in whole["choices"]]
        assert len(set(texts)) == 4
        for index, text in enumerate(texts):
            alone = (await call("POST", TEXT, many | {"n": 1, "seed": 40 + index})).json()
            assert alone["choices"][0]["text"] == text
            assert "choices" not in alone["kvring"]
        streamed = chunks_of(await call("POST", TEXT, many | USAGE))
        assert texts_of(streamed, 4) == texts
        assert finishes(streamed) == ["length"] * 4
        assert streamed[-1]["choices"] == []
        assert streamed[-1]["usage"]["completion_tokens"] == 32

    play(scene)


def test_more_choices_than_slots() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        answer = (await call("POST", TEXT, LONG | {"n": 8, "seed": 1})).json()
        assert len(answer["choices"]) == 8
        assert sum(ring.prefilled()) < 2 * 300

    play(scene, slots=2)


def test_a_chat_stream_opens_and_closes_each_choice_once() -> None:
    engine = FakeEngine(says("Hel", "lo", stop=EOS))
    chunks = chunks_of(ask(engine, "POST", CHAT, HI | {"n": 3, "stream": True}))
    roles = [c["index"] for k in chunks for c in k["choices"] if c.get("delta", {}).get("role")]
    ends = [c["index"] for k in chunks for c in k["choices"] if c["finish_reason"]]
    assert roles == [0, 1, 2]
    assert sorted(ends) == [0, 1, 2]
    assert texts_of(chunks, 3) == ["Hello"] * 3
    assert len({chunk["id"] for chunk in chunks}) == 1
    whole = post(FakeEngine(says("Hi", stop=EOS)), CHAT, HI | {"n": 2, "logprobs": None})
    assert [c["message"]["content"] for c in whole["choices"]] == ["Hi", "Hi"]


def test_seeds_follow_the_first_and_a_drawn_one_is_a_javascript_number() -> None:
    engine = FakeEngine(says("x"))
    post(engine, CHAT, HI | {"n": 3, "seed": (1 << 63) - 1})
    post(engine, CHAT, HI | {"n": 8})
    seeds = [turn.sampling.seed for turn in engine.submitted]
    assert seeds[:3] == [(1 << 63) - 1, 0, 1]
    assert seeds[3:] == list(range(seeds[3], seeds[3] + 8))
    assert seeds[-1] < 1 << 53


class Full(FakeEngine):
    """Takes two turns."""

    def submit(self, prompt: Any, **options: Any) -> TurnStream:  # type: ignore[override]
        if len(self.submitted) == 2:
            raise TurnError(429, "queue_full", "full")
        return super().submit(prompt, **options)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_refused_choice_gives_all_of_them_up(streamed: bool) -> None:
    engine = Full(says("x"))
    response = ask(engine, "POST", CHAT, HI | {"n": 3, "stream": streamed})
    assert response.status_code == 429
    assert [stream.cancelled for stream in engine.streams] == [["cancelled"]] * 2


class OneFails(FakeEngine):
    """The second turn fails, the others wait for ever."""

    def submit(self, prompt: Any, **options: Any) -> TurnStream:  # type: ignore[override]
        waits: list[Step] = [*says("a")[:-1], 60.0]
        self.script = fails(after="b") if len(self.submitted) == 1 else waits
        return super().submit(prompt, **options)


def test_a_failed_choice_ends_the_request() -> None:
    engine = OneFails()
    assert ask(engine, "POST", TEXT, PROMPT | {"n": 3}).status_code == 503
    assert [bool(stream.cancelled) for stream in engine.streams] == [True, False, True]
    engine = OneFails()
    response = ask(engine, "POST", TEXT, PROMPT | {"n": 3, "stream": True})
    assert response.text.count("event: error") == 1
    assert response.text.endswith("data: [DONE]\n\n")


# ---- sampling parameters ------------------------------------------------------------------------


def test_shaping_reaches_the_engine_only_where_it_shapes() -> None:
    engine = FakeEngine(says("x"))
    neutral = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0.0}
    post(engine, CHAT, HI | neutral | {"logit_bias": {}, "min_tokens": 0, "n": 1})
    assert engine.submitted[0].sampling.shaping is None
    wanted = {"repetition_penalty": 1.5, "presence_penalty": -2, "frequency_penalty": 0.5}
    post(engine, CHAT, HI | wanted | {"logit_bias": {"7": -100, "0": 3.5}, "min_tokens": 4})
    bias = ((7, -100.0), (0, 3.5))
    assert engine.submitted[1].sampling.shaping == Shaping(1.5, -2.0, 0.5, bias, 4)


def test_bias_and_min_tokens_on_a_ring() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        async def said(**change: Any) -> dict[str, Any]:
            answer = await call("POST", TEXT, LONG | {"temperature": 0} | change)
            assert answer.status_code == 200, answer.text
            return answer.json()  # type: ignore[no-any-return]

        forced = await said(logit_bias={"65": 100})
        assert forced["choices"][0]["text"] == "A" * 8
        stopped = await said(logit_bias={"65": 100, "66": 50}, stop_token_ids=[65])
        assert stopped["choices"][0]["text"] == ""
        assert stopped["usage"]["completion_tokens"] == 1
        later = await said(logit_bias={"65": 100, "66": 50}, stop_token_ids=[65], min_tokens=3)
        assert later["choices"][0]["text"] == "BBB"
        assert later["usage"]["completion_tokens"] == 4
        once = await said(logit_bias={str(i): 30 - i for i in range(8)}, frequency_penalty=2)
        assert len(set(ring.last_tokens)) > 1, once

    play(scene)


def test_stop_strings_wait_for_min_tokens() -> None:
    script = says("a", "STOP", "b", "STOP", "c", reason="length")
    answer = post(FakeEngine(script), TEXT, PROMPT | {"stop": "STOP", "min_tokens": 5})
    assert answer["choices"][0]["text"] == "aSTOPb"
    assert answer["kvring"]["ended_by"] == "string"

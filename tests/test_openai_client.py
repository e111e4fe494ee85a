"""openai-python against the server: chats, streams, tools, and errors as its own exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from coord.actions import TurnError
from coord.http.keys import hold
from tests.fake_engine import FakeEngine, fails, says
from tests.localring import LocalRing
from tests.test_gateway import EOS
from tests.test_gateway_live import serving
from tests.test_tool_loop import TOOLS
from tests.test_tools_api import ARGS, CALL

HI: list[Any] = [{"role": "user", "content": "hi"}]
Scene = Callable[[openai.AsyncOpenAI], Awaitable[None]]


def on(engine: Any, scene: Scene, *, key: str = "any", **settings: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), serving(engine, **settings) as url:
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
            async with client:
                await scene(client)

    asyncio.run(main())


def on_ring(scene: Scene) -> None:
    """Of toy stages: what is resident is real."""

    async def main() -> None:
        ring = LocalRing()
        await ring.open()
        async with asyncio.timeout(60), serving(ring) as url:
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any")
            async with client:
                await scene(client)
        await ring.close()

    asyncio.run(main())


def test_the_second_turn_of_a_chat_is_cached_streamed_or_not() -> None:
    async def scene(client: openai.AsyncOpenAI) -> None:
        first = await client.chat.completions.create(model="toy", messages=HI, max_tokens=16)
        assert first.usage is not None
        said = first.choices[0].message
        assert said.content
        more = [*HI, said.model_dump(exclude_none=True), *HI]
        second = await client.chat.completions.create(model="toy", messages=more, max_tokens=16)
        known = first.usage.prompt_tokens + first.usage.completion_tokens - 1
        assert second.usage is not None
        assert second.usage.prompt_tokens_details is not None
        assert second.usage.prompt_tokens_details.cached_tokens == known
        more += [second.choices[0].message.model_dump(exclude_none=True), *HI]
        usage, text = None, ""
        async for chunk in await client.chat.completions.create(
            model="toy",
            messages=more,
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
        ):
            usage = chunk.usage or usage
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        known = second.usage.prompt_tokens + second.usage.completion_tokens - 1
        assert usage.prompt_tokens_details.cached_tokens == known

    on_ring(scene)


def test_tools_whole_and_by_its_stream_helper() -> None:
    async def scene(client: openai.AsyncOpenAI) -> None:
        asked: dict[str, Any] = {"model": "toy", "messages": HI, "tools": TOOLS}
        whole = await client.chat.completions.create(**asked)
        [call] = whole.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("weather", ARGS)
        async with client.chat.completions.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert "tool_calls.function.arguments.delta" in kinds
        [made] = final.choices[0].message.tool_calls or []
        assert (made.function.name, made.function.arguments) == ("weather", ARGS)
        assert final.choices[0].finish_reason == "tool_calls"
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        messages = [*HI, whole.choices[0].message, result]
        await client.chat.completions.create(**{**asked, "messages": messages})
        prompt = bytes(engine.submitted[-1].prompt).decode()
        assert prompt.endswith(f"assistant: {CALL}\ntool: rain\nassistant: ")

    engine = FakeEngine(says(*CALL, stop=EOS))
    on(engine, scene)


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (TurnError(400, "context_length_exceeded", "long"), openai.BadRequestError),
        (TurnError(404, "x", "gone"), openai.NotFoundError),
        (TurnError(429, "queue_full", "full"), openai.RateLimitError),
        (TurnError(503, "not_ready", "no ring"), openai.InternalServerError),
    ],
)
def test_errors_are_its_exceptions(refusal: TurnError, kind: type[openai.APIStatusError]) -> None:
    async def scene(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(kind) as caught:
            await client.chat.completions.create(model="toy", messages=HI)
        assert caught.value.code == refusal.code

    on(FakeEngine(refusal=refusal), scene)


def test_bad_requests_and_keys_are_its_exceptions() -> None:
    async def scene(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="toy", messages=HI)

    async def keyed(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="toy", messages=HI, temperature=9)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=HI)
        assert [model.id async for model in client.models.list()] == ["toy"]

    keys = (hold("me", "secret", admin=False),)
    on(FakeEngine(says("x")), scene, key="wrong", api_keys=keys)
    on(FakeEngine(says("x")), keyed, key="secret", api_keys=keys)


def test_an_error_in_a_stream_is_its_exception() -> None:
    async def scene(client: openai.AsyncOpenAI) -> None:
        pieces: list[str] = []

        async def read() -> None:
            async for chunk in await client.chat.completions.create(
                model="toy", messages=HI, stream=True
            ):
                pieces.append(chunk.choices[0].delta.content or "")

        with pytest.raises(openai.APIError, match="the ring was lost"):
            await read()
        assert "".join(pieces) == "Hel"

    on(FakeEngine(fails(after="Hel")), scene)

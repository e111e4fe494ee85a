"""The HTTP API on a real server: clients that leave, cancels, and many streams at once."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from coord.http.engine import Engine
from tests.fake_engine import FakeEngine, Step, says
from tests.test_gateway import CHAT, EOS, HI, app_of, finishes, text_of


@asynccontextmanager
async def serving(engine: Engine, **settings: Any) -> AsyncIterator[str]:
    """A real server on a free port; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            app_of(engine, keep_alive_s=0.05, **settings),
            log_level="error",
            lifespan="off",
            ws="none",
        )
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


def on_server(engine: FakeEngine, scene: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """Play a scene against a real server; afterwards no task of a request may be left."""

    async def main() -> None:
        async with asyncio.timeout(10), serving(engine) as url:
            async with httpx.AsyncClient(base_url=url) as client:
                before = len(asyncio.all_tasks())
                await scene(client)
            while len(asyncio.all_tasks()) > before:
                await asyncio.sleep(0.01)

    asyncio.run(main())


@pytest.mark.parametrize("script", [[30.0], [*says("x")[:-1], 30.0]])
def test_a_client_that_leaves_a_stream_cancels_its_turn(script: list[Step]) -> None:
    engine = FakeEngine(script)

    async def scene(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", CHAT, json=HI | {"stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    break
        await asyncio.wait_for(engine.streams[0].ended.wait(), 1.0)

    on_server(engine, scene)
    assert engine.streams[0].cancelled[0] == "cancelled"


def test_a_client_that_leaves_before_a_whole_answer_cancels_its_turn() -> None:
    engine = FakeEngine([*says("x")[:-1], 30.0])

    async def scene(client: httpx.AsyncClient) -> None:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(CHAT, json=HI, timeout=0.2)
        await asyncio.wait_for(engine.streams[0].ended.wait(), 1.0)
        page = (await client.get("/metrics")).text
        assert 'kvring:request_success_total{finished_reason="abort"} 1.0' in page

    on_server(engine, scene)
    assert engine.streams[0].cancelled[0] == "cancelled"


def test_a_cancelled_reply_ends_as_stopped_with_what_it_had() -> None:
    engine = FakeEngine([*says("Hel")[:-1], 30.0])

    async def scene(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", CHAT, json=HI | {"stream": True}) as response:
            chunks = []
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunks.append(json.loads(line[6:]))
                if len(chunks) == 2:
                    answer = await client.post(f"/v1/cancel/{chunks[0]['id']}")
                    assert answer.json() == {"id": chunks[0]["id"], "cancelled": True}
        assert (text_of(chunks), finishes(chunks)) == ("Hel", ["stop"])
        assert chunks[-1]["kvring"]["ended_by"] == "cancelled"
        gone = await client.post(f"/v1/cancel/{chunks[0]['id']}")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "reply_not_found")

    on_server(engine, scene)


def test_many_streams_run_beside_each_other() -> None:
    engine = FakeEngine([0.1, *says("Hel", "lo", stop=EOS)])

    async def scene(client: httpx.AsyncClient) -> None:
        answers = await asyncio.gather(
            *(client.post(CHAT, json=HI | {"stream": bool(i % 2)}) for i in range(40))
        )
        assert all(answer.status_code == 200 for answer in answers)
        assert len({answer.headers["x-request-id"] for answer in answers}) == 40

    on_server(engine, scene)

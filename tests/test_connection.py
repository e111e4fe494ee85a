"""The HTTP API's patience on a real server: slow readers, slow senders, too many connections."""

from __future__ import annotations

import asyncio
import errno
import json
import select
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import httpx
import pytest
import uvicorn

from coord.actions import Admitted, Finished, Tokens
from coord.gateway import Settings, build_app
from coord.http.connection import Patience, protocol
from coord.http.engine import Engine
from coord.tokenizer import ByteTokenizer
from tests.fake_engine import FakeEngine, Step, says
from tests.localring import LocalRing
from tests.test_gateway import CHAT, HI

PATIENCE = Patience()
LONG_TOKENS = 12_000  # 3 MB of events: far more than the buffers of both sockets hold
Address = tuple[str, int]
Scene = Callable[[Address], Awaitable[None]]


@asynccontextmanager
async def serving(
    engine: Engine, patience: Patience, **settings: Any
) -> AsyncIterator[tuple[Address, uvicorn.Server]]:
    """The server as `kvring coord` runs it, on a free port."""
    app = build_app(engine, ByteTokenizer([0]), Settings(keep_alive_s=0.05, **settings))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            app, http=protocol(patience), ws="none", log_config=None, lifespan="off"
        )
        config.timeout_graceful_shutdown = 1
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[:2], server
        finally:
            server.should_exit = True
            await task


def on_server(
    engine: FakeEngine, scene: Scene, patience: Patience = PATIENCE, **settings: Any
) -> None:
    """Play a scene; afterwards no task and no connection of a client may be left."""

    async def main() -> None:
        async with asyncio.timeout(30), serving(engine, patience, **settings) as (at, server):
            await asyncio.sleep(0.2)
            before = len(asyncio.all_tasks())
            await scene(at)
            state = server.server_state
            while state.connections or len(asyncio.all_tasks()) > before:
                await asyncio.sleep(0.01)

    asyncio.run(main())


def request(body: dict[str, Any], path: str = CHAT) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def connect(at: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*at)


async def to_the_end(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes; a reset is an end too."""
    got = b""
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            got += data
    return got


async def within(seconds: float, wait: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(wait, seconds)


# ---- readers ------------------------------------------------------------------------------------


def long_reply() -> list[Step]:
    tokens = [Tokens(1, (97,)) for _ in range(LONG_TOKENS)]
    return [Admitted(1, "r0", 0, 10, 0), *tokens, Finished(1, "length")]


@contextmanager
def unread(at: Address, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A client that asks and then reads nothing."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(at)
        client.sendall(request(body))
        yield client


async def gone(client: socket.socket) -> bool:
    """The server has reset the connection: nothing of the answer is kept for it."""
    poller = select.poll()
    poller.register(client, select.POLLERR)
    while not poller.poll(0):
        await asyncio.sleep(0.01)
    return client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET


def test_a_client_that_reads_nothing_is_cut_off_and_its_turn_ends() -> None:
    engine = FakeEngine(long_reply())

    async def scene(at: Address) -> None:
        with unread(at, HI | {"stream": True}) as client:
            assert await within(10.0, gone(client))
            await within(1.0, engine.streams[0].ended.wait())
            assert engine.streams[0].cancelled, "not played to its end into memory"

    on_server(engine, scene, Patience(write_s=0.3))


def test_neighbours_of_a_slow_reader_are_served() -> None:
    engine = FakeEngine(long_reply())

    async def scene(at: Address) -> None:
        with unread(at, HI | {"stream": True}):
            await asyncio.sleep(0.5)
            engine.script = says("Hello")
            async with httpx.AsyncClient(base_url=f"http://{at[0]}:{at[1]}") as other:
                for stream in (False, True):
                    answer = await other.post(CHAT, json=HI | {"stream": stream}, timeout=5)
                    assert answer.status_code == 200
                    assert "Hello" in answer.text
            assert not engine.streams[0].cancelled, "still within its patience"
            assert not engine.streams[0].ended.is_set()

    on_server(engine, scene, Patience(write_s=20.0))


def test_the_ring_does_not_wait_for_a_slow_reader() -> None:
    """Its tokens wait in the turn's own queue; the only slot goes to the next turn."""

    async def main() -> None:
        ring = LocalRing(slots=1)
        await ring.open()
        many = {"max_tokens": 900, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
        async with serving(ring, Patience(write_s=2.0)) as (at, server):
            with unread(at, HI | many | {"stream": True}) as client:
                while not ring.last_tokens:  # it may be over before it is seen running
                    await asyncio.sleep(0.001)
                async with httpx.AsyncClient(base_url=f"http://{at[0]}:{at[1]}") as other:
                    answer = await other.post(CHAT, json=HI | {"max_tokens": 5}, timeout=20)
                    assert answer.json()["kvring"]["turn"] == 2
                    page = (await other.get("/metrics")).text
                assert ring.scheduler.running() == 0, "both turns are over for the ring"
                assert "request_success_total" in page
                assert 'finished_reason="length"} 1.0' in page, "one is not for its client"
                assert await gone(client)
            while server.server_state.connections:
                await asyncio.sleep(0.01)
        await ring.close()

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


def large_answer() -> FakeEngine:
    """3 MB, all written at once where it is no stream."""
    top = tuple((byte, -0.5) for byte in range(20))
    tokens = [Tokens(1, (97,), (-0.1,), (top,)) for _ in range(2000)]
    return FakeEngine([Admitted(1, "r0", 0, 10, 0), *tokens, Finished(1, "length")])


@pytest.mark.parametrize("stream", [True, False])
def test_a_reader_that_is_slow_but_reads_gets_everything(stream: bool) -> None:
    """No byte for write_s is the limit, not the time for all of it."""

    async def scene(at: Address) -> None:
        loop, got = asyncio.get_running_loop(), bytearray()
        body = HI | {"stream": stream, "logprobs": True, "top_logprobs": 20}
        with socket.create_connection(at) as client:
            client.sendall(request(body))
            client.setblocking(False)
            first = await loop.sock_recv(client, 1)
            began = loop.time()
            while data := await loop.sock_recv(client, 1 << 15):
                got += data
                await asyncio.sleep(0.03)
                if got.endswith((b"0\r\n\r\n", b'"ended_by":"length"}}')):
                    break
        assert first == b"H"
        assert loop.time() - began > 2 * 0.7
        assert bytes(got).count(b'"top_logprobs":[') == 2000
        assert b'"finish_reason":"length"' in got

    on_server(large_answer(), scene, Patience(write_s=0.7))


def test_an_unread_whole_answer_does_not_hold_its_connection() -> None:
    """It is over for the gateway, but its bytes stand in the buffer."""
    engine = large_answer()

    async def scene(at: Address) -> None:
        with unread(at, HI | {"logprobs": True, "top_logprobs": 20}) as client:
            assert await gone(client)
            assert not engine.streams[0].cancelled

    on_server(engine, scene, Patience(write_s=0.3))


# ---- senders ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1/chat", b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: "]
)
def test_a_head_that_does_not_come_closes_the_connection(sent: bytes) -> None:
    async def scene(at: Address) -> None:
        reader, writer = await connect(at)
        writer.write(sent)
        assert await within(3.0, to_the_end(reader)) == b""
        writer.close()

    on_server(FakeEngine(), scene, Patience(head_s=0.3))


def test_a_trickled_head_is_not_more_patient() -> None:
    async def scene(at: Address) -> None:
        reader, writer = await connect(at)
        ending = asyncio.ensure_future(to_the_end(reader))
        with suppress(ConnectionError):
            for byte in b"GET /health HTTP/1.1\r\nx: " + b"y" * 200:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)
                if ending.done():
                    break
        assert ending.done()
        assert await ending == b""
        writer.close()

    on_server(FakeEngine(), scene, Patience(head_s=0.3))


def test_the_next_request_of_a_connection_is_waited_for_no_longer() -> None:
    async def scene(at: Address) -> None:
        reader, writer = await connect(at)
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b'"ok"' in await within(2.0, reader.readuntil(b"}"))
        writer.write(b"GET /hea")  # ends uvicorn's own timer
        assert await within(3.0, to_the_end(reader)) == b""
        writer.close()

    on_server(FakeEngine(), scene, Patience(head_s=0.5))


def test_a_body_that_does_not_come_is_a_408_and_the_connection_ends() -> None:
    async def scene(at: Address) -> None:
        reader, writer = await connect(at)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{{".encode())
        answer = await within(3.0, to_the_end(reader))
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"body_timeout"' in answer
        writer.close()

    on_server(FakeEngine(), scene, body_timeout_s=0.2)


def test_a_long_reply_is_no_slow_head() -> None:
    engine = FakeEngine([0.8, *says("Hello")])

    async def scene(at: Address) -> None:
        reader, writer = await connect(at)
        writer.write(request(HI))
        assert b'"Hello"' in await within(5.0, to_the_end(reader))
        writer.close()

    on_server(engine, scene, Patience(head_s=0.2))


# ---- connections --------------------------------------------------------------------------------


def test_too_many_connections_get_a_clean_503_and_probes_their_answer() -> None:
    async def scene(at: Address) -> None:
        idle = [await connect(at) for _ in range(3)]
        await asyncio.sleep(0.1)
        reader, writer = await connect(at)
        writer.write(request(HI))
        answer = await within(2.0, to_the_end(reader))
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: " in answer
        assert b"\r\nconnection: close" in answer
        assert b'"code":"too_many_connections"' in answer
        probe, asking = await connect(at)
        asking.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert b'"ok"' in await within(2.0, to_the_end(probe))
        for _, each in (*idle, (reader, writer), (probe, asking)):
            each.close()
        await asyncio.sleep(0.1)
        async with httpx.AsyncClient(base_url=f"http://{at[0]}:{at[1]}") as client:
            assert (await client.post(CHAT, json=HI)).status_code == 200

    on_server(FakeEngine(says("x")), scene, Patience(connections=3))


def test_beyond_twice_as_many_a_connection_is_closed_unheard() -> None:
    async def scene(at: Address) -> None:
        held = [await connect(at) for _ in range(4)]
        await asyncio.sleep(0.1)
        reader, writer = await connect(at)
        assert await within(2.0, to_the_end(reader)) == b""
        for _, each in (*held, (reader, writer)):
            each.close()

    on_server(FakeEngine(), scene, Patience(connections=2))

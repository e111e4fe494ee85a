"""Owns a response that streams server-sent events, and noticing that a client has gone.

Knows bytes and connections; what the events say is coord.http.answer's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coord.http.errors import ClientGoneError
from coord.http.jsonline import dump_line

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def encode_event(payload: Mapping[str, Any]) -> bytes:
    """One event."""
    return f"data: {dump_line(payload)}\n\n".encode()


def encode_named(name: str, payload: Mapping[str, Any]) -> bytes:
    """One event with a name of its own."""
    return f"event: {name}\n".encode() + encode_event(payload)


async def until_gone(receive: Receive) -> None:
    """Wait, after the body was read, until the client closes; then raise ClientGoneError."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGoneError


class EventStream(Response):
    """Sends chunks as they come, a comment where none came for keep_alive_s (case 40).

    When the client goes, chunks is closed where it stands. on_close runs in every case, last.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        *,
        keep_alive_s: float,
        on_close: Callable[[], None],
        headers: Mapping[str, str],
    ) -> None:
        self.status_code = 200
        self.background = None
        self._chunks = chunks
        self._keep_alive_s = keep_alive_s
        self._on_close = on_close
        self._sent_at = 0.0
        # Exactly this content type: charset is not a parameter of text/event-stream.
        self.raw_headers = [
            (b"content-type", b"text/event-stream"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Stream until the chunks end or the client goes."""
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            async with aclosing(self._chunks), asyncio.TaskGroup() as group:
                helpers = (
                    group.create_task(until_gone(receive)),
                    group.create_task(self._keep_alive(send)),
                )
                async for chunk in self._chunks:
                    await self._send(send, chunk)
                for helper in helpers:
                    helper.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except* ClientGoneError:
            pass
        finally:
            self._on_close()

    async def _send(self, send: Send, chunk: bytes) -> None:
        self._sent_at = time.monotonic()
        await send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            silent_s = time.monotonic() - self._sent_at
            if silent_s >= self._keep_alive_s:
                await self._send(send, KEEP_ALIVE)
                silent_s = 0.0
            await asyncio.sleep(self._keep_alive_s - silent_s)

"""Owns the server's patience with connections: for heads, for readers, and how many there are.

uvicorn alone would wait for ever for a request's head, and for a client that reads nothing. What a
request says, and how long its body may take, is coord.http.errors'.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from coord.actions import TurnError
from coord.http.errors import respond

# The kernel's share of an unread answer; Linux alone would go up to 4 MB for each connection.
SEND_BUFFER_BYTES = 1 << 18
_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets, and what is unsent is dropped
OPEN_PATHS = ("/health", "/ready")  # probes: no key needed, and answered on a full server

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """head_s: from a connection (or the last answer) to the end of a request's head.

    write_s: a client that has taken no byte for so long is cut off. connections: at most so many
    are served; up to twice as many get an error, and what comes beyond is closed unheard.
    """

    head_s: float = 10.0
    write_s: float = 30.0
    connections: int = 512


def protocol(limits: Patience) -> type[H11Protocol]:
    """The protocol class for uvicorn.Config(http=...)."""

    class Patient(_Connection):
        patience = limits

    return Patient


class _Timer:
    """Calls something once, later, unless it is stopped."""

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self._seconds = seconds
        self._call = call
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """If it is not running already."""
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(self._seconds, self._fire)

    def stop(self) -> None:
        """Whether it is running or not."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._call()


class _Connection(H11Protocol):
    patience: ClassVar[Patience]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head = _Timer(self.patience.head_s, self._head_is_late)
        self._stuck = _Timer(self.patience.write_s, self._is_stuck)
        self._unwritten = 0  # bytes in the transport's buffer when it was last looked at

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._socket().setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        # Paused whenever the kernel takes no more: a turn's events then wait in its bounded queue.
        transport.set_write_buffer_limits(high=0)
        count, most = len(self.connections), self.patience.connections
        if count > 2 * most:
            transport.abort()
            return
        if count > most:
            # Any: uvicorn and starlette type the same ASGI dictionaries differently.
            self.app = cast(Any, _overloaded(cast(Any, self.app), most))
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head.stop()
        self._stuck.stop()
        super().connection_lost(exc)

    # ---- a request's head ----

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()

    def _watch_head(self) -> None:
        """While no request is being answered, its head (and the last one's body) must come."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering or self.transport.is_closing():
            self._head.stop()
        else:
            self._head.start()

    def _head_is_late(self) -> None:
        self.transport.close()

    # ---- an answer's way out ----

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unwritten = self.transport.get_write_buffer_size()
        self._stuck.start()

    def resume_writing(self) -> None:
        self._stuck.stop()
        super().resume_writing()

    def _is_stuck(self) -> None:
        """Cut off whoever took nothing; closing would wait for the buffer to empty."""
        left = self.transport.get_write_buffer_size()
        if left < self._unwritten:
            self._unwritten = left
            self._stuck.start()
            return
        _log.warning("slow_reader_cut_off", unwritten=left, seconds=self.patience.write_s)
        # Otherwise the kernel would keep its share for minutes, until the client read it.
        self._socket().setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self.transport.abort()

    def _socket(self) -> socket.socket:
        found: socket.socket = self.transport.get_extra_info("socket")
        return found


def _overloaded(app: ASGIApp, most: int) -> ASGIApp:
    """Answers probes as ever, and everybody else that there are too many."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            await app(scope, receive, send)
            return
        text = f"{most} connections are open already"
        refusal = respond(TurnError(503, "too_many_connections", text))
        refusal.headers["connection"] = "close"
        await refusal(scope, receive, send)

    return answer

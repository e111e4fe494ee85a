"""Owns the links: PUSH and PULL sockets that carry numbered frames; the only file with aiozmq.

Two pairs with the same meaning: PushLink and PullLink block and belong to one thread (a stage's
compute thread); open_push and open_pull run in an event loop on aiozmq. Knows no stage, turn or
policy. With keys (Security) a link is encrypted, a PULL side lets in the allowed keys only, and
large frames travel in pieces (transport.pieces). What can't be decoded, is repeated, or comes from
a dead incarnation is counted and dropped here; a jump in the numbers is delivered as a LinkGap
before the frame that shows it.

Three mistakes make an aiozmq socket deaf for ever (stock loop and uvloop), so no transport leaves
this file: repr() of a transport eats the edge-triggered fd (never log one), an exception out of
msg_received stops the reader, and close() while reading is paused leaves a stale fd behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import aiozmq
import zmq

from transport.codec import MAX_HEADER_BYTES, MAX_PARTS, MAX_PAYLOAD_BYTES
from transport.emulate import Air, Deliver, Emulate, Line
from transport.frame import Buffer, Envelope, Frame, LinkGap
from transport.keys import Security as Security
from transport.numbering import Inbox, LinkCounts, OnDrop, Outbox
from transport.peers import OnPeer, PeerWatch
from transport.peers import PeerEvent as PeerEvent
from transport.pieces import most_pieces, split
from transport.sockets import (
    EVENTS,
    bind,
    endpoint,
    explain,
    meaning,
    open_socket,
    reconnect,
    shut_door,
    watch,
)
from transport.sockets import HWM_FRAMES as HWM_FRAMES
from transport.sockets import LinkError as LinkError
from transport.sockets import make_keys as make_keys
from transport.sockets import public_of as public_of

BIND_PATIENCE_S = 1.0  # libzmq releases a closed socket's address a moment later
COPY_BYTES = 1 << 20  # a smaller part is copied when sent: passing a reference costs more
VIEW_BYTES = 1 << 16  # a larger part is received as a view: a copy costs more
SEND_TIMEOUT_S = 10.0
LOOK_S = 0.2  # a blocked sender looks so often whether it has to connect again
RECONNECT_S = 1.0  # after a refusal; libzmq does it by itself after all other failures

OnFrame: TypeAlias = Callable[[Frame, Envelope], None]


class PushLink:
    """The sending end of a link, blocking; use it from one thread only.

    address: the peer's, "tcp://host:port" or "ipc://path"; it need not be up yet. sender names this
    socket and must be unique among the senders of that peer (a stage's heartbeats leave through
    another socket than its frames: "s0/control" and "s0"); incarnation is the process's random
    63-bit life number. emulate: frames take their time, and the thread that delivers them owns the
    socket from then on. on_peer hears of the peer's coming and going, in a thread of its own.
    Raises LinkError for an address that is none.
    """

    def __init__(
        self,
        address: str,
        *,
        sender: str,
        incarnation: int,
        timeout_s: float = SEND_TIMEOUT_S,
        max_bytes: int = MAX_PAYLOAD_BYTES,
        security: Security | None = None,
        emulate: Emulate | None = None,
        on_peer: OnPeer | None = None,
    ) -> None:
        self.address = self._wanted = address
        self.header: Buffer = b""  # of the last frame that was sent, as it was encoded
        self._timeout_s = timeout_s
        self._pieces = security is not None
        self._outbox = Outbox(sender, incarnation, max_bytes)
        self._socket = open_socket(zmq.PUSH, address, max_bytes, security)
        self._socket.sndtimeo = round(min(timeout_s, LOOK_S) * 1000)
        self._socket.copy_threshold = COPY_BYTES
        self._again = threading.Event()  # it has to connect again: it was refused, or is elsewhere
        self._on_peer = on_peer
        watch(self._socket, sender, self._hear)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise explain("connect to", address, error) from None
        self._air = _air(emulate, sender, self._land)

    def send(self, frame: Frame) -> Envelope:
        """Send one frame; hand over fresh bytes, large ones are not copied.

        Returns the envelope it left under. Raises LinkError when the peer has taken nothing for
        timeout_s (the frame is then neither sent nor numbered), FrameError when it is too large.
        """
        parts = self._outbox.pack(frame)
        self.header = parts[0]
        if self._air is None:
            self._write(parts)
        elif not self._air.put(parts):
            raise _behind(self.address)
        return self._outbox.sent()

    def redirect(self, address: str) -> None:
        """The peer is at another address; from any thread. The next frame goes there."""
        if address != self._wanted:
            self._wanted = address
            self._again.set()

    def _hear(self, event: PeerEvent) -> None:
        if event.event == "refused":
            self._again.set()
        if self._on_peer is not None:
            self._on_peer(event)

    def _write(self, parts: Sequence[Buffer]) -> None:
        if self._pieces:
            parts = split(parts)
        deadline = time.monotonic() + self._timeout_s
        while not self._put(parts):
            if time.monotonic() >= deadline:
                raise LinkError(
                    errno.ETIMEDOUT,
                    f"{self.address} took no frame for {self._timeout_s:g} s; "
                    "is that process running?",
                )

    def _put(self, parts: Sequence[Buffer]) -> bool:
        """Hand one message to libzmq; False when it took nothing for LOOK_S."""
        if self._again.is_set():
            self._again.clear()
            old, self.address = self.address, self._wanted
            reconnect(self._socket, old, self.address)
        try:
            for part in parts[:-1]:
                self._socket.send(part, zmq.SNDMORE)
            self._socket.send(parts[-1], copy=False)  # blocks on a message's first part only
        except zmq.Again:
            return False
        return True

    def _land(self, parts: Sequence[Buffer]) -> None:
        with contextlib.suppress(LinkError):  # its sender is far on; the receiver sees the gap
            self._write(parts)

    def close(self, linger_s: float = 0.0) -> None:
        """Close; frames not yet handed to the network get linger_s, then they are lost."""
        if self._air is not None:
            self._air.close(land=linger_s > 0)
        self._socket.close(linger=round(linger_s * 1000))


class PullLink:
    """The receiving end of any number of links, blocking; use it from one thread only.

    address: where to bind, or with port * any free one (then see `address`). link names it
    where messages are dropped: on_drop(reason) hears of the 1st, 2nd, 4th, 8th and so on; on_peer,
    in a thread of its own, of peers that come, go and are refused. Raises LinkError when the
    address is in use or is none.
    """

    def __init__(
        self,
        address: str,
        *,
        link: str,
        max_bytes: int = MAX_PAYLOAD_BYTES,
        security: Security | None = None,
        on_drop: OnDrop | None = None,
        on_peer: OnPeer | None = None,
    ) -> None:
        self._inbox = Inbox(link, on_drop)
        self._most_parts = _most_parts(max_bytes, security)
        self._ready: deque[tuple[Frame, Envelope]] = deque()  # at most a frame behind its gap
        self._socket = open_socket(zmq.PULL, address, max_bytes, security)
        if on_peer is not None:
            watch(self._socket, link, on_peer)
        self._timeout_ms = -1  # libzmq's word for no timeout, the socket's default
        self.envelope: Envelope | None = None  # of the frame that recv returned last
        self.header: Buffer | None = None  # of its message; None for a LinkGap
        deadline = time.monotonic() + BIND_PATIENCE_S
        try:
            while not bind(self._socket, address, last=time.monotonic() >= deadline):
                time.sleep(0.05)
        except LinkError:
            self.close()
            raise
        self.address = endpoint(self._socket)

    @property
    def counts(self) -> LinkCounts:
        """What has arrived so far."""
        return self._inbox.counts

    def recv(self, timeout_s: float) -> Frame | None:
        """The next frame, or None after timeout_s without one; `envelope` says whose it is.

        Large tensors are read-only views of the received message. Never raises FrameError.
        """
        if not self._ready:
            deadline = time.monotonic() + timeout_s
            self._wait_at_most(timeout_s)
            while True:
                try:
                    parts = self._parts()
                except zmq.Again:
                    return None
                self._ready.extend(self._inbox.take(parts))
                if self._ready:
                    break
                self._wait_at_most(deadline - time.monotonic())
        frame, self.envelope = self._ready.popleft()
        self.header = None if isinstance(frame, LinkGap) else self._inbox.header
        return frame

    def _wait_at_most(self, timeout_s: float) -> None:
        timeout_ms = max(0, round(timeout_s * 1000))
        if timeout_ms != self._timeout_ms:  # setting an option costs 4 us
            self._socket.rcvtimeo = self._timeout_ms = timeout_ms

    def _parts(self) -> list[Buffer]:
        """One message; recv_multipart takes twice as long, and copies large parts."""
        message = self._socket.recv(copy=False)
        parts: list[Buffer] = [message.bytes]
        while message.more:
            message = self._socket.recv(copy=False)
            if (
                len(parts) <= self._most_parts
            ):  # one too many shows; what follows it need not be kept
                parts.append(message.bytes if len(message) < VIEW_BYTES else message.buffer)
        return parts

    def close(self) -> None:
        """Close and release the address; messages not yet received are lost."""
        shut_door(self._socket)
        self._socket.close(linger=0)


class AsyncPull:
    """The receiving end in an event loop; made by open_pull."""

    def __init__(
        self, protocol: _Protocol, inbox: Inbox, raw: zmq.Socket[bytes], address: str
    ) -> None:
        self._protocol = protocol
        self._inbox = inbox
        self._raw = raw
        self.address = address

    @property
    def counts(self) -> LinkCounts:
        """What has arrived so far."""
        return self._inbox.counts

    async def wait(self) -> None:
        """Return when the link is closed; raise what on_frame or the socket raised.

        The owner's task awaits it, so that a bug in a callback ends the process, not the reading.
        """
        await asyncio.shield(self._protocol.lost)

    async def close(self) -> None:
        """Close and release the address. Never raises a callback's error; wait() does."""
        if not self._protocol.lost.done():
            shut_door(self._raw)
        await self._protocol.close()


class AsyncPush:
    """The sending end in an event loop; made by open_push."""

    def __init__(
        self,
        protocol: _Protocol,
        outbox: Outbox,
        raw: zmq.Socket[bytes],
        address: str,
        emulate: Emulate | None,
        pieces: bool,
    ) -> None:
        self._protocol = protocol
        self._raw = raw
        self._pieces = pieces
        self._outbox = outbox
        self.address = address
        self.header: Buffer = b""  # of the last frame that was sent, as it was encoded
        self._loop = asyncio.get_running_loop()
        self._air = _air(emulate, outbox.next.sender, self._land)

    def send(self, frame: Frame) -> Envelope:
        """Send one frame without waiting; hand over fresh bytes, they may be kept by reference.

        Returns the envelope it left under. Raises LinkError when the link is closed or the peer
        has fallen HWM_FRAMES behind (the frame is then neither sent nor numbered), FrameError when
        it is too large.
        """
        self._check()
        parts = self._outbox.pack(frame)
        self.header = parts[0]
        if self._air is None:
            self._write(parts)
        elif not self._air.put(parts):
            raise _behind(self.address)
        return self._outbox.sent()

    def _write(self, parts: Sequence[Buffer]) -> None:
        self._protocol.transport.write(split(parts) if self._pieces else parts)

    def _check(self) -> None:
        if self._protocol.lost.done():
            raise LinkError(errno.EPIPE, f"the link to {self.address} is closed")
        if self._protocol.transport.get_write_buffer_size() > 0:  # aiozmq would queue unbounded
            raise _behind(self.address)

    def _land(self, parts: Sequence[Buffer]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody closed the link
            self._loop.call_soon_threadsafe(self._write_late, parts)

    def _write_late(self, parts: Sequence[Buffer]) -> None:
        with contextlib.suppress(LinkError):  # its sender is far on; the receiver sees the gap
            self._check()
            self._write(parts)

    def redirect(self, address: str) -> None:
        """The peer is, or may be, at another address: connect there."""
        if not self._protocol.lost.done():
            reconnect(self._raw, self.address, address)
            self.address = address

    async def wait(self) -> None:
        """Return when the link is closed; raise what the socket raised."""
        await asyncio.shield(self._protocol.lost)

    async def close(self, linger_s: float = 0.0) -> None:
        """Close; frames not yet handed to the network get linger_s, then they are lost."""
        if self._air is not None:
            self._air.close(land=linger_s > 0)
            await asyncio.sleep(0)  # let what has landed be written
        await self._protocol.close(linger_s)


async def open_pull(
    address: str,
    on_frame: OnFrame,
    *,
    link: str,
    max_bytes: int = MAX_PAYLOAD_BYTES,
    security: Security | None = None,
    on_drop: OnDrop | None = None,
    on_peer: OnPeer | None = None,
) -> AsyncPull:
    """Bind a PULL socket in the running loop; see PullLink for the parameters and errors.

    on_frame(frame, envelope) runs in the loop, one call per frame; if it raises, reading stops and
    AsyncPull.wait() raises that. A LinkGap has the envelope of the frame after it.
    """
    inbox = Inbox(link, on_drop)

    def on_message(parts: Sequence[Buffer]) -> None:
        for frame, envelope in inbox.take(parts):
            on_frame(frame, envelope)

    raw = open_socket(zmq.PULL, address, max_bytes, security)
    protocol = await _open(raw, _Protocol(link, on_message, on_peer))
    deadline = time.monotonic() + BIND_PATIENCE_S
    try:
        while not bind(raw, address, last=time.monotonic() >= deadline):
            await asyncio.sleep(0.05)
    except LinkError:
        shut_door(raw)
        await protocol.close()
        raise
    return AsyncPull(protocol, inbox, raw, endpoint(raw))


async def open_push(
    address: str,
    *,
    sender: str,
    incarnation: int,
    max_bytes: int = MAX_PAYLOAD_BYTES,
    security: Security | None = None,
    on_peer: OnPeer | None = None,
    emulate: Emulate | None = None,
) -> AsyncPush:
    """Connect a PUSH socket in the running loop; see PushLink for the parameters and errors."""
    raw = open_socket(zmq.PUSH, address, max_bytes, security)
    loop, again = asyncio.get_running_loop(), False  # again: it will connect again soon

    def hear(event: PeerEvent) -> None:
        nonlocal again
        if event.event == "refused" and not again:
            again = True
            loop.call_later(RECONNECT_S, connect_again)
        if on_peer is not None:
            on_peer(event)

    def connect_again() -> None:
        nonlocal again
        again = False
        push.redirect(push.address)

    protocol = await _open(raw, _Protocol(sender, None, hear))
    outbox = Outbox(sender, incarnation, max_bytes)
    push = AsyncPush(protocol, outbox, raw, address, emulate, security is not None)
    try:
        raw.connect(address)
    except zmq.ZMQError as error:
        await protocol.close()
        raise explain("connect to", address, error) from None
    return push


def _most_parts(max_bytes: int, security: Security | None) -> int:
    return MAX_PARTS if security is None else most_pieces(max_bytes + MAX_HEADER_BYTES)


def _air(emulate: Emulate | None, sender: str, deliver: Deliver) -> Air | None:
    return Air(Line(emulate, sender), deliver) if emulate is not None and emulate.on else None


def _behind(address: str) -> LinkError:
    return LinkError(errno.ENOBUFS, f"{address} is {HWM_FRAMES} frames behind; is it running?")


class _Protocol(aiozmq.ZmqProtocol):  # type: ignore[misc]
    """aiozmq's callbacks. `transport` is never logged, printed or handed out (module docstring)."""

    def __init__(
        self,
        link: str,
        on_message: Callable[[Sequence[Buffer]], None] | None,
        on_peer: OnPeer | None,
    ) -> None:
        self.transport: Any = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_peer = on_peer
        self._peers = PeerWatch(link)
        self._on_message = on_message
        self._error: BaseException | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, exc: BaseException | None) -> None:
        error = self._error or exc
        if error is None:
            self.lost.set_result(None)
        else:
            self.lost.set_exception(error)

    def msg_received(self, data: Sequence[bytes]) -> None:
        assert self._on_message is not None
        self._guard(self._on_message, data)

    def event_received(self, event: Any) -> None:
        seen = meaning(event.event, event.value)
        told = seen and self._peers.take(seen, event.value, event.endpoint)
        if told and self.on_peer is not None:
            self._guard(self.on_peer, told)

    def _guard(self, callback: Callable[[Any], None], argument: Any) -> None:
        try:
            if self._error is None:
                callback(argument)
        except Exception as error:  # kept for wait(); out of here it would stop the reader
            self._error = error
            self.transport.abort()

    async def close(self, linger_s: float = 0.0) -> None:
        """Let go of the socket; aiozmq's close would wait for its buffer, peer or no peer."""
        if not self.lost.done():
            self.transport.setsockopt(zmq.LINGER, round(linger_s * 1000))
            self.transport.abort()
        await asyncio.wait([self.lost])


async def _open(raw: zmq.Socket[bytes], protocol: _Protocol) -> _Protocol:
    """Give the socket to aiozmq; the monitor must be on before it binds or connects."""
    await aiozmq.create_zmq_connection(lambda: protocol, raw.type, zmq_sock=raw)
    protocol.transport.set_write_buffer_limits(high=1 << 62, low=0)
    if protocol.on_peer is not None:
        await protocol.transport.enable_monitor(sum(EVENTS))
    return protocol

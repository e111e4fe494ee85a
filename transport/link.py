"""Owns the sockets: PUSH and PULL links that carry numbered frames; the only file that imports zmq.

Two pairs with the same meaning: PushLink and PullLink block and belong to one thread (a stage's
compute thread); open_push and open_pull run in an event loop on aiozmq. Knows no stage, turn or
policy. What can't be decoded, is repeated, or comes from a dead incarnation is counted and dropped
here; a jump in the numbers is delivered as a LinkGap before the frame that shows it.

Three mistakes make an aiozmq socket deaf for ever (stock loop and uvloop), so no transport leaves
this file: repr() of a transport eats the edge-triggered fd (never log one), an exception out of
msg_received stops the reader, and close() while reading is paused leaves a stale fd behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import aiozmq
import zmq

from transport.address import listening, numeric
from transport.codec import MAX_HEADER_BYTES, MAX_PARTS, MAX_PAYLOAD_BYTES
from transport.emulate import Air, Deliver, Emulate, Line
from transport.frame import Buffer, Envelope, Frame, LinkGap
from transport.numbering import Inbox, LinkCounts, OnDrop, Outbox

HWM_FRAMES = 1000  # far above any scheduler window (stages + 1), which is what bounds memory
BIND_PATIENCE_S = 1.0  # libzmq releases a closed socket's address a moment later
COPY_BYTES = 1 << 20  # a smaller part is copied when sent: passing a reference costs more
VIEW_BYTES = 1 << 16  # a larger part is received as a view: a copy costs more
SEND_TIMEOUT_S = 10.0

OnFrame: TypeAlias = Callable[[Frame, Envelope], None]


class LinkError(OSError):
    """A link can't be opened, or its peer takes no frames; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Security:
    """CURVE keys of one side, Z85 text of 40 characters each; None anywhere means plain sockets.

    server_key: the PULL side's public key, needed to push. Clients are encrypted but not yet
    checked against a list of allowed keys.
    """

    public_key: str
    secret_key: str
    server_key: str | None = None


def make_keys() -> tuple[str, str]:
    """A new CURVE pair (public, secret) as Z85 text, from the system's randomness."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """What a socket monitor saw. event: "connected", "disconnected" or "refused" (handshake)."""

    link: str
    event: str
    address: str


OnPeer: TypeAlias = Callable[[PeerEvent], None]


class PushLink:
    """The sending end of a link, blocking; use it from one thread only.

    address: the peer's, "tcp://host:port" or "ipc://path"; it need not be up yet. sender names this
    socket and must be unique among the senders of that peer (a stage's heartbeats leave through
    another socket than its frames: "s0/control" and "s0"); incarnation is the process's random
    63-bit life number. emulate: frames take their time, and the thread that delivers them owns the
    socket from then on. Raises LinkError for an address that is none.
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
    ) -> None:
        self.address = address
        self.header: Buffer = b""  # of the last frame that was sent, as it was encoded
        self._timeout_s = timeout_s
        self._outbox = Outbox(sender, incarnation, max_bytes)
        self._socket = _socket(zmq.PUSH, address, max_bytes, security)
        self._socket.sndtimeo = round(timeout_s * 1000)
        self._socket.copy_threshold = COPY_BYTES
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise _explain("connect to", address, error) from None
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

    def _write(self, parts: Sequence[Buffer]) -> None:
        try:
            for part in parts[:-1]:
                self._socket.send(part, zmq.SNDMORE)
            self._socket.send(parts[-1], copy=False)  # blocks on a message's first part only
        except zmq.Again:
            raise LinkError(
                errno.ETIMEDOUT,
                f"{self.address} took no frame for {self._timeout_s:g} s; is that process running?",
            ) from None

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
    where messages are dropped: on_drop(reason) hears of each. Raises LinkError when the address
    is in use or is none.
    """

    def __init__(
        self,
        address: str,
        *,
        link: str,
        max_bytes: int = MAX_PAYLOAD_BYTES,
        security: Security | None = None,
        on_drop: OnDrop | None = None,
    ) -> None:
        self._inbox = Inbox(link, on_drop)
        self._ready: deque[tuple[Frame, Envelope]] = deque()  # at most a frame behind its gap
        self._socket = _socket(zmq.PULL, address, max_bytes, security)
        self._timeout_ms = -1  # libzmq's word for no timeout, the socket's default
        self.envelope: Envelope | None = None  # of the frame that recv returned last
        self.header: Buffer | None = None  # of its message; None for a LinkGap
        self._last: Buffer = b""  # the last message's header; its tensor is not kept
        deadline = time.monotonic() + BIND_PATIENCE_S
        try:
            while not _bind(self._socket, address, last=time.monotonic() >= deadline):
                time.sleep(0.05)
        except LinkError:
            self._socket.close()
            raise
        self.address = _endpoint(self._socket)

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
                self._last = parts[0]
                self._ready.extend(self._inbox.take(parts))
                if self._ready:
                    break
                self._wait_at_most(deadline - time.monotonic())
        frame, self.envelope = self._ready.popleft()
        self.header = None if isinstance(frame, LinkGap) else self._last
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
            if len(parts) <= MAX_PARTS:  # one too many shows; what follows it need not be kept
                parts.append(message.bytes if len(message) < VIEW_BYTES else message.buffer)
        return parts

    def close(self) -> None:
        """Close and release the address; messages not yet received are lost."""
        self._socket.close(linger=0)


class AsyncPull:
    """The receiving end in an event loop; made by open_pull."""

    def __init__(self, protocol: _Protocol, inbox: Inbox, address: str) -> None:
        self._protocol = protocol
        self._inbox = inbox
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
        await self._protocol.close()


class AsyncPush:
    """The sending end in an event loop; made by open_push."""

    def __init__(
        self, protocol: _Protocol, outbox: Outbox, address: str, emulate: Emulate | None
    ) -> None:
        self._protocol = protocol
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
            self._protocol.transport.write(parts)
        elif not self._air.put(parts):
            raise _behind(self.address)
        return self._outbox.sent()

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
            self._protocol.transport.write(parts)

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

    raw = _socket(zmq.PULL, address, max_bytes, security)
    protocol = await _open(raw, _Protocol(link, on_message, on_peer))
    deadline = time.monotonic() + BIND_PATIENCE_S
    try:
        while not _bind(raw, address, last=time.monotonic() >= deadline):
            await asyncio.sleep(0.05)
    except LinkError:
        await protocol.close()
        raise
    return AsyncPull(protocol, inbox, _endpoint(raw))


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
    raw = _socket(zmq.PUSH, address, max_bytes, security)
    protocol = await _open(raw, _Protocol(sender, None, on_peer))
    try:
        raw.connect(address)
    except zmq.ZMQError as error:
        await protocol.close()
        raise _explain("connect to", address, error) from None
    return AsyncPush(protocol, Outbox(sender, incarnation, max_bytes), address, emulate)


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
        self._link = link
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
        name = _EVENTS.get(event.event)
        if name is not None and self.on_peer is not None:
            self._guard(self.on_peer, PeerEvent(self._link, name, event.endpoint))

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


_EVENTS = {
    int(zmq.EVENT_HANDSHAKE_SUCCEEDED): "connected",
    int(zmq.EVENT_DISCONNECTED): "disconnected",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "refused",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "refused",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "refused",
}


async def _open(raw: zmq.Socket[bytes], protocol: _Protocol) -> _Protocol:
    """Give the socket to aiozmq; the monitor must be on before it binds or connects."""
    await aiozmq.create_zmq_connection(lambda: protocol, raw.type, zmq_sock=raw)
    protocol.transport.set_write_buffer_limits(high=1 << 62, low=0)
    if protocol.on_peer is not None:
        await protocol.transport.enable_monitor(sum(_EVENTS))
    return protocol


def _socket(
    kind: zmq.SocketType, address: str, max_bytes: int, security: Security | None
) -> zmq.Socket[bytes]:
    raw: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    raw.linger = 0
    raw.set_hwm(HWM_FRAMES)
    raw.maxmsgsize = max(max_bytes, MAX_HEADER_BYTES)
    raw.ipv6 = "[" in address
    raw.tcp_keepalive = 1  # a vanished machine is noticed in 30 s; ZMTP's own heartbeats would
    raw.tcp_keepalive_idle = 10  # wait behind a large frame on a slow link and cut it
    raw.tcp_keepalive_intvl = 5
    raw.tcp_keepalive_cnt = 4
    raw.reconnect_ivl = 50
    raw.reconnect_ivl_max = 1000
    if security is not None:
        raw.curve_publickey = security.public_key.encode()
        raw.curve_secretkey = security.secret_key.encode()
        if kind == zmq.PULL:
            raw.curve_server = 1
        elif security.server_key is not None:
            raw.curve_serverkey = security.server_key.encode()
    return raw


def _bind(raw: zmq.Socket[bytes], address: str, *, last: bool) -> bool:
    """Bind; False when the address is in use and there is time to try again."""
    try:
        if address.startswith("ipc://") and listening(address.removeprefix("ipc://")):
            raise zmq.ZMQError(errno.EADDRINUSE)  # libzmq would take the path from its owner
        raw.bind(numeric(address))
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE and not last:
            return False
        raise _explain("bind", address, error) from None
    return True


def _explain(action: str, address: str, error: zmq.ZMQError) -> LinkError:
    advice = {
        errno.EADDRINUSE: "another process listens there: stop it, or choose another address",
        errno.EADDRNOTAVAIL: "not an address of this machine: set `bind` beside `address`",
        errno.ENODEV: "not an address of this machine: set `bind` beside `address`",
        errno.EINVAL: _FORM,
        errno.ENOENT: "the folder of the ipc path does not exist: create it",
        errno.EACCES: "not allowed: choose a port above 1023 or a writable folder",
        errno.ENAMETOOLONG: "an ipc path has at most 107 bytes: choose a shorter one",
    }.get(error.errno or 0, "check the address")
    if not address.startswith(("tcp://", "ipc://")):
        advice = _FORM
    why = zmq.strerror(error.errno or 0)
    return LinkError(error.errno, f"cannot {action} {address}: {why}; {advice}")


_FORM = "not an address: write tcp://host:port or ipc://path"


def _endpoint(raw: zmq.Socket[bytes]) -> str:
    found = raw.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(found, bytes)
    return found.rstrip(b"\0").decode()

"""Owns raw zmq sockets: their options, keys and addresses, and the monitor of a blocking one.

transport.link puts frames on them; nothing else uses them.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import uuid

import zmq
from zmq.utils.monitor import recv_monitor_message

from transport.address import listening, numeric
from transport.codec import MAX_HEADER_BYTES
from transport.door import door
from transport.keys import Security
from transport.peers import OnPeer, PeerWatch, Seen
from transport.pieces import PIECE_BYTES

HWM_FRAMES = 1000  # far above any scheduler window (stages + 1), which is what bounds memory
HANDSHAKE_S = 5.0  # a stranger that says nothing holds a connection for so long
# What a peer's machine has not acknowledged for so long ends the connection. TCP itself tries ever
# more seldom: after 15 s of silence it found a machine that was back 12 s later, with this 1 s.
UNACKED_S = 10.0
CONNECT_S = 2.0  # of one attempt, for the same reason
CURVE_BYTES = 64  # what encryption adds to a message part, and some more

EVENTS = {
    int(zmq.EVENT_ACCEPTED): Seen.OPENED,
    int(zmq.EVENT_CONNECTED): Seen.OPENED,
    int(zmq.EVENT_HANDSHAKE_SUCCEEDED): Seen.LET_IN,
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): Seen.WRONG_KEY,
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): Seen.STRANGER,
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): Seen.NONSENSE,
    int(zmq.EVENT_DISCONNECTED): Seen.CLOSED,
}
_MISMATCH = 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH, a value of FAILED_PROTOCOL
_CRYPTOGRAPHIC = 0x11000001  # ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC


class LinkError(OSError):
    """A link can't be opened, or its peer takes no frames; the message says what to do."""


def make_keys() -> tuple[str, str]:
    """A new CURVE pair (public, secret) as Z85 text, from the system's randomness."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def public_of(secret: str) -> str:
    """The public key of a secret one."""
    return str(zmq.curve_public(secret.encode()).decode())


def meaning(event: int, value: int) -> Seen | None:
    """What an event of EVENTS, with its value, says; None for another."""
    seen = EVENTS.get(event)
    if seen is Seen.WRONG_KEY and value == _MISMATCH:
        return Seen.NO_KEY
    return Seen.NONSENSE if seen is Seen.WRONG_KEY and value != _CRYPTOGRAPHIC else seen


def watch(raw: zmq.Socket[bytes], link: str, on_peer: OnPeer) -> None:
    """Tell on_peer of every peer of a blocking socket, from a thread that ends with the socket.

    Before it binds or connects. The thread reads at once, whatever the socket's own thread does:
    libzmq's I/O thread would wait for a reader that is 1,000 events behind.
    """
    endpoint = f"inproc://kvring-monitor-{uuid.uuid4().hex}"
    raw.monitor(endpoint, sum(EVENTS) | zmq.EVENT_MONITOR_STOPPED)
    events: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    events.linger = 0
    events.connect(endpoint)
    peers = PeerWatch(link)

    def read() -> None:
        with events:
            while True:
                event = recv_monitor_message(events)
                if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                    return
                seen = meaning(event["event"], event["value"])
                told = seen and peers.take(seen, event["value"], event["endpoint"].decode())
                if told:
                    on_peer(told)

    threading.Thread(target=read, name=f"peers-{link}", daemon=True).start()


def open_socket(
    kind: zmq.SocketType, address: str, max_bytes: int, security: Security | None
) -> zmq.Socket[bytes]:
    """A socket with every option set, neither bound nor connected."""
    raw: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    raw.linger = 0
    raw.set_hwm(HWM_FRAMES)
    raw.maxmsgsize = max(max_bytes, MAX_HEADER_BYTES)
    raw.handshake_ivl = round(HANDSHAKE_S * 1000)
    raw.ipv6 = "[" in address
    raw.tcp_keepalive = 1  # a vanished machine is noticed in 30 s at most; ZMTP's
    raw.tcp_keepalive_idle = 10  # own heartbeats would wait behind a large frame on a slow link
    raw.tcp_keepalive_intvl = 5
    raw.tcp_keepalive_cnt = 4
    raw.tcp_maxrt = round(UNACKED_S * 1000)
    raw.connect_timeout = round(CONNECT_S * 1000)
    raw.reconnect_ivl = 50
    raw.reconnect_ivl_max = 250  # who comes back waits for it; a refused connect costs 0.1 ms
    if security is not None:
        raw.curve_publickey = security.public_key.encode()
        raw.curve_secretkey = security.secret_key.encode()
        raw.maxmsgsize = PIECE_BYTES + CURVE_BYTES
        if kind == zmq.PULL:
            raw.curve_server = 1
            raw.zap_domain = door().open(security.allowed)
            raw.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer nobody gets in
        else:
            assert security.server_key is not None, address
            raw.curve_serverkey = security.server_key.encode()
    return raw


def reconnect(raw: zmq.Socket[bytes], old: str, new: str) -> None:
    """Connect a PUSH socket again: its peer has moved, or `old` refused the handshake.

    libzmq gives a refused connection up for good. So a peer that gets the right keys later, or a
    stranger on the peer's port while that is down, would end the link until this process restarts.
    What was queued is lost; the receiver sees it.
    """
    with contextlib.suppress(zmq.ZMQError):
        raw.disconnect(old)
    with contextlib.suppress(zmq.ZMQError):  # closed meanwhile: its owner knows
        raw.connect(new)


def shut_door(raw: zmq.Socket[bytes]) -> None:
    """Before a PULL socket is closed: its keys open nothing any more."""
    domain = raw.getsockopt(zmq.ZAP_DOMAIN)
    if domain:
        assert isinstance(domain, bytes)
        door().shut(domain.rstrip(b"\0"))


def bind(raw: zmq.Socket[bytes], address: str, *, last: bool) -> bool:
    """Bind; False when the address is in use and there is time to try again."""
    try:
        if address.startswith("ipc://") and listening(address.removeprefix("ipc://")):
            raise zmq.ZMQError(errno.EADDRINUSE)  # libzmq would take the path from its owner
        raw.bind(numeric(address))
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE and not last:
            return False
        raise explain("bind", address, error) from None
    return True


def explain(action: str, address: str, error: zmq.ZMQError) -> LinkError:
    """The same error in words, with what to do."""
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


def endpoint(raw: zmq.Socket[bytes]) -> str:
    """Where a bound socket listens."""
    found = raw.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(found, bytes)
    return found.rstrip(b"\0").decode()

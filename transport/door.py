"""Owns who is let in: the process's one answer to libzmq's question whose key may push where.

libzmq asks a ZAP handler (ZeroMQ RFC 27) about every CURVE handshake, over inproc and blocking only
that connection. It sits in a thread of its own, so that it answers sockets of any thread or loop.
A socket's domain is its own, unknown domains and keys are refused, and so is everybody while nobody
answers (ZAP_ENFORCE_DOMAIN).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from functools import cache

import zmq

from transport.keys import key_bytes

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_REQUEST_PARTS = 7  # version, request id, domain, address, identity, mechanism, CURVE's key
_STARTING = threading.Lock()


class Door:
    """Domains and the keys that may enter them. Use `door()`: a context has one handler."""

    def __init__(self) -> None:
        self._allowed: dict[bytes, frozenset[bytes]] = {}
        self._numbers = itertools.count()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.REP)
        self._socket.bind(_ENDPOINT)
        threading.Thread(target=self._run, name="door", daemon=True).start()

    def open(self, keys: Iterable[str]) -> bytes:
        """A new domain that these public keys may enter."""
        domain = f"kvring-{next(self._numbers)}".encode()
        self._allowed[domain] = frozenset(key_bytes(key) for key in keys)
        return domain

    def shut(self, domain: bytes) -> None:
        """Nobody enters the domain any more; those inside stay until its socket is closed."""
        self._allowed.pop(domain, None)

    def _run(self) -> None:
        while True:
            request = self._socket.recv_multipart()
            number = request[1] if len(request) > 1 else b""
            status = b"200" if self._admits(request) else b"400"
            self._socket.send_multipart([_VERSION, number, status, b"", b"", b""])

    def _admits(self, request: list[bytes]) -> bool:
        if len(request) != _REQUEST_PARTS or request[0] != _VERSION or request[5] != b"CURVE":
            return False
        return request[6] in self._allowed.get(request[2], frozenset())


@cache
def _made() -> Door:
    return Door()


def door() -> Door:
    """The process's handler; started when first needed, before any socket with keys binds."""
    with _STARTING:
        return _made()

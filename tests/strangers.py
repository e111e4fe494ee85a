"""Peers that are not kvring's: raw ZeroMQ sockets and plain TCP, with the keys they are given."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import zmq

from transport.codec import encode
from transport.frame import Envelope, RollCall

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
LONG_COMMAND = b"\x06"  # ZMTP 3: then its size in 8 bytes


@dataclass(frozen=True, slots=True)
class Keys:
    """What a client uses: its own pair, and the public key that it takes the server's to be."""

    public: str
    secret: str
    server: str


def takeover(ring: str) -> Sequence[bytes]:
    """A frame that would end every stage's epoch, if one ever took it."""
    envelope = Envelope(f"{ring}/coordinator", 1, 0)
    return [bytes(part) for part in encode(RollCall(ring, 1 << 60), envelope)]


@contextmanager
def pushing(
    address: str, keys: Keys | None, mechanism: str = "CURVE"
) -> Iterator[zmq.Socket[bytes]]:
    """A raw PUSH socket that connects with these keys, or with none."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.linger = 0
        push.reconnect_ivl = 20
        if keys is not None:
            push.curve_publickey = keys.public.encode()
            push.curve_secretkey = keys.secret.encode()
            push.curve_serverkey = keys.server.encode()
        elif mechanism == "PLAIN":
            push.plain_username, push.plain_password = b"admin", b"admin"
        push.connect(address)
        yield push


def flood(
    address: str, messages: Sequence[Sequence[bytes]], keys: Keys | None, mechanism: str = "CURVE"
) -> int:
    """Push the messages again and again for half a second; how many were taken off its hands."""
    sent = 0
    with pushing(address, keys, mechanism) as push:
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            for message in messages:
                with suppress(zmq.Again):
                    push.send_multipart(message, zmq.DONTWAIT)
                    sent += 1
            time.sleep(0.01)
    return sent


def shout(address: str, data: bytes) -> int:
    """Send bytes over plain TCP until the other side hangs up; how many it took."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    taken = 0
    with socket.create_connection((host, int(port)), timeout=10) as peer, suppress(OSError):
        for at in range(0, len(data), 1 << 16):
            peer.sendall(data[at : at + (1 << 16)])
            taken = at + (1 << 16)
        while peer.recv(1 << 16):
            pass
    return taken


def huge_command(announced: int, sent: int) -> bytes:
    """A CURVE greeting and the beginning of a command that says how large it will be."""
    return GREETING + LONG_COMMAND + struct.pack(">Q", announced) + bytes(sent)

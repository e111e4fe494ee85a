"""The HTTP server against raw sockets: a toy ring goes on, and its neighbour's tokens are right."""

from __future__ import annotations

import contextlib
import errno
import json
import random
import socket
import struct
import time
from collections.abc import Iterator
from threading import Event, Thread

import pytest

from tests import processes
from tests.processes import get
from tests.toyclient import complete, truth

BODY = json.dumps({"prompt": [1, 2, 3], "max_tokens": 3}).encode()
PATH = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
WHOLE = PATH + b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
CHUNKED = PATH + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
OPEN_S = 0.3  # for whoever says nothing; the server must not wait with us

MESSAGES: dict[str, bytes] = {
    "binary": bytes(range(256)) * 40,
    "zeros": bytes(100_000),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(24),
    "no version": b"GET /health\r\n\r\n",
    "another version": b"GET /health HTTP/9.9\r\n\r\n",
    "a method of a megabyte": b"G" * (1 << 20) + b" / HTTP/1.1\r\n\r\n",
    "a path of a megabyte": b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n",
    "a header of a megabyte": GET + b"X: " + b"a" * (1 << 20) + b"\r\n\r\n",
    "50,000 headers": GET + b"X: y\r\n" * 50_000 + b"\r\n",
    "folded headers": GET + b"X: y\r\n z\r\n\r\n",
    "a header without a name": GET + b": y\r\n\r\n",
    "bytes in a header": GET + b"X: \xff\x00\x01\r\n\r\n",
    "an escape that is none": b"GET /%zz%00%ff HTTP/1.1\r\nHost: x\r\n\r\n",
    "a slot of 5,000 digits": b"DELETE /ring/slots/"
    + b"9" * 5000
    + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a slot in other digits": b"DELETE /ring/slots/%D9%A3 HTTP/1.1\r\nHost: x\r\n\r\n",
    "line feeds only": b"GET /health HTTP/1.1\nHost: x\n\n",
    "a length too long": PATH + b"Content-Length: 100000\r\n\r\n" + BODY,
    "a length too short": PATH + b"Content-Length: 5\r\n\r\n" + BODY,
    "a negative length": PATH + b"Content-Length: -1\r\n\r\n" + BODY,
    "a length of 400 digits": PATH + b"Content-Length: " + b"9" * 400 + b"\r\n\r\n" + BODY,
    "two lengths": PATH + b"Content-Length: 5\r\nContent-Length: 50\r\n\r\n" + BODY,
    "a length and chunks": CHUNKED[:-2] + b"Content-Length: 5\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "a chunk of no size": CHUNKED + b"\r\nhello\r\n0\r\n\r\n",
    "a chunk of 2^64 bytes": CHUNKED + b"FFFFFFFFFFFFFFFFF\r\nhello",
    "a negative chunk": CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n",
    "a chunk that is longer": CHUNKED + b"2\r\nhello\r\n0\r\n\r\n",
    "chunks without an end": CHUNKED + b"1\r\n{\r\n" * 5000,
    "a chunk's endless comment": CHUNKED + b"1;" + b"x" * (1 << 20),
    "another coding": PATH + b"Transfer-Encoding: gzip\r\n\r\n" + bytes(50),
    "100 requests at once": WHOLE * 100,
    "a request behind a broken one": WHOLE + b"nonsense\r\n\r\n" + WHOLE,
    "an upgrade": GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + bytes(100),
    "an expectation": PATH + b"Expect: 100-continue\r\nContent-Length: 50\r\n\r\n",
    "CONNECT": b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    "another's URL": b"GET http://example.com/health HTTP/1.1\r\nHost: x\r\n\r\n",
    "an asterisk": b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    "a path that climbs": b"GET /v1/models/../../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with processes.fleet(tmp_path_factory.mktemp("hostile")) as made:
        process, base = made.up("--model", "toy", "--stages", "2", "--max-model-len", "600")
        made.ready(base)
        yield base
        assert process.popen.poll() is None, process


@pytest.fixture(scope="module")
def neighbour(ring: str) -> Iterator[list[int]]:
    """Somebody who goes on asking all the while; how often, in the end."""
    over, asked, wrong = Event(), [0], []

    def ask() -> None:
        draw = random.Random(5)
        while not over.is_set():
            prompt = [draw.randrange(256) for _ in range(draw.randrange(1, 30))]
            answer = complete(ring, prompt, 30)
            asked[0] += 1
            if answer.tokens != truth(prompt, 30):
                wrong.append(prompt)

    thread = Thread(target=ask)
    thread.start()
    yield asked
    over.set()
    thread.join(60.0)
    assert not thread.is_alive()
    assert asked[0] > 10
    assert not wrong


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20.0)


def answers(link: socket.socket, limit_s: float) -> bytes:
    """What comes until the server closes, or is silent for so long."""
    link.settimeout(limit_s)
    found = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        while part := link.recv(1 << 16):
            found += part
    return found


def alive(url: str) -> None:
    began = time.monotonic()
    assert get(f"{url}/health").status_code == 200
    assert time.monotonic() - began < 10.0


def no_500(said: bytes) -> None:
    for line in said.split(b"\r\n"):
        if line.startswith(b"HTTP/1.1 "):
            assert line[9:12] != b"500", said[-2000:]


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_a_hostile_message(message: bytes, ring: str, neighbour: list[int]) -> None:
    with connect(ring) as link:
        with contextlib.suppress(ConnectionError):  # it may close before it has read all
            link.sendall(message)
        no_500(answers(link, OPEN_S))
    alive(ring)


@contextlib.contextmanager
def _hung_up() -> Iterator[None]:
    """The server may close at any point: then one can't even be half closed. No silence passes."""
    try:
        yield
    except ConnectionError:
        pass
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise


@pytest.mark.parametrize("seed", range(3))
def test_spoiled_requests(seed: int, ring: str, neighbour: list[int]) -> None:
    """Bytes replaced and cut; sent in pieces; then half closed, reset or left open."""
    draw = random.Random(seed)
    left_open = []
    for _ in range(40):
        data = bytearray(draw.choice([WHOLE, CHUNKED + b"1\r\n{\r\n0\r\n\r\n", GET + b"\r\n"]))
        for _spoil in range(draw.randrange(1, 6)):
            at = draw.randrange(len(data))
            data[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        link = connect(ring)
        with _hung_up():
            for start in range(0, len(data), 37):
                link.sendall(data[start : start + 37])
            ending = draw.choice(["half", "reset", "open", "close"])
            if ending == "half":
                link.shutdown(socket.SHUT_WR)
                no_500(answers(link, OPEN_S))
            elif ending == "reset":
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif ending == "open":
                left_open.append(link)
                continue
        link.close()
    alive(ring)
    for link in left_open:
        no_500(answers(link, 0.01))
        link.close()
    processes.idle(ring)


def test_two_hundred_slow_clients_hold_nobody_up(ring: str, neighbour: list[int]) -> None:
    links = [connect(ring) for _ in range(200)]
    before = neighbour[0]
    for index in range(12):
        for link in links:
            link.sendall(WHOLE[index : index + 1])
        time.sleep(0.1)
    assert neighbour[0] > before
    for link in links:
        link.close()
    alive(ring)
    prompt = [7, 8, 9]
    assert complete(ring, prompt, 20).tokens == truth(prompt, 20)

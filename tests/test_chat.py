from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakeserver import FakeServer, serve
from tools import cli

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serve() as server:
        yield server


def chat(fake: FakeServer, monkeypatch: pytest.MonkeyPatch, text: str, *options: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return cli.run(["chat", "--url", fake.url, *options])


def test_a_piped_conversation_prints_only_replies_on_stdout(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.replies = ["Good day", "Fine thanks"]
    assert chat(fake, monkeypatch, "hello there\nhow are you\n", "--system", "be brief") == 0
    seen = capsys.readouterr()
    assert seen.out == "Good day\nFine thanks\n"
    assert "\033" not in seen.err
    first, second = seen.err.splitlines()
    assert "0 cached + 4 prefilled · 2 tokens · 123.4 tokens/s" in first
    assert "5 cached + 4 prefilled" in second  # be brief hello there Good | day how are you
    assert [message["role"] for message in fake.bodies[1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert fake.bodies[0]["model"] == "fake"
    assert "max_tokens" not in fake.bodies[0]


def test_options_reach_the_request(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.api_key = "secret"
    options = ["--api-key", "secret", "--model", "m", "--temperature", "0.5", "--max-tokens", "3"]
    assert chat(fake, monkeypatch, "hi\n", *options) == 0
    body = fake.bodies[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.5, 3)


def test_a_trailing_backslash_continues_the_message(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chat(fake, monkeypatch, "one\\\ntwo\\\nthree\n") == 0
    assert fake.bodies[0]["messages"][0]["content"] == "one\ntwo\nthree"


def test_commands(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.replies = ["A", "B"]
    lines = "/stats\nfirst\n/stats\n/new\nsecond\n/help\n/what\n/exit\nnever\n"
    assert chat(fake, monkeypatch, lines) == 0
    out = capsys.readouterr().out
    assert "no turn yet" in out
    assert "  1  first token" in out
    assert "Ctrl-C stops a reply" in out
    assert "/what: no such command" in out
    assert [len(body["messages"]) for body in fake.bodies] == [1, 1]


def test_it_waits_while_the_ring_loads(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.not_ready = 2
    assert chat(fake, monkeypatch, "hi\n") == 0
    waited = [line for line in capsys.readouterr().err.splitlines() if "waiting" in line]
    assert waited == [f"waiting for {fake.url}: r0: waiting for s1 40%"]


def test_a_turn_refused_with_503_is_sent_again(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.reject = (503, "the ring is forming", "not_ready")
    fake.replies = ["here again"]
    assert chat(fake, monkeypatch, "hi\n") == 0
    assert capsys.readouterr().out == "here again\n"


def test_errors_are_one_line_and_exit_code_1(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.reject = (400, "5000 tokens are too many", "context_length_exceeded")
    assert chat(fake, monkeypatch, "hi\n") == 1
    err = capsys.readouterr().err
    assert err == (
        "kvring: the server says 400: 5000 tokens are too many (/new starts another conversation)\n"
    )
    fake.error_after = 1
    assert chat(fake, monkeypatch, "hi\n") == 1
    assert "kvring: the server ended the reply: ring lost" in capsys.readouterr().err


def test_no_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["chat", "--url", "127.0.0.1:9"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("kvring: no server at http://127.0.0.1:9 ")
    assert "kvring up" in err
    assert err.count("\n") == 1
    assert cli.run(["chat", "--url", "ftp://x"]) == 2


def test_ctrl_c_stops_the_reply_and_a_second_one_leaves(fake: FakeServer) -> None:
    """In a real terminal: the interrupt closes the stream, which the server sees as a cancel."""
    fake.endless = True
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "tools.cli", "chat", "--url", fake.url]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, cwd=ROOT)
    os.close(slave)
    screen = Screen(master)
    try:
        screen.wait_for("> ")
        os.write(master, b"talk\n")
        screen.wait_for("more more")
        process.send_signal(signal.SIGINT)
        screen.wait_for("\033[2mfirst token")
        screen.wait_for("stopped")
        assert fake.cancelled.wait(10)
        screen.wait_for("> ")
        assert process.poll() is None
        time.sleep(0.3)  # readline shows its prompt a moment before it can be interrupted
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
    finally:
        process.kill()
        process.wait()
        os.close(master)


class Screen:
    """What a program wrote to its terminal, consumed in order."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unread = ""

    def wait_for(self, text: str) -> None:
        """Read past the next `text`; fails after 10 s without it."""
        deadline = time.monotonic() + 10
        while text not in self._unread:
            rest = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._descriptor], [], [], rest)
            assert ready, f"never saw {text!r} in {self._unread!r}"
            self._unread += os.read(self._descriptor, 65536).decode(errors="replace")
        self._unread = self._unread.split(text, 1)[1]

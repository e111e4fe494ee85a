from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakeserver import FakeServer, serve
from tests.screen import CTRL_C, ENTER, ROOT, terminal
from tools import cli
from tools.client import Json, Reply
from tools.conversation import Turn
from tools.prompt import KEPT, History
from tools.terminal import console
from tools.turns import table


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
    assert capsys.readouterr() == ("Good day\nFine thanks\n", "")
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
    fake.replies = ["A", "B", "C", "D"]
    lines = "/stats\n/retry\n/back\n/fork 1\nfirst\nsecond\n/stats\n/fork x\n/fork 1\nother\n"
    rest = "/new\n/back\nthird\n/new now\n/help\n/what\n /what\n/exit\nnever\n"
    assert chat(fake, monkeypatch, lines + rest) == 0
    out = capsys.readouterr().out
    assert out.count("no turn yet") == 3  # stats, retry, fork
    assert "no other conversation yet" in out
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert rows[rows.index("A") + 2 :][:4] == [
        "turn cached prefilled first token tokens/s drafts reuse ended",
        "1 0 1 1.5 ms 123 -",
        "2 1 2 1.5 ms 123 3/4 at 1: another text stands there",
        "all 1 (25%) 3",
    ]
    assert "/fork x: no such turn; give 0 to 2" in out
    assert "Ctrl-C stops a reply" in out
    assert "/new takes no argument" in out
    assert "/what: no such command" in out
    said = [[each["content"] for each in body["messages"]] for body in fake.bodies]
    assert said[2:4] == [["first", "A", "other"], ["first", "A", "other", "C", "third"]]
    assert said[4][-1] == " /what"
    sessions = [body["prompt_cache_key"] for body in fake.bodies]
    assert sessions[0] == sessions[1] != sessions[2] == sessions[3]


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
    words = "kvring: the server says 400: 5000 tokens are too many"
    assert err == f"{words} (docs/troubleshooting.md#prompt-too-long)\n"
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


def test_ctrl_c_cuts_a_stream_of_a_server_without_cancel(fake: FakeServer, tmp_path: Path) -> None:
    """In a real terminal: the stream is closed, which the server sees as a cancel."""
    fake.endless = True
    with terminal("chat", "--url", fake.url, state=tmp_path) as screen:
        screen.wait_for("> ")
        screen.press(f"talk{ENTER}")
        screen.wait_for("more more")
        screen.press(CTRL_C)
        screen.wait_for(r"first token .* · stopped")
        assert fake.cancelled.wait(10)
        screen.wait_for("> ")
        assert screen.process.poll() is None
        time.sleep(0.3)  # readline shows its prompt a moment before it can be interrupted
        screen.press(CTRL_C)
        screen.wait_for("Ctrl-C again(?s:.*)> ")
        time.sleep(0.3)
        screen.press("half a sent")
        screen.wait_for("half a sent")
        screen.press(CTRL_C)  # empties the line, and does not count
        screen.wait_for("> ")
        time.sleep(0.3)
        screen.press(CTRL_C)
        screen.wait_for("Ctrl-C again")
        time.sleep(0.3)
        screen.press(CTRL_C)
        assert screen.wait() == 130


def test_a_lost_server_costs_no_word(tmp_path: Path) -> None:
    with serve() as fake, terminal("chat", "--url", fake.url, state=tmp_path) as screen:
        screen.wait_for("> ")
        screen.press(f"one{ENTER}")
        screen.wait_for("cached 0 · prefilled 1 ")
        fake.error_after = 1
        screen.press(f"two{ENTER}")
        screen.wait_for(r"(?s)kvring: the server ended the reply: ring lost.*;.*lost: /retry")
        port = fake.port
        fake.stop()
        screen.press(f"/retry{ENTER}")
        screen.wait_for("(?s)kvring: no server at .*/retry asks")
        with serve(port) as again:
            screen.press(f"/retry{ENTER}")
            screen.wait_for("prefilled")
            screen.press(f"/retry{ENTER}")
            screen.wait_for("prefilled")
            screen.press(f"/stats{ENTER}")
            screen.wait_for("again 2 ")
            said = [[each["content"] for each in body["messages"]] for body in again.bodies]
            assert [words[::2] for words in said] == [["one", "two"]] * 2
            assert len({body["prompt_cache_key"] for body in fake.bodies + again.bodies}) == 1


def test_no_heading_of_the_turns_costs_is_cut() -> None:
    kvring: Json = {"matched": 12_345, "prefilled": 1_234, "ttft_ms": 123_456.0}
    usage: Json = {"completion_tokens": 90, "prompt_tokens": 13_579}
    usage |= {"prompt_tokens_details": {"cached_tokens": 12_345}}
    kvring |= {"drafts_accepted": 1_234, "drafts_rejected": 4_321}
    turns = [Turn("x", Reply(usage=usage, kvring=kvring), again) for again in (False, True)]
    for columns in (60, 71, 72, 80, 100):
        sink = io.StringIO()
        console(sink, columns).print(table(turns, columns))
        lines = sink.getvalue().splitlines()
        assert "…" not in sink.getvalue(), columns
        assert max(map(len, lines)) <= columns
        assert lines[columns < 72].split()[:2] == ["turn", "cached"], columns
    assert "(91%)" in lines[-1]


def test_without_a_terminal_there_is_the_reply_and_nothing_else(
    fake: FakeServer, tmp_path: Path
) -> None:
    """Also where only the input is a pipe: echo hi | kvring chat."""
    words = " ".join(["rather"] * 30)
    fake.replies = [words, words]
    command = ["chat", "--url", fake.url]
    program = [sys.executable, "-m", "tools.cli", *command]
    done = subprocess.run(program, input=b"hi\n", capture_output=True, cwd=ROOT, check=True)
    assert (done.stdout, done.stderr) == (f"{words}\n".encode(), b"")
    with subprocess.Popen(["echo", "hi"], stdout=subprocess.PIPE) as echo:
        assert echo.stdout is not None
        with terminal(*command, state=tmp_path, stdin=echo.stdout.fileno()) as screen:
            screen.wait_for(words)
            assert screen.wait() == 0
    assert screen.raw == f"{words}\r\n"
    assert list(tmp_path.iterdir()) == []


def test_replies_are_broken_between_words_and_cannot_steer_the_terminal(
    fake: FakeServer, tmp_path: Path
) -> None:
    fake.replies = [" ".join(["sentence"] * 9 + ["red\x1b[31m\x07", "x" * 100])]
    with terminal("chat", "--url", fake.url, state=tmp_path, columns=40) as screen:
        screen.wait_for("> ")
        screen.press(f"go{ENTER}")
        screen.wait_for(r"cached 0 · prefilled 1\s+first token 1.5 ms · 123 tokens/s")
        shown = screen.raw
    while moved := re.search(r"\x1b\[(\d+)D\x1b\[K", shown):  # taken to the next line
        shown = shown[: moved.start() - int(moved[1])] + shown[moved.end() :]
    lines = [line.strip("\r ") for line in shown.split("\n")]
    assert sum(line.endswith(" ".join(["sentence"] * 4)) for line in lines) == 2
    assert "sentence red\ufffd[31m\ufffd" in lines
    assert [len(line) for line in lines if set(line) == {"x"}] == [39, 39, 22]


def test_the_history_survives_what_may_happen_to_its_file(tmp_path: Path) -> None:
    file = tmp_path / "state" / "history"
    history = History(file)
    for text in ("a", "b", "b", "grüße\nzwei"):
        history.add(text)
    with file.open("a") as damaged:
        damaged.write('7\n"half a li')
    assert History(file).entries == ["a", "b", "grüße\nzwei"]
    file.write_text("".join(f'"{n}"\n' for n in range(2 * KEPT + 1)))
    assert History(file).entries[0] == str(KEPT + 1)
    assert len(file.read_text().splitlines()) == KEPT
    assert [each.name for each in file.parent.iterdir()] == ["history"]
    assert file.stat().st_mode & 0o777 == 0o600
    nowhere = History(file / "below")
    nowhere.add("kept for this run")
    assert nowhere.entries == ["kept for this run"]
    assert str(nowhere.trouble).startswith(str(file))
    os.mkfifo(tmp_path / "fifo")
    assert str(History(tmp_path / "fifo").trouble).endswith("fifo: no regular file")
    homeless = History(None)
    homeless.add("kept for this run")
    assert (homeless.entries, homeless.trouble) == (nowhere.entries, "there is no home directory")

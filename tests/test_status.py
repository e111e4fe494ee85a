from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakeserver import RING, FakeServer, serve
from tests.screen import BACKGROUND, CTRL_C, terminal
from tools import cli
from tools.client import Client, Json, Readiness
from tools.status import BAR_CELLS, bar, render


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serve() as server:
        yield server


def plain(text: str, _: str) -> str:
    return text


def test_a_ready_ring_as_text(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["status", "--url", fake.url]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "fake · ready · up 1 min 15 s · 4,096 tokens per slot · 1 running · 0 waiting",
        "",
        "ring r0 · ready · epoch 3 · exact · reuse on · 2/4 frames in flight · hop 0.41 ms"
        " · model ab12cd34ef56",
        "  stage  layers  state                   pid   memory  busy  heard      address",
        "  s0     0-9     ready                   4711  812 MB  43%   0.2 s ago  tcp://127.0.0.1:7000",
        "  s1     -       loading 40% (layer 14)  -     -       -     -          -",
        "  slot  resident                               turn  idle  kept  session",
        "  0     ████████████············  2,048/4,096  17    0 s   -     -",
        "  1     ························  0/4,096      -     -     -     -",
    ]


def test_not_ready_exits_with_3(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    fake.not_ready = 1
    assert cli.run(["status", "--url", fake.url]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert "not ready" in lines[0]
    assert lines[1] == "  r0: waiting for s1 40%"


def test_json_is_the_servers_own(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["status", "--json", "--url", fake.url + "/v1/"]) == 0
    assert json.loads(capsys.readouterr().out) == RING
    fake.not_ready = 1
    assert cli.run(["status", "--json", "--url", fake.url]) == 3
    assert json.loads(capsys.readouterr().out) == RING


def test_unreachable_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["status", "--url", "http://127.0.0.1:9"]) == 1
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith("kvring: no server at")


def test_a_wrong_key_is_said(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    fake.api_key = "secret"
    assert cli.run(["status", "--url", fake.url]) == 1
    said = "kvring: the server says 401: wrong API key (docs/troubleshooting.md#api-keys)\n"
    assert capsys.readouterr().err == said
    assert cli.run(["status", "--url", fake.url, "--api-key", "secret"]) == 0


def test_watching_goes_on_until_ctrl_c_and_waits_for_a_server_that_is_away(tmp_path: Path) -> None:
    with serve() as fake, terminal("status", "--url", fake.url, "-w", "0.1", state=tmp_path) as it:
        it.wait_for("fake · ready")
        port = fake.port
        fake.stop()
        it.wait_for("no server at")
        it.wait_for(r"waiting for it; \d s ago it said:")
        it.wait_for("fake · ready")
        with serve(port) as again:
            again.not_ready = 2
            it.wait_for("fake · not ready")
            it.wait_for("fake · ready")
            it.wait_for(r"(?s)fake · ready.*fake · ready")
            it.press(CTRL_C)
            assert it.wait() == 0
    assert "Traceback" not in it.text


def test_watching_into_a_pipe_prints_again_and_again(fake: FakeServer) -> None:
    command = [sys.executable, "-m", "tools.cli", "status", "--url", fake.url, "--watch", "0.1"]
    for option, first in (([], "fake · ready · up 1 min 15 s"), (["--json"], '{"model": "fake"')):
        pipe = subprocess.PIPE
        with subprocess.Popen([*command, *option], stdout=pipe, stderr=pipe, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            seen: list[str] = []
            while sum(line.startswith(first) for line in seen) < 2:
                seen.append(process.stdout.readline())
                assert seen[-1]
            process.send_signal(signal.SIGINT)
            rest, errors = process.stdout.read(), process.stderr.read()
        assert (process.returncode, errors) == (0, "")
        assert "\x1b" not in "".join(seen) + rest


def test_in_the_background_nothing_is_rewritten(fake: FakeServer, tmp_path: Path) -> None:
    """Someone types in that terminal."""
    options = ("status", "--url", fake.url, "-w", "0.1")
    with terminal(*options, state=tmp_path, start=BACKGROUND) as screen:
        screen.wait_for("(?s)fake · ready.*fake · ready")
    assert "\x1b" not in screen.raw


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["5"], "5: seconds are for --watch"),
        (["--watch", "0"], "--watch 0: 0.1 to 3600 seconds"),
        (["--watch", "--url", "ftp://x"], "--url ftp://x"),
    ],
)
def test_a_watch_that_cannot_be(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["status", *options]) == 2
    assert capsys.readouterr().err.startswith(f"kvring: {words}")


def test_watching_without_the_key_ends(
    fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.api_key = "secret"
    assert cli.run(["status", "--url", fake.url, "--watch"]) == 1
    assert capsys.readouterr().err.startswith("kvring: the server says 401: wrong API key ")


def test_missing_and_odd_values_are_dashes() -> None:
    ready = Readiness(ready=True, detail="", progress=None)
    lines = render({}, ready, plain)
    assert lines == ["- · ready · up - · - tokens per slot · - running · - waiting"]
    odd = {
        "turns": 5,
        "rings": [7, {"stages": [{"layers": "x"}, None], "slots": [{"capacity": None}]}],
    }
    text = "\n".join(render(odd, ready, plain))
    assert "ring - · - · epoch - · - · reuse -" in text


def test_a_narrow_terminal_gets_short_bars_and_no_addresses() -> None:
    lines = render(RING, Readiness(True, "", None), plain, columns=79)
    assert "tcp://" not in "\n".join(lines)
    assert lines[-2] == "  0     ████····  2,048/4,096  17    0 s   -     -"
    assert max(map(len, lines[3:])) <= 72


def test_what_does_not_fit_goes_on_below() -> None:
    """All headings and cells are there, in lines that fit."""
    lines = render(RING, Readiness(True, "", None), plain, columns=60)
    assert lines[3:] == [
        "  stage  layers  state                   pid   memory  busy",
        "  s0     0-9     ready                   4711  812 MB  43%",
        "  s1     -       loading 40% (layer 14)  -     -       -",
        "  stage  heard",
        "  s0     0.2 s ago",
        "  s1     -",
        "  slot  resident               turn  idle  kept  session",
        "  0     ████····  2,048/4,096  17    0 s   -     -",
        "  1     ········  0/4,096      -     -     -     -",
    ]
    for columns in range(40, 80):
        told = render(RING, Readiness(True, "", None), plain, columns=columns)[3:]
        assert max(map(len, told)) <= columns
        assert {"heard", "busy", "session", "kept"} <= set(" ".join(told).split())


def test_a_status_in_a_narrow_terminal_is_folded(fake: FakeServer, tmp_path: Path) -> None:
    with terminal("status", "--url", fake.url, state=tmp_path, columns=60) as screen:
        assert screen.wait() == 0
        screen.wait_for("stage  heard")
    assert max(map(len, screen.text.splitlines())) <= 60


def test_a_share_is_of_what_loads() -> None:
    assert str(Readiness(False, "r0: s1 loads", 0.4)) == "r0: s1 loads 40%"
    assert str(Readiness(False, "draining: 1 turn is still running", 1.0)).endswith("running")


def test_bar_shows_any_row_and_is_full_only_at_capacity() -> None:
    assert bar(0, 4096).count("█") == 0
    assert bar(1, 4096).count("█") == 1
    assert bar(4095, 4096).count("█") == BAR_CELLS - 1
    assert bar(4096, 4096).count("█") == BAR_CELLS
    assert bar(1, 0) == "·" * BAR_CELLS


def test_kept_parked_and_others_slots_are_shown_and_previews_cannot_steer_a_terminal() -> None:
    ring = {
        "slots": [
            {"slot": 0, "occupied": True, "capacity": 64},
            {"slot": 1, "resident": 8, "capacity": 64, "kept_s": 90.0, "session": "ab12"},
        ],
        "parked": [{"slot": 2, "resident": 500, "idle_s": 4.0, "preview": "You\x1b[31m\nare"}],
        "parked_rows": 500,
        "park_limit_rows": 1000,
        "evictions": {"ttl": 2, "request": 1},
    }
    ready = Readiness(ready=True, detail="", progress=None)
    lines = render({"rings": [ring]}, ready, plain)[3:]
    assert [" ".join(line.split()) for line in lines] == [
        "slot resident turn idle kept session",
        "0 another's - - - -",
        f"1 {bar(8, 64)} 8/64 - - 1 min 30 s ab12",
        "parked rows idle session",
        "2 500 4 s - You [31m are",
        "500 of 1,000 rows are parked",
        "evictions: 2 ttl, 1 request",
    ]


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (["--evict", "3"], ("DELETE", "/ring/slots/3", {}, None)),
        (["--keep", "1", "60", "--ring", "r1"], ("PUT", "/ring/slots/1", {"ring": "r1"}, 60.0)),
    ],
)
def test_slots_are_evicted_and_kept_by_hand(
    fake: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    asked: tuple[str, str, dict[str, str], float | None],
) -> None:
    seen: list[tuple[str, str, dict[str, str], float | None]] = []

    def change(
        _: Client, method: str, path: str, query: dict[str, str], body: Json | None = None
    ) -> Json:
        seen.append((method, path, query, None if body is None else body["keep_s"]))
        return {}

    monkeypatch.setattr(Client, "change", change)
    assert cli.run(["status", "--url", fake.url, *options]) == 0
    assert seen == [asked]


def test_a_key_of_any_characters_can_be_sent() -> None:
    """CASES 45, from the client's side."""
    with Client("http://127.0.0.1:9", "clé-é") as client:
        assert client._http.headers.raw[-1][1] == "Bearer clé-é".encode()

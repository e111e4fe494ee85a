from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakeserver import FakeServer, serve
from tools import bench, cli, server
from tools.client import Client
from tools.errors import ToolError
from tools.multiturn import Plan, Prose, measure

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--turns=3", "--first-tokens=60", "--suffix-tokens=20", "--max-tokens=8", "--rounds=2"]


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serve() as server_:
        yield server_


def test_multiturn_writes_table_json_and_plot(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--url", fake.url, "--out", str(tmp_path), *SMALL]
    assert cli.run(["bench", "multiturn", *options]) == 0
    seen = capsys.readouterr()
    assert "follow-up turns: first token after" in seen.out
    assert "DIFFERENT" not in seen.out
    assert "\033" not in seen.out
    assert "round 2/2, turn 3/3, cold" in seen.err
    report = json.loads((tmp_path / "multiturn.json").read_text())
    assert report["mismatches"] == []
    assert report["server"]["model"] == "fake"
    assert [row["prompt_tokens"] for row in report["turns"]] == [60, 88, 116]
    assert [row["cold_prefilled"] for row in report["turns"]] == [60, 88, 116]
    # the reply's last token was never an input, so it is prefilled with the suffix
    assert [row["cached_prefilled"] for row in report["turns"]][1:] == [21, 21]
    assert len(report["measurements"]) == 2 * 3 * 2
    assert (tmp_path / "multiturn.png").read_bytes().startswith(b"\x89PNG")


def test_both_arms_get_the_same_messages_in_alternating_order(fake: FakeServer) -> None:
    with Client(fake.url) as client:
        results = measure(client, Plan(2, 30, 20, 4, 2), lambda _: None)
    asked = fake.bodies[1:]  # the first one warms up
    for one, other in zip(asked[::2], asked[1::2], strict=True):
        assert one["messages"] == other["messages"]
        assert [body.get("kvring") for body in (one, other)].count({"reuse": False}) == 1
    arms = [result.arm for result in results]
    assert arms == ["cached", "cold", "cold", "cached", "cold", "cached", "cached", "cold"]
    assert asked[2]["messages"][1] == {"role": "assistant", "content": results[0].text}
    assert asked[0]["temperature"] == 0


def test_a_different_text_is_an_error(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.cold_differs = True
    options = ["--url", fake.url, "--out", str(tmp_path), *SMALL]
    assert cli.run(["bench", "multiturn", *options]) == 1
    seen = capsys.readouterr()
    assert seen.out.count("DIFFERENT") == 3
    assert "cold and cached differ in 6 of 6 turns, first in round 1 turn 1; see" in seen.err
    assert len(json.loads((tmp_path / "multiturn.json").read_text())["mismatches"]) == 6


def test_the_text_has_the_wanted_length_and_no_shared_prefix() -> None:
    prose = Prose(tokens_per_word=1.5)
    prose.restart(1)
    first = prose.message(1, 1, 3000)
    assert 1990 <= len(first.split()) <= 2000
    prose.restart(1)
    assert prose.message(1, 1, 3000) == first
    prose.restart(2)
    assert prose.message(2, 1, 3000)[:12] != first[:12]


def test_its_own_server_is_started_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child stands for `kvring up`; it must get one interrupt and the time to end."""
    log = tmp_path / "log"
    script = tmp_path / "child.py"
    script.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: (print('interrupted', flush=True), sys.exit(0)))\n"
        "print(sys.argv[1:], flush=True)\n"
        "time.sleep(60)\n"
    )
    real = subprocess.Popen

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = real(
            [sys.executable, str(script), *command[3:]], **options
        )
        return process

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(server, "_wait", lambda process, url, log: _until(log, "up"))
    with server.own_server(["--model", "toy"], log) as url:
        address = url.removeprefix("http://")
    assert f"['up', '--http', '{address}', '--model', 'toy']" in log.read_text()
    assert log.read_text().endswith("interrupted\n")


def test_a_server_that_does_not_start_is_said(tmp_path: Path) -> None:
    with (
        pytest.raises(ToolError, match=r"kvring up ended with exit code 2: .*--stages"),
        server.own_server(["--stages", "0"], tmp_path / "log"),
    ):
        pass


def test_floor_times_the_suffix_alone(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--url", fake.url, "--out", str(tmp_path), "--floor", "--model", "toy", *SMALL]
    assert cli.run(["bench", "multiturn", *options]) == 0
    assert "floor: the suffix alone takes" in capsys.readouterr().out
    floor = json.loads((tmp_path / "multiturn.json").read_text())["floor"]
    assert floor["suffix"] == 21
    assert len(floor["all_ms"]) == 5
    assert bench.FLOOR.is_file()


def _until(log: Path, text: str) -> None:
    deadline = time.monotonic() + 10
    while text not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)

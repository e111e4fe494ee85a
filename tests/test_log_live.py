"""kvring log on what real processes recorded: a ring of toys, a SIGKILL, and a reader beside it."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path

from tests.processes import Fleet, Process, assert_clear, fleet, post, until, write_ring
from tests.test_log_redact import check_chains, recorded
from tools import cli
from transport.recorder import segments


def test_a_recorded_ring(tmp_path: Path) -> None:
    with fleet(tmp_path / "output") as made:
        _scene(made, tmp_path)


def _scene(made: Fleet, folder: Path) -> None:
    logs = folder / "logs"
    ring = write_ring(folder / "ring.toml", stages=2)
    record = ("--record", logs, "--record-payloads", "digest")
    started = {"coord": made.coord(ring, *record)}
    started |= {name: made.stage(ring, name, *record) for name in ring.names}
    made.ready(ring.url)
    reader = made.start("log", "show", "-f", "--json", "--kind", "submit", logs, name="reader")
    prompt = [5, 6, 7, 8] * 20
    texts = []
    for turn in (1, 2):
        body = {"model": "m", "prompt": prompt, "max_tokens": 30, "temperature": 0}
        answer = post(f"{ring.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["choices"][0]["text"])
        until("the reader has seen it", partial(_has_lines, reader, turn))
    assert [json.loads(line)["frame"]["turn"] for line in reader.output.splitlines()] == [1, 2]
    reader.send(signal.SIGINT)
    reader.expected.append(130)
    assert reader.wait() == 130, reader
    assert reader.errors == ""
    for process in started.values():
        process.kill()
    assert texts[0] == texts[1]
    _look(logs, folder)


def _has_lines(reader: Process, count: int) -> bool:
    return len(reader.output.splitlines()) == count


def _look(logs: Path, folder: Path) -> None:
    assert len(segments(logs)) == 3
    for command in (
        ["show", str(logs)],
        ["trace", str(logs), "-o", str(folder / "trace.json")],
        ["plot", str(logs), "-o", str(folder / "plot.png")],
        ["redact", str(logs), "-o", str(folder / "redacted")],
        ["story", "1", str(logs)],
        ["story", "2", str(folder / "redacted")],
    ):
        assert cli.run(["log", *command]) == 0, command
    check_chains(recorded(logs))
    seen = check_chains(recorded(folder / "redacted"))
    assert seen["parents"] > 60
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    transits = [e for e in events if e["ph"] == "X" and groups[e["pid"]] == "links"]
    runs = [e for e in transits if e["name"].startswith("Run")]
    verdicts = [e for e in transits if e["name"].startswith("Verdict")]
    assert len(runs) == 2 * len(verdicts) > 40


def test_payloads_without_a_directory_are_refused(tmp_path: Path) -> None:
    ring = write_ring(tmp_path / "ring.toml", stages=1)
    with fleet(tmp_path / "output") as made:
        for command in (
            ["up", "--model", "toy"],
            ["stage", "--ring", ring.path, "--name", "s0"],
            ["coord", "--ring", ring.path],
        ):
            process = made.start(*command, "--record-payloads", "full")
            assert_clear(process, 2, "--record-payloads full", "--record DIR")

"""Recordings of real processes replay in all three modes: turns, a cancel, a killed stage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests import processes
from tests.processes import Fleet, RingFile, get, idle, until, write_ring
from tests.recorded import other_token, rewrite
from tests.toyclient import complete, streaming, truth
from tools.framelogs.read import entries
from tools.framelogs.read import processes as logs_of
from transport.config import dumps
from transport.frame import Cancel, Frame, Submit, Verdict
from transport.framelog import LogRecord

LONG_S = 300.0  # for a replay that loads a model on cores that others use
RECORD = ("--record-payloads", "full", "--record")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with processes.fleet(tmp_path / "processes") as made:
        yield made


def prompt_of(seed: int, count: int) -> list[int]:
    return [seed, *(Random(seed).randrange(256) for _ in range(count - 1))]


def start(fleet: Fleet, ring: RingFile, logs: Path) -> dict[str, processes.Process]:
    """A recording ring by hand, ready."""
    started = {"coord": fleet.coord(ring, *RECORD, logs)}
    started |= {name: fleet.stage(ring, name, *RECORD, logs) for name in ring.names}
    fleet.ready(ring.url)
    return started


def end(started: dict[str, processes.Process]) -> None:
    for process in started.values():
        process.popen.terminate()
    for process in started.values():
        process.wait(LONG_S)


def replay(fleet: Fleet, *arguments: object, code: int = 0) -> dict[str, Any]:
    """`kvring replay ... --json`: what it says."""
    process = fleet.start("replay", *arguments, "--json")
    process.expected.append(code)
    assert process.wait(LONG_S) == code, process
    found: dict[str, Any] = json.loads(process.output)
    return found


def test_a_ring_with_a_cancel_and_a_killed_stage(fleet: Fleet, tmp_path: Path) -> None:
    ring = write_ring(tmp_path / "ring.toml", stages=3)
    logs = tmp_path / "logs"
    started = start(fleet, ring, logs)
    first = complete(ring.url, prompt_of(1, 100), 30)
    complete(ring.url, [*prompt_of(1, 100), *first.tokens, 5, 6, 7], 30)
    with streaming(ring.url, prompt_of(2, 50), 1500) as reading:
        reading.read(10)
    idle(ring.url)
    with streaming(ring.url, prompt_of(3, 50), 400) as reading:
        reading.read(20)
        started["s1"].kill()
        started["s1"] = fleet.stage(ring, "s1", *RECORD, logs)
        assert reading.rest().tokens == truth(prompt_of(3, 50), 400)
    end(started)

    core = replay(fleet, logs)
    assert core["equal"] is True
    lives = sorted(each["process"] for each in core["processes"])
    assert lives == ["coord", "s0", "s1", "s1", "s2"]
    assert core["frames_compared_at_both_ends"] > 1000

    for stage in ("s0", "s2"):
        done = replay(fleet, logs, "--stage", stage)
        assert done["exact"] is True
        assert done["frames"] > 300
    for life in logs.glob("s1.*"):
        assert replay(fleet, life, "--stage", "s1")["frames"] > 20

    for name in ring.names:
        fleet.stage(ring, name)
    driven = replay(fleet, logs, "--ring", ring.path, "--speed", "0")
    assert driven["equal"] is True
    assert (driven["turns"], driven["cancelled"]) == (4, 1)
    assert driven["tokens"] >= 30 + 30 + 10 + 400

    # the same ring, and a log in which it had said another token
    (coord,) = [each for each in logs_of([logs]) if each.name == "coord"]
    verdicts = [each for each in entries(coord) if isinstance(each.frame, Verdict)]
    last = next(each for each in reversed(verdicts) if _results(each.frame))

    def forge(index: int, _: LogRecord, frame: Frame) -> Frame | None:
        return other_token(frame) if index == last.index else None

    assert rewrite(coord.paths[0], forge) == 1
    driven = replay(fleet, coord.paths[0], "--ring", ring.path, "--speed", "0", code=1)
    assert "turn 4, reply token 399: recorded" in driven["differences"][0]
    core = replay(fleet, logs, code=1)
    assert core["place"] == last.place, "its other end says so"


def _results(frame: Frame) -> bool:
    return isinstance(frame, Verdict) and any(result.tokens for result in frame.results)


def test_verify_modes_own_turns_are_inputs_too(fleet: Fleet, tmp_path: Path) -> None:
    ring = write_ring(tmp_path / "ring.toml", stages=2)
    spec = replace(ring.config.coordinator, verify_share=1.0)
    ring.path.write_text(dumps(replace(ring.config, coordinator=spec)))
    logs = tmp_path / "logs"
    started = start(fleet, ring, logs)
    known = prompt_of(4, 60)
    for _ in range(3):  # each comes while the one before is run again, or waits to be
        answer = complete(ring.url, known, 40)
        known = [*known, *answer.tokens, 9]

    def verified() -> bool:
        said = get(f"{ring.url}/metrics").text
        (line,) = [each for each in said.splitlines() if each.startswith("kvring:verify_runs_to")]
        return float(line.split()[-1]) >= 1

    until("a turn was run again", verified, 60)
    long = complete(ring.url, known, 300)
    complete(ring.url, [*known, *long.tokens, 7], 300)
    until("it is being run again", lambda: _cold_runs(logs) > 2, 60)
    complete(ring.url, prompt_of(5, 20), 5)
    end(started)
    core = replay(fleet, logs)
    assert core["equal"] is True
    (coord,) = [each for each in logs_of([logs]) if each.name == "coord"]
    reasons = [each.frame.reason for each in entries(coord) if isinstance(each.frame, Cancel)]
    assert set(reasons) <= {"verify interrupted"}


def _cold_runs(logs: Path) -> int:
    (coord,) = [each for each in logs_of([logs]) if each.name == "coord"]
    submits = [each.frame for each in entries(coord) if isinstance(each.frame, Submit)]
    return sum(not submit.reuse for submit in submits)

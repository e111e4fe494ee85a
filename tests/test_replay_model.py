"""A recording of three stages of the default model replays in all three modes. DESIGN 3, 6."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import processes
from tests.modelfile import default_model
from tests.processes import NO_TLS, QUICK, idle, post, until, write_ring
from tests.recorded import other_token, rewrite
from tests.test_replay_processes import RECORD, end, replay
from tools.framelogs.read import entries
from tools.framelogs.read import processes as logs_of
from transport.frame import Forwarded, Frame, Run, Verdict
from transport.framelog import Direction, LogRecord

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

READY_S = 300.0
STORY = "Once upon a time there was a lighthouse keeper who counted the ships that passed. " * 4


def body(prompt: str, count: int, **options: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": count, "temperature": 0, **options}


def ask(url: str, prompt: str, count: int, **options: Any) -> str:
    answer = post(f"{url}/v1/completions", json=body(prompt, count, **options), timeout_s=300)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


@contextmanager
def reading(url: str, prompt: str, count: int, events: int) -> Iterator[Iterator[str]]:
    """A stream's events after the first ones; leaving the block closes the connection."""
    asked = body(prompt, count, stream=True)
    with (
        httpx.Client(timeout=300, verify=NO_TLS) as client,
        client.stream("POST", f"{url}/v1/completions", json=asked) as answer,
    ):
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        for _ in range(events):
            next(lines)
        yield lines


def test_three_stages_of_the_default_model(tmp_path: Path) -> None:
    limits = replace(QUICK, max_model_len=1024, lost_after_s=30.0, frame_timeout_s=120.0)
    limits = replace(limits, resume_s=300.0, chunk_tokens=64)
    ring = write_ring(
        tmp_path / "ring.toml",
        model=str(default_model()),
        layers=30,
        stages=3,
        limits=limits,
        dtype="bfloat16",
    )
    logs = tmp_path / "logs"
    with processes.fleet(tmp_path / "processes") as fleet:
        started = {"coord": fleet.coord(ring, *RECORD, logs)}
        started |= {name: fleet.stage(ring, name, *RECORD, logs) for name in ring.names}
        fleet.ready(ring.url, READY_S)
        first = ask(ring.url, STORY, 16)
        ask(ring.url, f"{STORY}{first} The end. And then", 12, seed=7, temperature=0.8)
        with reading(ring.url, "The tide tables say", 200, 3):
            pass  # a cancel
        idle(ring.url)
        with reading(ring.url, "A list of rivers:", 24, 4) as rest:
            started["s1"].kill()
            started["s1"] = fleet.stage(ring, "s1", *RECORD, logs)
            assert list(rest)[-1] == "data: [DONE]"
        idle(ring.url)
        end(started)

        core = replay(fleet, logs)
        assert core["equal"] is True
        assert len(core["processes"]) == 5
        assert core["frames_compared_at_both_ends"] > 100
        for stage in ("s0", "s2"):
            done = replay(fleet, logs, "--stage", stage)
            assert (done["exact"], done["largest_difference"]) == (True, 0.0)
            assert done["frames"] > 10
        for life in logs.glob("s1.*"):
            assert replay(fleet, life, "--stage", "s1")["exact"] is True
        for name in ring.names:
            started[name] = fleet.stage(ring, name)
        for name in ring.names:
            _loaded(started[name])
        driven = replay(fleet, logs, "--ring", ring.path, "--speed", "0")
        assert driven["equal"] is True
        assert (driven["turns"], driven["cancelled"]) == (4, 1)

        _one_token_of_the_tail(fleet, logs)


def _loaded(stage: processes.Process) -> None:
    until(f"{stage.name} is loaded", lambda: '"event": "loaded"' in stage.errors, READY_S)


def _one_token_of_the_tail(fleet: processes.Fleet, logs: Path) -> None:
    """An input token, changed in the tail's log alone: its own block computes something else."""
    (tail,) = [each for each in logs_of([logs]) if each.name == "s2"]
    taken = [
        each
        for each in entries(tail)
        if isinstance(each.frame, Run) and each.record.direction is Direction.IN
    ]
    victim = taken[len(taken) // 2]

    def forge(index: int, _: LogRecord, frame: Frame) -> Frame | None:
        return other_token(frame) if index in (victim.index + 1, victim.index + 2) else None

    assert rewrite(tail.paths[0], forge) == 2  # what it computed, and its verdict: equal again
    assert isinstance(list(entries(tail))[victim.index + 1].frame, Forwarded)
    assert isinstance(list(entries(tail))[victim.index + 2].frame, Verdict)
    found = replay(fleet, tail.paths[0], code=0)
    assert found["equal"] is True, "one log's core can't tell"
    found = replay(fleet, tail.paths[0], "--stage", "s2", code=1)
    assert found["record"] == victim.index + 1
    assert "tokens[0]: recorded" in found["difference"]

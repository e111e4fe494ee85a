"""Coordinators of real processes that are killed and started again: what was warm stays warm.

CASES 8 and 22: what a stage no longer holds is computed again, and no token is wrong.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests import processes
from tests.modelfile import default_model
from tests.processes import Fleet, Process, RingFile, get, until, write_ring
from tests.test_processes import prompt_of
from tests.test_real_model import LAYERS, READY_S, chat, follow_up, opening
from tests.toyclient import Answer, complete, truth

REPLY = 12
WRITTEN_S = 0.5  # the look comes 0.05 s behind a turn's end, and the write behind it


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with processes.fleet(tmp_path / "processes") as made:
        yield made


class Hand:
    """A ring of two stages by hand, and its state file."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.fleet = fleet
        self.ring: RingFile = write_ring(folder / "ring.toml", stages=2)
        self.state = folder / ".kvring" / "ring.sqlite"
        self.running: dict[str, Process] = fleet.whole(self.ring)

    def ask(self, prompt: list[int]) -> Answer:
        answer = complete(self.ring.url, prompt, REPLY)
        assert answer.tokens == truth(prompt, REPLY)
        return answer

    def converse(self, seed: int) -> list[int]:
        """A first turn, and the prompt of the second."""
        prompt = prompt_of(seed, 80)
        return [*prompt, *self.ask(prompt).tokens, 1, 2, 3]

    def kill_coordinator(self) -> None:
        processes.idle(self.ring.url)
        time.sleep(WRITTEN_S)
        self.running["coord"].kill()

    def start_coordinator(self, *options: object) -> None:
        self.running["coord"] = self.fleet.coord(self.ring, *options)
        self.fleet.ready(self.ring.url)

    def said(self, event: str) -> list[str]:
        """Lines of the coordinator's log."""
        lines = self.running["coord"].errors.splitlines()
        return [line for line in lines if f'"event": "{event}"' in line]


def test_sessions_stay_warm_when_the_coordinator_is_killed(fleet: Fleet, tmp_path: Path) -> None:
    """As many as there are slots: the self-check gives none of them up."""
    hand = Hand(fleet, tmp_path)
    sessions = [hand.converse(seed) for seed in range(4)]
    for slot in processes.slots(hand.ring.url):
        assert slot["resident"], "each session has its slot"
    hand.kill_coordinator()
    hand.start_coordinator()
    for second in sessions:
        assert hand.ask(second).cached == len(second) - 4, "all but the last committed token"
    metrics = get(f"{hand.ring.url}/metrics").text
    assert "evictions_total" not in metrics, metrics
    assert stat.S_IMODE(os.stat(hand.state).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(hand.state.parent).st_mode) == 0o700


def test_a_stage_that_restarts_meanwhile_makes_it_cold(fleet: Fleet, tmp_path: Path) -> None:
    """Every claim on the ring is struck out; the other stage's rows are written anew."""
    hand = Hand(fleet, tmp_path)
    second = hand.converse(1)
    hand.kill_coordinator()
    hand.running["s1"].kill()
    hand.running["s1"] = fleet.stage(hand.ring, "s1")
    hand.start_coordinator()
    first = hand.ask(second)
    assert first.cached == 0
    third = [*second, *first.tokens, 9]
    assert hand.ask(third).cached == len(third) - 2


def test_a_stopped_coordinator_writes_its_last_state(fleet: Fleet, tmp_path: Path) -> None:
    """SIGTERM right behind a turn: nothing waits for a timer."""
    hand = Hand(fleet, tmp_path)
    second = hand.converse(2)
    hand.running["coord"].expected.append(0)
    hand.running["coord"].send(signal.SIGTERM)
    assert hand.running["coord"].wait() == 0
    hand.start_coordinator()
    assert hand.ask(second).cached == len(second) - 4


@pytest.mark.parametrize("damage", ["garbage", "torn", "foreign", "locked", "directory"])
def test_a_bad_state_file_costs_a_cold_start(damage: str, fleet: Fleet, tmp_path: Path) -> None:
    """One line says it; a file that is not ours is left as it is."""
    hand = Hand(fleet, tmp_path)
    second = hand.converse(3)
    hand.kill_coordinator()
    held: sqlite3.Connection | None = None
    if damage == "torn":
        with sqlite3.connect(hand.state) as folded:
            folded.execute("PRAGMA journal_mode = DELETE")
        folded.close()
        size = hand.state.stat().st_size
        with hand.state.open("r+b") as file:
            file.seek(100)
            file.write(b"\xff" * (size - 100))
    elif damage == "locked":
        held = sqlite3.connect(hand.state, isolation_level=None)
        held.execute("PRAGMA locking_mode = EXCLUSIVE")
        held.execute("BEGIN EXCLUSIVE")
    else:
        for path in hand.state.parent.iterdir():
            path.unlink()
        if damage == "garbage":
            hand.state.write_text("my diary\n" * 100)
        elif damage == "directory":
            hand.state.mkdir()
        else:
            with sqlite3.connect(hand.state) as other:
                other.execute("CREATE TABLE mine (x)")
            other.close()
    before = hand.state.read_bytes() if damage in ("garbage", "foreign") else b""
    hand.start_coordinator()
    assert hand.ask(second).cached == 0
    (line,) = hand.said("state_damaged" if damage == "torn" else "state_not_kept")
    assert str(hand.state) in line
    assert "Traceback" not in hand.running["coord"].errors
    if before:
        assert hand.state.read_bytes() == before
    if held is not None:
        held.close()
    if damage == "torn":
        assert hand.state.with_name("ring.sqlite.damaged").exists()
        hand.kill_coordinator()
        hand.start_coordinator()
        third = [*second, *truth(second, REPLY), 4]
        assert hand.ask(third).cached == len(third) - 2, "the new file is in use"


def test_off_writes_nothing(fleet: Fleet, tmp_path: Path) -> None:
    hand = Hand(fleet, tmp_path)
    hand.kill_coordinator()
    for path in hand.state.parent.iterdir():
        path.unlink()
    hand.start_coordinator("--state", "off")
    second = hand.converse(4)
    hand.kill_coordinator()
    assert not list(hand.state.parent.iterdir())
    named = tmp_path / "named.sqlite"
    hand.start_coordinator("--state", named)
    assert hand.ask(second).cached == 0
    until("it is written", named.exists)


@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_default_model_s_sessions_stay_warm(fleet: Fleet, tmp_path: Path) -> None:
    """A sampled reply: its ids are not what its text would be tokenised to, and are found again."""
    limits = replace(processes.QUICK, max_model_len=1024, lost_after_s=20.0)
    ring = write_ring(
        tmp_path / "ring.toml",
        model=str(default_model()),
        layers=LAYERS,
        stages=2,
        limits=limits,
        dtype="bfloat16",
    )
    running = fleet.whole(ring, READY_S)
    first = chat(ring.url, opening(), temperature=1.5, seed=3, max_tokens=40)
    processes.idle(ring.url)
    time.sleep(WRITTEN_S)
    running["coord"].kill()
    fleet.coord(ring)
    fleet.ready(ring.url, READY_S)
    messages = follow_up(opening(), first)
    warm = chat(ring.url, messages)
    assert warm.cached == first.prompt + first.completion - 1
    assert warm.what == chat(ring.url, messages, reuse=False).what

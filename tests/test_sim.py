"""The simulator plays clean worlds, notices injected bugs, shrinks, and writes logs that open.

`python -m tests.mutations --sim` hunts every bug; `kvring sim --seeds N` plays more worlds.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import coord.ring
from coord.ledger import Ledger
from coord.rollcall import renewed
from tests.bugs import MUTATIONS
from tests.mutations import hunted, shrunk
from tools.cli import run
from tools.framelogs.read import merged, processes
from tools.sim import hunt
from tools.sim.check import ViolationError
from tools.sim.draw import Options, draw
from tools.sim.hunt import play, play_seeds
from tools.sim.script import FAULTS, Crash, Say, Script
from tools.sim.world import World
from transport.chain import Chain
from transport.config import loads
from transport.frame import RollCall
from transport.framelog import Direction

CLEAN = 130  # seeds of a default run, in two parts
# Bugs that the first seeds notice, of every core; the others take up to some hundred seeds.
SAMPLED = (
    "the ledger claims a row too many",
    "a pinned slot may be given up",
    "another salt matches",
    "a resume repeats the last token",
    "a stop token goes unnoticed",
    "every draft is accepted",
    "what was sent behind a wrong draft is believed",
    "an answer's epoch is ignored",
    "a copy is not checked",
    "no refusal is told",
    "a stage does not tell of lost frames",
    "a measurement's trial writes over rows that are held",
    "a measurement meets a stage twice",
    "a new turn is refused as soon as a ring is lost",
    "a spare ring serves beside the others",
)


@pytest.mark.parametrize("first", [0, CLEAN // 2])
def test_worlds_are_clean(first: int) -> None:
    tally = play_seeds(range(first, first + CLEAN // 2), Options())
    assert not tally.failures
    assert tally.frames > 200 * tally.seeds


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_alone(fault: str) -> None:
    assert not play_seeds(range(10_000, 10_006), Options(faults=(fault,))).failures


def test_nothing_is_refused_where_nothing_goes_wrong() -> None:
    tally = play_seeds(range(20_000, 20_020), Options(faults=(), stages=(2, 3), clients=(4, 4)))
    assert not tally.failures


@pytest.mark.parametrize("name", SAMPLED, ids=lambda name: name.replace(" ", "-"))
def test_a_bug_is_noticed(name: str) -> None:
    (mutant,) = [each for each in MUTATIONS if each.name == name]
    assert hunted(mutant, range(40)) is not None


def test_a_new_coordinator_finds_what_the_last_one_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing but coordinators end: of what is in the file, nearly all is still there."""
    told, believed = [0], [0]

    def counted(ledger: Ledger, held: Any, call: RollCall, reason: str) -> Any:
        found = renewed(ledger, held, call, reason)
        if not ledger.slots:
            told[0] += len(held)
            believed[0] += sum(bool(each.resident) for each in found[0].holdings().values())
        return found

    monkeypatch.setattr(coord.ring, "renewed", counted)
    for seed in range(30_000, 30_030):
        World(draw(seed, Options(faults=("restart",)))).play()
    assert told[0] > 20
    assert believed[0] > 0.8 * told[0]


def test_a_seed_is_one_world_whatever_was_played_before() -> None:
    script = draw(7, Options())
    first = World(script)
    first.play()
    again = World(draw(7, Options()))
    again.play()
    ends = [(w.checks.frames, w.heap.happened, w.heap.now) for w in (first, again)]
    assert ends[0] == ends[1]


def test_what_fails_is_shrunk_to_what_is_needed() -> None:
    """A resume that starts over needs a client whose stage dies, and nothing else."""
    (mutant,) = [each for each in MUTATIONS if each.name == "a resume repeats the last token"]
    failure = hunted(mutant, range(40))
    assert failure is not None
    lines = shrunk(mutant, failure)
    whole = list(draw(failure.seed, Options()).lines())
    assert len(lines) < len(whole)
    assert len(lines) <= 5, lines


def test_a_failing_seed_is_told_and_its_logs_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    extend = Ledger.extend

    def one_more(self: Ledger, index: int, chain: Chain, end: int) -> None:
        extend(self, index, chain, min(end + 1, len(chain)))

    monkeypatch.setattr(Ledger, "extend", one_more)
    assert run(["sim", "--seeds", "1", "--faults", "none", "--log", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "seed 0 violates: " in said
    assert "it still violates: " in said
    assert "again: kvring sim --seed" in said
    (folder,) = tmp_path.iterdir()
    found = processes([folder])
    assert found[0].header.role == "coordinator"
    assert loads(found[0].header.config).model.path == "toy"
    assert sum(1 for _ in merged(found)) > 20


def test_the_logs_of_one_seed_are_what_the_cores_took(tmp_path: Path) -> None:
    """Times in a log are the very times that the cores were given."""
    script = draw(3, Options(faults=()))
    world = World(script, tmp_path)
    times: list[float] = []
    handle = world.coordinator.take

    def noted(*args: object, **kwargs: object) -> None:
        times.append(world.heap.now / 1e9)
        handle(*args, **kwargs)  # type: ignore[arg-type]

    world.coordinator.take = noted  # type: ignore[method-assign]
    world.play()
    (coordinator,) = [each for each in processes([tmp_path]) if each.name == "coord"]
    entries = [e for e in merged([coordinator]) if e.record.direction is not Direction.OUT]
    assert [entry.record.mono_ns / 1e9 for entry in entries] == times


def test_what_cannot_be_played_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--faults", "fire"], "--faults fire: must be one of stall, crash"),
        (["--stages", "0-3"], "--stages 0-3: must be from 1 to"),
        (["--clients", "x"], "--clients x: must be N or LOW-HIGH"),
    ):
        assert run(["sim", *arguments]) == 2
        assert words in capsys.readouterr().err


def test_json_and_several_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(
            ["sim", "--seeds", "51", "--jobs", "2", "--json", "--stages", "1-2", "--clients", "1-3"]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["seeds"] == 51
    assert found["failures"] == []


def test_a_stage_that_never_comes_back_is_told() -> None:
    """The liveness bound ends: a ring without its stage finishes no turn."""
    say = Say(0, 0, 0, 0, None, (1, 2, 3), 30)
    crash = Crash(20_000, 0, 0, 10**12, 0, 0)
    shape = replace(draw(1, Options(stages=(1, 1), rings=(1, 1))).shape, seed=1)
    world = World(Script(shape, (say, crash)))
    world.faults._until = lambda for_us: None  # type: ignore[method-assign]
    with pytest.raises(ViolationError, match=r"liveness|unfair"):
        world.play()


def test_a_failure_by_assertion_names_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Ledger) -> None:
        raise AssertionError("as if")

    monkeypatch.setattr(Ledger, "check", broken)
    failure, _ = play(draw(0, Options()))
    assert failure is not None
    assert failure.name.startswith("AssertionError in test_sim.py:")
    assert hunt.minimal(failure, Options())[0].entries == ()

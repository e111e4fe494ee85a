"""Core replay: the same frames from a fresh core, and one changed token found where it lies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from coord.scheduler import Scheduler
from pipeline.stage import Stage
from tests.memoryring import limits, serial
from tests.recorded import RecordedRing, other_token, play, rewrite
from tools.cli import run
from tools.errors import ToolError
from tools.framelogs.read import LogDamageError, entries, processes
from tools.replay import DifferenceError, Replayer, open_log, parse_where
from tools.replay.links import compare_links
from transport.frame import Cancel, Drafted, Frame, RollCall, Run, Submit, Verdict
from transport.framelog import (
    Direction,
    FrameLogReader,
    FrameLogWriter,
    LogHeader,
    LogRecord,
    Payloads,
)

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def quiet(folder: Path, **options: object) -> RecordedRing:
    """Two turns and a follow-up on three stages, no fault."""
    ring = RecordedRing(folder, **options).form()  # type: ignore[arg-type]
    first = ring.ask(PROMPT, 6)
    ring.ask([*PROMPT, *first.tokens, 11, 12], 5)
    ring.ask([9, 8, 7], 4)
    ring.close()
    return ring


def replay(folder: Path) -> list[Replayer]:
    """Replay all; a DifferenceError passes through."""
    found = processes([folder])
    _, wrong = compare_links(found)
    if wrong is not None:
        raise wrong
    done = [Replayer(process) for process in found]
    for replayer in done:
        for _ in replayer:
            pass
    return done


def file_of(folder: Path, name: str) -> Path:
    (path,) = folder.glob(f"{name}.*.kvrlog")
    return path


# ---- equal ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("payloads", Payloads)
def test_a_quiet_ring_replays(payloads: Payloads, tmp_path: Path) -> None:
    ring = quiet(tmp_path, payloads=payloads)
    coord, *stages = replay(tmp_path)
    assert coord.sends == len(ring.sent)
    assert coord.unsent == coord.cut == 0
    assert [each.process.name for each in stages] == ["s0", "s1", "s2"]
    assert all(each.sends == len(ring.sent) for each in stages)


@pytest.mark.parametrize("seed", range(20))
def test_any_ring_with_faults_replays(seed: int, tmp_path: Path) -> None:
    ring = RecordedRing(tmp_path, 1 + seed % 4, bounds=limits(slots=2, park_bytes=4096))
    play(ring, seed)
    ring.close()
    done = replay(tmp_path)
    assert len(done) > len(ring.stages)
    coord = done[0]
    assert coord.sends - coord.unsent == len(ring.sent)
    live = {turn.id: turn.known for turn in ring.scheduler.turns.values()}
    assert isinstance(coord.core, Scheduler)
    assert {turn.id: turn.known for turn in coord.core.turns.values()} == live
    lives = {each.process.header.incarnation: each.core for each in done[1:]}
    for stage, incarnation in zip(ring.stages, ring.incarnations, strict=True):
        again = lives[incarnation]
        assert isinstance(again, Stage)
        for slot in range(len(stage.slots)):
            assert again.slots.tokens(slot) == stage.slots.tokens(slot)


def test_refused_frames_are_recorded_and_replayed(tmp_path: Path) -> None:
    ring = RecordedRing(tmp_path).form()
    ring.refusing = True
    turn = ring.submit(PROMPT, 3)
    ring.refusing = False
    ring.wait(2000.0)  # the frame's timeout
    for _ in range(5):
        ring.wait(2.0)
        ring.pump()
    assert ring.replies[turn].finished == "length"
    ring.close()
    coord = replay(tmp_path)[0]
    assert coord.unsent == 1


def test_without_drafts(tmp_path: Path) -> None:
    quiet(tmp_path, drafter="off")
    assert replay(tmp_path)[0].sends


def test_with_a_draft_model(tmp_path: Path) -> None:
    """Its answers are inputs: right ones, wrong ones, late ones and none."""
    ring = RecordedRing(tmp_path, drafter="model").form()
    turn = ring.submit(PROMPT, 24)
    truth = serial(PROMPT, 40)
    while not ring.replies[turn].over:
        for at, draft in enumerate(ring.drafts):
            done = draft.known - len(PROMPT)
            guess = truth[done : done + draft.count - at % 3]
            wrong = at % 4 == 1
            ring.tell(Drafted(turn, draft.known, tuple(t ^ wrong for t in guess)))
        ring.drafts.clear()
        ring.happen(ring.choices()[0])
    assert tuple(ring.replies[turn].tokens) == truth[:24]
    ring.close()
    coord = replay(tmp_path)[0]
    drafted = [each for each in entries(coord.process) if isinstance(each.frame, Drafted)]
    assert len(drafted) > 1


def test_what_verify_mode_writes_beside_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet(tmp_path)
    header = LogHeader("coordinator", "verify-1-warm", 5, "test", 1)
    beside = tmp_path / "verify-1-warm.00000000000000000001.000000.kvrlog"
    with beside.open("xb") as file:
        FrameLogWriter(file, header)
    assert run(["replay", str(tmp_path)]) == 0
    assert "verify" not in capsys.readouterr().out
    assert run(["replay", str(beside)]) == 1
    assert "does not say which ring.toml verify-1-warm ran with" in capsys.readouterr().err


def test_a_log_that_ends_between_an_input_and_its_frames(tmp_path: Path) -> None:
    """A killed process: what it did not get to write is no difference, and is counted."""
    quiet(tmp_path)
    path = file_of(tmp_path, "coord")
    with path.open("rb") as file:
        records = list(FrameLogReader(file))
    last_out = max(at for at, each in enumerate(records) if each.direction is Direction.OUT)
    path.write_bytes(path.read_bytes()[: records[last_out].offset + 5])
    coord = replay(tmp_path)[0]
    assert coord.cut == 1
    assert coord.process.torn_bytes == 5


# ---- changed -------------------------------------------------------------------------------------


def changed(folder: Path, name: str, pick: Callable[[int, LogRecord, Frame], bool]) -> int:
    """Change a token of the first record that `pick` takes; its index."""
    found: list[int] = []

    def forge(index: int, record: LogRecord, frame: Frame) -> Frame | None:
        forged = other_token(frame)
        if found or forged is None or not pick(index, record, frame):
            return None
        found.append(index)
        return forged

    assert rewrite(file_of(folder, name), forge) == 1
    return found[0]


def is_turn(frame: Frame, turn: int) -> bool:
    match frame:
        case Submit():
            return frame.turn == turn
        case Run():
            return any(segment.turn == turn for segment in frame.segments)
        case Verdict():
            return any(result.turn == turn for result in frame.results)
    return False


@pytest.mark.parametrize("kind", [Submit, Run, Verdict])
@pytest.mark.parametrize("turn", [1, 2, 3])
def test_one_changed_token_of_the_coordinator(kind: type[Frame], turn: int, tmp_path: Path) -> None:
    """Its log alone shows a Submit or a Verdict by what follows from it, a Run by itself."""
    quiet(tmp_path)
    at = changed(
        tmp_path, "coord", lambda _, __, frame: isinstance(frame, kind) and is_turn(frame, turn)
    )
    (coord,) = processes([file_of(tmp_path, "coord")])
    replayer = Replayer(coord)
    with pytest.raises(DifferenceError) as caught:
        replayer.run_until(None)
    assert replayer.last is not None
    if kind is Run:
        assert caught.value.at.index == at
    else:  # while that input was handled: at the first frame made from it
        assert replayer.last.index == at
    assert "recorded" in caught.value.message


def test_every_changed_token_of_any_frame_is_found_with_the_other_ends_log(tmp_path: Path) -> None:
    """Also one of no consequence: a turn's last token, or what was picked behind a wrong draft."""
    folder = tmp_path / "whole"
    quiet(folder)
    files = sorted(folder.iterdir())
    whole = {path: path.read_bytes() for path in files}
    checked = 0
    for path in files:
        with path.open("rb") as file:
            records = list(FrameLogReader(file))
        for wanted, record in enumerate(records):
            wrong = rewrite(
                path,
                lambda index, _, frame, wanted=wanted: (  # type: ignore[misc]
                    other_token(frame) if index == wanted else None
                ),
            )
            if wrong:
                checked += 1
                with pytest.raises(DifferenceError) as caught:
                    replay(folder)
                mine = caught.value.at.path == path and caught.value.at.index == wanted
                other = f"{path.name}:{record.offset}" in caught.value.message
                local = record.direction is Direction.LOCAL and (
                    caught.value.at.path == path and caught.value.at.index == wanted + 1
                )  # nobody else recorded it: the frame that is made from it
                assert mine or other or local, (path.name, wanted)
            path.write_bytes(whole[path])
    assert checked > 100


@pytest.mark.parametrize("name", ["s0", "s1", "s2"])
def test_one_changed_token_of_a_stage(name: str, tmp_path: Path) -> None:
    quiet(tmp_path)
    sent = Verdict if name == "s2" else Run
    at = changed(
        tmp_path,
        name,
        lambda _, record, frame: record.direction is Direction.OUT and isinstance(frame, sent),
    )
    (stage,) = processes([file_of(tmp_path, name)])
    with pytest.raises(DifferenceError) as caught:
        Replayer(stage).run_until(None)
    assert caught.value.at.index == at


def test_a_missing_or_an_invented_send_is_a_difference(tmp_path: Path) -> None:
    quiet(tmp_path)
    path = file_of(tmp_path, "coord")

    def without(index: int, record: LogRecord, frame: Frame) -> Frame | None:
        run = isinstance(frame, Run) and record.direction is Direction.OUT
        return RollCall("r", 99) if run else None

    assert rewrite(path, without)
    (coord,) = processes([path])
    with pytest.raises(DifferenceError, match="kind: recorded RollCall"):
        Replayer(coord).run_until(None)
    rewrite(path, lambda _, __, frame: Cancel(9) if isinstance(frame, RollCall) else None)
    with pytest.raises(DifferenceError, match="kind: recorded Cancel"):
        Replayer(coord).run_until(None)


def test_the_command_says_it_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet(tmp_path)
    assert run(["replay", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "coord: " in said
    assert "all equal" in said
    at = changed(tmp_path, "coord", lambda _, __, frame: is_turn(frame, 2))
    assert run(["replay", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "segments[0].slot: recorded 0, replayed 1" in said, "another prompt, another slot"
    assert "the core sends: Run" in said
    assert f"#{at} " in said, "the story tells the input"
    assert run(["replay", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] is False
    assert found["process"] == "coord"
    assert len(found["story"]) > 5


# ---- damage --------------------------------------------------------------------------------------


def test_a_flipped_byte_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet(tmp_path)
    path = file_of(tmp_path, "s1")
    with path.open("rb") as file:
        records = list(FrameLogReader(file))
    data = bytearray(path.read_bytes())
    victim = records[len(records) // 2].offset
    for at in range(victim, victim + 120, 7):
        broken = bytearray(data)
        broken[at] ^= 0x10
        path.write_bytes(broken)
        with pytest.raises(LogDamageError) as caught:
            replay(tmp_path)
        assert caught.value.path == path
        assert caught.value.offset in [record.offset for record in records]
    assert run(["replay", str(tmp_path)]) == 1
    assert f"{path}: byte {victim}" in capsys.readouterr().err


# ---- rotated logs --------------------------------------------------------------------------------


def test_rotated_segments_replay_and_missing_ones_are_said(tmp_path: Path) -> None:
    quiet(tmp_path, segment_bytes=2000)
    replay(tmp_path)
    coord = sorted(tmp_path.glob("coord.*"))
    assert len(coord) > 3
    coord[0].unlink()
    with pytest.raises(ToolError, match="coord: its segments 0 to 0 are missing"):
        replay(tmp_path)
    coord[2].unlink()
    with pytest.raises(ToolError, match="segment 2 is missing"):
        replay(tmp_path)


def test_a_stage_from_the_middle_of_its_log(tmp_path: Path) -> None:
    """Refused where a slot's rows were written before; else it goes on."""
    ring = RecordedRing(tmp_path, segment_bytes=1500).form()
    ring.ask(PROMPT, 6)
    ring.restart(2)  # a roll call says again who is there
    for _ in range(5):
        ring.wait(2.0)
        ring.pump()
    ring.ask([5, 5, 5, 5], 4)
    ring.ask([5, 5, 5, 5], 4)
    ring.close()
    paths = sorted(tmp_path.glob("s0.*"))
    refusals: list[str] = []
    equal = 0
    for first in range(1, len(paths)):
        paths[first - 1].unlink()
        process = processes([tmp_path])[1]
        assert process.name == "s0"
        try:
            replayer = Replayer(process)
            replayer.run_until(None)
            assert replayer.sends
            equal += 1
        except DifferenceError:
            raise
        except ToolError as error:
            refusals.append(error.message)
    assert equal
    assert any("written before this log begins (segments 0 to" in each for each in refusals)
    assert all("before this log begins" in each or "no roll call" in each for each in refusals)


# ---- stopping ------------------------------------------------------------------------------------


def test_stop_at_a_frame_and_look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet(tmp_path)
    coord = open_log(tmp_path, "coord")
    everything = list(entries(coord.process))
    verdict = next(each for each in everything if is_turn(each.frame, 2) and each.index)
    run_frame = next(
        each for each in everything if isinstance(each.frame, Run) and is_turn(each.frame, 2)
    )
    assert isinstance(run_frame.frame, Run)
    numbers = f"{run_frame.frame.epoch},{run_frame.frame.seq}"
    step = coord.run_until(parse_where(numbers))
    assert step is not None
    assert run_frame.index in [each.index for each in step.sent]
    assert isinstance(coord.core, Scheduler)
    assert list(coord.core.turns) == [2]
    assert coord.core.turns[2].slot is not None
    places = [f"#{verdict.index}", verdict.place, str(tmp_path / verdict.place)]
    for place in places:
        again = open_log(file_of(tmp_path, "coord"))
        reached = again.run_until(parse_where(place))
        assert reached is not None
        assert reached.input.index == verdict.index
    assert run(["replay", str(tmp_path), "--until", numbers]) == 0
    said = capsys.readouterr().out
    assert "process coord" in said
    assert "process s2" in said
    assert "turn 2, state running" in said
    path = file_of(tmp_path, "s1")
    assert run(["replay", str(path), "--until", "5", "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert state["stage"] == "s1"
    assert [each["slot"] for each in state["slots"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--until", "soon"], "--until soon: must be"),
        (["--until", "3"], "which process"),
        (["--until", "7,7777"], "no such frame"),
        (["--until", "x.kvrlog:10"], "x.kvrlog is none of"),
        (["--stage", "s9"], "no log of a stage 's9'; there are s0, s1, s2"),
        (["--ring", "http://127.0.0.1:1"], "name the ring.toml"),
        (["--ring", "nowhere.toml"], "nowhere.toml: no such file"),
        (["--ring", "x", "--stage", "s0"], "one at a time"),
        (["--speed", "-1", "--ring", "x"], "--speed -1: must not be negative"),
    ],
)
def test_bad_requests(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet(tmp_path)
    assert run(["replay", str(tmp_path), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_what_is_no_log_of_a_ring(tmp_path: Path) -> None:
    quiet(tmp_path)
    with pytest.raises(ToolError, match="name one of coord, s0, s1, s2"):
        open_log(tmp_path)
    with pytest.raises(ToolError, match="name one of"):
        open_log(tmp_path, "s7")


def test_a_redacted_log_replays_in_a_core_and_on_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet(tmp_path / "logs")
    assert run(["log", "redact", str(tmp_path / "logs"), "-o", str(tmp_path / "out")]) == 0
    assert run(["replay", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    for option in (["--stage", "s1"], ["--ring", str(tmp_path / "ring.toml")]):
        assert run(["replay", str(tmp_path / "out"), *option]) == 2
        said = capsys.readouterr().err
        assert len(said.splitlines()) == 1
        assert f"{option[0]} {option[1]}: " in said
        assert "coord." in said
        assert "is redacted" in said

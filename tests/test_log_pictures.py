"""kvring log trace and plot: the trace keeps the format's rules and the recorded times."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.recordedring import RecordedRing, played
from tools import cli
from tools.framelogs.plot import columns, measure, shares
from tools.framelogs.read import Entry, entries, processes
from tools.framelogs.stream import Stream
from transport.frame import Forwarded, LinkGap
from transport.framelog import Direction

Trace = list[dict[str, Any]]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RecordedRing]:
    folder = tmp_path_factory.mktemp("logs")
    return folder, played(folder)


@pytest.fixture(scope="module")
def logs(scene: tuple[Path, RecordedRing]) -> Path:
    return scene[0]


def trace(path: Path, out: Path) -> tuple[Trace, dict[str, Any]]:
    assert cli.run(["log", "trace", str(path), "-o", str(out)]) == 0
    found = json.loads(out.read_text())
    return found["traceEvents"], found["otherData"]


def tracks(events: Trace, group: str) -> dict[str, Trace]:
    """Spans of a group's tracks, by the track's name."""
    pids = [e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == group]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, Trace] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["pid"] in pids:
            found[names[event["pid"], event["tid"]]].append(event)
    return found


def recorded(logs: Path) -> list[Entry]:
    return [entry for process in processes([logs]) for entry in entries(process)]


def test_the_format(logs: Path, tmp_path: Path) -> None:
    """Trace Event Format: required fields, microseconds, named tracks, slices that nest."""
    events, _ = trace(logs, tmp_path / "trace.json")
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    groups = {e["pid"] for e in events if e["name"] == "process_name"}
    open_slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        assert event["ph"] in {"X", "C", "M"}
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert event["pid"] in groups
        assert type(event["name"]) is str
        assert type(event["args"]) is dict
        if event["ph"] == "M":
            assert event["name"] in {
                "process_name", "process_sort_index", "thread_name", "thread_sort_index",
            }  # fmt: skip
            continue
        assert type(event["ts"]) in (int, float)
        assert 0 <= event["ts"] < 10e6
        if event["ph"] == "C":
            assert all(type(value) is int for value in event["args"].values())
        else:
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in named
            slices = open_slices[event["pid"], event["tid"]]
            slices.append((event["ts"], event["ts"] + event["dur"]))
    for slices in open_slices.values():
        ends: list[float] = []
        for begin, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while ends and ends[-1] <= begin + 1e-6:
                ends.pop()
            assert not ends or end <= ends[-1] + 1e-6
            ends.append(end)


def test_forwards_are_the_recorded_ones(logs: Path, tmp_path: Path) -> None:
    events, data = trace(logs, tmp_path / "trace.json")
    found = tracks(events, "stages")
    start = data["start_ns"]
    for name in ("s0", "s1", "s2"):
        mine = [entry for entry in recorded(logs) if entry.process.name == name]
        done = [entry.at_ns for entry in mine if isinstance(entry.frame, Forwarded)]
        ends = [start + round((each["ts"] + each["dur"]) * 1e3) for each in found[name]]
        assert ends == done
        assert len(done) == data["stages"][name]["forwards"] > 50
        spans = [(each["ts"], each["ts"] + each["dur"]) for each in found[name]]
        gaps = [b[0] - a[1] for a, b in pairwise(spans)]
        said = [each["args"]["idle_before_us"] for each in found[name][1:]]
        assert said == pytest.approx(gaps, abs=1e-3)
        busy = sum(end - begin for begin, end in spans)
        idle = 1 - busy / (spans[-1][1] - spans[0][0])
        assert data["stages"][name]["idle_share"] == pytest.approx(idle, abs=1e-3)


def test_transits_are_from_log_to_log(logs: Path, tmp_path: Path) -> None:
    events, data = trace(logs, tmp_path / "trace.json")
    left: dict[tuple[str, int, int], int] = {}
    came: dict[tuple[str, int, int], int] = {}
    for entry in recorded(logs):
        envelope = entry.envelope
        key = envelope.sender, envelope.incarnation, envelope.number
        if entry.record.direction is Direction.OUT:
            left[key] = entry.at_ns
        elif entry.record.direction is Direction.IN and not isinstance(entry.frame, LinkGap):
            came[key] = entry.at_ns
    spans = [each for track in tracks(events, "links").values() for each in track]
    expected = sorted((left[key], came[key]) for key in left.keys() & came.keys())
    found = [
        (
            data["start_ns"] + round(each["ts"] * 1e3),
            data["start_ns"] + round((each["ts"] + each["dur"]) * 1e3),
        )
        for each in spans
    ]
    assert sorted(found) == expected
    assert len(found) > 200
    assert set(tracks(events, "links")) >= {
        "coord -> s0", "s0 -> s1", "s1 -> s2", "s2 -> coord",
    }  # fmt: skip


def test_turns_counters_and_losses(logs: Path, tmp_path: Path) -> None:
    events, _ = trace(logs, tmp_path / "trace.json")
    turns = tracks(events, "turns")
    assert list(turns) == [f"turn {number}" for number in range(1, 8)]
    phases = [each["name"] for each in turns["turn 5"]]
    assert phases == [
        "turn 5", "waiting", "prefill", "decode", "ring lost", "prefill", "decode",
    ]  # fmt: skip
    assert turns["turn 5"][0]["args"] == {
        "prompt": 30, "tokens": 20, "drafts_accepted": 0, "end": "length",
    }  # fmt: skip
    assert turns["turn 6"][0]["args"]["end"] == "cancelled"
    (lost,) = tracks(events, "rings")["r"]
    assert lost["name"] == "lost: stage s1 was restarted"
    counts = [e["args"]["frames"] for e in events if e["name"] == "r: frames in flight"]
    assert max(counts) >= 3
    assert counts[-1] == 0


def test_the_coordinators_log_gives_estimates(logs: Path, tmp_path: Path) -> None:
    (path,) = logs.glob("coord.*")
    events, data = trace(path, tmp_path / "trace.json")
    found = tracks(events, "stages")
    assert set(found) == {"s0", "s1", "s2"}
    assert all(each["args"]["estimated"] for track in found.values() for each in track)
    whole = trace(logs, tmp_path / "whole.json")[1]
    for name in found:
        exact, estimated = whole["stages"][name]["busy_ms"], data["stages"][name]["busy_ms"]
        assert estimated == pytest.approx(exact, rel=0.15)  # a frame was lost on its way back


# ---- plot --------------------------------------------------------------------------------------


def test_a_picture(logs: Path, tmp_path: Path) -> None:
    from matplotlib import image

    out = tmp_path / "picture.png"
    assert cli.run(["log", "plot", str(logs), "-o", str(out)]) == 0
    pixels = image.imread(out)
    assert pixels.shape[0] > 300
    assert pixels.shape[1] > 1000
    assert pixels.std() > 0.02, "an empty picture"


def test_what_is_plotted(scene: tuple[Path, RecordedRing]) -> None:
    logs, ring = scene
    stream = Stream([logs])
    rings, span, _ = measure(stream, stream.processes[0])
    series = rings["r"]
    slots = ring.scheduler.rings["r"].ledger.slots
    ends = [steps[-1][1] for _, steps in sorted(series.rows.items())]
    assert ends == [slot.resident for slot in slots]
    assert max(value for _, value in series.frames) >= 3
    assert series.frames[-1][1] == 0
    assert max(value for _, value in series.turns) == 2
    assert series.turns[-1][1] == 0
    ((begin, end),) = series.losses
    assert end is not None
    assert 0 < begin < end < span
    for forwards in series.forwards.values():
        assert all(0 <= a <= b <= span for a, b in forwards)


def test_shares_and_columns_are_means_over_time() -> None:
    assert shares([(0.0, 1.0), (2.5, 3.0)], 4.0, 4) == [1.0, 0.0, 0.5, 0.0]
    assert shares([(0.5, 2.5)], 4.0, 2) == [0.75, 0.25]
    mean, most = columns([(0.0, 0), (1.0, 3), (1.5, 1)], 2.0, 2)
    assert (mean, most) == ([0.0, 2.0], [0, 3])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plot", "LOGS", "-o", "x.jpg"], "must end in .png"),
        (["plot", "STAGE", "-o", "x.png"], "no coordinator's log"),
        (["plot", "LOGS", "-o", "/nowhere/x.png"], "/nowhere/x.png"),
        (["trace", "LOGS", "-o", "/nowhere/x.json"], "/nowhere/x.json"),
    ],
)
def test_bad_asks_end_in_one_line(
    arguments: list[str], words: str, logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (stage,) = logs.glob("s0.*")
    named = {"LOGS": str(logs), "STAGE": str(stage)}
    assert cli.run(["log", *(named.get(each, each) for each in arguments)]) in (1, 2)
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1
    assert words in errors

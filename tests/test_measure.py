"""Measuring: the stage core's part as a script, and a real ring whose rows it must not touch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pipeline.measure import machine_of
from pipeline.model import ModelInfo, ToyModel
from pipeline.slowed import Slowed
from pipeline.stage import Forward, Send, Stage, Survey
from tests import processes
from tests.processes import QUICK, Fleet, RingFile, get, post, until, with_keys, write_ring
from tests.toyclient import complete, truth
from tools.framelogs.check import prove
from tools.replay.core import Replayer
from transport.chain import root_hash
from transport.codec import MAX_STAGES
from transport.config import Limits, Ring, dumps, load
from transport.config import Stage as StageSpec
from transport.frame import (
    Forwarded,
    Kind,
    Look,
    Machine,
    Measure,
    Measured,
    RollCall,
    Run,
    Segment,
    Tensor,
)

PRINT = b"model-1"
INFO = ModelInfo((0, 2), 4, PRINT, 2, 16, 50, "toy")
MACHINE = Machine(
    "s0", "m", "cpu", "python", PRINT, (0, 2), 4, 2, 16, 8, 8, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9
)
BULK = Measure("r", 5, Look.BULK, payload=Tensor("uint8", (3,), b"abc"))
MARK = Measure("r", 5, Look.MARK)


def fresh() -> Stage:
    return Stage("r", "s0", 7, INFO)


# ---- the core ------------------------------------------------------------------------------------


def test_a_survey_writes_behind_what_is_held_and_needs_no_epoch() -> None:
    stage = fresh()
    asked = Measure("r", 9, Look.MACHINES, True, (MACHINE,))
    assert stage.handle(asked, 0.0) == [Survey(asked, 0, 0)]
    stage.handle(RollCall("r", 1), 0.0)
    for slot, rows in ((0, 5), (1, 3)):
        parent = root_hash(PRINT, b"")
        segment = Segment(1, slot, 0, (1,) * rows, Kind.PREFILL, parent, 0)
        stage.handle(Run("r", 1, slot + 1, (segment,)), 0.0)
        stage.handle(Forwarded(1, slot + 1, Tensor("uint8", (rows, 8), bytes(8 * rows))), 0.0)
    assert stage.handle(asked, 0.0) == [Survey(asked, 1, 3)], "the slot with the most room"
    own = replace(MACHINE, name="me")
    answer = stage.handle(Measured(9, True, (MACHINE, own)), 0.0)
    assert answer == [Send(Measure("r", 9, Look.MACHINES, True, (MACHINE, own)))]
    assert stage.epoch == 1
    stage.check()


def test_a_link_is_timed_from_the_mark_to_the_end_of_the_bulk() -> None:
    stage = fresh()
    assert stage.handle(MARK, 1.0) == []
    timed = replace(BULK, gaps_ns=(250_000_000,))
    assert stage.handle(BULK, 1.25) == [Send(MARK), Send(timed)]
    assert stage.handle(BULK, 9.0)[1] == Send(replace(BULK, gaps_ns=(0,))), "its mark is used up"
    stage.handle(replace(MARK, number=4), 9.0)
    assert stage.handle(BULK, 9.5)[1] == Send(replace(BULK, gaps_ns=(0,))), "another's mark"


def test_measuring_waits_for_the_forward_at_hand() -> None:
    stage = fresh()
    stage.handle(RollCall("r", 1), 0.0)
    segment = Segment(1, 0, 0, (1, 2), Kind.PREFILL, root_hash(PRINT, b""), 0)
    run = Run("r", 1, 1, (segment,))
    assert stage.handle(run, 0.0) == [Forward(run, None)]
    asked = Measure("r", 9, Look.MACHINES)
    assert stage.handle(asked, 0.0) == []
    after = stage.handle(Forwarded(1, 1, Tensor("uint8", (2, 8), bytes(16))), 0.0)
    assert after[1:] == [Survey(asked, 1, 0)]


def test_a_measure_of_another_ring_or_round_for_ever_is_dropped() -> None:
    stage = fresh()
    full = (MACHINE,) * MAX_STAGES
    for frame in (
        replace(BULK, ring="q"),
        replace(BULK, gaps_ns=(1,) * MAX_STAGES),
        Measure("r", 1, Look.MACHINES, False, full),
    ):
        assert stage.handle(frame, 0.0) == []
    assert stage.dropped == 3


# ---- a machine ----------------------------------------------------------------------------------


def survey(model: Any, stages: int = 2, start: int = 0) -> Machine:
    specs = tuple(
        StageSpec(f"s{i}", f"tcp://127.0.0.1:{port}", (2 * i, 2 * i + 2))
        for i, port in enumerate(processes.free_ports(stages))
    )
    ring = Ring("r", f"tcp://127.0.0.1:{processes.free_ports(1)[0]}", specs)
    asked = Survey(Measure("r", 1, Look.MACHINES, True), 0, start)
    return machine_of(asked, model, ring, specs[0], Limits(chunk_tokens=64), "cpu")


def test_trial_forwards_leave_the_rows_that_are_held_alone() -> None:
    model = ToyModel((0, 2), 4, slots=1, capacity=64)
    prompt = tuple(range(20))
    model.forward([Segment(1, 0, 0, prompt, Kind.PREFILL, bytes(16), 0)], None)
    before = [model.rows(layer, 0, 20) for layer in range(2)]
    found = survey(model, start=20)
    assert [model.rows(layer, 0, 20) for layer in range(2)] == before
    assert found.decode_ns > 0
    assert found.prefill_rows == 44, "what has room behind them"
    assert found.trips == (), "nobody listens"
    assert (found.wire_bytes, found.layers, found.fingerprint) == (8, (0, 2), b"kvring-toy-1")
    assert 0 < found.free_bytes <= found.total_bytes


def test_a_full_slot_and_a_slow_block_are_measured_within_bounds() -> None:
    full = survey(ToyModel((0, 2), 4, slots=1, capacity=16), start=16)
    assert (full.decode_ns, full.prefill_rows, full.prefill_ns) == (0, 0, 0)
    slow = Slowed(ToyModel((0, 2), 2, slots=1, capacity=256), 200.0)
    started = time.monotonic()
    found = survey(slow)
    assert time.monotonic() - started < 8
    assert 0.4e9 <= found.decode_ns < 0.5e9
    assert found.prefill_rows == 16, "more would take longer than a trial may"
    assert slow.info.tail


# ---- a real ring --------------------------------------------------------------------------------


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with processes.fleet(tmp_path / "processes") as made:
        yield made


def throttled(ring: RingFile, *layer_ms: float, mbit: float = 0.0) -> RingFile:
    """The same ring with slower stages and links."""
    (one,) = ring.config.rings
    stages = tuple(
        replace(stage, layer_ms=ms) for stage, ms in zip(one.stages, layer_ms, strict=True)
    )
    emulate = replace(ring.config.emulate, mbit=mbit)
    config = replace(ring.config, rings=(replace(one, stages=stages),), emulate=emulate)
    ring.path.write_text(dumps(config))
    return RingFile(ring.path, load(ring.path))


def test_the_coordinator_measures_and_no_turn_notices(fleet: Fleet, tmp_path: Path) -> None:
    limits = replace(QUICK, chunk_tokens=32)
    ring = with_keys(write_ring(tmp_path / "ring.toml", limits=limits))
    ring = throttled(ring, 4.0, 2.0, 1.0, mbit=100.0)
    logs = tmp_path / "logs"
    fleet.coord(ring, "--record", logs)
    for name in ring.names:
        fleet.stage(ring, name, "--record", logs)
    fleet.ready(ring.url)
    prompt = [7, *(Random(7).randrange(256) for _ in range(60))]
    complete(ring.url, prompt, 1)
    said = post(f"{ring.url}/ring/measure?wide=1").json()
    rows = [each["decode_ns"] / 1e6 for each in said["stages"]]
    for took, layer_ms in zip(rows, (4.0, 2.0, 1.0), strict=True):
        assert 2 * layer_ms <= took < 2 * layer_ms + 5
    assert [set(each["trips"]) for each in said["stages"]] == [
        {"", "s1", "s2"},
        {"", "s0", "s2"},
        {"", "s0", "s1"},
    ]
    assert [(link["from"], link["to"]) for link in said["links"]] == [
        ("", "s0"),
        ("s0", "s1"),
        ("s1", "s2"),
        ("s2", ""),
    ]
    for link in said["links"]:
        assert 50 < link["mbit"] < 110, link  # a busy receiver sees the end of a bulk late
        assert 0 < link["round_trip_s"] < 1
    for stage in said["stages"]:
        assert abs(stage["clock_offset_s"]) <= stage["clock_error_s"] + 0.05, stage
    answer = complete(ring.url, prompt, 20)
    assert answer.tokens == truth(prompt, 20)
    assert answer.cached > 0, "what was resident still is"
    busy(ring.url)
    fleet.end()
    proved = prove([logs])
    assert proved.tally.proved["R1"] > 0
    for process in proved.processes:
        assert sum(1 for _ in Replayer(process)) > 10, "every frame that was sent is made again"


def busy(url: str) -> None:
    """While a turn runs nothing is measured, and the turn goes on."""
    with ThreadPoolExecutor(1) as pool:
        turn = pool.submit(complete, url, [9, 9, 9], 60)
        until("it runs", lambda: get(f"{url}/ring").json()["turns"]["running"])
        refused = post(f"{url}/ring/measure")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "ring_busy")
        assert turn.result().tokens == truth([9, 9, 9], 60)
    missing = post(f"{url}/ring/measure?ring=other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "ring_not_found")

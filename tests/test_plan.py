"""kvring plan: the split against brute force, memory and order, the file it writes, a real ring."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import processes
from tests.processes import QUICK, Fleet, RingFile, until, write_ring
from tests.toyclient import complete, truth
from tools import cli
from tools.errors import ToolError
from tools.measuring import Link, Machine, Measured
from tools.plan.command import _report
from tools.plan.costs import Costs
from tools.plan.rewrite import planned, rewritten
from tools.plan.split import quickest, split
from transport.config import Limits, dumps, load, loads

MB = 10**6


Best = tuple[tuple[float, float] | None, float | None]


def brute_force(costs: Sequence[Sequence[float | None]], layers: int) -> Best:
    """The least bottleneck with the least sum of all splits that have it; the least sum of all."""
    best: tuple[float, float] | None = None
    shortest: float | None = None
    for cuts in combinations(range(1, layers), len(costs) - 1):
        ends = [0, *cuts, layers]
        times = [row[ends[i + 1] - ends[i]] for i, row in enumerate(costs)]
        known = [time for time in times if time is not None]
        if len(known) == len(times):
            made = max(known), sum(known)
            best = made if best is None else min(best, made)
            shortest = made[1] if shortest is None else min(shortest, made[1])
    return best, shortest


@st.composite
def cost_tables(draw: st.DrawFn) -> tuple[list[list[float | None]], int]:
    """Whole numbers, so that sums are exact; in no order, and some do not fit."""
    stages = draw(st.integers(1, 5))
    layers = draw(st.integers(stages, 9))
    cell = st.none() | st.integers(0, 20).map(float)
    row = st.lists(cell, min_size=layers + 1, max_size=layers + 1)
    return draw(st.lists(row, min_size=stages, max_size=stages)), layers


@given(cost_tables())
@settings(max_examples=120, deadline=None)
def test_no_split_is_better(drawn: tuple[list[list[float | None]], int]) -> None:
    costs, layers = drawn
    counts = split(costs, layers)
    best, shortest = brute_force(costs, layers)
    if best is None:
        assert counts is None
        assert quickest(costs, layers) is None
        return
    alone = quickest(costs, layers)
    assert alone is not None
    assert sum(row[count] or 0.0 for row, count in zip(costs, alone, strict=True)) == shortest
    assert counts is not None
    assert (sum(counts), min(counts) >= 1, len(counts)) == (layers, True, len(costs))
    times = [row[count] for row, count in zip(costs, counts, strict=True)]
    known = [time for time in times if time is not None]
    assert len(known) == len(times)
    assert (max(known), sum(known)) == best


# ---- a measured ring -----------------------------------------------------------------------------


def machine(at: int, layers: tuple[int, int], layer_ms: float, **changes: Any) -> Machine:
    count = layers[1] - layers[0]
    made = Machine(
        name=f"s{at}",
        machine=f"m{at}",
        device="cpu",
        software="",
        fingerprint="ab",
        layers=layers,
        layers_total=12,
        slots=2,
        capacity=512,
        row_bytes=1000 * count,
        wire_bytes=1000,
        weight_bytes=10 * MB * count,
        end_bytes=0,
        free_bytes=1000 * MB,
        total_bytes=2000 * MB,
        files=1024,
        decode_s=layer_ms * count / 1e3,
        end_s=0.0,
        prefill_rows=64,
        prefill_s=layer_ms * count * 2 / 1e3,
        trips={f"s{other}": 0.001 for other in range(4) if other != at} | {"": 0.001},
        clock_offset_s=0.0,
        clock_error_s=0.0,
    )
    return replace(made, **changes)


def measured(*machines: Machine, mbit: float = 1000.0) -> Measured:
    names = ["", *(each.name for each in machines), ""]
    links = tuple(Link(names[at], names[at + 1], 0.001, mbit) for at in range(len(names) - 1))
    trips = {each.name: 0.001 for each in machines}
    return Measured("r", 0.0005 * len(links), tuple(machines), links, trips)


LIMITS = Limits(slots=2, max_model_len=512, chunk_tokens=64)


def counts(costs: Costs) -> dict[str, int]:
    return {block.machine.name: block.count for block in costs.best().blocks}


def test_layers_follow_speed_and_memory() -> None:
    cuts = [(0, 4), (4, 8), (8, 12)]
    ring = [machine(at, cut, ms) for at, (cut, ms) in enumerate(zip(cuts, (3, 1, 2), strict=True))]
    found = measured(*ring)
    assert counts(Costs(found, LIMITS, 2)) == {"s0": 2, "s1": 7, "s2": 3}
    alone = Costs(found, LIMITS, 2, alone=True)
    assert counts(alone) == {"s0": 1, "s1": 10, "s2": 1}, "for one turn the fastest computes most"
    assert alone.best().one_rate > Costs(found, LIMITS, 2).best().one_rate
    # s1 has room for a layer more: 11 MB with its rows, and 4 MB for those that it may write
    full = replace(ring[1], free_bytes=100 * MB + 16 * MB)
    assert counts(Costs(measured(ring[0], full, ring[2]), LIMITS, 2))["s1"] == 5
    beside = [replace(each, machine="m", free_bytes=100 * MB + 16 * MB) for each in ring]
    assert counts(Costs(measured(*beside), LIMITS, 2)) == {"s0": 4, "s1": 4, "s2": 4}, (
        "what is left of one device is for all of its stages"
    )
    small = [replace(each, weight_bytes=10 * MB, free_bytes=0) for each in ring]
    costs = Costs(measured(*small), replace(LIMITS, slots=90), 2)
    with pytest.raises(ToolError, match=r"the model does not fit: .* GB of weights and rows"):
        costs.best()
    with pytest.raises(ToolError, match="stage s1 could not try its block: every slot is full"):
        Costs(measured(ring[0], replace(ring[1], decode_s=0.0), ring[2]), LIMITS, 2)


def two_stages(second_ms: float) -> Measured:
    """Six layers each, of 1 ms in the first stage."""
    return measured(machine(0, (0, 6), 1.0), machine(1, (6, 12), second_ms))


@pytest.mark.parametrize(
    ("second_ms", "alone", "planned_counts"),
    [
        (1.18, False, [6, 6]),  # 7.08 ms now, 7 with a layer moved
        (1.30, False, [7, 5]),  # 7.8 and 7
        (1.02, True, [6, 6]),  # 12.12 ms in all, 12.02 with five layers moved
        (1.30, True, [11, 1]),  # 13.8 and 12.3
    ],
)
def test_what_gains_less_than_noise_is_no_plan(
    second_ms: float, alone: bool, planned_counts: list[int]
) -> None:
    costs = Costs(two_stages(second_ms), LIMITS, 2, alone=alone)
    assert [block.count for block in costs.best().blocks] == planned_counts
    assert (costs.best() == costs.now()) == (planned_counts == [6, 6])


def test_what_has_no_room_moves_for_less() -> None:
    first, second = two_stages(1.0).machines
    for free, expected in ((1000 * MB, 6), (100 * MB, 5)):  # a twentieth of its device is spared
        tight = replace(second, weight_bytes=60 * MB, free_bytes=free, row_bytes=6000)
        costs = Costs(measured(first, tight), LIMITS, 2)
        assert counts(costs)["s1"] == expected, free


def test_a_plan_that_is_no_better_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, new = tmp_path / "ring.toml", tmp_path / "new.toml"
    ring.write_text(TEXT.replace("[0, 4]", "[0, 6]").replace("[4, 12]", "[6, 12]"))

    def plan(second_ms: float, *options: str) -> tuple[str, str]:
        monkeypatch.setattr("tools.plan.command.measure", lambda *_: two_stages(second_ms))
        assert cli.run(["plan", "--ring", str(ring), *options]) == 0
        said = capsys.readouterr()
        return said.out, said.err

    said, told = plan(1.18, "--write", str(new))
    assert "the present split is as good: none gains more than 3%, and" in said
    assert "the layers are the present ones: nothing has to be started again" in told
    assert new.read_text() == ring.read_text()
    assert json.loads(plan(1.18, "--json")[0])["worth_a_restart"] is False
    new.unlink()
    said, told = plan(1.3, "--write", str(new))
    assert "as good" not in said
    assert "then restart all stages" in told
    assert "layers = [0, 7]" in new.read_text()
    assert json.loads(plan(1.3, "--json")[0])["worth_a_restart"] is True


def test_a_narrow_terminal_gets_the_table_in_pieces() -> None:
    found = two_stages(1.3)
    costs = Costs(found, LIMITS, 2)
    wide = _report(found, costs.now(), costs.best())
    narrow = _report(found, costs.now(), costs.best(), 60)
    tables = [line for line in narrow if line.startswith(("stage", "s0", "s1"))]
    assert max(map(len, tables)) <= 60
    assert [line.split()[0] for line in tables] == ["stage", "s0", "s1"] * 2
    heading = " ".join(tables[0].split() + tables[3].split()[1:])
    assert heading == " ".join(wide[0].split()), "no heading is cut, none is lost"
    assert tables[1].split() + tables[4].split()[1:] == wide[1].split()


def test_the_ends_hold_more_and_the_tail_computes_more() -> None:
    head = machine(0, (0, 6), 1.0, weight_bytes=90 * MB, end_bytes=30 * MB)
    tail = machine(1, (6, 12), 1.0, weight_bytes=90 * MB, end_bytes=30 * MB, end_s=0.004)
    costs = Costs(measured(head, tail), LIMITS, 2)
    best = costs.best()
    assert [block.count for block in best.blocks] == [8, 4], "the LM head costs four layers"
    assert [block.bytes for block in best.blocks] == [
        30 * MB + 8 * 11_024_000,
        30 * MB + 4 * 11_024_000,
    ]
    assert best.blocks[1].decode_s == pytest.approx(0.008)


def test_a_prediction_adds_up() -> None:
    ring = [machine(at, (4 * at, 4 * at + 4), ms) for at, ms in enumerate((4.0, 2.0, 1.0))]
    now = Costs(measured(*ring, mbit=8.0), LIMITS, 2).predict((0, 1, 2), (4, 4, 4))
    assert now is not None
    assert now.one_rate == pytest.approx(1 / (0.016 + 0.008 + 0.004 + 0.002))
    assert now.many_rate == pytest.approx(2 / 0.030), "two turns share a frame"
    for turns, many_s in ((20, 3 * 0.016), (40, 3 * (0.016 + 6 * 0.0005))):
        many = Costs(measured(*ring, mbit=8.0), LIMITS, turns).predict((0, 1, 2), (4, 4, 4))
        assert many is not None
        assert many.many_rate == pytest.approx(turns / many_s), "three frames fill the ring"
    chunk_s, transfer_s = 0.032, (300 + 64 * 1000) * 8 / 8e6  # of 64 rows in stage 0, on a link
    rest_s = 0.016 + 0.008 + 3 * transfer_s + 0.002
    assert now.ttft_s == pytest.approx(chunk_s + rest_s + 7 * transfer_s), "511 tokens, 8 chunks"
    assert now.bottleneck_s == 0.016
    assert now.fits


def test_the_order_follows_unequal_links() -> None:
    """s0 and s2 are in one place, s1 and s3 in another; the coordinator is with s0."""
    far, places = 0.1, {"": 0, "s0": 0, "s1": 1, "s2": 0, "s3": 1}

    def trips(name: str) -> dict[str, float]:
        return {
            other: 0.001 if place == places[name] else far
            for other, place in places.items()
            if other != name
        }

    ring = [machine(at, (3 * at, 3 * at + 3), 1.0, trips=trips(f"s{at}")) for at in range(4)]
    names = ["", "s0", "s1", "s2", "s3", ""]
    links = tuple(Link(one, two, trips(one)[two], 1000.0) for one, two in pairwise(names))
    round_trip_s = sum(link.round_trip_s or 0.0 for link in links) / 2
    found = Measured("r", round_trip_s, tuple(ring), links, trips(""))
    costs = Costs(found, LIMITS, 2)
    best = costs.best()
    ways = {
        order: made.one_rate
        for order in permutations(range(4))
        if (made := costs.predict(order, (3, 3, 3, 3))) is not None
    }
    assert best.one_rate >= max(ways.values()) * 0.98, "no order is better by more than it matters"
    order = [block.machine.name for block in best.blocks]
    crossings = sum(places[a] != places[b] for a, b in zip(["", *order], [*order, ""], strict=True))
    assert crossings == 2
    deaf = [replace(each, trips={}) for each in ring]
    kept = Costs(Measured("r", round_trip_s, tuple(deaf), links, {}), LIMITS, 2).best()
    assert [block.machine.name for block in kept.blocks] == ["s0", "s1", "s2", "s3"]


# ---- ring.toml -----------------------------------------------------------------------------------

TEXT = """# ours
[model]
path = "toy"  # for now

[[ring]]
name = "r"
verdicts = "tcp://127.0.0.1:1"

# in the cellar
[[ring.stage]]
name = "s0"
address = "tcp://127.0.0.1:2"
layers = [0, 4]  # slow

[[ring.stage]]
name = "s1"
address = "tcp://127.0.0.1:3"
layers = [4, 12]

[limits]
slots = 2  # enough
"""


def test_a_file_keeps_its_comments(tmp_path: Path) -> None:
    config = loads(TEXT, folder=tmp_path)
    after = planned(config, "r", [("s0", (0, 7)), ("s1", (7, 12))])
    text = rewritten(TEXT, tmp_path, config, after)
    assert text == TEXT.replace("[0, 4]", "[0, 7]").replace("[4, 12]", "[7, 12]")
    turned = planned(config, "r", [("s1", (0, 7)), ("s0", (7, 12))])
    text = rewritten(TEXT, tmp_path, config, turned)
    assert loads(text, folder=tmp_path) == turned
    assert "layers = [7, 12]  # slow" in text
    assert text.index('"s1"') < text.index('"s0"') < text.index("slots = 2  # enough")
    odd = TEXT.replace("layers = [0, 4]", "layers = [\n  0,\n  4,\n]")
    text = rewritten(odd, tmp_path, config, turned)
    assert loads(text, folder=tmp_path) == turned, "written anew where it can't be edited"


# ---- a real ring ---------------------------------------------------------------------------------


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with processes.fleet(tmp_path / "processes") as made:
        yield made


def test_a_throttled_ring_is_planned_and_serves(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ring = write_ring(
        tmp_path / "ring.toml", layers=14, stages=2, limits=replace(QUICK, chunk_tokens=32)
    )
    (one,) = ring.config.rings
    stages = tuple(
        replace(stage, layer_ms=ms) for stage, ms in zip(one.stages, (3.0, 1.0), strict=True)
    )
    config = replace(ring.config, rings=(replace(one, stages=stages),))
    ring.path.write_text(dumps(config))
    running = [fleet.stage(ring, name) for name in ring.names]
    for process in running:
        until("it is loaded", lambda: '"event": "loaded"' in process.errors)  # noqa: B023
    new = tmp_path / "new.toml"
    assert cli.run(["plan", "--ring", str(ring.path), "--json", "--write", str(new)]) == 0
    said = json.loads(capsys.readouterr().out)
    layers = [tuple(block["layers"]) for block in said["planned"]["blocks"]]
    assert layers in ([(0, 3), (3, 14)], [(0, 4), (4, 14)])
    assert said["planned"]["bottleneck_s"] < 0.65 * said["now"]["bottleneck_s"]
    assert said["planned"]["one_rate"] > 1.2 * said["now"]["one_rate"]
    assert cli.run(["plan", "--ring", str(ring.path), "--write", str(new)]) == 2
    assert "it is there already" in capsys.readouterr().err
    assert cli.run(["plan", "--ring", str(new)]) == 1
    assert "start them again" in capsys.readouterr().err
    for process in running:
        process.expected.append(0)
        process.popen.terminate()
        process.wait()
    fleet.whole(RingFile(new, load(new)))
    assert complete(ring.url, [1, 2, 3], 8).tokens == truth([1, 2, 3], 8, layers=14)

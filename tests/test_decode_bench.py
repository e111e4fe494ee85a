"""The decode and serve measurements: their arms, their arithmetic, and both on a real toy ring."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tools import cli
from tools.client import Reply
from tools.decode import Arm, Cell, Plan, mismatches, prompts, rows
from tools.errors import ToolError
from tools.load import Timeline, steady_rate
from tools.mixed import Neighbour

PLAN = Plan(
    model="toy",
    stages=2,
    delays_ms=(0.0, 20.0),
    drafters=("off", "lookup"),
    depths=(None, 1),
    draft_tokens=(None,),
    classes=("chat",),
    concurrency=(1, 4),
    max_tokens=8,
    rounds=1,
)


def line(times: list[float], tokens: int, sent: float = 0.0) -> Timeline:
    reply = Reply(usage={"completion_tokens": tokens})
    return Timeline(sent, reply, [(at, 10) for at in times])


def cell(arm: str, rate: float, texts: list[str], round_: int = 1) -> Cell:
    return Cell(round_, arm, "chat", 1, 10, rate, 50.0, 2.0, 3.0, 4, {"s0": 0.25}, texts)


def test_the_reference_comes_first_and_bounds_are_for_drafters() -> None:
    assert [arm.name for arm in PLAN.arms()] == [
        "0 ms off",
        "0 ms lookup",
        "0 ms lookup depth 1",
        "20 ms off",
        "20 ms lookup",
        "20 ms lookup depth 1",
    ]
    assert Arm(20, "lookup", 1, 7).options() == [
        *("--delay-ms", "20", "--drafter", "lookup", "--draft-depth", "1", "--draft-tokens", "7")
    ]
    with pytest.raises(ToolError, match="17 arms are over 16"):
        replace(PLAN, delays_ms=tuple(map(float, range(1, 17))), drafters=("off",)).arms()


def test_the_rate_is_that_of_the_time_when_all_decode() -> None:
    long = line([1.0, 2.0, 3.0, 4.0, 5.0], 50)
    short = line([2.0, 3.0, 4.0], 30)
    # from 2 to 4 s: two of five pieces of 50 tokens, two of three pieces of 30
    assert steady_rate([long, short]) == pytest.approx((20 + 20) / 2)
    assert steady_rate([line([1.0, 2.0], 20), line([3.0, 4.0], 20)]) == pytest.approx(30 / 3)
    assert long.gaps == [1.0] * 4
    with pytest.raises(ToolError, match="no text"):
        steady_rate([line([], 0)])


def test_rows_are_medians_against_the_reference() -> None:
    cells = [cell("0 ms off", rate, ["a"]) for rate in (10, 30, 20)]
    cells += [cell("20 ms lookup", rate, ["a"]) for rate in (40, 50, 60)]
    found = rows(cells)
    assert [(row.arm, row.tokens_per_s, row.ratio) for row in found] == [
        ("0 ms off", 20, 1.0),
        ("20 ms lookup", 50, 2.5),
    ]
    assert found[0].idle_share == 0.75


def test_another_text_than_the_references_is_found() -> None:
    cells = [cell("0 ms off", 1, ["a"]), cell("20 ms off", 1, ["a"]), cell("0 ms lookup", 1, ["b"])]
    assert mismatches(cells) == ["round 1, 1 x chat, 0 ms lookup"]


def test_gaps_are_compared_at_the_same_load() -> None:
    beside = Neighbour([0.01] * 9, [0.1, 0.12, 0.1, 0.2], 4000, 5.0)
    assert beside.usual_ms == pytest.approx(110)
    assert beside.longest_ms == pytest.approx(200)
    assert beside.ratio == pytest.approx(200 / 110)


def test_every_class_has_prompts() -> None:
    assert list(prompts()) == ["quote", "edit", "list", "chat", "fact"]
    assert all(len(texts) >= 2 for texts in prompts().values())
    with pytest.raises(ToolError, match="--classes verse: there are quote"):
        prompts(("verse",))


@pytest.mark.parametrize(
    "options",
    [
        ["decode", "--delay-ms", "fast"],
        ["decode", "--concurrency", ","],
        ["decode", "--draft-depth", "-1"],
        ["decode", "--classes", "verse"],
        ["serve", "--clients", "0"],
    ],
)
def test_wrong_options_are_named(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", *options]) == 2
    assert options[1] in capsys.readouterr().err


def test_decode_measures_a_toy_ring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--model toy --stages 1 --delay-ms 10 --drafter lookup --classes chat"
    sizes = "--concurrency 1,2 --max-tokens 6"
    out = ["--out", str(tmp_path)]
    assert cli.run(["bench", "decode", *options.split(), *sizes.split(), *out]) == 0
    assert "10 ms lookup" in capsys.readouterr().out
    found = json.loads((tmp_path / "decode.json").read_text())
    assert found["mismatches"] == []
    assert [(row["turns"], row["arm"]) for row in found["rows"]] == [
        (1, "0 ms off"),
        (1, "10 ms lookup"),
        (2, "0 ms off"),
        (2, "10 ms lookup"),
    ]
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG")


def test_serve_measures_a_toy_ring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--model toy --stages 2 --clients 2 --requests 4 --max-tokens 6 --long-tokens 300"
    assert cli.run(["bench", "serve", *options.split(), "--out", str(tmp_path)]) == 0
    assert "longest against usual" in capsys.readouterr().out
    found = json.loads((tmp_path / "serve.json").read_text())
    assert found["mixed"]["replies"] == 4
    assert found["neighbour"]["during"]
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")

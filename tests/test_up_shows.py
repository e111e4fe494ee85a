"""What `kvring up` shows of a ring that loads and that runs, from what the server says of it."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.torch_model import TorchModel
from pipeline.weights import open_model
from tests import tinymodels
from tools import glance
from tools.client import Json, Readiness
from tools.glance import Rate, totals
from tools.loading import lines, loading
from transport.config import Ring, Stage

STAGES = (Stage("s0", "ipc:///s0", (0, 10)), Stage("s1", "ipc:///s1", (10, 20)))
RING = Ring("ring0", "ipc:///verdicts", STAGES)


def shown(said: Readiness | None, columns: int) -> list[str]:
    sink = io.StringIO()
    Console(file=sink, width=columns).print(lines([RING], said, 4.25, columns))
    return [line.rstrip() for line in sink.getvalue().splitlines()]


def loads(**beat: object) -> Readiness:
    stages = {"s0": {"state": "ready", "progress": 1.0, "rss_bytes": 512_000_000}, "s1": beat}
    return Readiness(ready=False, detail="ring0: s1 loads", progress=0.7, body={"ring0": stages})


def test_a_line_for_each_stage_says_what_it_does() -> None:
    detail = "reading weights, 12 of 40 MB"
    said = loads(state="loading", progress=0.3, detail=detail, rss_bytes=290_000_000)
    assert shown(said, 60) == [
        "  s0  layers 0-9    ready                             512 MB",
        f"  s1  layers 10-19  30% {detail}  290 MB",
        "  4.2 s  1 of 2 stages ready",
    ]
    wide = shown(said, 90)
    assert wide[0].split() == ["s0", "layers", "0-9", "━" * 20, "ready", "512", "MB"]
    assert wide[1].split()[3] == "━" * 6
    assert shown(loads(state="ready"), 60)[2] == "  4.2 s  ring0: s1 loads"
    assert shown(None, 60)[0].split() == ["s0", "layers", "0-9", "starting"]
    assert shown(None, 60)[2] == "  4.2 s  the coordinator starts"
    assert (
        "no\ufffd[2Jsuch file" in shown(loads(state="failed", detail="no\x1b[2Jsuch file"), 60)[1]
    )


def test_elsewhere_what_is_awaited_is_a_line_whenever_it_changes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ready = Readiness(ready=True, detail="", progress=None)
    with loading([RING], sys.stderr) as tell:
        for said in (None, None, loads(state="loading"), loads(state="loading"), ready):
            tell(said)
    assert capsys.readouterr().err == "starting the coordinator\nring0: s1 loads\n"


def test_a_block_tells_how_much_of_its_weights_it_has_read(tmp_path: Path) -> None:
    source = open_model(tinymodels.write_directory(tmp_path, tinymodels.reference("llama")))
    told: list[tuple[float, str]] = []
    TorchModel(
        source,
        (0, 1),
        slots=1,
        capacity=512,
        progress=lambda share, what: told.append((share, what)),
    )
    reading = [share for share, what in told if what.startswith("reading weights, ")]
    assert reading == sorted(reading)
    assert (reading[0] > 0.0, reading[-1], len(reading)) == (True, 1.0, len(source.names((0, 1))))


def test_a_rate_is_the_mean_of_the_last_seconds() -> None:
    rate = Rate()
    assert rate.per_s is None
    for second in range(10):
        rate.note(second, 10.0 * second)
    assert rate.per_s == 10.0
    rate.note(10.0, 190.0)
    assert rate.per_s == pytest.approx((190 - 70) / 3)
    rate.note(11.0, 4.0)  # the server was started again
    assert rate.per_s is None


def test_a_glance_at_a_ring() -> None:
    def of(ring: Json, turns: Json, counted: dict[str, float], rate: float | None) -> list[str]:
        whole = {"turns": turns, "rings": [ring]}
        return glance.lines(whole, counted, rate, lambda text, _: text)

    stages = [{"name": "s0", "busy_share": 0.62}, {"name": "s1", "busy_share": None}]
    slots = [
        {"slot": 0, "resident": 1500, "capacity": 4096, "turn": 3},
        {"slot": 1, "resident": 0, "capacity": 4096, "turn": None},
    ]
    ring = {"name": "ring0", "state": "ready", "stages": stages, "slots": slots}
    counted = totals(
        "# TYPE kvring:prompt_tokens_total counter\nkvring:prompt_tokens_total 200.0\n"
        "kvring:prefix_cache_hits_total 150.0\nkvring:generation_tokens_total 1e+06\n"
    )
    assert counted["generation_tokens"] == 1e6
    assert of(ring, {"running": 1, "waiting": 2}, counted, 41.26) == [
        "41.3 tokens/s · 1 turn active · 2 waiting",
        "1 of 2 slots used · 1,500 rows resident (18%) · 75% of 200 prompt tokens cached",
        "busy s0 ████·· 62% · s1 ······ -",
    ]
    lost = {"name": "ring0", "state": "lost", "detail": "s1 is gone"}
    assert of(lost, {}, {}, None) == [
        "idle · 0 turns active",
        "0 of 0 slots used · 0 rows resident",
        "ring0 is lost: s1 is gone",
    ]

"""Owns how a measurement is shown: the table, the JSON file and the plot."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from statistics import median
from typing import TextIO

from tools.client import Json
from tools.multiturn import Measurement, Plan, Row, as_json, mismatches, rows

PIPE_COLUMNS = 120  # the table's width where there is no terminal to ask


def summary(table: list[Row], floor_ms: float | None) -> list[str]:
    """The result in two or three sentences: the follow-up turns, which are what reuse is for."""
    follow_ups = [row for row in table if row.turn > 1] or table
    cold = median(row.cold_ms for row in follow_ups)
    cached = median(row.cached_ms for row in follow_ups)
    lines = [
        f"follow-up turns: first token after {cold:,.0f} ms cold, {cached:,.0f} ms cached, "
        f"ratio {cold / max(1e-6, cached):.1f}"
    ]
    if floor_ms is not None:
        lines.append(
            f"floor: the suffix alone takes {floor_ms:,.0f} ms in one process; the cached turn is "
            f"{cached / max(1e-6, floor_ms):.2f} times that"
        )
    return lines


def print_table(table: list[Row], stream: TextIO) -> None:
    """One line per turn; colours and the terminal's width only where there is a terminal."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title="time to first token in ms: median (lowest-highest); tokens prefilled")
    for name in ("turn", "prompt", "cold ms", "prefill", "cached ms", "prefill", "ratio", "tok/s"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("text", no_wrap=True)
    for row in table:
        shown.add_row(
            str(row.turn),
            _number(row.prompt_tokens),
            _times(row.cold_ms, row.cold_range_ms),
            _number(row.cold_prefilled),
            _times(row.cached_ms, row.cached_range_ms),
            _number(row.cached_prefilled),
            f"{row.ratio:.1f}",
            _number(row.tokens_per_s, 1),
            "same" if row.same_text else "DIFFERENT",
        )
    width = None if stream.isatty() else PIPE_COLUMNS
    Console(file=stream, width=width, highlight=False).print(shown)


def write_json(
    path: Path, *, plan: Plan, server: Json, results: list[Measurement], floor: Json
) -> None:
    """Everything measured, with the machine it was measured on."""
    body = {
        "plan": as_json(plan),
        "machine": {
            "system": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "server": server,
        "turns": [as_json(row) for row in rows(results)],
        "floor": floor,
        "mismatches": [{"round": r, "turn": t} for r, t in mismatches(results)],
        "measurements": [as_json(result) for result in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {path}", file=sys.stderr)


def write_plot(path: Path, title: str, table: list[Row], floor_ms: float | None) -> None:
    """Bars per turn, cold beside cached, whiskers lowest to highest, the ratio above each pair."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    width = 0.38
    for offset, name, colour, values, ranges in (
        (
            -width / 2,
            "cold",
            "#8a8f98",
            [r.cold_ms for r in table],
            [r.cold_range_ms for r in table],
        ),
        (
            width / 2,
            "cached",
            "#1f77b4",
            [r.cached_ms for r in table],
            [r.cached_range_ms for r in table],
        ),
    ):
        whiskers = [
            [value - low for value, (low, _) in zip(values, ranges, strict=True)],
            [high - value for value, (_, high) in zip(values, ranges, strict=True)],
        ]
        places = [row.turn + offset for row in table]
        axes.bar(places, values, width, yerr=whiskers, capsize=3, color=colour, label=name)
    for row in table:
        top = max(row.cold_range_ms[1], row.cached_range_ms[1])
        axes.annotate(
            f"{row.ratio:.1f}x",
            (row.turn, top),
            textcoords="offset points",
            xytext=(0, 5),
            ha="center",
        )
    if floor_ms is not None:
        axes.axhline(floor_ms, color="#d62728", linestyle="--", label="floor: suffix alone")
    axes.set_xticks([row.turn for row in table])
    axes.set_xlabel("turn of the conversation")
    axes.set_ylabel("time to first token, ms")
    axes.set_title(title)
    axes.margins(y=0.12)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(f"wrote {path}", file=sys.stderr)


def _times(middle: float, span: tuple[float, float]) -> str:
    return f"{middle:,.0f} ({span[0]:,.0f}-{span[1]:,.0f})"


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"

"""Owns how the decode and serve measurements are shown: tables, JSON files and plots."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tools.client import Json

if TYPE_CHECKING:
    from tools.decode import Row

PIPE_COLUMNS = 110  # the table's width where there is no terminal to ask


def print_rows(table: list[Row], stream: TextIO) -> None:
    """One line per class, number of turns and arm."""
    shown = _table("tokens per second of all turns together; time to first token")
    for name in ("class", "turns", "arm", "tok/s", "ratio", "first ms", "tok/verify", "frames"):
        shown.add_column(name, justify="left" if name in {"class", "arm"} else "right")
    shown.add_column("idle", justify="right")
    for row in table:
        idle = "-" if row.idle_share is None else f"{row.idle_share:.0%}"
        shown.add_row(
            row.text_class,
            str(row.turns),
            row.arm,
            f"{row.tokens_per_s:,.1f}",
            f"{row.ratio:.2f}",
            f"{row.ttft_ms:,.0f}",
            _number(row.per_verify),
            _number(row.frames_in_flight),
            idle,
        )
    _print(shown, stream)


def print_pairs(title: str, pairs: dict[str, str], stream: TextIO) -> None:
    """A small table of names and values."""
    shown = _table(title)
    shown.add_column("what")
    shown.add_column("value", justify="right")
    for name, value in pairs.items():
        shown.add_row(name, value)
    _print(shown, stream)


def write_json(path: Path, body: Json) -> None:
    """What was measured, with the machine it was measured on."""
    machine = {
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine, **body}, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {path}", file=sys.stderr)


def plot_rows(path: Path, title: str, table: list[Row]) -> None:
    """A panel for each class: tokens per second over the number of turns, a line for each arm."""
    from matplotlib.figure import Figure

    classes = list(dict.fromkeys(row.text_class for row in table))
    figure = Figure(figsize=(4.2 * len(classes), 4.5), dpi=130, layout="constrained")
    panels = figure.subplots(1, len(classes), squeeze=False)[0]
    for axes, name in zip(panels, classes, strict=True):
        here = [row for row in table if row.text_class == name]
        for arm in dict.fromkeys(row.arm for row in here):
            line = [row for row in here if row.arm == arm]
            axes.plot([r.turns for r in line], [r.tokens_per_s for r in line], "o-", label=arm)
        axes.set_title(name)
        axes.set_xlabel("turns at once")
        axes.set_ylabel("tokens per second, all together")
        axes.set_yscale("log")
    panels[-1].legend(fontsize="small")
    figure.suptitle(title)
    _save(figure, path)


def plot_gaps(path: Path, title: str, gaps: dict[str, list[float]]) -> None:
    """The gaps between a reply's pieces, in order, one line for each case."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    for name, each in gaps.items():
        axes.plot([gap * 1e3 for gap in each], ".", label=name)
    axes.set_xlabel("piece of the reply")
    axes.set_ylabel("ms since the one before")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.legend()
    _save(figure, path)


def _table(title: str) -> Any:
    from rich.table import Table

    return Table(title=title)


def _print(shown: Any, stream: TextIO) -> None:
    from rich.console import Console

    width = None if stream.isatty() else PIPE_COLUMNS
    Console(file=stream, width=width, highlight=False).print(shown)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(f"wrote {path}", file=sys.stderr)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"

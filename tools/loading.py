"""Owns how a ring that starts is shown in a terminal: a line for each stage, and what is awaited.

Reads what GET /ready says; knows no process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from tools.client import Json, Readiness, integer, number
from tools.terminal import ProgressLine, in_place, printable, region, width
from transport.config import Ring

if TYPE_CHECKING:
    from rich.console import RenderableType

BAR_COLUMNS = 20
WIDE = 76  # columns of a terminal from which there is room for bars
WIDEST = 100  # columns that are used
STATE_STYLES = {"ready": "green", "failed": "red"}


@contextmanager
def opening(model: str, stream: TextIO) -> Iterator[None]:
    """Before there is anything to tell of, in place only."""
    line = ProgressLine(stream)
    if in_place(stream):
        line.show(f"  opening {printable(model)}")
    try:
        yield
    finally:
        line.close()


@contextmanager
def loading(rings: Sequence[Ring], stream: TextIO) -> Iterator[Callable[[Readiness | None], None]]:
    """Call with what the coordinator says, again and again; None while it does not answer.

    Where lines can't be rewritten, what is awaited is a line whenever it changes.
    """
    if not in_place(stream):
        line = ProgressLine(stream)

        def tell(said: Readiness | None) -> None:
            if said is None or not said.ready:
                line.show("starting the coordinator" if said is None else said.detail)

        yield tell
        return
    began = time.monotonic()
    with region(stream, leave=True) as show:
        yield lambda said: show(lines(rings, said, time.monotonic() - began, width(stream)))


def lines(
    rings: Sequence[Ring], said: Readiness | None, spent_s: float, columns: int
) -> RenderableType:
    """A line for each stage, and what is awaited."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.width = min(columns, WIDEST)
    rows.add_column(no_wrap=True)
    rows.add_column(no_wrap=True, style="dim")
    if columns >= WIDE:
        rows.add_column(width=BAR_COLUMNS)
    rows.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    rows.add_column(no_wrap=True, justify="right", style="dim")
    body = {} if said is None else said.body
    loaded = 0
    for ring in rings:
        told = body.get(ring.name)
        for stage in ring.stages:
            beat = told.get(stage.name, {}) if isinstance(told, dict) else {}
            loaded += beat.get("state") == "ready"
            cells = _stage(beat, wide=columns >= WIDE)
            layers = f"layers {stage.layers[0]}-{stage.layers[1] - 1}"
            rss = integer(beat.get("rss_bytes"))
            memory = "" if rss is None else f"{rss / 1e6:,.0f} MB"
            rows.add_row(f"  {stage.name}", layers, *cells, memory)
    stages = sum(len(ring.stages) for ring in rings)
    if said is None:
        awaited = "the coordinator starts"
    elif said.ready or loaded == stages:
        awaited = "ready" if said.ready else printable(said.detail)
    else:
        awaited = f"{loaded} of {stages} stages ready"
    text = f"  {spent_s:.1f} s  {awaited}"
    return Group(rows, Text(text, style="dim", no_wrap=True, overflow="ellipsis"))


def _stage(beat: Json, *, wide: bool) -> list[RenderableType]:
    """A bar, if there is room, and what the stage does."""
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    state = str(beat.get("state", "unknown"))
    share = number(beat.get("progress")) or 0.0
    if state in {"unknown", "ready"}:
        text = "starting" if state == "unknown" else "ready"
    else:
        text = printable(str(beat.get("detail") or state))
        if not wide and share:
            text = f"{share:3.0%} {text}"
    said = Text(text, style=STATE_STYLES.get(state, ""), overflow="ellipsis", no_wrap=True)
    if not wide:
        return [said]
    bar = ProgressBar(total=1.0, completed=share, width=BAR_COLUMNS, complete_style="default")
    return [bar, said]

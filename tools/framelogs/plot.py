"""Owns `kvring log plot`: frames in flight, busy stages and resident rows over time, as a PNG.

From the coordinator's log alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tools.errors import RUNTIME, USAGE, ToolError
from tools.framelogs.events import Ended, Formed, Lost, Submitted
from tools.framelogs.life import Life
from tools.framelogs.read import Process
from tools.framelogs.stream import Stream
from transport.frame import Run, Verdict

BINS = 240  # columns of the busy share
COLUMNS = 600  # of the frames in flight, which change hundreds of times a second
MAX_POINTS = 20_000  # of one line: more than the picture has columns
DPI = 110
Steps = list[tuple[float, int]]  # (seconds, value from then on)


@dataclass(slots=True)
class Series:
    """One ring's measurements, in seconds from the log's start."""

    frames: Steps = field(default_factory=list)
    forwards: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # [begin, end)
    rows: dict[int, Steps] = field(default_factory=dict)
    capacity: int = 0
    slots: int = 0
    losses: list[tuple[float, float | None]] = field(default_factory=list)
    turns: Steps = field(default_factory=list)


def run_plot(*, paths: Sequence[Path], out: Path) -> int:
    """Write the picture; the exit code: 1 when something could not be read."""
    if out.suffix.lower() != ".png":
        raise ToolError(f"-o {out}: must end in .png", code=USAGE)
    stream = Stream(paths)
    lives = [each for each in stream.processes if each.header.role == "coordinator"]
    lives = [each for each in lives if each.name != "verify"]
    if not lives:
        raise ToolError("no coordinator's log among them: only it knows slots and turns")
    if len(lives) > 1:
        named = ", ".join(str(each.paths[0]) for each in lives)
        raise ToolError(f"{len(lives)} lives of coordinators ({named}): plot one", code=USAGE)
    rings, span, start_ns = measure(stream, lives[0])
    if not rings:
        raise ToolError(f"{lives[0].paths[0]}: no ring was formed in it")
    _draw(rings, span, start_ns, out)
    print(out)
    for text in stream.notes + stream.damages:
        print(f"kvring: {text}", file=sys.stderr)
    return RUNTIME if stream.damages else 0


def measure(stream: Stream, process: Process) -> tuple[dict[str, Series], float, int]:
    """Each ring's series, the log's length in seconds, and its start."""
    life, start, at = Life(process.header.config), None, 0.0
    rings: dict[str, Series] = {}
    running = 0
    for entry in stream.of([process]):
        start = entry.at_ns if start is None else start
        at, frame = (entry.at_ns - start) / 1e9, entry.frame
        if isinstance(frame, Verdict) and frame.ring in life.rings:
            flight = life.rings[frame.ring].flying.get(frame.seq)
            if flight is not None and isinstance(flight.frame, Run):
                sent = (flight.sent_ns - start) / 1e9
                _forwards(rings.setdefault(frame.ring, Series()), frame, sent, at)
        for event in life.take(entry):
            if isinstance(event, Submitted):
                running += 1
            elif isinstance(event, Ended):
                running -= 1
            elif isinstance(event, Lost):
                rings.setdefault(event.ring, Series()).losses.append((at, None))
            elif isinstance(event, Formed):
                series = rings.setdefault(event.ring, Series())
                if series.losses and series.losses[-1][1] is None:
                    series.losses[-1] = series.losses[-1][0], at
        for name, ring in life.rings.items():
            series = rings.setdefault(name, Series())
            series.capacity, series.slots = ring.capacity, ring.slots
            _step(series.frames, at, len(ring.flying))
            _step(series.turns, at, running)
            for slot in range(ring.slots):
                _step(series.rows.setdefault(slot, []), at, ring.rows.get(slot, 0))
    return {name: each for name, each in rings.items() if each.slots}, at, start or 0


def _forwards(series: Series, verdict: Verdict, sent: float, back: float) -> None:
    """Where the stages' forwards lay, hops taken alike. See trace.Stages.estimate."""
    spent = sum(each.wait_us + each.forward_us for each in verdict.timings) / 1e6
    hop = max(0.0, back - sent - spent) / (len(verdict.timings) + 1)
    for each in verdict.timings:
        sent += hop + each.wait_us / 1e6
        end = sent + each.forward_us / 1e6
        series.forwards.setdefault(each.stage, []).append((sent, end))
        sent = end


def shares(forwards: Sequence[tuple[float, float]], span: float, bins: int) -> list[float]:
    """Share of each of `bins` equal parts of [0, span) that forwards take, at most 1."""
    width = span / bins
    busy = [0.0] * bins
    for begin, end in forwards:
        for at in range(max(0, int(begin / width)), min(bins - 1, int(end / width)) + 1):
            busy[at] += max(0.0, min(end, (at + 1) * width) - max(begin, at * width))
    return [min(1.0, each / width) for each in busy]


def columns(steps: Steps, span: float, count: int) -> tuple[list[float], list[int]]:
    """Of each of `count` equal parts of [0, span): a step line's mean over time, and its most."""
    width = span / count
    total, most = [0.0] * count, [0] * count
    ends = [at for at, _ in steps[1:]] + [span]
    for (begin, value), end in zip(steps, ends, strict=True):
        last = min(count - 1, int(end / width))
        for at in range(min(count - 1, int(begin / width)), last + 1):
            covered = min(end, (at + 1) * width) - max(begin, at * width)
            total[at] += value * max(0.0, covered)
            most[at] = max(most[at], value)
    return [each / width for each in total], most


def _step(steps: Steps, at: float, value: int) -> None:
    if not steps or steps[-1][1] != value:
        steps.append((at, value))


def _thinned(steps: Steps, span: float) -> tuple[list[float], list[int]]:
    """Times and values of a step line to `span`; of many in one column its least and its most."""
    found = [*steps, (span, steps[-1][1])] if steps else [(0.0, 0), (span, 0)]
    if len(found) > MAX_POINTS:
        columns: dict[int, Steps] = {}
        for at, value in found:
            columns.setdefault(int(at / span * MAX_POINTS / 4), []).append((at, value))
        found = []
        for points in columns.values():
            ends = [points[0], min(points, key=_value), max(points, key=_value), points[-1]]
            found += sorted(dict.fromkeys(ends))
    return [at for at, _ in found], [value for _, value in found]


def _value(point: tuple[float, int]) -> int:
    return point[1]


def _draw(rings: dict[str, Series], span: float, start_ns: int, out: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    span = max(span, 1e-3)
    heights = []
    for ring in rings.values():
        heights += [1.6, 0.45 * max(2, len(ring.forwards)), 0.5 * max(2, ring.slots)]
    figure, axes = plt.subplots(
        len(heights),
        1,
        figsize=(12, sum(heights) + 1.8),
        sharex=True,
        squeeze=False,
        height_ratios=heights,
        layout="constrained",
    )
    for index, (name, ring) in enumerate(rings.items()):
        flying, busy, resident = (axes[3 * index + i][0] for i in range(3))
        _flying(flying, name, ring, span)
        _busy(figure, busy, ring, span)
        _resident(figure, resident, ring, span)
        for axis in (flying, busy, resident):
            for begin, end in ring.losses:
                axis.axvspan(begin, span if end is None else end, color="tab:red", alpha=0.18, lw=0)
    axes[-1][0].set_xlabel(f"seconds from {datetime.fromtimestamp(start_ns / 1e9):%F %T}")
    axes[-1][0].set_xlim(0, span)
    try:
        figure.savefig(out, dpi=DPI)
    except OSError as error:
        raise ToolError(f"-o {out}: {error.strerror or error}") from None
    finally:
        plt.close(figure)


def _flying(axis: Any, name: str, ring: Series, span: float) -> None:
    edges = [span * i / COLUMNS for i in range(COLUMNS + 1)]
    mean, most = columns(ring.frames, span, COLUMNS)
    axis.stairs(most, edges, fill=True, color="tab:blue", alpha=0.25, label="frames, at most")
    axis.stairs(mean, edges, fill=True, color="tab:blue", alpha=0.8, label="frames, on average")
    x, y = _thinned(ring.turns, span)
    axis.step(x, y, where="post", lw=1.2, color="tab:orange", label="turns")
    axis.set_ylim(bottom=0)
    axis.yaxis.get_major_locator().set_params(integer=True)
    axis.legend(
        loc="lower right", bbox_to_anchor=(1, 0.99), ncols=3, fontsize="small", frameon=False
    )
    times = "once" if len(ring.losses) == 1 else f"{len(ring.losses)} times"
    lost = f" (red: the ring was lost, {times})" if ring.losses else ""
    axis.set_title(f"ring {name}: frames in flight, and turns{lost}", loc="left", fontsize="medium")


def _busy(figure: Any, axis: Any, ring: Series, span: float) -> None:
    table = [shares(forwards, span, BINS) for forwards in ring.forwards.values()]
    bounds = (0, span, len(table), 0)
    image = axis.imshow(
        table or [[0.0]], aspect="auto", cmap="Greens", vmin=0, vmax=1, extent=bounds,
        interpolation="nearest",
    )  # fmt: skip
    names = []
    for stage, forwards in ring.forwards.items():
        total = sum(end - begin for begin, end in forwards)
        names.append(f"{stage}  {total / span:.0%}")
    axis.set_yticks([i + 0.5 for i in range(len(names))], names)
    axis.set_title("stages: share of the time that they compute", loc="left", fontsize="medium")
    figure.colorbar(image, ax=axis, format="{x:.0%}", ticks=[0, 1], pad=0.01)


def _resident(figure: Any, axis: Any, ring: Series, span: float) -> None:
    del figure
    top = max((value for steps in ring.rows.values() for _, value in steps), default=0) or 1
    for slot in range(ring.slots):
        x, y = _thinned(ring.rows[slot], span)
        low = ring.slots - 1 - slot  # slot 0 on top
        axis.fill_between(
            x, [low + 0.9 * value / top for value in y], low, step="post", lw=0, alpha=0.75
        )
    ticks = [ring.slots - 1 - slot for slot in range(ring.slots)]
    axis.set_yticks(ticks, [f"slot {slot}" for slot in range(ring.slots)])
    axis.set_ylim(0, ring.slots)
    axis.grid(axis="y", lw=0.4)
    axis.set_title(
        f"slots: resident rows; a full height is {top} rows, a slot has {ring.capacity}",
        loc="left",
        fontsize="medium",
    )

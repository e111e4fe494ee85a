"""Owns how a soak is shown: the table, the JSON file and the picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.client import Json
from tools.soak.run import Result
from tools.soak.tally import quantile
from tools.soak.watch import Sample

SHOWN = 20  # findings of a kind that are written out
BINS = 120  # of the throughput over time, none shorter than 2 s
COLOURS = {"kill": "#d62728", "stop": "#ff7f0e", "restart": "#7f7f7f"}


def pairs(result: Result) -> dict[str, str]:
    """The table: names and values."""
    tally, span_s = result.tally, result.end - result.start
    tokens = sum(count for at, count in tally.texts if at <= result.end)
    found = {"load, s": f"{span_s:,.0f}", "requests": f"{tally.outcomes.total():,}"}
    found |= {f"  {name}": f"{count:,}" for name, count in tally.outcomes.most_common()}
    compared = tally.compared if tally.toy is not None else result.rechecked
    found |= {
        "turns resumed on a ring that formed again": f"{result.counters['resumed_total']:,.0f}",
        "replies compared with the truth": f"{compared:,}",
        "tokens per second": f"{tokens / span_s:,.1f}",
        "faults": f"{len(result.faults):,}",
    }
    for name, values in _times(result).items():
        middle, most = quantile(values, 0.5), quantile(values, 0.99)
        if middle is not None and most is not None:
            found[f"{name}, ms: p50, p99"] = f"{middle * 1e3:,.0f}, {most * 1e3:,.0f}"
    for trend in result.trends:
        found[f"memory of {trend.name}, MB: at {trend.span_s:.0f} s, grown"] = (
            f"{trend.rss / 1e6:,.1f}, {trend.rss_grown / 1e6:+,.2f}"
        )
    found["rows claimed at rest, proven by every stage"] = f"{result.claimed:,}, {result.proven:,}"
    found["findings"] = f"{result.total:,}"
    found |= {f"  {name}": f"{len(each):,}" for name, each in result.findings.items()}
    return found


def as_json(result: Result) -> Json:
    """Everything that was seen; times in s since the load began."""
    tally, start = result.tally, result.start
    return {
        "plan": asdict(result.plan),
        "load_s": result.end - start,
        "outcomes": dict(tally.outcomes),
        "kinds": dict(tally.kinds),
        "codes": dict(tally.codes),
        "compared": tally.compared if tally.toy is not None else result.rechecked,
        "not_comparable": result.incomparable,
        "counters": result.counters,
        "rows_at_rest": {"claimed": result.claimed, "proven": result.proven},
        "times_ms": {
            name: {
                "count": len(values),
                **{
                    f"p{share:.0%}".rstrip("%"): _ms(quantile(values, share))
                    for share in (0.5, 0.99)
                },
                "max": _ms(max(values, default=None)),
            }
            for name, values in _times(result).items()
        },
        "faults": [
            {
                **asdict(fault.planned),
                "at_s": fault.at - start,
                "answered_s": None if fault.answered is None else fault.answered - fault.at,
                "whole_s": None if fault.whole is None else fault.whole - fault.at,
            }
            for fault in result.faults
        ],
        "trends": [{**asdict(trend), "leak": trend.leak} for trend in result.trends],
        "findings": {
            name: {"count": len(found), "first": found[:SHOWN]}
            for name, found in result.findings.items()
        },
        "samples": _series(result),
    }


def plot(path: Path, title: str, result: Result) -> None:
    """Tokens per second, memory and descriptors over time; a line for each fault."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 9), dpi=130, layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    start, end = result.start, result.end
    bin_s = max(2.0, (end - start) / BINS)
    bins = max(1, int((end - start) / bin_s))
    rate, asked = [0.0] * bins, [0.0] * bins
    for at, tokens in result.tally.texts:
        index = int((at - start) / bin_s)
        if 0 <= index < bins:
            rate[index] += tokens / bin_s
            asked[index] += 1 / bin_s
    middles = [(index + 0.5) * bin_s for index in range(bins)]
    panels[0].step(middles, rate, where="mid", color="#1f77b4")
    panels[0].set_ylabel("tokens per second\nof completed requests")
    beside = panels[0].twinx()
    beside.step(middles, asked, where="mid", color="#2ca02c", alpha=0.4)
    beside.set_ylabel("requests per second", color="#2ca02c")
    beside.set_ylim(bottom=0)
    _lines(panels[1], result.samples, start, "rss", 1e-6)
    panels[1].set_ylabel("resident memory, MB")
    _lines(panels[2], result.samples, start, "fds", 1.0)
    panels[2].set_ylabel("open descriptors")
    panels[2].set_xlabel("s since the load began")
    for axes in panels:
        axes.set_ylim(bottom=0)
        _mark(axes, result, named=axes is panels[0])
    panels[1].legend(loc="lower right", fontsize="small", ncols=4)
    if result.faults:
        panels[0].legend(loc="upper right", fontsize="small", title="faults")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(f"wrote {path}", file=sys.stderr)


def _mark(axes: Any, result: Result, *, named: bool) -> None:
    seen: dict[str, None] = {}
    for fault in result.faults:
        at, kind = fault.at - result.start, fault.planned.kind
        name = kind if named and kind not in seen else None
        seen[kind] = None
        axes.axvline(at, color=COLOURS[kind], linewidth=0.9, alpha=0.8, label=name, zorder=0)


def _lines(axes: Any, samples: Sequence[Sample], start: float, what: str, scale: float) -> None:
    """A line for each process; it breaks where the process did."""
    for index, name in enumerate(dict.fromkeys(sample.name for sample in samples)):
        times: list[float] = []
        values: list[float] = []
        pid = None
        for sample in samples:
            if sample.name != name:
                continue
            if pid not in (None, sample.pid):
                times.append(sample.at - start)
                values.append(float("nan"))
            pid = sample.pid
            times.append(sample.at - start)
            values.append(getattr(sample, what) * scale)
        axes.plot(times, values, color=f"C{index}", label=name, linewidth=1.2)


def _times(result: Result) -> dict[str, list[float]]:
    tally, faults = result.tally, result.faults
    return {
        "time to first text": tally.first_s,
        "between two pieces of text": tally.gaps_s,
        "whole request": tally.total_s,
        "fault to the next answer": [f.answered - f.at for f in faults if f.answered is not None],
        "fault to a whole ring": [f.whole - f.at for f in faults if f.whole is not None],
    }


def _series(result: Result) -> list[Json]:
    """Samples by process; of each value a text, or the file would have a line for every number."""
    found: dict[tuple[str, int], list[Sample]] = {}
    for sample in result.samples:
        found.setdefault((sample.name, sample.pid), []).append(sample)
    return [
        {
            "name": name,
            "pid": pid,
            "at_s": " ".join(f"{each.at - result.start:.1f}" for each in life),
            **{
                what: " ".join(str(getattr(each, what)) for each in life)
                for what in ("rss", "fds", "threads")
            },
        }
        for (name, pid), life in found.items()
    ]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)

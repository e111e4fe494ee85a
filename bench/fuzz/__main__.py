"""Hostile frames against the decoder and the cores.

    python -m bench.fuzz frames [--count 1000000] [--seed 1] [--minutes N] [--json FILE]

Ends with the rates by the way a message was spoiled, and what became of what decoded; or with exit
code 1 and the seed of the world in which something escaped.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from pathlib import Path

from bench.fuzz.campaign import FuzzFailure, Report, run


def table(title: str, rows: list[tuple[str, str]]) -> str:
    """Names and figures in two columns."""
    width = max([len(name) for name, _ in rows], default=0)
    return "\n".join([title, *(f"  {name.ljust(width)}  {figure}" for name, figure in rows), ""])


def _counts(counts: Counter[str]) -> list[tuple[str, str]]:
    return [(name, f"{count:,}") for name, count in counts.most_common()]


def show(report: Report, took_s: float) -> str:
    """The report as text."""
    ways = [
        (way, f"{sent:>9,}  refused {report.refused[way] / sent:7.2%}")
        for way, sent in report.sent.most_common()
    ]
    refused = sum(report.refused.values())
    decode = [
        ("messages", f"{report.total:,} in {took_s:.0f} s"),
        ("refused", f"{refused:,} ({refused / report.total:.1%})"),
        ("slowest decode", f"{report.slowest_s * 1e3:.2f} ms of CPU"),
        ("most memory", f"{report.most_bytes:,} bytes, of {report.measured:,} traced"),
        ("and at most", f"{report.worst_ratio:.1f} bytes for each of a message over 4 KiB"),
    ]
    return "\n".join(
        (
            table("decode", decode),
            table("by the way a message was spoiled first", ways),
            table("why it was refused", _counts(report.reasons)),
            table("the cores", _counts(report.counts)),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["frames"])
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after so long")
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    began = time.monotonic()
    try:
        until_s = began + 60 * wanted.minutes
        report = run(wanted.count, wanted.seed, every=50_000, until_s=until_s)
    except FuzzFailure as failure:
        print(failure, file=sys.stderr)
        raise SystemExit(1) from failure
    took_s = time.monotonic() - began
    print(show(report, took_s))
    if wanted.json is not None:
        values = {**vars(report), "total": report.total, "took_s": round(took_s, 1)}
        wanted.json.write_text(json.dumps(values, indent=1))


if __name__ == "__main__":
    main()

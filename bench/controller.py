"""The curve of speculation, and where the controller sits on it, in virtual time.

    python -m bench.controller [--classes quote,chat] [--delays-ms 0,20] [--json FILE] [--png FILE]

Replies that the default model gave to bench/prompts.toml (bench/replies.json, token ids) are
decoded once for every fixed draft length and depth, and once as the controller decides, by the real
scheduler and drafter over the stages of bench.virtual: no machine noise, the same numbers every
time. Prints tokens per second; exit code 1 where the controller is under 0.9 of the best point.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.virtual import Costs, Script, VirtualRing
from coord.draft import Bounds, LookupDrafter

REPLIES = Path(__file__).resolve().parent / "replies.json"
LENGTHS = (0, 1, 3, 7, 15, 31)
DEPTHS = (1, 2, 3, 4, 8)
GOAL = 0.9
IDLE_S = 11.0  # before a turn: long enough for a ping


@dataclass(frozen=True, slots=True)
class Curve:
    """Tokens per second of one class at one delay. fixed: (length, depth) -> rate."""

    text_class: str
    delay_ms: float
    fixed: dict[tuple[int, int], float]
    adaptive: float
    frames: int  # that the controller sent

    @property
    def best(self) -> tuple[int, int]:
        """The best point of the curve."""
        return max(self.fixed, key=lambda point: self.fixed[point])

    @property
    def share(self) -> float:
        """The controller's rate over the best point's."""
        return self.adaptive / self.fixed[self.best]


def scripts(text_class: str) -> list[Script]:
    """The turns of a class."""
    data = json.loads(REPLIES.read_text(encoding="utf-8"))
    return [Script(tuple(each["prompt"]), tuple(each["reply"])) for each in data[text_class]]


def classes() -> list[str]:
    """Those that replies were recorded for."""
    return list(json.loads(REPLIES.read_text(encoding="utf-8")))


def rate(turns: list[Script], costs: Costs, bounds: Bounds) -> tuple[float, int]:
    """Tokens per second after the first token, one turn after another; and the frames sent."""
    tokens = frames = 0
    seconds = 0.0
    for turn in turns:
        ring = VirtualRing(costs, LookupDrafter)
        ring.ring.bounds = bounds
        ring.rest(IDLE_S)
        before = ring.frames
        ring.run([turn])
        seconds += turn.times[-1] - turn.times[0]
        tokens += len(turn.reply) - 1
        frames += ring.frames - before
    return tokens / seconds, frames


def curve(
    text_class: str,
    delay_ms: float,
    lengths: tuple[int, ...] = LENGTHS,
    depths: tuple[int, ...] = DEPTHS,
    most: int | None = None,
) -> Curve:
    """Fixed points, and the controller, over the first `most` turns of the class."""
    costs = Costs(delay_s=delay_ms / 1e3)
    fixed = {}
    for depth in depths:
        for length in lengths:
            if length or depth == 1:  # without drafts nothing can go ahead
                exactly = Bounds(length, depth, length, depth)
                fixed[length, depth], _ = rate(scripts(text_class)[:most], costs, exactly)
    adaptive, frames = rate(scripts(text_class)[:most], costs, Bounds())
    return Curve(text_class, delay_ms, fixed, adaptive, frames)


def show(found: Curve) -> None:
    """Print one table."""
    print(f"\n{found.text_class}, {found.delay_ms:g} ms one way: tokens per second")
    print("  depth  " + "".join(f"{f'k={length}':>9}" for length in LENGTHS))
    for depth in DEPTHS:
        cells = [found.fixed.get((length, depth)) for length in LENGTHS]
        line = "".join(" " * 9 if cell is None else f"{cell:9.1f}" for cell in cells)
        print(f"  {depth:5}  {line}")
    length, depth = found.best
    print(
        f"  controller {found.adaptive:.1f}, {found.share:.2f} of the best "
        f"(k={length}, depth {depth}); {found.frames} frames"
    )


def plot(path: Path, curves: list[Curve]) -> None:
    """A panel per class and delay: a line per depth over the draft length, and the controller."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(each.text_class for each in curves))
    delays = list(dict.fromkeys(each.delay_ms for each in curves))
    figure = Figure(figsize=(3.4 * len(names), 3.0 * len(delays)), dpi=120, layout="constrained")
    panels = figure.subplots(len(delays), len(names), squeeze=False)
    for each in curves:
        axes = panels[delays.index(each.delay_ms)][names.index(each.text_class)]
        for depth in DEPTHS:
            lengths = [length for length in LENGTHS if (length, depth) in each.fixed]
            rates = [each.fixed[length, depth] for length in lengths]
            axes.plot(lengths, rates, "o-", markersize=3, label=f"depth {depth}")
        axes.axhline(each.adaptive, color="black", linestyle="--", label="controller")
        axes.set_title(f"{each.text_class}, {each.delay_ms:g} ms", fontsize="medium")
        axes.set_ylim(bottom=0)
    panels[-1][0].set_xlabel("drafts per frame")
    panels[-1][0].set_ylabel("tokens per second")
    panels[0][-1].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--classes", default=",".join(classes()))
    parser.add_argument("--delays-ms", default="0,5,20,40")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    wanted = parser.parse_args()
    curves = []
    for name in wanted.classes.split(","):
        for delay_ms in wanted.delays_ms.split(","):
            curves.append(curve(name, float(delay_ms)))
            show(curves[-1])
    worst = min(curves, key=lambda each: each.share)
    print(f"\nworst: {worst.share:.2f} ({worst.text_class}, {worst.delay_ms:g} ms)")
    if wanted.json:
        rows = [
            {**asdict(each), "fixed": [[*point, value] for point, value in each.fixed.items()]}
            for each in curves
        ]
        wanted.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if wanted.png:
        plot(wanted.png, curves)
    return 0 if worst.share >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())

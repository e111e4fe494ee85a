"""Where one block's forward spends its time, and how far that is from the memory's floor.

    python -m bench.stage_profile MODEL|135m|360m|0.5b|1b [--dtype bfloat16] [--threads 1] [--torch]

MODEL is a file or directory; the names are random models of bench.random_model. A forward of a few
rows can't be faster than reading the weights once: the floor is their bytes, and those of the keys
and values it looks at, by what a plain sum of as many bytes takes. Beside the forward are timed, on
their own, its products and its attention; the rest is the difference. --torch: and the same forward
by torch's kernels. All take turns within each repeat, so that a busy machine slows them alike;
medians, and of one thread the processor's time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from bench.random_model import SHAPES, RandomSource
from pipeline.attention import Part, Plan, attention
from pipeline.kernels import ROWS, padded, spans
from pipeline.linears import Linear
from pipeline.torch_model import DTYPES, TorchModel
from pipeline.weights import Source, open_model
from transport.config import WEIGHTS
from transport.frame import Kind, Segment

Times = dict[str, float]


def measure(run: dict[str, Callable[[], object]], repeats: int, threads: int) -> Times:
    """Median milliseconds of each; the first round warms up."""
    clock = time.process_time if threads == 1 else time.perf_counter
    found: dict[str, list[float]] = {name: [] for name in run}
    for _ in range(repeats + 1):
        for name, call in run.items():
            start = clock()
            call()
            found[name].append((clock() - start) * 1000)
    return {name: median(times[1:]) for name, times in found.items()}


class Profile:
    """The parts of a block's forward of `rows` tokens at row `context`, each callable alone."""

    def __init__(self, model: TorchModel, rows: int, context: int, want: int) -> None:
        self.model, self.rows, self.context, self.want = model, rows, context, want
        modules = [each for _, layer in model._layers for each in layer.modules()]
        self.linears = [each for each in modules if isinstance(each, Linear)]
        dtype, device = model._dtype, model._device
        tiled = model._kernels.exact and model._kernels.native is None
        padding = padded(rows, ROWS) if tiled else rows
        self.tiled = tiled
        self.inputs: dict[int, torch.Tensor] = {}
        for linear in [*self.linears, model._head]:
            width = linear.width
            self.inputs[width] = torch.randn(1, padding, width).to(device, dtype)
        heads, groups, size = model._heads, model._groups, model._size
        self.query = torch.randn(heads, padding, size).to(device, dtype)
        self.key = torch.randn(groups, padding, size).to(device, dtype)

    def forward(self) -> None:
        """All of it, as a stage calls it."""
        vocabulary = self.model.info.vocabulary
        tokens = tuple((at * 7919) % vocabulary for at in range(self.rows))
        segment = Segment(0, 0, self.context, tokens, Kind.VERIFY, b"", self.want)
        self.model.forward([segment], None)

    @torch.inference_mode()
    def products(self) -> None:
        """Every product of the layers, and the LM head for the wanted rows."""
        for linear in self.linears:
            linear(self.inputs[linear.width])
        head = self.model._head
        rows = self.inputs[head.width]
        head(rows[:, : padded(self.want, ROWS) if self.tiled else self.want])

    @torch.inference_mode()
    def attention(self) -> None:
        """Writing keys and values and attending, in every layer."""
        model, end = self.model, self.context + self.rows
        cut = spans(self.context, end, model._heads // model._groups, model._kernels)
        plan = Plan([Part(0, self.context, end, 0, cut)], model._caches, model._kernels.native)
        for layer in model._caches:
            attention(
                plan, layer, self.query, self.key, self.key, scaling=model._size**-0.5, window=None
            )

    @property
    def bytes(self) -> int:
        """Weights, and keys and values up to the last row."""
        item = self.model._dtype.itemsize
        width = self.model._groups * self.model._size
        cached = 2 * len(self.model._caches) * (self.context + self.rows) * width * item
        head = self._numbers([self.model._head]) * item
        return int(self._numbers(self.linears) * self.model._item_bytes) + head + cached

    @torch.inference_mode()
    def _numbers(self, linears: list[Linear]) -> int:
        return sum(x.width * x(self.inputs[x.width]).shape[-1] for x in linears)


def open_source(name: str) -> Source:
    """A random model's name, or a path."""
    return RandomSource(name) if name in SHAPES else open_model(Path(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--weights", choices=WEIGHTS, default="dtype")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 512])
    options = parser.parse_args()
    source = open_source(options.model)

    def made(kernels: str) -> TorchModel:
        return TorchModel(
            source,
            (0, source.layers_total),
            slots=1,
            capacity=options.context + max(options.rows),
            dtype=DTYPES[options.dtype],
            weights=options.weights,
            kernels=kernels,
            threads=options.threads,
        )

    model = made("auto")
    other = made("torch") if options.torch else None
    print(model.info.kernel)
    print(f"{source.path}, context {options.context}, {options.threads} thread(s); ms")
    print("| rows | forward | floor | forward / floor | products | attention | rest | "
          "forward / products | GB/s |", end="")  # fmt: skip
    print(" torch's forward | its / this |" if other else "")
    print("|---" * (11 if other else 9) + "|")
    for rows in options.rows:
        profile = Profile(model, rows, options.context, min(rows, ROWS))
        plain = torch.ones(profile.bytes // 4)
        run = {
            "read": plain.sum,
            "forward": profile.forward,
            "products": profile.products,
            "attention": profile.attention,
        }
        if other is not None:
            run["torch"] = Profile(other, rows, options.context, min(rows, ROWS)).forward
        found = measure(run, options.repeats, options.threads)
        total, floor = found["forward"], found["read"]
        products, attending = found["products"], found["attention"]
        print(
            f"| {rows} | {total:.1f} | {floor:.1f} | {total / floor:.2f} | {products:.1f} "
            f"| {attending:.1f} | {total - products - attending:.1f} | {total / products:.2f} "
            f"| {profile.bytes / floor / 1e6:.1f} |",
            f"{found['torch']:.1f} | {found['torch'] / total:.2f} |" if other else "",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""How often logits differ between schedules of the same tokens: exact on and off, both dtypes.

python -m bench.exactness MODEL [--schedules N] [--tokens N] [--seed N]
Each schedule writes the same tokens in random pieces, beside a random neighbour; its tokens and
log probabilities are compared with those of one token at a time.
"""

import argparse
import random
from collections.abc import Sequence

import torch

from pipeline.torch_model import TorchModel
from pipeline.weights import open_model
from transport.frame import Kind, Sampling, Segment

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 34, 35, 64, 65, 66, 67, 128, 200)
PREFIX = 450  # rows below are copied, so that the pieces cross a key block at 512
Rows = list[tuple[int, tuple[tuple[int, float], ...]]]


def segment(slot: int, start: int, tokens: Sequence[int], want: int) -> Segment:
    return Segment(slot, slot, start, tuple(tokens), Kind.VERIFY, b"", want, Sampling(logprobs=5))


def schedule(model: TorchModel, tokens: Sequence[int], rng: random.Random | None) -> Rows:
    """(token, top) of each position from PREFIX on; rng None is one token at a time."""
    rows: Rows = []
    model.copy(0, 1, PREFIX)
    at = PREFIX
    while at < len(tokens):
        size = min(rng.choice(SIZES) if rng else 1, len(tokens) - at)
        frame = [segment(1, at, tokens[at : at + size], size)]
        if rng and rng.random() < 0.5:
            count = rng.choice(SIZES)
            frame.insert(rng.randrange(2), segment(2, 0, rng.choices(tokens, k=count), 0))
        found = next(r for r in model.forward(frame, None).results if r.slot == 1)
        rows += zip(found.tokens, found.top, strict=True)
        at += size
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--schedules", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    source = open_model(options.model)
    rng = random.Random(options.seed)
    tokens = rng.choices(range(source.vocabulary), k=PREFIX + options.tokens)
    print("| | schedules equal to the bit | rows that differ | tokens that differ | largest |")
    print("|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for exact in (False, True):
            block = (0, source.layers_total)
            model = TorchModel(
                source,
                block,
                slots=3,
                capacity=len(tokens),
                dtype=dtype,
                exact=exact,
                threads=options.threads,
            )
            model.forward([segment(0, 0, tokens[:PREFIX], 0)], None)
            truth = schedule(model, tokens, None)
            equal = rows = flips = 0
            largest = 0.0
            for number in range(options.schedules):
                found = schedule(model, tokens, random.Random(options.seed * 1000 + number))
                equal += found == truth
                for (token, top), (right, right_top) in zip(found, truth, strict=True):
                    rows += top != right_top
                    flips += token != right
                    pairs = zip(top, right_top, strict=True)
                    largest = max([largest, *(abs(a[1] - b[1]) for a, b in pairs)])
            count = options.schedules * len(truth)
            name = f"{str(dtype).removeprefix('torch.')} {'exact' if exact else 'plain'}"
            print(
                f"| {name} | {equal}/{options.schedules} | {rows}/{count} | {flips}/{count} "
                f"| {largest:.1e} |",
                flush=True,
            )
            print(f"  {model.info.kernel}", flush=True)


if __name__ == "__main__":
    main()

"""What each precision costs and keeps: perplexity, logits and greedy tokens against float32.

python -m bench.precision MODEL [--text FILE] [--tokens N] [--modes NAME ...]
The text's tokens are prefilled in chunks; a row's log probabilities are compared with float32's.
Speed: a prefill of 512 rows and single tokens behind it, on --threads threads.
"""

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from coord.tokenizer import load_tokenizer
from pipeline.torch_model import TorchModel
from pipeline.weights import open_model
from transport.frame import GREEDY, Kind, Sampling, Segment, Tensor

CHUNK = 128
# dtype, and what is not as it says
MODES: dict[str, tuple[torch.dtype, dict[str, str]]] = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "float16": (torch.float16, {}),
    "bfloat16 int8": (torch.bfloat16, {"weights": "int8"}),
    "bfloat16 int4": (torch.bfloat16, {"weights": "int4"}),
    "bfloat16 fp8 wire": (torch.bfloat16, {"activations": "fp8"}),
    "bfloat16 int8 KV": (torch.bfloat16, {"kv": "int8"}),
    "bfloat16 fp8 KV": (torch.bfloat16, {"kv": "fp8"}),
    "float32 int8 KV": (torch.float32, {"kv": "int8"}),
    "float32 fp8 KV": (torch.float32, {"kv": "fp8"}),
}


def segment(start: int, tokens: Sequence[int], want: int, sampling: Sampling = GREEDY) -> Segment:
    return Segment(0, 0, start, tuple(tokens), Kind.PREFILL, b"", want, sampling)


class Ring:
    def __init__(self, model: str, mode: str, rows: int, threads: int) -> None:
        dtype, others = MODES[mode]
        source = open_model(model)
        total = source.layers_total
        cuts = [(0, total // 3), (total // 3, 2 * total // 3), (2 * total // 3, total)]
        self.blocks = [
            TorchModel(
                source,
                cut,
                slots=1,
                capacity=rows,
                dtype=dtype,
                threads=threads,
                **others,
            )
            for cut in cuts
        ]
        self.vocabulary = source.vocabulary

    def last_rows(self, segment: Segment) -> torch.Tensor:
        """Logits [rows, vocabulary] of a segment's rows."""
        payload: Tensor | None = None
        for block in self.blocks[:-1]:
            payload = block.forward([segment], payload).payload
        tail, found = self.blocks[-1], []
        keep = tail._logits
        tail._logits = lambda hidden, rows: found.append(keep(hidden, rows)) or found[-1]  # type: ignore[func-returns-value,method-assign]
        tail.forward([segment], payload)
        tail._logits = keep  # type: ignore[method-assign]
        return torch.cat(found)

    def run(self, segment: Segment) -> int:
        payload: Tensor | None = None
        for block in self.blocks:
            output = block.forward([segment], payload)
            payload = output.payload
        return output.results[0].tokens[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, default=Path("bench/conversation.txt"))
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    tokens = load_tokenizer(options.model).encode(options.text.read_text())[: options.tokens]
    print(f"{len(tokens)} tokens")
    print(
        "| mode | perplexity | log prob. off: mean | largest | other token | 512 rows ms | 1 ms |"
    )
    print("|---|---|---|---|---|---|---|")
    truth: list[torch.Tensor] = []
    kernels = []
    for mode in dict.fromkeys(["float32", *options.modes]):
        ring = Ring(options.model, mode, len(tokens) + 64, options.threads)
        kernels.append(ring.blocks[0].info.kernel)
        loss = mean = largest = 0.0
        flips = 0
        for number, at in enumerate(range(0, len(tokens), CHUNK)):
            piece = tokens[at : at + CHUNK]
            with torch.inference_mode():
                rows = ring.last_rows(segment(at, piece, len(piece))).log_softmax(1)
            if mode == "float32":
                truth.append(rows)
            right = truth[number]
            after = torch.tensor(tokens[at + 1 : at + 1 + CHUNK])
            loss -= float(rows[: len(after)].gather(1, after[:, None]).double().sum())
            likely = right.topk(10).indices  # the far tail of a vocabulary says nothing
            off = (rows.gather(1, likely) - right.gather(1, likely)).abs()
            mean += float(off.double().sum()) / 10
            largest = max(largest, float(off.max()))
            flips += int((rows.argmax(1) != right.argmax(1)).sum())
        began = time.perf_counter()
        for at in range(0, 512, 256):
            ring.run(segment(at, tokens[at : at + 256], 1))
        prefill = time.perf_counter() - began
        began = time.perf_counter()
        for at in range(512, 532):
            ring.run(segment(at, tokens[at : at + 1], 1))
        single = (time.perf_counter() - began) / 20
        perplexity = math.exp(loss / (len(tokens) - 1))
        print(
            f"| {mode} | {perplexity:.3f} | {mean / len(tokens):.4f} | {largest:.3f} "
            f"| {flips / len(tokens):.2%} | {prefill * 1e3:.0f} | {single * 1e3:.1f} |",
            flush=True,
        )
    print(*kernels, sep="\n")


if __name__ == "__main__":
    main()

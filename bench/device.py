"""One device as a ring of three stage processes: is it exact, how fast is it, what does it hold?

    python -m bench.device [--device cuda:0] [--dtype bfloat16] [--model MODEL]

First the whole model as one block in this process gives the truth: a prompt in one piece, then one
token at a time. Then three stages on the device serve the same prompt cold, again cold and warm,
and a follow-up turn warm and cold. Every token and log probability must be equal, to the bit: the
ring's to the block's, and warm to cold. Exit code 1 when one is not. Takes one to five minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import structlog
import torch

from coord.actions import Tokens
from coord.coordinator import Coordinator
from pipeline.load import describe_model, vocabulary_of
from pipeline.torch_model import DTYPES, TorchModel
from pipeline.weights import open_model
from tools.pull import resolve_model
from transport.config import Config, Limits, Model, Ring, Stage, dumps
from transport.config import Coordinator as CoordinatorConfig
from transport.frame import Kind, Sampling, Segment

STAGES = 3
CHUNK = 512
ROWS = (1, 8, CHUNK)
SAMPLING = Sampling(logprobs=2)
SUFFIX = 80  # tokens of the follow-up turn
READY_S = 180.0
Scores = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn's tokens with their log probabilities, and its milliseconds."""

    scores: Scores
    first_ms: float
    per_s: float


def block_scores(model: TorchModel, prompt: Sequence[int], count: int) -> Scores:
    """The truth: prefill in chunks, then `count` greedy tokens, one by one."""
    scores: Scores = []
    at = 0
    tokens = list(prompt)
    while len(scores) < count:
        piece = tuple(tokens[at : at + CHUNK])
        want = int(at + len(piece) == len(tokens))
        segment = Segment(0, 0, at, piece, Kind.PREFILL, b"", want, SAMPLING)
        (found,) = model.forward([segment], None).results
        at += len(piece)
        if want:
            scores.append((found.tokens[0], found.logprobs[0]))
            tokens.append(found.tokens[0])
    return scores


def forward_ms(model: TorchModel, rows: int, context: int, repeats: int) -> float:
    """Median of one forward of `rows` rows whose answer is waited for."""
    tokens = tuple(at * 7919 % model.info.vocabulary for at in range(rows))
    segment = Segment(0, 0, context, tokens, Kind.VERIFY, b"", 1)
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        model.forward([segment], None)
        times.append((time.perf_counter() - start) * 1e3)
    return median(times[2:])


async def turn(
    coordinator: Coordinator, prompt: Sequence[int], count: int, *, reuse: bool = True
) -> Turn:
    """One greedy turn on the ring."""
    start = time.perf_counter()
    stream = coordinator.submit(prompt, budget=count, sampling=SAMPLING, reuse=reuse)
    scores: Scores = []
    first = last = start
    async for event in stream:
        if isinstance(event, Tokens):
            last = time.perf_counter()
            first = last if not scores else first
            scores += zip(event.tokens, event.logprobs, strict=True)
    return Turn(scores, (first - start) * 1e3, (len(scores) - 1) / max(last - first, 1e-9))


async def ring_turns(
    config: Config, file: Path, vocabulary: int, prompt: list[int], suffix: list[int], count: int
) -> tuple[dict[str, Turn], int]:
    """The ring's turns by name, and the resident bytes of its stages on the host."""
    file.write_text(dumps(config))
    command = [sys.executable, "-m", "tools.cli", "stage", "--ring", str(file), "--name"]
    log = (file.parent / "stages.log").open("wb")
    stages = [
        subprocess.Popen([*command, s.name], stdout=log, stderr=log) for s in config.rings[0].stages
    ]
    coordinator = Coordinator(config, 1, vocabulary)
    try:
        await coordinator.open()
        deadline = time.monotonic() + READY_S
        while not coordinator.ready()[0]:
            ended = any(stage.poll() is not None for stage in stages)
            if ended or time.monotonic() > deadline:
                log.flush()
                sys.exit(f"no ring: {(file.parent / 'stages.log').read_text()[-2000:]}")
            await asyncio.sleep(0.1)
        await turn(coordinator, prompt[: len(prompt) // 2], 2)  # kernels, caches of memory
        found = {"cold": await turn(coordinator, prompt, count, reuse=False)}
        found["cold again"] = await turn(coordinator, prompt, count, reuse=False)
        found["warm"] = await turn(coordinator, prompt, count)
        reply = [token for token, _ in found["warm"].scores]
        longer = [*prompt, *reply, *suffix]
        found["follow-up warm"] = await turn(coordinator, longer, count)
        found["follow-up cold"] = await turn(coordinator, longer, count, reuse=False)
        return found, sum(psutil.Process(stage.pid).memory_info().rss for stage in stages)
    finally:
        await coordinator.close()
        for stage in stages:
            stage.terminate()
        for stage in stages:
            stage.wait()
        log.close()


def compare(
    found: dict[str, Turn], truth: Scores, longer: Scores
) -> list[tuple[str, bool, bool, float]]:
    """What was compared, whether tokens and whether bits are equal, the largest difference."""
    pairs = [(f"ring {name} = one block", found[name].scores, truth) for name in list(found)[:3]]
    warm, cold = found["follow-up warm"].scores, found["follow-up cold"].scores
    pairs += [("follow-up warm = cold", warm, cold), ("follow-up = one block", warm, longer)]
    return [
        (
            name,
            [token for token, _ in a] == [token for token, _ in b],
            a == b,
            max((abs(x - y) for (_, x), (_, y) in zip(a, b, strict=False)), default=0.0),
        )
        for name, a, b in pairs
    ]


def one_block(
    wanted: argparse.Namespace, path: Path, layers: int, prompt: list[int], suffix: list[int]
) -> tuple[Scores, Scores, bool]:
    """The truth of both turns, and whether exact mode holds; prints what a forward takes."""
    model = TorchModel(
        open_model(path),
        (0, layers),
        slots=1,
        capacity=capacity(wanted),
        dtype=DTYPES[wanted.dtype],
        device=wanted.device,
        threads=1,
    )
    print(model.info.kernel)
    truth = block_scores(model, prompt, wanted.reply)
    longer = [*prompt, *(token for token, _ in truth), *suffix]
    after = block_scores(model, longer, wanted.reply)
    print("\n| whole model, one forward of | ms |\n|---|---|")
    for rows in ROWS:
        took = forward_ms(model, rows, wanted.prompt, 9 if rows < CHUNK else 3)
        print(f"| {rows} rows | {took:.1f} |")
    if torch.device(wanted.device).type == "cuda":
        print(f"\nits peak on the device: {torch.cuda.max_memory_allocated() / 1e6:.0f} MB")
    return truth, after, model.info.kernel.startswith("exact;")


def capacity(wanted: argparse.Namespace) -> int:
    """Rows of a slot: both turns, and a chunk for the timing."""
    rows: int = wanted.prompt + 2 * wanted.reply + SUFFIX + CHUNK
    return rows


def make_config(wanted: argparse.Namespace, path: Path, layers: int, folder: str) -> Config:
    """Three stages on the device."""
    cuts = [layers * index // STAGES for index in range(STAGES + 1)]
    stages = tuple(
        Stage(f"s{i}", f"ipc://{folder}/s{i}", (cuts[i], cuts[i + 1]), wanted.device)
        for i in range(STAGES)
    )
    return Config(
        Model(str(path), "m", wanted.dtype),
        (Ring("ring0", f"ipc://{folder}/verdicts", stages),),
        CoordinatorConfig(drafter="off"),  # tokens/s of plain decoding
        limits=Limits(max_model_len=capacity(wanted)),
    )


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--prompt", type=int, default=600, help="tokens")
    parser.add_argument("--reply", type=int, default=48, help="tokens")
    wanted = parser.parse_args()
    path = resolve_model(wanted.model, wanted.models).resolve()
    layers, _ = describe_model(str(path))
    vocabulary = vocabulary_of(str(path))
    draw = random.Random(1)
    ids = range(min(vocabulary, 30_000))
    prompt, suffix = draw.choices(ids, k=wanted.prompt), draw.choices(ids, k=SUFFIX)
    print(f"{wanted.device}, {wanted.dtype}, {path.name}, a prompt of {wanted.prompt} tokens")
    truth, after, exact = one_block(wanted, path, layers, prompt, suffix)
    with tempfile.TemporaryDirectory() as name:
        config = make_config(wanted, path, layers, name)
        file = Path(name) / "ring.toml"
        found, resident = asyncio.run(
            ring_turns(config, file, vocabulary, prompt, suffix, wanted.reply)
        )
    print(f"\n| a turn on {STAGES} stages | first token ms | tokens/s |\n|---|---|---|")
    for turn_name, each in found.items():
        print(f"| {turn_name} | {each.first_ms:.0f} | {each.per_s:.1f} |")
    print(f"\nthe stages' resident memory on the host: {resident / 1e6:.0f} MB")
    print("\n| compared | tokens equal | bits equal | largest difference |\n|---|---|---|---|")
    rows = compare(found, truth, after)
    for what, tokens, bits, largest in rows:
        print(f"| {what} | {tokens} | {bits} | {largest:.1e} |")
    if not exact:
        print("exact mode is off here (first lines): bits may differ, and tokens where they tie")
    sys.exit(0 if all(bits or (tokens and not exact) for _, tokens, bits, _ in rows) else 1)


if __name__ == "__main__":
    main()

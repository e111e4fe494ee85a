"""A three-stage ToyModel ring against raw pyzmq on the same processes' layout, in one run.

    python -m bench.toy_ring [--tokens 2000]

One turn decodes; each token is one frame round the ring (coordinator -> 3 stages -> coordinator)
through the real daemons, scheduler, ledger and codecs. `raw` is the same round trip of 1 KB
messages through three processes that only forward. Prints medians and p99 in ms, and the ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import structlog

from coord.actions import Tokens
from coord.coordinator import Coordinator
from transport.config import Config, Limits, Model, Ring, Stage, dumps
from transport.config import Coordinator as CoordinatorConfig
from transport.frame import Sampling

STAGES = 3
RAW = """
import sys, zmq
context = zmq.Context()
pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
pull.bind(sys.argv[1])
push.connect(sys.argv[2])
while True:
    push.send_multipart(pull.recv_multipart())
"""


def raw(folder: Path, count: int) -> list[float]:
    """Round trips in milliseconds of 1 KB through STAGES forwarding processes."""
    import zmq  # the yardstick: what the library costs without kvring

    ends = [f"ipc://{folder}/raw{i}" for i in range(STAGES + 1)]
    processes = [
        subprocess.Popen([sys.executable, "-c", RAW, ends[i], ends[i + 1]]) for i in range(STAGES)
    ]
    try:
        context = zmq.Context()
        pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        pull.bind(ends[-1])
        push.connect(ends[0])
        took = []
        for _ in range(count):
            started = time.perf_counter()
            push.send_multipart([b"h" * 100, b"x" * 1024])
            pull.recv_multipart()
            took.append((time.perf_counter() - started) * 1e3)
        return took[count // 10 :]
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def ring(folder: Path, count: int) -> list[float]:
    """Milliseconds between the tokens of one turn on a real toy ring."""
    stages = tuple(
        Stage(f"s{i}", f"ipc://{folder}/s{i}", (2 * i, 2 * i + 2)) for i in range(STAGES)
    )
    config = Config(
        Model("toy", "toy"),
        (Ring("ring0", f"ipc://{folder}/verdicts", stages),),
        CoordinatorConfig(drafter="off"),  # a frame carries one token
        limits=Limits(max_model_len=4096),
    )
    file = folder / "ring.toml"
    file.write_text(dumps(config))
    command = [sys.executable, "-m", "tools.cli", "stage", "--ring", str(file), "--name"]
    quiet = subprocess.DEVNULL
    processes = [subprocess.Popen([*command, s.name], stderr=quiet) for s in stages]
    coordinator = Coordinator(config, 1, 256)
    try:
        await coordinator.open()
        while not coordinator.ready()[0]:
            await asyncio.sleep(0.05)
        took = []
        stream = coordinator.submit([1, 2, 3], budget=count, stops=(), sampling=Sampling())
        last = time.perf_counter()
        async for event in stream:
            if isinstance(event, Tokens):
                now = time.perf_counter()
                took.append((now - last) * 1e3)
                last = now
        return took[count // 10 :]
    finally:
        await coordinator.close()
        for process in processes:
            process.terminate()
            process.wait()


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=1500)
    wanted = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for arm in ("raw", "ring", "raw", "ring"):
            took = (
                raw(folder, wanted.tokens)
                if arm == "raw"
                else asyncio.run(ring(folder, wanted.tokens))
            )
            results.setdefault(arm, []).extend(took)
    medians = {}
    for arm, took in results.items():
        took.sort()
        medians[arm] = statistics.median(took)
        print(f"{arm:5} median {medians[arm]:.3f} ms  p99 {took[int(len(took) * 0.99)]:.3f} ms")
    print(f"ring / raw {medians['ring'] / medians['raw']:.2f}")


if __name__ == "__main__":
    main()

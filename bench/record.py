"""What recording costs a single turn's decode: no recording against none, digest and full payloads.

    python -m bench.record [--model toy] [--tokens 100] [--rounds 40] [--arms off,none,full]

All arms are rings of three stages that run at once and take turns, in alternating order, so that
the machine's drift hits all of them; an idle ring costs nothing. Drafts are off. For each arm:
milliseconds per token by the server's clock and against the first arm's of the same round (median,
and the middle half), processor time of all its processes per token (what a busy machine leaves
comparable), and bytes written.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles

import psutil

from bench.stages import rate
from tools.client import Client
from tools.server import own_server

ARMS = ("off", "none", "digest", "full")


class Arm:
    """One ring. Lists: a value for each round."""

    def __init__(self, name: str, options: list[str], folder: Path, stack: ExitStack) -> None:
        self.name = name
        self._folder = folder / name
        if name != "off":
            options = [*options, "--record", str(self._folder), "--record-payloads", name]
        before = set(psutil.Process().children(recursive=True))
        url = stack.enter_context(own_server(options, Path(f"bench/out/record-{name}.log")))
        self._processes = set(psutil.Process().children(recursive=True)) - before
        self._client = stack.enter_context(Client(url))
        self.token_ms: list[float] = []
        self.cpu_ms: list[float] = []
        self.kib: list[float] = []

    def decode(self, tokens: int) -> None:
        """One turn, measured."""
        cpu, size = self._cpu_s(), self._bytes()
        self.token_ms.append(1e3 / rate(self._client, tokens))
        self.cpu_ms.append((self._cpu_s() - cpu) * 1e3 / tokens)
        self.kib.append((self._bytes() - size) / tokens / 1024)

    def _cpu_s(self) -> float:
        times = [process.cpu_times() for process in self._processes]
        return sum(each.user + each.system for each in times)

    def _bytes(self) -> int:
        folder = self._folder
        return sum(path.stat().st_size for path in folder.iterdir()) if folder.exists() else 0


def ratios(mine: list[float], first: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of mine over first, round by round."""
    found = [a / b - 1 for a, b in zip(mine, first, strict=True)]
    low, middle, high = quantiles(found, n=4)
    return low, middle, high


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="toy")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--arms", default=",".join(ARMS))
    wanted = parser.parse_args()
    options = ["--model", wanted.model, "--stages", "3", "--drafter", "off", "--slots", "2"]
    options += ["--threads", "1", "--max-model-len", "2048"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        arms = [Arm(name, options, folder, stack) for name in wanted.arms.split(",")]
        for arm in arms:
            arm.decode(wanted.tokens)  # the first one warms up
            arm.token_ms, arm.cpu_ms, arm.kib = [], [], []
        for index in range(wanted.rounds):
            for arm in arms if index % 2 else arms[::-1]:
                arm.decode(wanted.tokens)
    for arm in arms:
        low, middle, high = ratios(arm.token_ms, arms[0].token_ms)
        cpu, first = sum(arm.cpu_ms), sum(arms[0].cpu_ms)
        print(
            f"{arm.name:7} {median(arm.token_ms):8.3f} ms/token {middle:+6.1%} "
            f"({low:+.1%} to {high:+.1%})  processor {cpu / wanted.rounds:8.3f} ms/token "
            f"{cpu / first - 1:+6.1%}  {median(arm.kib):6.2f} KiB/token"
        )


if __name__ == "__main__":
    main()

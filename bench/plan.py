"""The even split against kvring plan's, on stages throttled to speeds 1 : 2 : 4, in one run.

    python -m bench.plan [--model toy|smollm2-135m] [--rounds 5] [--tokens 48] [--json FILE]

Three rings of three stages run side by side on loopback links: one with the even split, and what
`kvring plan` and `kvring plan --alone` made of it by measuring it. Their stages sleep for what is
missing to their speed (`layer_ms` in ring.toml), so that nine of them share two cores and do not
slow each other.

Measured in turns: one turn's decode, several turns' together, and the time to the first token of a
1,024-token prompt; drafts are off. Beside each stands what the plan predicted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from tools.client import Client
from tools.errors import ToolError
from tools.pull import resolve_model
from tools.server import free_port
from transport.config import OFF, TOY, Config, Coordinator, Limits, Model, Ring, Stage, dumps, load

SPEEDS = (1, 2, 4)
LAYERS = 30
TURNS = 24  # three frames of eight rows: as many as a ring of three stages holds
PROMPT_TOKENS = 1024
SLOWEST_MS = {TOY: 8.0}  # of a layer of the slowest stage; a real layer takes 1 to 2 ms itself
SLOW_MS = 24.0
READY_S = 180.0
NEEDED = 1.6  # planned over even
WITHIN = 0.2  # of the measurement, for the prediction


def even(model: str, path: str) -> Config:
    """Three stages of ten layers, the first a quarter as fast as the last."""
    slowest = SLOWEST_MS.get(model, SLOW_MS)
    stages = tuple(
        Stage(
            f"s{at}",
            f"tcp://127.0.0.1:{free_port()}",
            (LAYERS * at // 3, LAYERS * (at + 1) // 3),
            layer_ms=slowest / speed,
        )
        for at, speed in enumerate(SPEEDS)
    )
    ring = Ring("ring0", f"tcp://127.0.0.1:{free_port()}", stages)
    http = Coordinator(f"127.0.0.1:{free_port()}", "off", state=OFF)
    limits = Limits(slots=TURNS, max_model_len=2048, chunk_tokens=256)
    return Config(Model(path, model), (ring,), http, limits)


def moved(config: Config) -> Config:
    """The same on other ports, to run beside it."""
    (ring,) = config.rings
    stages = tuple(replace(s, address=f"tcp://127.0.0.1:{free_port()}") for s in ring.stages)
    ring = replace(ring, verdicts=f"tcp://127.0.0.1:{free_port()}", stages=stages)
    http = replace(config.coordinator, http=f"127.0.0.1:{free_port()}")
    return replace(config, rings=(ring,), coordinator=http)


@contextmanager
def running(config: Config, file: Path) -> Iterator[Client]:
    """The ring's processes, until the block ends; a client once it is ready."""
    file.write_text(dumps(config))
    commands = [["coord"], *(["stage", "--name", stage.name] for stage in config.rings[0].stages)]
    with ExitStack() as stack:
        log = stack.enter_context(file.with_suffix(".log").open("wb"))
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tools.cli", *command, "--ring", str(file)],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for command in commands
        ]
        stack.callback(_end, processes)
        client = stack.enter_context(Client(f"http://{config.coordinator.http}"))
        deadline = time.monotonic() + READY_S

        def alive() -> None:
            ended = any(process.poll() is not None for process in processes)
            if ended or time.monotonic() > deadline:
                raise ToolError(file.with_suffix(".log").read_text()[-2000:])

        client.wait_ready(lambda _: alive(), alive=alive)
        yield client


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(20)


def ask(client: Client, seed: int, prompt: int, tokens: int) -> dict[str, Any]:
    """One cold turn, and what the server says of it."""
    ids = [seed % 250 + 1, *((seed * 31 + at * 7) % 250 + 1 for at in range(prompt - 1))]
    body = {
        "prompt": ids,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "kvring": {"reuse": False},
    }
    return client.post("/v1/completions", body)["kvring"]


def one_rate(client: Client, seed: int, tokens: int) -> float:
    """Tokens per second of a turn alone."""
    return float(ask(client, seed, 8, tokens)["tokens_per_s"])


def many_rate(client: Client, seed: int, tokens: int) -> float:
    """Tokens per second of TURNS turns together: the sum of their own rates."""
    with ThreadPoolExecutor(TURNS) as pool:
        turns = [pool.submit(ask, client, seed + at, 8, tokens) for at in range(TURNS)]
        return sum(float(turn.result()["tokens_per_s"]) for turn in turns)


def ttft(client: Client, seed: int) -> float:
    """Seconds to the first token of a cold prompt of PROMPT_TOKENS."""
    return float(ask(client, seed, PROMPT_TOKENS, 1)["ttft_ms"]) / 1e3


def measure(
    clients: dict[str, Client], rounds: int, tokens: int
) -> dict[str, dict[str, list[float]]]:
    """By arm and quantity; the arms take turns, and the first round warms up."""
    found: dict[str, dict[str, list[float]]] = {
        arm: {"one_rate": [], "many_rate": [], "ttft_s": []} for arm in clients
    }
    for index in range(rounds + 1):
        for arm, client in clients.items():
            seed = 1000 * index
            values = {
                "one_rate": one_rate(client, seed + 1, tokens),
                "many_rate": many_rate(client, seed + 100, tokens),
                "ttft_s": ttft(client, seed + 200),
            }
            for name, value in values.items():
                if index:
                    found[arm][name].append(value)
    return found


def plan(file: Path, planned: Path, *more: str) -> dict[str, Any]:
    """What `kvring plan --json --write` says and writes."""
    command = [sys.executable, "-m", "tools.cli", "plan", "--ring", str(file), "--json"]
    command += ["--turns", str(TURNS), "--write", str(planned), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolError(done.stderr)
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def report(said: dict[str, Any], found: dict[str, dict[str, list[float]]]) -> bool:
    """Print the table; True when the plans are as good, and as right, as they must be."""
    words = {
        "one_rate": ("one turn, tokens/s", 1),
        "many_rate": (f"{TURNS} turns, tokens/s", 1),
        "ttft_s": (f"first token of {PROMPT_TOKENS:,}, s", 2),
    }
    good = True
    print("| | split | measured | over even | predicted | off |\n|---|---|---|---|---|---|")
    for name, (what, digits) in words.items():
        for arm, told in said.items():
            got, wanted = median(found[arm][name]), told[name]
            spread = f"{min(found[arm][name]):.{digits}f} to {max(found[arm][name]):.{digits}f}"
            off, over = wanted / got - 1, got / median(found["even"][name])
            layers = ", ".join(str(b["layers"][1] - b["layers"][0]) for b in told["blocks"])
            print(
                f"| {what} | {arm} ({layers}) | {got:.{digits}f} ({spread}) | {over:.2f} | "
                f"{wanted:.{digits}f} | {off:+.0%} |"
            )
            if name != "ttft_s":
                good = good and abs(off) <= WITHIN
            if (name, arm) in (("many_rate", "planned"), ("one_rate", "alone")):
                good = good and over >= NEEDED
    return good


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=TOY)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    path = (
        str(resolve_model(wanted.model, Path("models")).resolve()) if wanted.model != TOY else TOY
    )
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        config = even(wanted.model, path)
        clients = {"even": stack.enter_context(running(config, folder / "even.toml"))}
        said: dict[str, Any] = {}
        for arm, more in (("planned", ()), ("alone", ("--alone",))):
            made = plan(folder / "even.toml", folder / f"{arm}.toml", *more)
            said |= {"even": made["now"], arm: made["planned"]}
            better = moved(load(folder / f"{arm}.toml"))
            file = folder / f"beside-{arm}.toml"
            clients[arm] = stack.enter_context(running(better, file))
        found = measure(clients, wanted.rounds, wanted.tokens)
    good = report(said, found)
    if wanted.json is not None:
        wanted.json.write_text(json.dumps({"said": said, "found": found}, indent=2))
    print(
        "as promised" if good else f"NOT {NEEDED}x, or a rate was predicted worse than {WITHIN:.0%}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

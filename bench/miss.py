"""What a complete miss costs against reuse switched off: time to first token, in turn, one server.

    python -m bench.miss [--model smollm2-135m] [--tokens 400] [--pairs 12] [--stages 2]

No two prompts share a prefix, and all slots are taken, so a miss compares, gives up a slot and says
why. Prints the medians, the median of the pairs' ratios, and JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from statistics import median

from tools.client import Client
from tools.server import own_server


def ask(client: Client, model: str, prompt: list[int], reuse: bool) -> float:
    """Milliseconds until a prompt's first (and only) token is there."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    began = time.perf_counter()
    client.post("/v1/completions", body if reuse else {**body, "kvring": {"reuse": False}})
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--stages", type=int, default=2)
    wanted = parser.parse_args()
    draw = random.Random(1)
    arms: dict[bool, list[float]] = {True: [], False: []}
    options = ["--model", wanted.model, "--stages", str(wanted.stages)]
    log = Path("bench/out/miss-server.log")
    with own_server(options, log) as url, Client(url) as client:
        model = client.first_model()
        for pair in range(wanted.pairs + 3):
            for reuse in (True, False) if pair % 2 else (False, True):
                prompt = [
                    draw.randrange(100, 200 if wanted.model == "toy" else 40_000)
                    for _ in range(wanted.tokens)
                ]
                took = ask(client, model, prompt, reuse)
                if pair >= 3:  # the first ones fill the slots and warm up
                    arms[reuse].append(took)
    ratio = median(a / b for a, b in zip(arms[True], arms[False], strict=True))
    print(f"reuse off      median {median(arms[False]):9.2f} ms")
    print(f"complete miss  median {median(arms[True]):9.2f} ms  median of the ratios {ratio:.4f}")
    print(
        json.dumps(
            {"tokens": wanted.tokens, "off_ms": arms[False], "miss_ms": arms[True], "ratio": ratio}
        )
    )


if __name__ == "__main__":
    main()

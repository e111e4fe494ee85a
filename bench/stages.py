"""Three stages against one: what the ring costs a single turn's decode.

    python -m bench.stages [--tokens 64] [--rounds 3]

Both rings run at once, each stage with one thread, and take turns, so that the machine's drift hits
both; the idle one costs nothing. Drafts are off. Prints tokens per second and the ratio.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from tools.client import Client
from tools.server import own_server

PROMPT = "Write a long story about a lighthouse keeper who finds a message in a bottle."


def rate(client: Client, tokens: int) -> float:
    """Decode tokens per second of one turn, by the server's clock."""
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": tokens,
    }
    found = client.post("/v1/chat/completions", body)["kvring"]["tokens_per_s"]
    assert isinstance(found, float), found
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    wanted = parser.parse_args()
    common = ["--drafter", "off", "--dtype", wanted.dtype, "--max-model-len", "2048"]
    common += ["--slots", "2", "--threads", "1"]
    logs = Path("bench/out")
    rates: dict[int, list[float]] = {1: [], 3: []}
    with (
        own_server(["--stages", "1", *common], logs / "one-stage.log") as one,
        own_server(["--stages", "3", *common], logs / "three-stages.log") as three,
        Client(one) as single,
        Client(three) as ring,
    ):
        for index in range(wanted.rounds + 1):  # the first one warms up
            for stages, client in ((1, single), (3, ring)):
                found = rate(client, wanted.tokens)
                if index:
                    rates[stages].append(found)
    for stages, found in rates.items():
        spread = f"{min(found):.1f} to {max(found):.1f}"
        print(f"{stages} stage(s): {median(found):6.1f} tokens/s ({spread})")
    ratios = [three / one for one, three in zip(rates[1], rates[3], strict=True)]
    print(f"three / one: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()

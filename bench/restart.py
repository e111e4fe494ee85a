"""What a coordinator's restart costs a conversation: `python -m bench.restart [MODEL.gguf]`.

One ring of two stages by hand. With a model: a first turn; the coordinator is killed and started
again; the second turn, warm; the same second turn without reuse. Without: what writing the state
costs a turn of the toy, with and without a state file, and the event loop's share of it.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from transport.config import TOY, Config, Coordinator, Limits, Model, Ring, Stage, dumps

ROUNDS = 2
TURNS = 60  # of the toy, for the store's cost
WORDS = ["river", "bread", "clock", "tide", "map", "stone", "garden", "letter", "window", "winter"]


def ports(count: int) -> list[int]:
    """Free ports of this machine."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    found = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return found


class Hand:
    """A ring of two stages whose coordinator comes and goes."""

    def __init__(self, folder: Path, model: str, layers: int) -> None:
        http, *links = ports(4)
        at = [f"tcp://127.0.0.1:{port}" for port in links]
        stages = Stage("s0", at[1], (0, layers // 2)), Stage("s1", at[2], (layers // 2, layers))
        self.file = folder / "ring.toml"
        self.url = f"http://127.0.0.1:{http}"
        config = Config(
            Model(model, "m"),
            (Ring("r", at[0], stages),),
            Coordinator(f"127.0.0.1:{http}"),
            Limits(max_model_len=4096, lost_after_s=20.0),
        )
        self.file.write_text(dumps(config))
        self.log = (folder / "log").open("ab")  # open while its processes live
        names = ("s0", "s1")
        self.stages = [self._start("stage", "--name", name) for name in names]
        self.coordinator = self._start("coord")
        self.ready()

    def _start(self, command: str, *options: str) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", "tools.cli", command, "--ring", str(self.file), *options]
        return subprocess.Popen(line, stdout=self.log, stderr=self.log)

    def ready(self) -> float:
        """Seconds until a turn is taken."""
        started = time.monotonic()
        while time.monotonic() < started + 300:
            try:
                if httpx.get(f"{self.url}/ready").status_code == 200:
                    return time.monotonic() - started
            except httpx.HTTPError:
                pass
            time.sleep(0.02)
        raise SystemExit("the ring does not form")

    def restart(self, *options: str) -> float:
        """SIGKILL, and start again; seconds until ready."""
        time.sleep(0.5)
        self.coordinator.send_signal(signal.SIGKILL)
        self.coordinator.wait()
        self.coordinator = self._start("coord", *options)
        return self.ready()

    def ask(self, path: str, **body: Any) -> tuple[float, dict[str, Any]]:
        """Seconds to the first token, and the last chunk with usage."""
        body |= {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
        started, first, usage = time.monotonic(), 0.0, {}
        with httpx.stream("POST", f"{self.url}{path}", json=body, timeout=300) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                choice = (chunk["choices"] or [{}])[0]
                said = choice.get("text") or choice.get("delta", {}).get("content")
                if said and not first:
                    first = time.monotonic() - started
                    usage["text"] = ""
                if said:
                    usage["text"] += said
                usage |= chunk if chunk.get("usage") else {}
        return first, usage

    def metric(self, name: str) -> float:
        """One value of GET /metrics."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"kvring:{name} "))

    def end(self) -> None:
        """End all three; once more is nothing."""
        for process in (self.coordinator, *self.stages):
            process.send_signal(signal.SIGTERM)
        for process in (self.coordinator, *self.stages):
            process.wait(60)


def conversation(number: int) -> list[dict[str, str]]:
    """A first message of about 400 tokens."""
    words = " ".join(WORDS[(number + i * i) % len(WORDS)] for i in range(350))
    return [{"role": "user", "content": f"Note {number}: {words}. What did I write?"}]


def restarts(model: Path) -> None:
    """Time to the first token behind a restart, warm against cold."""
    with tempfile.TemporaryDirectory() as folder:
        hand = Hand(Path(folder), str(model), 30)
        atexit.register(hand.end)
        warm, cold, ready, kept = [], [], [], []
        for number in range(ROUNDS):
            messages = conversation(number)
            _, first = hand.ask("/v1/chat/completions", messages=messages, max_tokens=16)
            reply = {"role": "assistant", "content": first["text"]}
            messages += [reply, {"role": "user", "content": "And what else?"}]
            ready.append(hand.restart())
            took, second = hand.ask("/v1/chat/completions", messages=messages, max_tokens=8)
            warm.append(took)
            usage = second["usage"]
            kept.append((usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]))
            took, _ = hand.ask(
                "/v1/chat/completions", messages=messages, max_tokens=8, kvring={"reuse": False}
            )
            cold.append(took)
            print(f"cached of prompt {kept[-1]}: warm {warm[-1]:.2f} s, cold {cold[-1]:.2f} s")
        hand.end()
    print(f"ready again after {_show(ready)}; first token warm {_show(warm)}, cold {_show(cold)}")


def cost() -> None:
    """A turn with and without a state file, in turns of the toy."""
    with tempfile.TemporaryDirectory() as folder:
        hand = Hand(Path(folder), TOY, 6)
        atexit.register(hand.end)
        took: dict[str, list[float]] = {"on": [], "off": []}
        loop = [0.0, 0.0]
        for _ in range(2):
            for name, options in (("on", ()), ("off", ("--state", "off"))):
                hand.restart(*options)
                for number in range(TURNS):
                    body = [number % 250, *range(250)]
                    started = time.monotonic()
                    hand.ask("/v1/completions", prompt=body, max_tokens=4)
                    took[name].append(time.monotonic() - started)
                if name == "on":
                    loop = [hand.metric(f"state_look{each}_total") for each in ("s", "_seconds")]
        hand.end()
    share = loop[1] / TURNS * 1e3
    print(f"the event loop's share: {loop[0]:.0f} looks in {TURNS} turns, {share:.3f} ms a turn")
    print(f"a turn of 251 + 4 tokens: with {_show(took['on'])}, without {_show(took['off'])}")


def _show(seconds: list[float]) -> str:
    low, high = min(seconds) * 1e3, max(seconds) * 1e3
    return f"{statistics.median(seconds) * 1e3:.1f} ms ({low:.1f} to {high:.1f})"


def main() -> None:
    """Print one of them."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if len(sys.argv) > 1:
        restarts(Path(sys.argv[1]).resolve())
    else:
        cost()


if __name__ == "__main__":
    main()

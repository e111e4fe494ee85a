"""Runs each client against a server, in a virtual environment of its own. See docs/clients.md.

    python -m bench.clients --url http://127.0.0.1:8000 [--only llm,aider] [--folder DIR]

Each says two things in one conversation; the second must find resident tokens, by the server's own
count in GET /metrics (and by the reply's usage, where the client shows it). The environments are
made in a temporary folder, or kept in --folder.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

HERE = Path(__file__).resolve().parent
INSTALL_S = 900.0
TALK_S = 300.0
# Clients look for newer versions and price lists of theirs; neither is needed.
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "AIDER_ANALYTICS": "false", "NO_COLOR": "1"}


@dataclass(frozen=True, slots=True)
class Client:
    """package: as pip knows it. script: beside this file; it gets URL, KEY and MODEL."""

    package: str
    script: str


CLIENTS = {
    "openai": Client("openai", "talk_openai.py"),
    "litellm": Client("litellm", "talk_litellm.py"),
    "llm": Client("llm", "talk_llm.sh"),
    "aider": Client("aider-chat", "talk_aider.py"),
}


@dataclass(frozen=True, slots=True)
class Counts:
    """What the server has counted so far."""

    turns: int
    hits: int


def main() -> int:
    """0 if every client had a second turn that hit."""
    wanted = _arguments()
    model = httpx.get(f"{wanted.url}/v1/models").json()["data"][0]["id"]
    failed = []
    with tempfile.TemporaryDirectory(prefix="kvring-clients-") as scratch:
        folder = Path(wanted.folder or scratch).resolve()
        for name in wanted.only.split(","):
            client = CLIENTS[name]
            version = _install(client, folder / name)
            before = _counts(wanted.url)
            began = time.monotonic()
            ended = _talk(client, folder / name, wanted.url, model)
            after = _counts(wanted.url)
            turns, hits = after.turns - before.turns, after.hits - before.hits
            good = ended.returncode == 0 and turns >= 2 and hits > 0
            print(
                f"{name} {version}: {turns} turns, cached_tokens {hits}, "
                f"{time.monotonic() - began:.0f} s: {'ok' if good else 'FAILED'}"
            )
            if not good:
                failed.append(name)
                print(ended.stdout[-2000:], ended.stderr[-2000:], sep="\n")
            elif wanted.verbose:
                print(ended.stdout)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.clients")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    parser.add_argument("--only", default=",".join(CLIENTS), help="names, with commas")
    parser.add_argument("--folder", help="keep the environments here")
    parser.add_argument("--verbose", action="store_true", help="print what the clients print")
    wanted = parser.parse_args()
    unknown = set(wanted.only.split(",")) - set(CLIENTS)
    if unknown:
        parser.error(f"--only: no client {', '.join(sorted(unknown))}; known: {', '.join(CLIENTS)}")
    return wanted


def _install(client: Client, folder: Path) -> str:
    """An environment with the client; its version."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        command = [python, "-m", "pip", "install", "-q", client.package]
        subprocess.run(command, check=True, timeout=INSTALL_S)
    shown = f"from importlib.metadata import version; print(version({client.package!r}))"
    found = subprocess.run([python, "-c", shown], check=True, capture_output=True, text=True)
    return found.stdout.strip()


def _talk(client: Client, folder: Path, url: str, model: str) -> subprocess.CompletedProcess[str]:
    script = HERE / client.script
    binaries = folder / "bin"
    runner = binaries / "python" if script.suffix == ".py" else "sh"
    home = folder / "home"
    home.mkdir(exist_ok=True)
    more = {"PATH": f"{binaries}:{os.environ['PATH']}", "HOME": str(home), **QUIET}
    return subprocess.run(
        [runner, script, f"{url}/v1", "any", model],
        cwd=home,
        env={**os.environ, **more},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TALK_S,
        check=False,
    )


def _counts(url: str) -> Counts:
    page = httpx.get(f"{url}/metrics").text
    hits = re.search(r"^kvring:prefix_cache_hits_total ([\d.e+]+)", page, re.MULTILINE)
    ended = re.findall(r"^kvring:request_success_total\{.*\} ([\d.e+]+)", page, re.MULTILINE)
    return Counts(int(sum(map(float, ended))), int(float(hits[1])) if hits else 0)


if __name__ == "__main__":
    sys.exit(main())

"""docs/quick-start-two-machines.md, typed in: its ring.toml, its commands, in their order.

Two folders are the two machines, at two loopback addresses; `ssh` and `scp` are stand-ins that
reach the other folder. The toy stands in for the model.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks
from tests.processes import END_S, free_ports, until
from transport.config import load

PAGE = ROOT / "docs" / "quick-start-two-machines.md"
SSH = 'shift\ncd "$OTHER" && exec "$@"\n'
SCP = 'shift\nfor last; do :; done\nset -- "${@:1:$#-1}"\nexec cp -p "$@" "$OTHER/${last#*:}"\n'
KVRING = f'PYTHONPATH="{ROOT}" exec "{sys.executable}" -m tools.cli "$@"\n'


class Desk:
    """Both machines: their folders, the shell that runs a command, what was started."""

    def __init__(self, folder: Path) -> None:
        self.homes = {name: folder / name for name in "AB"}
        self.tools = folder / "bin"
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        for home in self.homes.values():
            self._script(home / "kvring" / ".venv" / "bin" / "kvring", KVRING)
        self._script(self.tools / "ssh", SSH)
        self._script(self.tools / "scp", SCP)
        verdicts, stage, http = (str(port) for port in free_ports(3))
        self.places = {
            "192.168.1.10:8000": f"127.0.0.1:{http}",
            "192.168.1.10": "127.0.0.2",
            "192.168.1.11": "127.0.0.3",
            ":7000": f":{verdicts}",
            ":7001": f":{stage}",
            ":8000": f":{http}",
        }
        self.url = f"http://127.0.0.1:{http}"

    def _script(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}")
        path.chmod(0o755)

    def moved(self, text: str) -> str:
        """With the addresses of this test."""
        for old, new in self.places.items():
            text = text.replace(old, new)
        return text

    def _env(self) -> dict[str, str]:
        path = f"{self.tools}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "OTHER": str(self.homes["B"])}

    def run(self, machine: str, command: str) -> str:
        """What a block of commands prints; all of them must succeed."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.moved(command)],
            cwd=self.homes[machine] / "kvring",
            env=self._env(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def start(self, machine: str, command: str) -> None:
        """What stays in its terminal."""
        name = command.partition("--name ")[2].strip() or "coord"
        with (self.homes[machine] / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                ["bash", "-c", f"exec {self.moved(command)}"],
                cwd=self.homes[machine] / "kvring",
                env=self._env(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def end(self, name: str) -> None:
        """Ctrl-C."""
        process = self.running.pop(name)
        process.send_signal(signal.SIGINT)
        assert process.wait(END_S) == 0

    def ready(self, command: str) -> str:
        """What the page's own look at /ready says once it says yes."""

        def look() -> str:
            for name, process in self.running.items():
                assert process.poll() is None, f"{name} has ended"
            try:
                said = self.run("A", command)
            except AssertionError:
                return ""  # the coordinator does not listen yet
            return said if '"ready":true' in said else ""

        return until("the ring is ready", look)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    made = Desk(tmp_path)
    try:
        yield made
    finally:
        for process in made.running.values():
            process.kill()
            process.wait()


def test_the_page_word_for_word(desk: Desk) -> None:
    (text,) = blocks(PAGE, "toml")
    (setup, keygen, copy, s1, s0, coord, ready, status, chat, apikey, again, models) = blocks(
        PAGE, "sh"
    )
    assert setup.splitlines() == ["cd ~/kvring", "make setup"]

    desk.run("A", keygen)
    model = 'path = "models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"'
    for old, new in ((model, 'path = "toy"'), ("[0, 15]", "[0, 3]"), ("[15, 30]", "[3, 6]")):
        assert old in text
        text = text.replace(old, new)
    (desk.homes["A"] / "kvring" / "ring.toml").write_text(desk.moved(text))
    desk.run("A", copy)
    there = sorted(each.name for each in (desk.homes["B"] / "kvring" / "keys").iterdir())
    assert there == ["coordinator.public", "s0.public", "s1.public", "s1.secret"]
    assert load(desk.homes["B"] / "kvring" / "ring.toml").rings[0].stages[1].public_key

    desk.start("B", s1)
    desk.start("A", s0)
    desk.start("A", coord)
    assert json.loads(desk.ready(ready))["ready"] is True
    said = desk.run("A", f"{status.strip()} --url {desk.url}")  # the page means port 8000
    assert "smollm2-135m · ready" in said
    assert desk.moved("tcp://192.168.1.11:7001") in said
    answer = json.loads(desk.run("A", chat))
    assert answer["choices"][0]["finish_reason"] in {"stop", "length"}
    first = answer["usage"]["prompt_tokens"]

    desk.run("A", apikey)
    desk.end("coord")
    desk.start("A", again)
    desk.ready(ready)
    assert "smollm2-135m" in desk.run("A", models)
    key = (desk.homes["A"] / "kvring" / "ann.txt").read_text().splitlines()[0]
    body = chat.replace("-H 'Content", f"-H 'Authorization: Bearer {key}' -H 'Content")
    assert json.loads(desk.run("A", body))["usage"]["prompt_tokens"] == first
    assert "invalid_api_key" in desk.run("A", chat)
    for name in list(desk.running):
        desk.end(name)

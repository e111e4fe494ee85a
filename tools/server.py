"""Owns a `kvring up` that a measurement starts for itself and ends again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.client import Client, Readiness
from tools.errors import ToolError
from tools.terminal import ProgressLine

STOP_S = 20.0  # for the stages to go after the interrupt; then they are killed
LOG_TAIL_LINES = 8


def free_port() -> int:
    """A TCP port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def own_server(arguments: list[str], log: Path) -> Iterator[str]:
    """Run `kvring up` with its output in `log`; yields the URL once it is ready, ends it after."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "tools.cli", "up", "--http", address, *arguments]
    log.parent.mkdir(parents=True, exist_ok=True)
    # a SIGTERM ends this process as Ctrl-C does: otherwise the server would outlive it
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C here must not reach it twice
        )
        try:
            _wait(process, f"http://{address}", log)
            yield f"http://{address}"
        finally:
            _stop(process)
            signal.signal(signal.SIGTERM, previous)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    line = ProgressLine(sys.stderr)

    def alive() -> None:
        code = process.poll()
        if code is not None:
            tail = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            raise ToolError(f"kvring up ended with exit code {code}: {' | '.join(tail)} ({log})")

    def show(state: Readiness) -> None:
        alive()
        line.show(f"starting kvring: {state}")

    try:
        with Client(url) as client:
            client.wait_ready(show, alive=alive)
    finally:
        line.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):  # it, or a stage that it left behind
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

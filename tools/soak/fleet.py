"""Owns the ring's processes: starts each by its command line, and again whenever it has ended.

As a supervisor (systemd, a container runtime) does it. An end that nobody asked for is noted.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

LOOK_S = 0.1
END_S = 20.0  # after SIGTERM; the drain of the coordinator is shorter
COORDINATOR = "coord"


@dataclass(slots=True)
class Member:
    """One process of the ring, under all its pids."""

    name: str
    arguments: list[str]
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    hold: bool = False  # it is to stay down
    expected: bool = False  # its end was asked for
    logs: list[Path] = field(default_factory=list)


class Fleet:
    """The processes. Any thread may call it."""

    def __init__(self, ring: Path, stages: list[str], keys: Path, logs: Path) -> None:
        common = ["--ring", str(ring)]
        coord = Member(COORDINATOR, ["coord", *common, "--api-key-file", str(keys)])
        self.members = {COORDINATOR: coord}
        for name in stages:
            self.members[name] = Member(name, ["stage", *common, "--name", name])
        self._logs = logs
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self.problems: list[str] = []

    def start(self) -> None:
        """Start all, and keep them running."""
        self._logs.mkdir(parents=True, exist_ok=True)
        for member in self.members.values():
            self._start(member)
        self._thread.start()

    def pids(self) -> dict[str, int]:
        """Of those that run."""
        with self._lock:
            return {
                member.name: member.process.pid
                for member in self.members.values()
                if member.process is not None and member.process.poll() is None
            }

    def send(self, name: str, number: signal.Signals) -> None:
        """A signal that does not end it."""
        with self._lock:
            process = self.members[name].process
            if process is not None and process.poll() is None:
                process.send_signal(number)

    def down(self, name: str, number: signal.Signals) -> None:
        """End it and leave it down until `up`."""
        with self._lock:
            member = self.members[name]
            member.hold = member.expected = True
            self.send(name, number)
            process = member.process
        if process is not None:
            self._wait(member, process)

    def up(self, name: str) -> None:
        """Let the supervisor start it again."""
        with self._lock:
            self.members[name].hold = False

    def end(self) -> None:
        """End all by SIGTERM; one that doesn't is a problem, and is killed."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        for member in self.members.values():
            member.expected = True
            self.send(member.name, signal.SIGCONT)
            self.send(member.name, signal.SIGTERM)
        for member in self.members.values():
            if member.process is not None:
                self._wait(member, member.process)
                self._note_end(member, member.process)
        self._read_logs()

    def _wait(self, member: Member, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.problems.append(f"{member.name} did not end within {END_S:g} s of a signal")
            process.kill()
            process.wait()

    def _start(self, member: Member) -> None:
        log = self._logs / f"{member.name}-{member.starts}.log"
        with log.open("wb") as sink:
            member.process = subprocess.Popen(
                [sys.executable, "-m", "tools.cli", *member.arguments, "--with-parent"],
                stdin=subprocess.PIPE,  # its end tells the child that this process is gone
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C is for this process alone
            )
        member.starts += 1
        member.logs.append(log)
        member.expected = False

    def _supervise(self) -> None:
        while not self._stop.wait(LOOK_S):
            with self._lock:
                for member in self.members.values():
                    process = member.process
                    if process is None or process.poll() is None or member.hold:
                        continue
                    self._note_end(member, process)
                    self._start(member)

    def _note_end(self, member: Member, process: subprocess.Popen[bytes]) -> None:
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        code = process.returncode
        asked = member.expected and code in (0, -signal.SIGKILL)
        if not asked:
            self.problems.append(f"{member.name} ended with exit code {code}: {member.logs[-1]}")

    def _read_logs(self) -> None:
        for member in self.members.values():
            for log in member.logs:
                if "Traceback" in log.read_text(errors="replace"):
                    self.problems.append(f"{member.name} raised: {log}")


def wait_until(deadline: float, stop: threading.Event) -> bool:
    """Sleep until then by time.monotonic(); True when `stop` was set before."""
    return stop.wait(max(0.0, deadline - time.monotonic()))

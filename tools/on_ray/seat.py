"""Owns one stage's life on the cluster: its actor, its exit code, its coming back when lost.

To `kvring up` a seat is the stage's process. Where actors are made and who hears of a new address
is tools.on_ray.cluster's.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import ray
from ray.exceptions import RayError, RayTaskError

from tools.on_ray.node import LOADED, Look, Taken
from tools.terminal import in_place

POLL_S = 0.3
FIRST_PAUSE_S = 0.5  # before a lost stage is started again; doubled each time
LAST_PAUSE_S = 30.0
STEADY_S = 60.0  # a stage that has run for so long is not one that fails again and again
TRIES = 3  # starts of a stage that is killed before it has ever been loaded


class Landlord(Protocol):
    """What a seat needs of its cluster."""

    asked: str  # what one stage asks for, in words
    wait_s: float

    def hire(self, seat: Seat) -> Any:
        """A new actor for the seat's place; the one it had is ended."""

    def take(self, actor: Any, port: int | None) -> Any:
        """A reference to its Taken."""

    def settle(self, seat: Seat, taken: Taken) -> Any:
        """Everybody hears where the stage is now, then it starts there; a reference to that."""


class _GoneError(Exception):
    """The actor is lost; the message says why."""


class Seat:
    """One stage. Its thread starts it, copies its output, and starts it again when it is lost."""

    def __init__(self, name: str, landlord: Landlord) -> None:
        self.name = name
        self.actor: Any = None
        self.taken: Taken | None = None
        self.port: int | None = None  # that it had last
        self.stdin = None  # of a local process its end hurries it; here `kill` does
        self.returncode: int | None = None
        self._landlord = landlord
        self._stop, self._killed = threading.Event(), threading.Event()
        self._loaded = False
        self._thread = threading.Thread(target=self._run, name=f"seat-{name}", daemon=True)
        self._log = Path()

    def begin(self, log: Path) -> None:
        """Start the stage where it was taken in; log: where its output is copied to."""
        self._log = log
        self._log.touch()
        self._thread.start()

    # ---- as a process ----

    def poll(self) -> int | None:
        """The exit code of a stage that is not started again; None while it lives."""
        return self.returncode

    def terminate(self) -> None:
        """Ask it to end."""
        self._stop.set()
        if self.actor is not None:
            self.actor.stop.remote()

    def kill(self) -> None:
        """End it now, with its actor."""
        self._stop.set()
        self._killed.set()
        if self.actor is not None:
            ray.kill(self.actor)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until its thread has seen it end."""
        if self._thread.is_alive():
            self._thread.join(timeout)
        return self.returncode or 0

    # ---- its thread ----

    def _run(self) -> None:
        code = 1  # should this thread itself fail
        try:
            with self._log.open("ab", buffering=0) as log:
                code = self._serve(log)
        finally:
            self.returncode = code

    def _serve(self, log: BinaryIO) -> int:
        """Run it until it is told to end, or has no hope; the exit code."""
        pause_s, tries = FIRST_PAUSE_S, 0
        while True:
            began = time.monotonic()
            code, why = self._once(log)
            if self._stop.is_set():
                return code or 0
            tries += 1
            if not self._loaded and (code is None or code < 0) and tries >= TRIES:
                log.write(f"kvring: {why}, {tries} times\n".encode())
                return 1
            if not self._loaded and code is not None and code >= 0:
                return code or 1  # its own last words are in the log
            if time.monotonic() > began + STEADY_S:
                pause_s = FIRST_PAUSE_S
            self._tell(f"stage {self.name}: {why}; it is started again")
            if self._stop.wait(pause_s):
                return 0
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _once(self, log: BinaryIO) -> tuple[int | None, str]:
        """Start it and follow it to its end: its exit code, None with its actor; and why."""
        try:
            if self.taken is None:
                self.taken = self._take()
            if self.taken.flaw:
                raise _GoneError(f"on node {self.taken.host}: {self.taken.flaw}")
            self._ask(self._landlord.settle(self, self.taken))
            if self._stop.is_set():  # it was told before it had started
                self.actor.stop.remote()
            code = self._follow(log)
        except _GoneError as gone:
            self.taken = None
            return None, str(gone)
        how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return code, f"{how} on {self.taken.host}"

    def _take(self) -> Taken:
        """A new actor where Ray finds room; on the same node it gets the same port."""
        self.actor = self._landlord.hire(self)
        ref = self._landlord.take(self.actor, self.port)
        told_at = time.monotonic() + self._landlord.wait_s
        while not ray.wait([ref], timeout=POLL_S)[0]:
            if self._stop.is_set():
                raise _GoneError("told to end")
            if time.monotonic() > told_at:
                told_at += 10 * self._landlord.wait_s
                self._tell(f"stage {self.name} waits for a place: {self._landlord.asked}")
        taken: Taken = self._ask(ref)
        self.port = port_of(taken.address)
        return taken

    def _follow(self, log: BinaryIO) -> int:
        while True:
            look: Look = self._ask(self.actor.look.remote())
            log.write(look.output)
            self._loaded = self._loaded or LOADED in look.output
            if look.code is not None:
                if self._stop.is_set():
                    self._ask(self.actor.clear.remote())
                return look.code
            self._stop.wait(POLL_S) if not self._stop.is_set() else time.sleep(0.05)

    def _tell(self, text: str) -> None:
        """A line beside the stage's own; also in the terminal, unless lines are rewritten there."""
        with self._log.open("a") as log:
            log.write(f"kvring: {text}\n")
        if not in_place(sys.stderr):
            print(text, file=sys.stderr, flush=True)

    def _ask(self, ref: Any) -> Any:
        """The answer of a call. A node that is cut off is waited for until Ray drops it."""
        while not self._killed.is_set():
            if ray.wait([ref], timeout=POLL_S)[0]:
                try:
                    return ray.get(ref)
                except RayError as error:
                    raise _GoneError(_why(error)) from None
        raise _GoneError("killed")


def port_of(address: str) -> int:
    """The port of tcp://host:port."""
    return int(address.rpartition(":")[2])


def _why(error: RayError) -> str:
    """What happened, in one line."""
    if isinstance(error, RayTaskError):
        return str(error.cause)
    return str(error).strip().splitlines()[0][:160]

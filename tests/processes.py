"""Real kvring processes for a test: started by their command lines, watched, and ended by pid.

Every process of a Fleet, and whatever it starts in turn, carries the fleet's mark in its
environment. So a process that outlives its parent is found too.
"""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from transport.config import TOY, Config, Coordinator, Limits, Model, Ring, Stage, dumps, load
from transport.keys import write_key
from transport.link import make_keys

ROOT = Path(__file__).resolve().parent.parent
MARK = "KVRING_TEST_FLEET"
READY_S = 120.0  # a ring of toys takes 2-4 s on two idle cores, ten times that on busy ones
END_S = 20.0
POLL_S = 0.03
# Everything is plain HTTP; loading the CA certificates would cost 20 ms for each request.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
TOY_LAYERS = 6
# Loss is noticed soon; still far above the pauses of four processes on two busy cores.
QUICK = Limits(max_model_len=4096, heartbeat_s=0.2, lost_after_s=1.0)

T = TypeVar("T")


def until(what: str, look: Callable[[], T | None], limit_s: float = READY_S) -> T:
    """Poll until `look` returns something true; AssertionError with `what` when it never does."""
    deadline = time.monotonic() + limit_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s:g} s: {what}")
        time.sleep(POLL_S)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; all different."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


@dataclass(frozen=True, slots=True)
class RingFile:
    """A ring.toml on disk."""

    path: Path
    config: Config

    @property
    def url(self) -> str:
        """Base of the HTTP API."""
        return f"http://{self.config.coordinator.http}"

    @property
    def names(self) -> list[str]:
        """Stages in order."""
        return [stage.name for stage in self.config.rings[0].stages]


def write_ring(
    path: Path,
    *,
    model: str = TOY,
    layers: int = TOY_LAYERS,
    stages: int = 3,
    limits: Limits = QUICK,
    dtype: str = "float32",
) -> RingFile:
    """A ring of tcp loopback links on free ports."""
    http, verdicts, *ports = free_ports(stages + 2)
    cuts = [layers * index // stages for index in range(stages + 1)]
    specs = tuple(
        Stage(f"s{i}", f"tcp://127.0.0.1:{port}", (cuts[i], cuts[i + 1]))
        for i, port in enumerate(ports)
    )
    ring = Ring("r", f"tcp://127.0.0.1:{verdicts}", specs)
    config = Config(Model(model, "m", dtype), (ring,), Coordinator(f"127.0.0.1:{http}"), limits)
    path.write_text(dumps(config))
    return RingFile(path, config)


def with_keys(ring: RingFile) -> RingFile:
    """The same ring with CURVE keys: its files in `keys` beside it, its ring.toml rewritten."""
    folder = ring.path.parent / "keys"
    folder.mkdir(exist_ok=True)

    def keyed(name: str) -> dict[str, Any]:
        public, secret = make_keys()
        file = folder / f"{name}.secret"
        write_key(file, secret, 0o600, force=False)
        return {"public_key": public, "secret_key_file": str(file)}

    config = ring.config
    (one,) = config.rings
    stages = tuple(replace(stage, **keyed(stage.name)) for stage in one.stages)
    coordinator = replace(config.coordinator, **keyed("coordinator"))
    config = replace(config, rings=(replace(one, stages=stages),), coordinator=coordinator)
    ring.path.write_text(dumps(config))
    return RingFile(ring.path, load(ring.path))


class Process:
    """One kvring process; its output goes to files."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], folder: Path) -> None:
        self.name = name
        self.popen = popen
        self._folder = folder
        self.expected: list[int] = []  # exit codes that are no failure of the fleet

    @property
    def output(self) -> str:
        """What it wrote to stdout."""
        return (self._folder / "stdout").read_text(errors="replace")

    @property
    def errors(self) -> str:
        """What it wrote to stderr."""
        return (self._folder / "stderr").read_text(errors="replace")

    def wait(self, limit_s: float = END_S) -> int:
        """Its exit code; an AssertionError when it does not end."""
        try:
            return self.popen.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self} did not end within {limit_s:g} s") from None

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.popen.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.popen.kill()
        self.wait()

    def __str__(self) -> str:
        return f"{self.name} (pid {self.popen.pid}, stderr: {self.errors[-2000:]})"


class Fleet:
    """The processes of one test."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        """scratch: a folder with a short name; ipc paths end at 107 bytes."""
        self._folder = folder
        self.scratch = scratch
        self._mark = uuid.uuid4().hex
        self.processes: list[Process] = []

    def start(
        self,
        *arguments: object,
        name: str | None = None,
        stdin: int = subprocess.DEVNULL,
        module: str = "tools.cli",
        variables: Mapping[str, str] | None = None,
    ) -> Process:
        """Start `kvring ARGUMENTS`, or another module with them."""
        name = name or str(arguments[0])
        folder = self._folder / f"{len(self.processes):02d}-{name}"
        folder.mkdir(parents=True)
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            popen = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                cwd=ROOT,
                env={
                    **os.environ,
                    **(variables or {}),
                    MARK: self._mark,
                    "TMPDIR": str(self.scratch),
                },
                stdin=stdin,
                stdout=out,
                stderr=err,
            )
        process = Process(name, popen, folder)
        self.processes.append(process)
        return process

    def stage(
        self,
        ring: RingFile,
        name: str,
        *options: object,
        variables: Mapping[str, str] | None = None,
    ) -> Process:
        """Start one stage by hand."""
        words = ("stage", "--ring", ring.path, "--name", name, *options)
        return self.start(*words, name=name, variables=variables)

    def coord(self, ring: RingFile, *options: object) -> Process:
        """Start the coordinator by hand."""
        return self.start("coord", "--ring", ring.path, *options)

    def whole(self, ring: RingFile, limit_s: float = READY_S) -> dict[str, Process]:
        """Start a ring by hand and wait until it is ready; its processes by name."""
        started = {"coord": self.coord(ring)}
        started |= {name: self.stage(ring, name) for name in ring.names}
        self.ready(ring.url, limit_s)
        return started

    def up(self, *options: object, http: str | None = None) -> tuple[Process, str]:
        """Start `kvring up`; the process and the API's base. Does not wait."""
        http = http or f"127.0.0.1:{free_ports(1)[0]}"
        return self.start("up", "--http", http, *options), f"http://{http}"

    def ready(self, url: str, limit_s: float = READY_S) -> None:
        """Wait until a ring is ready; an AssertionError at once when a process has ended."""
        seen: dict[str, Any] = {}

        def look() -> bool:
            for process in self.processes:
                code = process.popen.poll()
                expected = (None, -signal.SIGKILL, *process.expected)  # the test's own business
                assert code in expected, f"exit code {code}: {process}"
            seen.update(readiness(url))
            return bool(seen["status"] == 200)

        try:
            until("the ring is ready", look, limit_s)
        except AssertionError as error:
            logs = "\n".join(map(str, self.processes))
            raise AssertionError(f"{error}; {seen}\n{logs}") from None

    def not_ready(self, url: str, *words: str, limit_s: float = READY_S) -> dict[str, Any]:
        """Wait until GET /ready is 503 and says all the words; its body."""
        seen: dict[str, Any] = {}

        def look() -> bool:
            seen.update(readiness(url))
            said = str(seen.get("missing"))
            return seen["status"] == 503 and all(word in said for word in words)

        try:
            until(f"503 with {words}", look, limit_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; the last was {seen}") from None
        return seen

    def alive(self) -> list[psutil.Process]:
        """Every process of this fleet, children and orphans included."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                gone = process.status() == psutil.STATUS_ZOMBIE
                if not gone and process.environ().get(MARK) == self._mark:
                    found.append(process)
        return found

    def gone(self, limit_s: float = END_S) -> None:
        """Wait until no process of this fleet is left."""
        until("every process has ended", lambda: not self.alive(), limit_s)

    def end(self) -> None:
        """End all; an AssertionError names what its own parent had left behind."""
        for process in self.processes:
            if process.popen.poll() is None:
                process.send(signal.SIGCONT)
                process.send(signal.SIGTERM)
        stuck = []
        for process in self.processes:
            if process.popen.stdin is not None:
                process.popen.stdin.close()
            try:
                process.wait()
            except AssertionError as error:
                stuck.append(str(error))
                process.kill()
        left = self.alive()
        stuck += [f"left behind: {each.pid} {each.cmdline()}" for each in left]
        for each in left:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        assert not stuck, "\n".join(stuck)


@contextmanager
def fleet(folder: Path) -> Iterator[Fleet]:
    """A Fleet whose processes are all ended, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as scratch:
        made = Fleet(folder, Path(scratch))
        try:
            yield made
        finally:
            made.end()


def get(url: str, headers: dict[str, str] | None = None) -> httpx.Response:
    """GET, whatever the status."""
    return httpx.get(url, timeout=10, verify=NO_TLS, headers=headers)


def post(url: str, timeout_s: float = 60.0, **options: Any) -> httpx.Response:
    """POST, whatever the status."""
    return httpx.post(url, timeout=timeout_s, verify=NO_TLS, **options)


def readiness(url: str) -> dict[str, Any]:
    """GET /ready: its body and `status`; status 0 while nobody answers."""
    try:
        answer = get(f"{url}/ready")
    except httpx.HTTPError:
        return {"status": 0, "missing": "nobody answers"}
    return {"status": answer.status_code, **answer.json()}


def slots(url: str) -> list[dict[str, Any]]:
    """The first ring's slots, from GET /ring."""
    found: list[dict[str, Any]] = get(f"{url}/ring").json()["rings"][0]["slots"]
    return found


def idle(url: str) -> None:
    """Wait until no turn runs and every slot is free."""

    def look() -> bool:
        turns = get(f"{url}/ring").json()["turns"]
        nobody = turns == {"running": 0, "waiting": 0}
        return nobody and all(slot["turn"] is None for slot in slots(url))

    until("every slot is free", look, 20)


def assert_clear(process: Process, code: int, *words: str) -> None:
    """It ended with this exit code, and its last line on stderr says all the words."""
    process.expected.append(code)
    assert process.wait(READY_S) == code, process
    assert "Traceback" not in process.errors, process
    lines = process.errors.strip().splitlines()
    assert [line for line in lines if line.startswith("kvring: ")] == lines[-1:], process
    for word in words:
        assert word in lines[-1], (word, lines[-1])

"""Owns what runs on a node: one stage process, the port it listens on, its files and its output.

tools.on_ray.seat makes it a Ray actor and calls it; every call returns at once. Should the actor be
killed, the stage sees the end of its standard input and ends too.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from transport.config import TOY
from transport.keys import write_key

LOOK_BYTES = 1 << 18  # of a stage's output, in one look
LOADED = b'"event": "loaded"'


@dataclass(frozen=True, slots=True)
class Taken:
    """Where a stage will run. address: tcp://host:port, as other nodes reach it.

    flaw: why it can't run there, in words; "" when it can.
    """

    host: str
    address: str
    flaw: str


@dataclass(frozen=True, slots=True)
class Look:
    """A stage's output since the last look, and its exit code once it has ended."""

    output: bytes
    code: int | None


def hold_port(host: str, wanted: int | None) -> socket.socket:
    """A socket that keeps a port for another process to listen on; the wanted one, if it is free.

    Bound, and not listening: with SO_REUSEADDR, which libzmq sets, the other process can bind
    beside it, and the kernel gives the port to nobody who asks for any. Raises OSError.
    """
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        with contextlib.suppress(OSError):
            if wanted is not None:
                holder.bind((host, wanted))
                return holder
        holder.bind((host, 0))
    except OSError:
        holder.close()
        raise
    return holder


def address_of(holder: socket.socket) -> str:
    """The address of a held port."""
    host, port = holder.getsockname()[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def installed() -> str:
    """The version of kvring here."""
    try:
        return version("kvring")
    except PackageNotFoundError:
        return "source"


class StageHost:
    """Runs one stage on the node where it is made."""

    def __init__(self) -> None:
        self._holder: socket.socket | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="kvring-"))  # of mode 0700
        self._name = ""
        self._process: subprocess.Popen[bytes] | None = None
        if signal.getsignal(signal.SIGUSR1) is not signal.SIG_IGN:
            # A stage begins with it ignored, too: `moved` can't end one that does not listen yet.
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        self._read = 0

    def take(self, port: int | None, model: str, kvring: str) -> Taken:
        """Take a port, that one if it is free, and say whether the model is here."""
        from ray.util import get_node_ip_address

        host = get_node_ip_address()
        self._holder = hold_port(host, port)
        flaw = ""
        if installed() != kvring:
            flaw = f"kvring is {installed()} there and {kvring} here: install the same one"
        elif model != TOY and not Path(model).exists():
            flaw = (
                f"no model at {model}: every node needs it at the same path (a shared folder, or "
                "`kvring pull NAME` there)"
            )
        return Taken(host, address_of(self._holder), flaw)

    def start(self, name: str, ring: str, secret: str, extra: list[str]) -> None:
        """Start the stage; ring: the text of ring.toml, secret: the stage's own key."""
        self._drop()
        self._name, self._read = name, 0
        self._write(ring)
        write_key(self._secret, secret, 0o600, force=True)
        command = [sys.executable, "-m", "tools.cli", "stage", "--ring", str(self._ring)]
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(
                [*command, "--name", name, "--with-parent", *extra],
                stdin=subprocess.PIPE,  # its end tells the stage that this process is gone
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def moved(self, ring: str) -> None:
        """Others of the ring are at other addresses."""
        if self._process is not None and self._process.poll() is None:
            self._write(ring)
            self._process.send_signal(signal.SIGUSR1)

    def look(self) -> Look:
        """What the stage has printed since the last look; this process prints it too, for Ray."""
        if self._process is None:
            return Look(b"", None)
        code = self._process.poll()  # before its output: what it said last is in it
        with self._log.open("rb") as log:
            log.seek(self._read)
            output = log.read(LOOK_BYTES)
        self._read += len(output)
        sys.stderr.write(output.decode(errors="replace"))
        sys.stderr.flush()
        if LOADED in output:
            self._secret.unlink(missing_ok=True)  # it was read before
        return Look(output, code if len(output) < LOOK_BYTES else None)

    def stop(self) -> None:
        """Ask the stage to end: it finishes the frame at hand."""
        if self._process is not None:
            self._process.terminate()

    def clear(self) -> None:
        """Give back the port and the files, once the stage has ended."""
        self._drop()
        if self._holder is not None:
            self._holder.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _drop(self) -> None:
        """Let go of a stage that has ended."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    @property
    def _ring(self) -> Path:
        return self._folder / "ring.toml"

    @property
    def _log(self) -> Path:
        return self._folder / f"{self._name}.log"

    @property
    def _secret(self) -> Path:
        return self._folder / f"{self._name}.secret"

    def _write(self, ring: str) -> None:
        new = self._folder / "ring.new"
        new.write_text(ring)
        new.replace(self._ring)  # whole, whenever the stage reads it

"""`kvring bench serve` over real links: every process in a network namespace of its own.

    sudo python -m bench.netns [--delay-ms 20] [--mbit 100] [--model toy] [-- BENCH OPTIONS]

Each namespace has one veth pair to a hub. The hub forwards every link's TCP stream and holds its
bytes for the delay, in order (netem is not in every kernel); tbf shapes each veth where tc is
there. So [emulate] can be compared with links that a kernel makes. All addresses live inside
namespaces that this makes and removes. Says "skipped" and ends with 0 without root or ip.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.load import describe_model
from tools.pull import resolve_model
from transport.config import TOY, Config, Coordinator, Limits, Model, Ring, Stage, dumps
from transport.emulate import Air, Emulate, Line
from transport.frame import Buffer

HUB = "10.77.255.1"  # inside the hub's namespace only
PORT = 7100
HTTP = "127.0.0.1:8000"  # inside the coordinator's namespace only
CHUNK_BYTES = 1 << 18


class SkippedError(Exception):
    """This machine can't do it; the message says why."""


def run(*command: str) -> None:
    """Run a command that must not fail."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SkippedError(f"{' '.join(command)}: {done.stderr.strip()}")


class Network:
    """A hub and `count` namespaces around it; number 0 is the coordinator's."""

    def __init__(self, count: int, mbit: float) -> None:
        self.hub = f"kvring{os.getpid()}-hub"
        self.names = [f"kvring{os.getpid()}-{index}" for index in range(count)]
        self._mbit = mbit
        self._made: list[str] = []

    def make(self) -> None:
        """Make namespaces, veth pairs, addresses and routes."""
        for name in (self.hub, *self.names):
            run("ip", "netns", "add", name)
            self._made.append(name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", self.hub, "addr", "add", f"{HUB}/32", "dev", "lo")
        for index, name in enumerate(self.names):
            peer = f"v{index}"
            pair = ("type", "veth", "peer", "name", peer, "netns", self.hub)
            run("ip", "link", "add", "v", "netns", name, *pair)
            for space, device, last in ((name, "v", 2), (self.hub, peer, 1)):
                run("ip", "-n", space, "addr", "add", f"10.77.{index}.{last}/24", "dev", device)
                run("ip", "-n", space, "link", "set", device, "up")
                if self._mbit:
                    shape = ("rate", f"{self._mbit:g}mbit", "burst", "256kb", "latency", "400ms")
                    run("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", *shape)
            run("ip", "-n", name, "route", "add", "default", "via", f"10.77.{index}.1")

    def remove(self) -> None:
        """Remove the namespaces, and with them everything in them."""
        for name in self._made:
            subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True)


def forward(delay_ms: float, count: int) -> None:
    """In the hub: pass each stream for HUB:PORT+i on to namespace i, delayed. Does not return."""
    for index in range(count):
        listener = socket.create_server((HUB, PORT + index))
        target = (f"10.77.{index}.2", PORT)
        threading.Thread(target=_accept, args=(listener, target, delay_ms), daemon=True).start()
    threading.Event().wait()


def _accept(listener: socket.socket, target: tuple[str, int], delay_ms: float) -> None:
    while True:
        near, _ = listener.accept()
        try:
            far = socket.create_connection(target)
        except OSError:  # not listening yet: the sender will connect again
            near.close()
            continue
        for one, other in ((near, far), (far, near)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_pump, args=(one, other, delay_ms), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, delay_ms: float) -> None:
    def land(parts: Sequence[Buffer]) -> None:
        with contextlib.suppress(OSError):  # the other side is gone, and the reader will see it
            sink.sendall(parts[0])

    air = Air(Line(Emulate(delay_ms), "hub"), land)
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK_BYTES):
            while not air.put([data]):
                time.sleep(0.001)  # the air is full: TCP holds the sender back
    air.close(land=True)
    for each in (source, sink):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def ring_file(folder: Path, model: str, stages: int) -> Path:
    """A ring.toml whose links all go through the hub."""
    path = TOY if model == TOY else str(resolve_model(model, Path("models")).resolve())
    layers, context = describe_model(path)
    cuts = [layers * index // stages for index in range(stages + 1)]
    specs = tuple(
        Stage(
            f"s{i}",
            f"tcp://{HUB}:{PORT + 1 + i}",
            (cuts[i], cuts[i + 1]),
            bind=f"tcp://10.77.{1 + i}.2:{PORT}",
        )
        for i in range(stages)
    )
    ring = Ring("ring0", f"tcp://{HUB}:{PORT}", specs, bind=f"tcp://10.77.0.2:{PORT}")
    limits = Limits(slots=8, max_model_len=min(context, 8192))
    config = Config(Model(path, model), (ring,), Coordinator(HTTP), limits)
    file = folder / "ring.toml"
    file.write_text(dumps(config))
    return file


@contextlib.contextmanager
def processes(network: Network, file: Path, delay_ms: float, stages: int) -> Iterator[None]:
    """The hub's forwarder, the stages and the coordinator; all ended at the end."""
    python = sys.executable
    cli = [python, "-m", "tools.cli"]
    count = len(network.names)
    started = []
    places = [(network.hub, [python, "-m", "bench.netns", "--forward", str(count)])]
    places[0][1].extend(["--delay-ms", str(delay_ms)])
    places.append((network.names[0], [*cli, "coord", "--ring", str(file), "--insecure"]))
    for i in range(stages):
        command = [*cli, "stage", "--ring", str(file), "--name", f"s{i}", "--insecure"]
        places.append((network.names[1 + i], command))
    try:
        for number, (space, command) in enumerate(places):
            log = (file.parent / f"{number}.log").open("wb")
            with log:
                started.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", space, *command], stdout=log, stderr=log
                    )
                )
        yield
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_ready(network: Network, patience_s: float = 120.0) -> None:
    """Return when the ring takes turns."""
    deadline = time.monotonic() + patience_s
    command = [sys.executable, "-m", "tools.cli", "status", "--url", f"http://{HTTP}"]
    while True:
        done = subprocess.run(
            ["ip", "netns", "exec", network.names[0], *command],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            print(done.stdout)
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"the ring is not ready: {done.stdout} {done.stderr}")
        time.sleep(0.5)


def measure(wanted: argparse.Namespace) -> int:
    """Make the network, run the bench in the coordinator's namespace, remove it all."""
    if os.geteuid() != 0:
        raise SkippedError("it needs root to make network namespaces")
    if shutil.which("ip") is None:
        raise SkippedError("there is no `ip` (package iproute2)")
    mbit = wanted.mbit
    if mbit and shutil.which("tc") is None:
        print("no `tc`: bandwidth is not limited", file=sys.stderr)
        mbit = 0.0
    network = Network(wanted.stages + 1, mbit)
    with tempfile.TemporaryDirectory(prefix="kvring-netns-") as name:
        file = ring_file(Path(name), wanted.model, wanted.stages)
        try:
            network.make()
            with processes(network, file, wanted.delay_ms, wanted.stages):
                wait_ready(network)
                bench = [sys.executable, "-m", "tools.cli", "bench", "serve"]
                bench += ["--url", f"http://{HTTP}", *wanted.bench]
                done = subprocess.run(
                    ["ip", "netns", "exec", network.names[0], *bench], check=False
                )
                return done.returncode
        finally:
            network.remove()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--mbit", type=float, default=0.0)
    parser.add_argument("--model", default=TOY)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--forward", type=int, help=argparse.SUPPRESS)
    parser.add_argument("bench", nargs="*", help="options of kvring bench serve, after --")
    wanted = parser.parse_args()
    if wanted.forward is not None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        forward(wanted.delay_ms, wanted.forward)
    try:
        return measure(wanted)
    except SkippedError as reason:
        print(f"skipped: {reason}", file=sys.stderr)
        return 0


if __name__ == "__main__":
    sys.exit(main())

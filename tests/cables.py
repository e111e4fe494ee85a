"""Links that a test can cut: a TCP cable in this process, and network namespaces where root is.

A Cable stands between a sender and the port where its peer listens. Namespaces are routed by the
kernel, so that what is cut there is cut for TCP itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

from bench.netns import Network, SkippedError, run

CHUNK_BYTES = 1 << 16
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST
CLONE_NEWNET = 0x40000000
_LABELS = itertools.count()


class Cable:
    """Passes the connections to its `port` on to another port of this machine, until cut."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._whole = threading.Event()
        self._whole.set()
        self._refusing = False
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        self.held = 0  # bytes that came since the cable was cut
        self._pumping: list[threading.Thread] = []
        self._taking = threading.Thread(target=self._accept, daemon=True)
        self._taking.start()

    def stall(self) -> None:
        """Nothing passes, either way; no end hears of it."""
        self.held = 0
        self._whole.clear()

    def reset(self) -> None:
        """What is under way is lost, every connection is reset, and so is every new one."""
        with self._lock:
            self._refusing = True
            ends, self._ends = self._ends, []
        for each in ends:
            _reset(each)  # a pump that waits for the cable finds its sink gone

    def mend(self) -> None:
        """Everything passes again."""
        self._refusing = False
        self._whole.set()

    def close(self) -> None:
        """End all connections, and take no more."""
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self.reset()
        self._whole.set()
        self._taking.join()
        for each in self._pumping:
            each.join()

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    near, _ = self._listener.accept()
                except OSError:
                    return  # closed
                if self._refusing:
                    _reset(near)
                    continue
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:  # nobody listens: the sender will connect again
                    _reset(near)
                    continue
                with self._lock:
                    self._ends += [near, far]
                both = threading.Thread(target=self._pass, args=(near, far), daemon=True)
                self._pumping.append(both)
                both.start()

    def _pass(self, near: socket.socket, far: socket.socket) -> None:
        with near, far:
            back = threading.Thread(target=self._pump, args=(far, near), daemon=True)
            back.start()
            self._pump(near, far)
            back.join()
        with self._lock:
            self._ends = [each for each in self._ends if each not in (near, far)]

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):  # cut, or an end has gone
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := source.recv(CHUNK_BYTES):
                if not self._whole.is_set():
                    self.held += len(data)
                self._whole.wait()
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def _reset(end: socket.socket) -> None:
    """Close with RST, and wake who reads from it."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        end.shutdown(socket.SHUT_RD)
    end.close()


class Machines:
    """Namespaces around a router: number 0 is the coordinator's, 1 + i is stage i's."""

    def __init__(self, count: int) -> None:
        self._network = Network(count, 0.0)
        label = f"kvt{os.getpid()}-{next(_LABELS)}"  # several may stand at a time
        self._network.hub = f"{label}-hub"
        self.names = self._network.names = [f"{label}-{index}" for index in range(count)]

    def make(self) -> None:
        """Raises SkippedError with the reason where this machine can't."""
        if os.geteuid() != 0:
            raise SkippedError("it needs root to make network namespaces")
        if shutil.which("ip") is None:
            raise SkippedError("there is no `ip` (package iproute2)")
        self._network.make()
        try:
            with inside(self._network.hub):
                Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        except OSError as error:
            raise SkippedError(f"no forwarding between namespaces: {error}") from None

    def remove(self) -> None:
        """Remove all that was made."""
        self._network.remove()

    def unplug(self, number: int, *, back: bool = False) -> None:
        """Take a machine's cable out (or put it back): its own end sees no carrier."""
        state = "up" if back else "down"
        run("ip", "-n", self._network.hub, "link", "set", f"v{number}", state)

    def part(self, one: int, other: int, *, back: bool = False) -> None:
        """Drop every packet between two machines, both ways; all else passes."""
        verb = "del" if back else "add"
        for source, target in ((one, other), (other, one)):
            path = ("from", address(source), "to", address(target), "blackhole")
            run("ip", "-n", self._network.hub, "rule", verb, *path)

    def swallow(self, number: int, *, back: bool = False) -> None:
        """Drop every packet from and to a machine; no router says that it is out of reach."""
        verb = "del" if back else "add"
        for side in ("from", "to"):
            run("ip", "-n", self._network.hub, "rule", verb, side, address(number), "blackhole")


def address(number: int) -> str:
    """A machine's."""
    return f"10.77.{number}.2"


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread, and what it starts, is in that network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(descriptor: int) -> None:
        if libc.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")

    with (
        Path("/proc/thread-self/ns/net").open("rb") as home,
        Path("/run/netns", namespace).open("rb") as there,
    ):
        enter(there.fileno())
        try:
            yield
        finally:
            enter(home.fileno())

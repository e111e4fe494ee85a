"""Owns how long it takes to reach an address: connect to it, say nothing, and hang up.

One connection costs one round trip of the network, whoever listens and whatever keys it wants; the
listener sees a peer that made no handshake. Knows no frame.
"""

from __future__ import annotations

import socket
import time

TRIES = 3  # the quickest counts: the first may wait for name resolution or a sleeping radio


def parts(address: str) -> tuple[str, int]:
    """Host and port of tcp://host:port or host:port; of a wildcard, this machine's loopback."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    return {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), int(port)


def connect(address: str, limit_s: float) -> float:
    """Seconds to connect to tcp://host:port, host:port or ipc://path. Raises OSError."""
    if address.startswith("ipc://"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(limit_s)
            started = time.perf_counter()
            probe.connect(address.removeprefix("ipc://"))
            return time.perf_counter() - started
    host, port = parts(address)
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.settimeout(limit_s)
        started = time.perf_counter()
        probe.connect(where)
        return time.perf_counter() - started


def round_trip(address: str, limit_s: float) -> float | None:
    """The quickest of a few connections, in seconds; None where nobody answers within limit_s."""
    deadline = time.monotonic() + limit_s
    best: float | None = None
    for _ in range(TRIES):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        try:
            took = connect(address, left_s)
        except OSError:
            break
        best = took if best is None else min(best, took)
    return best

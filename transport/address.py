"""Owns what an address means to this machine: who listens there, which number a name has."""

from __future__ import annotations

import socket


def listening(path: str) -> bool:
    """True when a process listens on this unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def numeric(address: str) -> str:
    """Numeric form of a host name: libzmq binds to numeric addresses and interfaces only."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or host == "*" or host.startswith("["):
        return address
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return address  # libzmq may know it as an interface; if not, its error is explained
    return f"tcp://{found[0][4][0]}:{port}"

"""Owns what an address means to this machine: who listens, its number, and who can reach it."""

from __future__ import annotations

import ipaddress
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


def exposed(address: str) -> bool:
    """True when other machines may reach a listener at tcp://host:port, ipc://path or host:port.

    So for wildcards, for a name of which any address is no loopback one, and for what has no
    address at all: libzmq may know it as a network interface.
    """
    if address.startswith("ipc://"):
        return False
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host in ("", "*"):
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return True
    return not all(_loopback(str(each[4][0])) for each in found)


def _loopback(host: str) -> bool:
    number = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(number, "ipv4_mapped", None)
    return (mapped or number).is_loopback

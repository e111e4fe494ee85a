"""Owns the checks of a ring's addresses: whose they are, free or taken, reached or not."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tools.doctor.checks import Check, See, fail, ok, warn
from transport.address import listening
from transport.config import Config, Ring, Stage
from transport.reach import connect, parts

REACH_S = 2.0  # for another machine to answer
IPC_BYTES = 107  # of a unix socket's path


@dataclass(frozen=True, slots=True)
class Place:
    """An address of ring.toml. own: of this machine; listen: where its process binds."""

    what: str
    address: str
    listen: str
    start: str  # the command that runs what listens there
    own: bool


def places_of(config: Config) -> list[Place]:
    """Every stage's socket and every ring's verdict socket."""
    found = []
    for ring in config.rings:
        coordinator = f"coordinator {ring.name}"
        start = "kvring coord --ring FILE"
        found.append(_place(coordinator, ring.verdicts, ring.listen, start))
        for stage in ring.stages:
            start = f"kvring stage --ring FILE --name {stage.name}"
            found.append(_place(f"stage {stage.name}", stage.address, stage.listen, start))
    return found


def own_stages(ring: Ring) -> list[Stage]:
    """The stages that this machine runs, as far as their addresses tell."""
    return [stage for stage in ring.stages if is_own(stage.address)]


def _place(what: str, address: str, listen: str, start: str) -> Place:
    return Place(what, address, listen, start, is_own(address))


def is_own(address: str) -> bool:
    """True for a unix socket, and for a host of which an address is one of this machine's."""
    if address.startswith("ipc://"):
        return True
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host in {"*", "0.0.0.0", "::"}:
        return True
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    mine = {each.address for nics in psutil.net_if_addrs().values() for each in nics}
    return any(ip in mine or ipaddress.ip_address(ip.partition("%")[0]).is_loopback for ip in found)


def taken(address: str) -> OSError | None:
    """Why an own address can't be bound now; None where it can."""
    try:
        if address.startswith("ipc://"):
            _check_path(address.removeprefix("ipc://"))
            return None
        host, port = _host_port(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error
    return None


def _check_path(path: str) -> None:
    if len(path.encode()) > IPC_BYTES:
        raise OSError(errno.ENAMETOOLONG, f"an ipc path has at most {IPC_BYTES} bytes")
    if not Path(path).parent.is_dir():
        raise OSError(errno.ENOENT, f"the folder {Path(path).parent} does not exist")
    if listening(path):
        raise OSError(errno.EADDRINUSE, "address already in use")


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    return "0.0.0.0" if host == "*" else host, int(port)


def place_checks(
    places: list[Place],
    answering: dict[str, Check],
    bound: set[str],
    *,
    anybody: bool,
    asked: bool = True,
) -> Iterator[Check]:
    """A line for each address; anybody: some process of the ring runs; asked: one could be asked.

    answering: the lines of what was heard of. bound: what was bound a moment ago, and so is free.
    """
    for place in places:
        if place.what in answering:
            yield answering[place.what]
        elif place.what in bound:
            yield ok(place.what, f"{place.listen} is free to bind")
        elif place.own:
            yield _own(place, anybody=anybody, asked=asked)
        else:
            yield _others(place)


def _own(place: Place, *, anybody: bool, asked: bool) -> Check:
    why = taken(place.listen)
    if why is None and not anybody:
        return ok(place.what, f"{place.listen} is free to bind")
    if why is None:
        said = f"{place.listen}: nobody listens"
        return fail(place.what, said, f"start it: {place.start}", See.STAGE)
    if why.errno == errno.EADDRINUSE and not asked:
        said = f"{place.listen} is taken, by {place.what} or by another: nobody could be asked"
        return warn(place.what, said)
    if why.errno == errno.EADDRINUSE:
        said = f"{place.listen} is taken, and nothing was heard of {place.what} from there"
        advice = "if it is that process, it still loads or has other keys (see its log); "
        advice += "else stop what listens there (ss -ltnp), or choose another port"
        return fail(place.what, said, advice, See.PORT)
    said = f"{place.listen} can't be bound ({why.strerror or why})"
    return fail(place.what, said, "set `bind` beside `address` in ring.toml", See.PORT)


def _others(place: Place) -> Check:
    try:
        took = connect(place.address, REACH_S)
    except (OSError, UnicodeError) as error:
        said = f"{place.address} is not reached ({getattr(error, 'strerror', None) or error})"
        advice = f"start it there ({place.start}), and let its port through the firewall"
        return fail(place.what, said, advice, See.STAGE)
    host, port = parts(place.address)
    return ok(place.what, f"{host}:{port} is reached in {took * 1e3:.1f} ms")

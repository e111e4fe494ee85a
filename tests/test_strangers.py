"""A ring with keys among strangers: nothing is delivered, nothing grows, and the ring serves on.

Real processes over tcp; the strangers are raw ZeroMQ clients. Each has something that the ring's
own peers have, down to a valid key of the same ring at another's door.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import processes, strangers
from tests.processes import Fleet, Process, RingFile, get, until, with_keys, write_ring
from tests.strangers import Keys
from tests.toyclient import complete, truth
from transport.config import Limits
from transport.link import make_keys

MESSAGES = [strangers.takeover("r"), [b"\xff" * 1000], [b"", bytes(1 << 20)]]
GROWTH_BYTES = 8 << 20  # far under what the strangers offer; Python's own noise is 1-2 MB
IDLERS = 100


class World:
    """A ring with keys, and what strangers may know of it."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.ring = with_keys(write_ring(folder / "ring.toml"))
        self.started = fleet.whole(self.ring)
        (ring,) = self.ring.config.rings
        self.head, self.middle, self.tail = ring.stages
        self.coordinator = self.ring.config.coordinator
        self.doors = [  # address, and the public key behind it
            (self.head.address, str(self.head.public_key)),
            (self.middle.address, str(self.middle.public_key)),
            (ring.verdicts, str(self.coordinator.public_key)),
        ]

    def keys_of(self, owner: Any, server: str) -> Keys:
        """What the process `owner` itself would use to push to `server`."""
        secret = Path(owner.secret_key_file).read_text().strip()
        return Keys(owner.public_key, secret, server)

    def state(self) -> dict[str, float]:
        """Of the ring: what a delivered frame would change."""
        described = get(f"{self.ring.url}/ring").json()["rings"][0]
        return {
            "epoch": described["epoch"],
            "lost": self.metric("rings_lost_total"),
            "stale": self.metric("stale_verdicts_total"),
            "rejects": self.metric("rejects_total"),
        }

    def metric(self, name: str) -> float:
        """One number of GET /metrics."""
        lines = get(f"{self.ring.url}/metrics").text.splitlines()
        (line,) = [line for line in lines if line.startswith(f"kvring:{name} ")]
        return float(line.split()[1])

    def memory(self) -> dict[str, int]:
        """Resident bytes of each process."""
        return {
            name: psutil.Process(process.popen.pid).memory_info().rss
            for name, process in self.started.items()
        }

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """Events of one kind in a process's log."""
        lines = self.started[name].errors.splitlines()
        return [said for said in map(json.loads, lines) if said["event"] == event]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("strangers")
    with processes.fleet(folder / "processes") as fleet:
        yield World(fleet, folder)


def no_keys(_world: World, address: str, _server: str) -> None:
    strangers.flood(address, MESSAGES, None)


def a_password(_world: World, address: str, _server: str) -> None:
    strangers.flood(address, MESSAGES, None, "PLAIN")


def an_unknown_key(_world: World, address: str, server: str) -> None:
    strangers.flood(address, MESSAGES, Keys(*make_keys(), server))


def keys_of_another_ring(world: World, address: str, server: str) -> None:
    other = make_keys()[0]
    member = world.keys_of(world.tail, server)
    strangers.flood(address, MESSAGES, Keys(member.public, member.secret, other))


def a_public_key_without_its_secret(world: World, address: str, server: str) -> None:
    secret = make_keys()[1]
    strangers.flood(address, MESSAGES, Keys(str(world.coordinator.public_key), secret, server))


def a_neighbour_at_the_wrong_door(world: World, address: str, server: str) -> None:
    """Each door opens for some; nobody passes the frames of the one before it."""
    owners = {
        world.head.address: world.tail,
        world.middle.address: world.coordinator,
        world.ring.config.rings[0].verdicts: world.coordinator,
    }
    strangers.flood(address, MESSAGES, world.keys_of(owners[address], server))


def garbage(_world: World, address: str, _server: str) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 400, b"\0" * (8 << 20)):
        strangers.shout(address, data)


def a_huge_handshake(_world: World, address: str, _server: str) -> None:
    for size in (1 << 62, 1 << 30, 64 << 20):
        assert strangers.shout(address, strangers.huge_command(size, 64 << 20)) < 32 << 20


def silence(_world: World, address: str, _server: str) -> None:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    peers = [socket.create_connection((host, int(port))) for _ in range(IDLERS)]
    for peer in peers:
        peer.settimeout(20)
        peer.sendall(strangers.GREETING)
    for peer in peers:
        while peer.recv(1000):  # until it is hung up on
            pass
        peer.close()


STRANGERS: list[Callable[[World, str, str], None]] = [
    no_keys,
    a_password,
    an_unknown_key,
    keys_of_another_ring,
    a_public_key_without_its_secret,
    a_neighbour_at_the_wrong_door,
    garbage,
    a_huge_handshake,
    silence,
]


@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda stranger: stranger.__name__)
def test_a_stranger_changes_nothing(
    world: World, stranger: Callable[[World, str, str], None]
) -> None:
    prompt = list(range(60))
    assert complete(world.ring.url, prompt, 5).tokens == truth(prompt, 5)
    state, refused = world.state(), world.metric("refused_peers_total")
    memory = world.memory()
    for address, server in world.doors:
        stranger(world, address, server)
    assert complete(world.ring.url, prompt, 30).tokens == truth(prompt, 30)
    grown = {name: now - memory[name] for name, now in world.memory().items()}
    assert world.state() == state
    assert max(grown.values()) < GROWTH_BYTES, grown
    assert world.metric("refused_peers_total") > refused
    for name in world.started:
        assert not world.events(name, "message_dropped"), "a message was delivered"


def test_refusals_are_logged_once_in_a_while(world: World) -> None:
    unknown = Keys(*make_keys(), world.doors[1][1])
    for _ in range(3):
        strangers.flood(world.doors[1][0], MESSAGES, unknown)  # each connects again and again
    said = world.events("s1", "peer_refused")
    assert 1 <= len(said) <= 8, said
    assert said[-1]["total"] >= said[-1]["count"] >= 1
    assert {"s1", "r"} == {said[-1]["stage"], said[-1]["ring"]}
    assert not world.events("s2", "peer_refused"), "nobody knocked there"


def test_the_right_key_is_let_in(world: World) -> None:
    """What proves the other tests: the same client and messages, with the predecessor's keys."""
    address, server = world.doors[1]
    strangers.flood(address, [[b"\xff" * 1000]], world.keys_of(world.head, server))
    until("the stage drops it", lambda: world.events("s1", "message_dropped"), 10)


# ---- lost peers ----------------------------------------------------------------------------------


def test_a_killed_stage_is_missed_long_before_its_heartbeats(tmp_path: Path) -> None:
    limits = Limits(heartbeat_s=2.0, lost_after_s=60.0)
    with processes.fleet(tmp_path / "processes") as fleet:
        ring = write_ring(tmp_path / "ring.toml", limits=limits)
        started = fleet.whole(ring)
        prompt = list(range(40))
        for name in ring.names:
            _kill_and_restart(fleet, ring, started, name)
            assert complete(ring.url, prompt, 10).tokens == truth(prompt, 10)


def _kill_and_restart(fleet: Fleet, ring: RingFile, started: dict[str, Process], name: str) -> None:
    index = ring.names.index(name)
    witness = "s0" if index == 0 else ring.names[index - 1]
    started[name].kill()
    fleet.not_ready(ring.url, f"stage {witness}", limit_s=5)  # of 60 s; 0.05 s on idle cores
    started[name] = fleet.stage(ring, name)
    fleet.ready(ring.url)

"""Who may listen where, with which keys, and that no secret is ever written: real processes."""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests import processes
from tests.processes import (
    Fleet,
    RingFile,
    assert_clear,
    free_ports,
    get,
    post,
    until,
    with_keys,
    write_ring,
)
from tests.test_bad_input import refused
from tests.toyclient import complete, truth
from transport.address import exposed
from transport.config import dumps, load
from transport.keys import key_bytes
from transport.link import make_keys


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with processes.fleet(tmp_path / "processes") as made:
        yield made


def own_address() -> str:
    """An IPv4 address of this machine that is no loopback one, else the wildcard."""
    found = [each for name in psutil.net_if_addrs().values() for each in name]
    hosts = [each.address for each in found if each.family == socket.AF_INET]
    return next((host for host in hosts if not host.startswith("127.")), "0.0.0.0")


# ---- where to listen -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "open_to_others"),
    [
        ("ipc:///tmp/s.sock", False),
        ("tcp://127.0.0.1:7000", False),
        ("tcp://127.9.9.9:7000", False),
        ("tcp://localhost:7000", False),
        ("tcp://[::1]:7000", False),
        ("tcp://[::ffff:127.0.0.1]:7000", False),
        ("127.0.0.1:0", False),
        ("[::1]:8000", False),
        ("tcp://*:7000", True),
        ("tcp://0.0.0.0:7000", True),
        ("tcp://[::]:7000", True),
        ("tcp://[::ffff:10.0.0.1]:7000", True),
        ("tcp://[fe80::1%eth0]:7000", True),
        ("tcp://192.0.2.1:7000", True),
        ("tcp://nobody.invalid:7000", True),
        ("tcp://eth0:7000", True),
        ("0.0.0.0:8000", True),
        (":8000", True),
    ],
)
def test_what_other_machines_can_reach(address: str, open_to_others: bool) -> None:
    assert exposed(address) is open_to_others


def open_ring(folder: Path, *, stage: bool) -> RingFile:
    """A ring of one stage; the stage or the coordinator listens for other machines."""
    ring = write_ring(folder / "ring.toml", stages=1)
    (one,) = ring.config.rings
    bind = f"tcp://{own_address()}:{free_ports(1)[0]}"
    if stage:
        one = replace(one, stages=(replace(one.head, address=bind.replace("0.0.0.0", "h")),))
        one = replace(one, stages=(replace(one.head, bind=bind),))
    else:
        one = replace(one, bind=bind)
    config = replace(ring.config, rings=(one,))
    ring.path.write_text(dumps(config))
    return RingFile(ring.path, load(ring.path))


def test_a_stage_without_keys_listens_on_loopback_only(fleet: Fleet, tmp_path: Path) -> None:
    ring = open_ring(tmp_path, stage=True)
    address = ring.config.rings[0].head.listen
    said = ("stage s0", address, "without keys", "kvring keygen", "--insecure")
    assert_clear(fleet.stage(ring, "s0"), 2, *said)
    process = fleet.stage(ring, "s0", "--insecure")
    until("it is loaded", lambda: '"event": "loaded"' in process.errors)
    assert '"event": "insecure"' in process.errors
    assert address in process.errors


def test_a_coordinator_without_keys_listens_on_loopback_only(fleet: Fleet, tmp_path: Path) -> None:
    ring = open_ring(tmp_path, stage=False)
    said = ("coordinator", ring.config.rings[0].listen, "without keys", "--insecure")
    assert_clear(fleet.coord(ring), 2, *said)
    ring = with_keys(ring)
    process = fleet.coord(ring)
    until("it listens", lambda: '"event": "listening"' in process.errors)
    assert "insecure" not in process.errors


def test_http_without_api_keys_listens_on_loopback_only(
    fleet: Fleet, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    host = own_address()
    said = (f"HTTP address {host}:0", "no API keys", "--insecure")
    up = ["up", "--model", "toy", "--http", f"{host}:0"]
    refused(capfd, 2, up, *said, "give --api-key-file FILE", "--api-key KEY")
    ring = write_ring(tmp_path / "ring.toml", stages=1)
    coord = fleet.coord(ring, "--http", f"{host}:0")
    assert_clear(coord, 2, *said, "--api-key-file", "container")
    keyed = fleet.coord(ring, "--http", f"{host}:0", "--api-key", "k" * 20)
    until("it listens", lambda: '"event": "listening"' in keyed.errors)
    keyed.popen.terminate()
    keyed.wait()
    told = fleet.coord(ring, "--http", f"{host}:0", "--insecure")
    until("it listens", lambda: '"event": "listening"' in told.errors)
    assert '"missing": "API keys"' in told.errors


def test_plain_api_keys_that_others_can_read(fleet: Fleet, tmp_path: Path) -> None:
    ring = write_ring(tmp_path / "ring.toml", stages=1)
    keys = tmp_path / "keys"
    keys.write_text("ann:a-key-in-plain-text\n")
    keys.chmod(0o644)
    process = fleet.coord(ring, "--api-key-file", keys)
    assert_clear(process, 2, "others can read it (mode 0644)", f"chmod 600 {keys}")
    assert "a-key-in-plain-text" not in process.errors


# ---- wrong keys ----------------------------------------------------------------------------------


def test_a_secret_that_can_not_be_used(fleet: Fleet, tmp_path: Path) -> None:
    ring = with_keys(write_ring(tmp_path / "ring.toml", stages=1))
    file = tmp_path / "keys" / "s0.secret"
    secret = file.read_text().strip()
    file.chmod(0o640)
    readable = fleet.stage(ring, "s0")
    assert_clear(readable, 2, "secret_key_file of stage s0", "(mode 0640): chmod 600", str(file))
    file.chmod(0o600)
    file.write_text(make_keys()[1])
    assert_clear(fleet.stage(ring, "s0"), 2, str(file), "is not the secret to its public_key")
    file.unlink()
    assert_clear(fleet.stage(ring, "s0"), 2, str(file), "No such file")
    coordinator = tmp_path / "keys" / "coordinator.secret"
    coordinator.chmod(0o604)
    assert_clear(fleet.coord(ring), 2, "secret_key_file of the coordinator", str(coordinator))
    assert all(secret not in process.errors for process in fleet.processes)


def test_a_stage_with_keys_of_another_ring_is_named_and_kept_out(
    fleet: Fleet, tmp_path: Path
) -> None:
    """Both sides say what is wrong; the ring forms when the right file is there."""
    ring = with_keys(write_ring(tmp_path / "ring.toml", stages=2))
    (tmp_path / "other").mkdir()
    other = with_keys(RingFile(tmp_path / "other" / "ring.toml", ring.config))
    coord, before = fleet.coord(ring), fleet.stage(ring, "s0")
    wrong = fleet.stage(other, "s1")
    refusals = [(coord, "peer_refused"), (before, "link_refused"), (wrong, "link_refused")]
    refusals.append((wrong, "peer_refused"))
    until("all say so", lambda: all(f'"event": "{what}"' in who.errors for who, what in refusals))
    assert "not for this side's public key" in coord.errors
    until("only s1 is missing", lambda: _only_s1(fleet, ring))
    wrong.kill()
    fleet.stage(ring, "s1")
    fleet.ready(ring.url)
    prompt = list(range(30))
    assert complete(ring.url, prompt, 10).tokens == truth(prompt, 10)


def _only_s1(fleet: Fleet, ring: RingFile) -> bool:
    return "s0" not in fleet.not_ready(ring.url, "s1")["missing"]


# ---- no secret is written ------------------------------------------------------------------------


def test_no_secret_is_written_anywhere(fleet: Fleet, tmp_path: Path) -> None:
    """Logs, frame logs with whole payloads, /ring, /metrics, answers, process arguments."""
    ring = with_keys(write_ring(tmp_path / "ring.toml", stages=2))
    keys, record = tmp_path / "api-keys", tmp_path / "record"
    api_key, mistyped = "kvr-an-api-key-that-nobody-may-see", "kvr-a-key-with-a-typing-mistake"
    keys.write_text(f"ann:{api_key} admin\n")
    keys.chmod(0o600)
    recording = ("--record", record, "--record-payloads", "full")
    fleet.coord(ring, "--api-key-file", keys, *recording)
    for name in ring.names:
        fleet.stage(ring, name, *recording)
    fleet.ready(ring.url)
    body = {"prompt": list(range(50)), "max_tokens": 10, "cache_salt": "s"}
    seen = []
    for key, status in ((api_key, 200), (mistyped, 401)):
        headers = {"Authorization": f"Bearer {key}"}
        answer = post(f"{ring.url}/v1/completions", json=body, headers=headers)
        assert answer.status_code == status
        seen.append(answer.text)
        for page in ("ring", "metrics", "v1/models"):
            seen.append(get(f"{ring.url}/{page}", headers).text)
    seen += [get(f"{ring.url}/{page}").text for page in ("ready", "health")]
    seen += [" ".join(process.cmdline()) for process in fleet.alive()]
    fleet.end()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    kept = {path for path in files if path.suffix == ".secret" or path == keys}
    written = [path for path in files if path not in kept]
    assert len(kept) == 4
    assert sum(path.suffix == ".kvrlog" for path in written) == 3
    haystacks = {str(path): path.read_bytes() for path in written}
    assert str(ring.config.coordinator.public_key).encode() in haystacks[str(ring.path)]
    haystacks["what was seen"] = "\n".join(seen).encode()
    assert b"kvring" in haystacks["what was seen"]
    for path in kept - {keys}:
        secret = path.read_text().strip()
        raw = key_bytes(secret)
        forms = [secret.encode(), raw, raw.hex().encode(), base64.b64encode(raw)]
        _absent(forms, haystacks)
    _absent([api_key.encode(), mistyped.encode()], haystacks)


def _absent(needles: list[bytes], haystacks: dict[str, bytes]) -> None:
    for name, hay in haystacks.items():
        assert not any(needle in hay for needle in needles), name

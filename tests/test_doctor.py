"""kvring doctor: what it finds, what it says to do, and that it ends, whoever is not there."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.torch_model import TorchModel
from pipeline.weights import open_model
from tests import processes
from tests.processes import Fleet, RingFile, free_ports, until, with_keys, write_ring
from tests.tinymodels import reference, write_directory
from tools import cli
from tools.doctor import command
from tools.doctor.checks import PAGE, Check, Level, See, show
from tools.doctor.local import files_check, python_check
from tools.doctor.measured import measured_checks
from tools.doctor.need import need_of
from tools.doctor.packages import package_checks, satisfies
from tools.doctor.secrets import key_checks
from tools.measuring import Link, Machine, Measured
from transport.config import Coordinator, Limits, dumps

GB = 10**9


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    """Exit code, and each check by what it looks at."""
    code = cli.run(["doctor", "--json", *map(str, arguments)])
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] == (code == 0)
    return code, {check["what"]: check for check in said["checks"]}


def failed(checks: dict[str, Any]) -> dict[str, str]:
    """The symptom that each failed check points to."""
    return {
        what: (check["see"] or "").removeprefix(PAGE)
        for what, check in checks.items()
        if check["level"] == "fail"
    }


# ---- this machine --------------------------------------------------------------------------------


def test_without_a_ring_it_says_what_up_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # no model was pulled here
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setattr(command, "UP_HTTP", f"127.0.0.1:{other.getsockname()[1]}")
        code, checks = run(capsys)
    assert code == 1
    assert failed(checks) == {"http": "#port-in-use"}
    assert checks["model"]["level"] == "warn"
    assert "kvring pull smollm2-135m" in checks["model"]["said"]
    assert {"python", "packages", "torch", "threads", "device cpu"} <= set(checks)
    monkeypatch.setattr(command, "UP_HTTP", f"127.0.0.1:{free_ports(1)[0]}")
    assert cli.run(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok    python ")
    assert "\033" not in "".join(lines), "a pipe gets no colours"
    assert lines[-1] == f"{len(lines) - 1} checks: 0 failed, 1 to look at"


def test_versions_are_held_against_pyproject(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, clauses, wanted in (
        ("2.13.0+cpu", ">=2.6", True),
        ("1.0", ">=1.0,<2", True),
        ("2.0.0", ">=1.0,<2", False),
        ("5.24.3", "~=5.24.0", True),
        ("5.25.0", "~=5.24.0", False),
        ("26", ">=26.0", True),
    ):
        assert satisfies(found, clauses) is wanted, (found, clauses)
    wants = ["torch>=999", "no-such-thing>=1", "numpy>=1.26", 'ruff>=0.9; extra == "dev"']
    monkeypatch.setattr("tools.doctor.packages.requires", lambda _: wants)
    said = {check.what: check for check in package_checks()}
    assert [check.level for check in said.values()] == [Level.FAIL] * 2
    assert said["package torch"].see is See.TORCH
    assert said["package no-such-thing"].todo == 'pip install "no-such-thing>=1"'
    assert python_check().level is Level.OK
    few = files_check(10**9)
    assert (few.level, few.see) == (Level.WARN, See.FILES)


@pytest.mark.parametrize(("weights", "kv"), [("dtype", "dtype"), ("int8", "fp8")])
def test_memory_is_told_from_the_headers(weights: str, kv: str, tmp_path: Path) -> None:
    source = open_model(write_directory(tmp_path, reference("llama")))
    need = need_of(source, "bfloat16", weights, kv)
    limits = Limits(slots=3, max_model_len=600)
    for layers in ((0, 2), (2, 3), (4, 6)):
        info = TorchModel(
            source,
            layers,
            slots=3,
            capacity=600,
            dtype=torch.bfloat16,
            weights=weights,
            kv=kv,
            exact=False,
        ).info
        held = info.weight_bytes + info.slots * info.capacity * info.row_bytes
        assert abs(need.block(layers, limits) - held) <= 2 * 96, "but for the final norm"


# ---- a ring.toml ---------------------------------------------------------------------------------


def test_a_ring_that_does_not_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ring = with_keys(write_ring(tmp_path / "ring.toml"))
    code, checks = run(capsys, "--ring", ring.path, "--record", tmp_path / "logs")
    assert (code, failed(checks)) == (0, {})
    assert "free to bind" in checks["stage s1"]["said"]
    assert checks["measure r"]["level"] == "warn"
    assert checks["key s0"]["said"].startswith(
        f"public {ring.config.rings[0].stages[0].public_key}"
    )
    secrets = [file.read_text().strip() for file in (tmp_path / "keys").iterdir()]
    assert len(secrets) == 4
    for secret in secrets:
        assert secret not in json.dumps(checks), "no secret is said"


def test_what_is_wrong_with_a_ring(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ring = with_keys(write_ring(tmp_path / "ring.toml", model=str(tmp_path / "no.gguf")))
    (one,) = ring.config.rings
    (tmp_path / "keys" / "s0.secret").chmod(0o644)
    (tmp_path / "keys" / "s1.secret").write_bytes((tmp_path / "keys" / "s2.secret").read_bytes())
    api_keys = tmp_path / "api-keys"
    api_keys.write_text("me:secret-of-mine\n")
    api_keys.chmod(0o644)
    away = replace(one.stages[2], address=f"tcp://[::1]:{free_ports(1)[0]}", device="cuda:7")
    stages = (*one.stages[:2], replace(away, bind=None))
    config = replace(ring.config, rings=(replace(one, stages=stages),))
    ring.path.write_text(dumps(config))
    host, port = one.stages[1].address.removeprefix("tcp://").split(":")
    with socket.socket() as other:
        other.bind((host, int(port)))
        other.listen()
        code, checks = run(capsys, "--ring", ring.path, "--api-key-file", api_keys)
    assert code == 1
    assert failed(checks) == {
        "model": "#model-not-supported",
        "key s0": "#keys",
        "key s1": "#keys",
        "api keys": "#keys",
        "stage s1": "#port-in-use",
        "device cuda:7": "#torch",
    }
    assert "chmod 600" in checks["key s0"]["said"]
    assert checks["key s0"]["todo"] == "", "chmod is all there is to do"
    assert "secret-of-mine" not in json.dumps(checks)


def test_links_without_keys_and_a_file_that_is_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ring = write_ring(tmp_path / "ring.toml", stages=2)
    (one,) = ring.config.rings
    # nobody answers in the block that is kept for documentation: RFC 5737
    stages = (one.stages[0], replace(one.stages[1], address="tcp://192.0.2.1:7101"))
    http = Coordinator(f"0.0.0.0:{free_ports(1)[0]}")
    config = replace(ring.config, rings=(replace(one, stages=stages),), coordinator=http)
    ring.path.write_text(dumps(config))
    code, checks = run(capsys, "--ring", ring.path)
    assert (code, failed(checks)) == (1, {"keys": "#keys", "stage s1": "#stage-not-heard-of"})
    assert "kvring stage --ring FILE --name s1" in checks["stage s1"]["todo"]
    assert checks["api keys"]["level"] == "warn"
    (meant,) = key_checks(config, insecure=True)
    assert meant.level is Level.WARN
    ring.path.write_text("[model]\npath = 3\n")
    code, checks = run(capsys, "--ring", ring.path)
    assert code == 1
    assert "ring.toml:2" in checks["ring.toml"]["said"]


# ---- what was measured ---------------------------------------------------------------------------


def measured(ring: RingFile, **changes: Any) -> list[Check]:
    """The checks of a healthy ring of three, whose second stage (or link) is changed."""
    (one,) = ring.config.rings
    machines = [
        Machine(
            stage.name, f"m{at}", "cpu", "torch 2", "ab" * 16, stage.layers, 6, 4, 4096, 64, 1152,
            GB, 0, 8 * GB, 16 * GB, 1024, 0.01, 0.0, 64, 0.1, {}, 0.0, 0.001,
        )
        for at, stage in enumerate(one.stages)
    ]  # fmt: skip
    link = {name: changes.pop(name) for name in ("round_trip_s", "mbit") if name in changes}
    machines[1] = replace(machines[1], **changes)
    names = ["", *ring.names, ""]
    links = [Link(names[at], names[at + 1], 0.001, 1000.0) for at in range(4)]
    links[1] = replace(links[1], **link)
    found = Measured("r", 0.002, tuple(machines), tuple(links), {})
    return list(measured_checks(ring.config, one, found))


@pytest.mark.parametrize(
    ("changes", "level", "see"),
    [
        ({}, Level.OK, None),
        ({"clock_offset_s": -2.0}, Level.WARN, See.CLOCK),
        ({"clock_offset_s": 90.0}, Level.FAIL, See.CLOCK),
        ({"clock_offset_s": 2.0, "clock_error_s": 1.8}, Level.OK, None),
        ({"fingerprint": "cd" * 16}, Level.FAIL, See.WEIGHTS),
        ({"layers": (2, 3)}, Level.FAIL, See.WEIGHTS),
        ({"slots": 3}, Level.FAIL, See.WEIGHTS),
        ({"free_bytes": 1000}, Level.FAIL, See.MEMORY),
        ({"free_bytes": GB, "row_bytes": 100_000}, Level.WARN, See.MEMORY),
        ({"files": 64}, Level.FAIL, See.FILES),
        ({"round_trip_s": 0.3}, Level.WARN, See.LINK),
        ({"round_trip_s": None}, Level.WARN, See.LINK),
        ({"mbit": 1.0}, Level.WARN, See.LINK),
    ],
)
def test_what_is_made_of_a_measurement(
    changes: dict[str, Any], level: Level, see: See | None, tmp_path: Path
) -> None:
    found = measured(write_ring(tmp_path / "ring.toml"), **changes)
    assert {(check.level, check.see) for check in found} == {(Level.OK, None), (level, see)}


def test_another_ring_than_that_of_the_file(tmp_path: Path) -> None:
    ring = write_ring(tmp_path / "ring.toml")
    (found,) = measured(ring, name="s9")
    assert (found.level, found.see) == (Level.FAIL, See.WEIGHTS)
    assert "'s9'" in found.said


def test_others_words_do_not_steer_the_terminal() -> None:
    out = io.StringIO()
    show([Check(Level.FAIL, "stage s0", "says failed: \033[2Jgone\nfor good")], out)
    assert out.getvalue().splitlines()[0] == "fail  stage s0  says failed: [2Jgone for good"


def test_every_symptom_has_its_place_on_the_page() -> None:
    lines = (processes.ROOT / PAGE).read_text().splitlines()
    anchors = {f"#{line[3:].lower().replace(' ', '-')}" for line in lines if line[:3] == "## "}
    assert {see.value for see in See} <= anchors


# ---- real processes ------------------------------------------------------------------------------


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with processes.fleet(tmp_path / "processes") as made:
        yield made


def test_a_ring_before_and_with_its_coordinator(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ring = with_keys(write_ring(tmp_path / "ring.toml", stages=2))
    for name in ring.names:
        process = fleet.stage(ring, name)
        until(f"{name} is loaded", lambda: '"event": "loaded"' in process.errors)  # noqa: B023
    code, checks = run(capsys, "--ring", ring.path)
    assert (code, failed(checks)) == (0, {})
    for what in ("runs s0", "memory s1", "clock s0", "weights", "link s0 to s1", "ring r"):
        assert checks[what]["level"] == "ok", what
    assert checks["coordinator r"]["said"].endswith("free to bind")
    keys = tmp_path / "api-keys"
    keys.write_text("boss:boss-key admin\nother:other-key\n")
    keys.chmod(0o600)
    fleet.coord(ring, "--api-key-file", keys)
    fleet.ready(ring.url)
    code, checks = run(capsys, "--ring", ring.path, "--api-key", "boss-key")
    assert (code, failed(checks)) == (0, {})
    assert "link coordinator to s0" in checks
    assert "answers" in checks["coordinator r"]["said"]
    code, checks = run(capsys, "--ring", ring.path, "--api-key", "other-key")
    assert (code, checks["measure r"]["level"]) == (0, "warn")
    code, checks = run(capsys, "--ring", ring.path)
    assert failed(checks)["coordinator"] == "#keys"
    elsewhere = f"127.0.0.1:{free_ports(1)[0]}"
    served_elsewhere(ring, elsewhere, capsys)
    process.expected.append(-9)
    process.kill()
    fleet.not_ready(ring.url, "s1")
    code, checks = run(capsys, "--ring", ring.path, "--api-key", "boss-key")
    assert code == 1
    assert failed(checks) == {"ring r": "#stage-not-heard-of", "stage s1": "#stage-not-heard-of"}


def served_elsewhere(ring: RingFile, http: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody is told to stop a ring that runs because its HTTP API is elsewhere."""
    config = replace(ring.config, coordinator=replace(ring.config.coordinator, http=http))
    other = ring.path.with_name("moved.toml")
    other.write_text(dumps(config))
    code, checks = run(capsys, "--ring", other)
    assert (code, failed(checks)) == (1, {"measure r": "#port-in-use"})
    assert "--url" in checks["measure r"]["todo"]
    code, checks = run(capsys, "--ring", other, "--url", f"http://{http}")
    assert (code, failed(checks)) == (1, {"coordinator": "#no-server"})
    for what in ("coordinator r", "stage s0", "stage s1"):
        assert (checks[what]["level"], checks[what]["todo"]) == ("warn", ""), what

"""deploy/: every file parses, and every command line in it is one that kvring understands."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from coord.http.connection import OPEN_PATHS
from tools import cli
from transport.config import Config, Limits, load

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
STOP_S = 10  # for what comes behind the drain


def understood(arguments: list[str]) -> dict[str, Any]:
    """Parse a command line as kvring would, without running it; its options."""
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    name, *rest = arguments
    assert name in commands, f"no command {name!r}"
    context = commands[name].make_context(name, rest)
    found: dict[str, Any] = context.params
    return found


def unit(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    return parser


def compose() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def containerfile() -> list[tuple[str, str]]:
    """Instructions and their arguments, continued lines joined."""
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    parts = [line.split(None, 1) for line in lines if line and not line.startswith("#")]
    return [(part[0], part[1]) for part in parts]


def ring() -> Config:
    return load(DEPLOY / "ring.toml")


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


# ---- systemd ------------------------------------------------------------------------------------


def test_there_is_a_unit_for_each_daemon() -> None:
    assert [path.name for path in UNITS] == ["kvring-coord.service", "kvring-stage@.service"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_units_command_line_is_understood(path: Path) -> None:
    program, *arguments = shlex.split(unit(path)["Service"]["ExecStart"])
    assert program.endswith("/bin/kvring")
    options = understood(arguments)
    assert options["ring"] == Path("/etc/kvring/ring.toml")
    if path.name == "kvring-coord.service":
        credential = unit(path)["Service"]["LoadCredential"].partition(":")[0]
        assert options["api_key_file"] == Path(f"%d/{credential}")
    else:
        assert options["name"] == "%i"


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_is_hardened_and_waits_for_the_drain(path: Path) -> None:
    service = unit(path)["Service"]
    assert service["Type"] == "exec", "notify is not spoken"
    for key, value in (
        ("DynamicUser", "yes"),
        ("ProtectSystem", "strict"),
        ("ProtectHome", "yes"),
        ("NoNewPrivileges", "yes"),
        ("CapabilityBoundingSet", ""),
        ("Restart", "on-failure"),
    ):
        assert service[key] == value, key
    drain = Limits().drain_s if "coord" in path.name else 0
    assert seconds(service["TimeoutStopSec"]) >= drain + STOP_S


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_finds_nothing_wrong(path: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here")
    copy = tmp_path / path.name.replace("@.", "@s0.")
    text = path.read_text().replace("/opt/kvring/.venv/bin/kvring", "/bin/true")
    copy.write_text(text.replace("WorkingDirectory=/opt/kvring", "WorkingDirectory=/"))
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = done.stdout + done.stderr
    if "Failed to" in said and path.name.partition(".")[0] not in said:
        pytest.skip(f"systemd-analyze does not work here: {said.strip()}")
    assert (done.returncode, said) == (0, "")


# ---- containers ---------------------------------------------------------------------------------


def test_the_services_of_compose_are_the_stages_of_its_ring() -> None:
    config = ring()
    stages = {}
    for name, service in compose()["services"].items():
        options = understood(service["command"])
        if service["command"][0] == "stage":
            stages[name] = options["name"]
            assert service["healthcheck"] == {"disable": True}, "it has no HTTP port"
        else:
            assert service["command"][0] == "coord"
            drain = config.limits.drain_s
            assert seconds(service["stop_grace_period"]) >= drain + STOP_S
            port = config.coordinator.http.rpartition(":")[2]
            assert service["ports"] == [f"127.0.0.1:{port}:{port}"]
        mounts = [volume.split(":")[1] for volume in service["volumes"]]
        assert str(options["ring"]) in mounts
        model = Path(str(options["ring"])).parent / Path(config.model.path).relative_to(DEPLOY)
        assert any(model.is_relative_to(mount) for mount in mounts)
    assert stages == {stage.name: stage.name for stage in config.rings[0].stages}
    assert len(stages) == 3


def test_every_link_of_the_ring_names_a_service() -> None:
    spec = ring().rings[0]
    hosts = {stage.address.removeprefix("tcp://").partition(":")[0] for stage in spec.stages}
    hosts.add(spec.verdicts.removeprefix("tcp://").partition(":")[0])
    assert hosts == set(compose()["services"])


def test_the_image_copies_what_there_is_and_all_that_is_needed() -> None:
    copied: list[str] = []
    for name, argument in containerfile():
        if name == "COPY" and not argument.startswith("--from"):
            *sources, _ = argument.split()
            copied += sources
    for source in copied:
        assert (ROOT / source).exists(), source
    kept = (DEPLOY / "Containerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in kept if line.startswith("!")} == set(copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tops = {
        each.removesuffix("*")
        for each in project["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    assert tops <= set(copied)
    assert {project["project"]["readme"], *project["project"]["license-files"]} <= set(copied)


def test_the_image_runs_kvring_without_rights_and_asks_for_its_health() -> None:
    parts = containerfile()
    final = parts[max(i for i, (name, _) in enumerate(parts) if name == "FROM") :]
    found = dict(final)
    assert found["USER"] != "root"
    assert found["ENTRYPOINT"] == '["/opt/kvring/bin/kvring"]'
    assert json.loads(found["CMD"]) == ["--help"]
    assert found["STOPSIGNAL"] == "SIGTERM"
    path = re.search(r"http://127\.0\.0\.1:8000(/\w+)", found["HEALTHCHECK"])
    assert path is not None
    assert path[1] in OPEN_PATHS, "no key is needed"
    assert any(name == "ARG" and argument.startswith("TORCH_INDEX") for name, argument in parts)


# ---- words --------------------------------------------------------------------------------------


def test_the_readmes_command_lines_are_the_same() -> None:
    lines = re.findall(
        r"^    \.venv/bin/kvring (.*?)(?: #.*)?$", (ROOT / "README.md").read_text(), re.M
    )
    assert len(lines) > 3
    for line in lines:
        understood(shlex.split(line, comments=True))
    started = {understood(shlex.split(line))["name"] for line in lines if line.startswith("stage")}
    assert started == {"s0", "s1"}


def test_the_page_names_every_file() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    for path in (*UNITS, DEPLOY / "compose.yaml", DEPLOY / "ring.toml"):
        assert f"deploy/{path.name}" in page, path.name


def test_an_installation_has_every_package() -> None:
    """`kvring log check` once lacked its own: a list of packages was one folder behind.

    All below the names that are included are found, where each folder is a package.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    include = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert sorted(include) == ["coord*", "pipeline*", "tools*", "transport*"]
    for top in ("coord", "pipeline", "tools", "transport"):
        for path in (ROOT / top).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), path

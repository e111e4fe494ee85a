from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tools import cli
from tools.errors import USAGE, ToolError
from transport.config import loads

ROOT = Path(__file__).resolve().parent.parent


class FakeUp(ModuleType):
    """Stands for tools.up and tools.serve: keeps what each command was called with."""

    def __init__(self) -> None:
        super().__init__("tools.up")
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.error: ToolError | None = None

    def run_up(self, **options: Any) -> int:
        return self._called("up", options)

    def run_stage(self, **options: Any) -> int:
        return self._called("stage", options)

    def run_coord(self, **options: Any) -> int:
        return self._called("coord", options)

    def _called(self, name: str, options: dict[str, Any]) -> int:
        self.calls.append((name, options))
        if self.error is not None:
            raise self.error
        return 7


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch) -> FakeUp:
    fake = FakeUp()
    monkeypatch.setitem(sys.modules, "tools.up", fake)
    monkeypatch.setitem(sys.modules, "tools.serve", fake)
    return fake


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"], ["up", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    check = (
        "import sys; from tools import cli; code = cli.run(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'numpy', 'zmq', 'fastapi', 'httpx', 'matplotlib'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules); sys.exit(code)"
    )
    command = [sys.executable, "-c", check, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage: kvring" in done.stdout


def test_version_and_bare_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvring ")
    assert cli.run([]) == 0
    assert cli.run(["bench"]) == 0
    assert "multiturn" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nonsense"], "--nonsense"),
        (["dance"], "dance"),
        (["up", "--stages", "0"], "--stages"),
        (["up", "--stages", "three"], "--stages"),
        (["up", "--dtype", "float8"], "float8"),
        (["up", "--http", "8000"], "HOST:PORT"),
        (["up", "--http", "127.0.0.1:99999"], "HOST:PORT"),
        (["up", "--record-payloads", "some"], "some"),
        (["stage", "--name", "s0"], "--ring"),
        (["stage", "--ring", "Makefile"], "--name"),
        (["stage", "--ring", "absent.toml", "--name", "s0"], "absent.toml"),
        (["coord", "--ring", "absent.toml"], "absent.toml"),
        *[
            ([*each, "--ring", "."], "--ring .: is a directory, not a ring.toml")
            for each in (["stage", "--name", "s0"], ["coord"], ["doctor"], ["plan"], ["keygen"])
        ],
        (["doctor", "--ring", "absent.toml"], "--ring absent.toml: no such file"),
        (["chat", "--temperature", "3"], "--temperature"),
        (["pull"], "NAME"),
        (["pull", "nobody-knows"], "smollm2-135m"),
        (["bench", "multiturn", "--rounds", "0"], "--rounds"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: list[str],
    words: str,
    up: FakeUp,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.run(arguments) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith("kvring: ")
    assert seen.err.count("\n") == 1
    assert words in seen.err
    assert up.calls == []


def test_up_passes_every_option(up: FakeUp) -> None:
    assert cli.run(["up"]) == 7
    defaults = {
        "model": "smollm2-135m",
        "stages": 3,
        "slots": 4,
        "max_model_len": None,
        "dtype": "bfloat16",
        "weights": "dtype",
        "activations": "dtype",
        "kernels": "auto",
        "kv": "dtype",
        "threads": None,
        "drafter": "lookup",
        "draft_model": None,
        "rings": 1,
        "park_mb": 0,
        "idle_ttl_s": 0.0,
        "verify_share": 0.0,
        "http": "127.0.0.1:8000",
        "served_model_name": None,
        "api_key": None,
        "api_key_file": None,
        "record": None,
        "record_payloads": "none",
        "delay_ms": 0.0,
        "jitter_ms": 0.0,
        "mbit": 0.0,
        "draft_depth": None,
        "draft_tokens": None,
        "insecure": False,
    }
    assert up.calls == [("up", defaults)]
    given = "up --model toy --stages 2 --slots 5 --max-model-len 512 --dtype float32 --http [::1]:0"
    given += " --served-model-name m --api-key k --record logs --record-payloads digest"
    given += " --weights int8 --activations fp8 --kernels torch --kv int8 --api-key-file keys"
    given += " --rings 2 --park-mb 64 --idle-ttl-s 600 --verify-share 0.05 --drafter off"
    given += " --delay-ms 5 --jitter-ms 1 --mbit 100 --draft-depth 2 --draft-tokens 7 --threads 2"
    given += " --draft-model small --insecure"
    assert cli.run(given.split()) == 7
    assert up.calls[1][1] == {
        "model": "toy",
        "stages": 2,
        "slots": 5,
        "max_model_len": 512,
        "dtype": "float32",
        "weights": "int8",
        "activations": "fp8",
        "kernels": "torch",
        "kv": "int8",
        "threads": 2,
        "drafter": "off",
        "draft_model": "small",
        "rings": 2,
        "park_mb": 64,
        "idle_ttl_s": 600.0,
        "verify_share": 0.05,
        "http": "[::1]:0",
        "served_model_name": "m",
        "api_key": "k",
        "api_key_file": Path("keys"),
        "record": Path("logs"),
        "record_payloads": "digest",
        "delay_ms": 5.0,
        "jitter_ms": 1.0,
        "mbit": 100.0,
        "draft_depth": 2,
        "draft_tokens": 7,
        "insecure": True,
    }


def test_stage_and_coord_pass_every_option(up: FakeUp, tmp_path: Path) -> None:
    ring = tmp_path / "ring.toml"
    ring.touch()
    common = {"ring": ring, "record": None, "record_payloads": "none", "with_parent": False}
    common["insecure"] = False
    keys = {"api_key": None, "api_key_file": None, "state": None}
    assert cli.run(["stage", "--ring", str(ring), "--name", "s0", "--device", "cuda:0"]) == 7
    assert cli.run(["coord", "--ring", str(ring), "--http", "0.0.0.0:80"]) == 7
    assert up.calls == [
        ("stage", {**common, "name": "s0", "device": "cuda:0"}),
        ("coord", {**common, **keys, "http": "0.0.0.0:80"}),
    ]
    assert cli.run(["coord", "--ring", str(ring), "--insecure"]) == 7
    assert up.calls[2] == ("coord", {**common, **keys, "http": None, "insecure": True})


def test_an_expected_failure_is_one_line(up: FakeUp, capsys: pytest.CaptureFixture[str]) -> None:
    up.error = ToolError("port 8000\nis taken")
    assert cli.run(["up"]) == 1
    assert capsys.readouterr().err == "kvring: port 8000 is taken\n"
    up.error = ToolError("ring.toml line 3: no key 'stagse'", code=USAGE)
    assert cli.run(["up"]) == 2


def test_an_unexpected_failure_keeps_its_traceback(
    up: FakeUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: Any) -> int:
        raise AssertionError("a bug")

    monkeypatch.setattr(up, "run_up", broken)
    with pytest.raises(AssertionError, match="a bug"):
        cli.run(["up"])


def test_the_pages_ring_toml_is_valid() -> None:
    text = (ROOT / "docs" / "ring-toml.md").read_text(encoding="utf-8")
    config = loads(text.split("```toml\n")[1].split("```")[0], folder=ROOT)
    assert [stage.layers for stage in config.rings[0].stages] == [(0, 15), (15, 30)]


@pytest.mark.parametrize(
    "arguments",
    [["up", "--idle-ttl-s", "inf"], ["up", "--delay-ms", "nan"], ["status", "--keep", "0", "nan"]],
)
def test_a_number_that_is_none(
    arguments: list[str], up: FakeUp, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert arguments[1] in said
    assert up.calls == []

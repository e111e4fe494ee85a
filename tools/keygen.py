"""Owns `kvring keygen`: draws CURVE keys, writes their files, and says what ring.toml needs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tools.errors import USAGE, ToolError
from transport.config import ConfigError, load
from transport.keys import write_key
from transport.link import make_keys
from transport.toml_table import NAME

COORDINATOR = "coordinator"


def run_keygen(*, ring: Path | None, names: list[str], folder: Path | None, force: bool) -> int:
    """One pair for each process; 0 when all are written. Raises ToolError, then none is new.

    ring: a ring.toml whose processes get keys; or `names`. folder: where the files go, by default
    "keys" beside ring.toml.
    """
    base = ring.parent if ring is not None else Path()
    folder = folder or base / "keys"
    names = _names(ring, names)
    _check_free(folder, names, force)
    made = {name: make_keys() for name in names}
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, (public, secret) in made.items():
            write_key(folder / f"{name}.secret", secret, 0o600, force=force)
            write_key(folder / f"{name}.public", public, 0o644, force=force)
    except OSError as error:
        raise ToolError(f"{error.filename or folder}: {error.strerror or error}") from None
    where = Path(os.path.relpath(folder, base))
    for name, (public, _) in made.items():
        print("[coordinator]" if name == COORDINATOR else f"# in [[ring.stage]] {name}")
        print(f'public_key = "{public}"')
        print(f'secret_key_file = "{where / name}.secret"\n')
    pairs = "1 pair is" if len(made) == 1 else f"{len(made)} pairs are"
    print(
        f"{pairs} in {folder}. Put the lines into ring.toml, the same file on every "
        "machine; give each process its own .secret file and no other.",
        file=sys.stderr,
    )
    return 0


def _names(ring: Path | None, names: list[str]) -> list[str]:
    if (ring is None) != bool(names):
        raise ToolError("say --ring FILE for all its processes, or --name NAME", code=USAGE)
    for name in names:
        if not NAME.fullmatch(name):
            raise ToolError(f"--name {name}: must be 1 to 64 of A-Z a-z 0-9 _ . -", code=USAGE)
    if ring is not None:
        try:
            config = load(ring)
        except (ConfigError, OSError) as error:
            raise ToolError(str(error), code=USAGE) from None
        names = [COORDINATOR, *(stage.name for each in config.rings for stage in each.stages)]
    if len(set(names)) < len(names):
        raise ToolError(f"two processes of one name: {', '.join(sorted(names))}", code=USAGE)
    return names


def _check_free(folder: Path, names: list[str], force: bool) -> None:
    if force:
        return
    taken = [
        path
        for name in names
        for path in (folder / f"{name}.secret", folder / f"{name}.public")
        if os.path.lexists(path)
    ]
    if taken:
        raise ToolError(
            f"{taken[0]} is there already: --force replaces it (its ring then needs the new key), "
            "--name makes the keys of one process"
        )

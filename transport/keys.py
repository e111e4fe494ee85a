"""Owns CURVE keys as text and as files: what is one, who may read it, which link gets which.

A key is 40 characters of Z85 (ZeroMQ RFC 32). Secrets appear in no repr, error or log. Opens no
socket; drawing a pair is transport.link's.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_MOST_BYTES = 256  # of a key file


class KeyFileError(ValueError):
    """A key file can't be used; the message names it and says what to do, never what is in it."""


@dataclass(frozen=True, slots=True)
class Security:
    """CURVE keys of one side of a link, Z85 text of 40 characters each.

    server_key: the PULL side's public key, needed to push. allowed: public keys of those who may
    push to a PULL side; nobody else gets through the handshake.
    """

    public_key: str
    secret_key: str = field(repr=False)
    server_key: str | None = None
    allowed: tuple[str, ...] = ()


def is_key(text: str) -> bool:
    """True for the Z85 text of 32 bytes."""
    if not _Z85.fullmatch(text):
        return False
    groups = [text[at : at + 5] for at in range(0, 40, 5)]
    return all(_number(group) < 1 << 32 for group in groups)


def key_bytes(text: str) -> bytes:
    """The 32 bytes of a key."""
    groups = [text[at : at + 5] for at in range(0, 40, 5)]
    return b"".join(_number(group).to_bytes(4, "big") for group in groups)


def _number(group: str) -> int:
    number = 0
    for character in group:
        number = number * 85 + _DIGITS.index(character)
    return number


def read_public(path: Path) -> str:
    """The public key in a file. Raises KeyFileError."""
    _, data = _read(path)
    return _key(path, data)


def read_secret(path: Path) -> str:
    """The secret key in a file that nobody else can read. Raises KeyFileError."""
    found, data = _read(path)
    if found.st_uid != os.geteuid():
        raise KeyFileError(
            f"{path}: it belongs to user {found.st_uid}, and this process runs as {os.geteuid()}: "
            "chown it"
        )
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise KeyFileError(f"{path}: others can read it (mode {mode:04o}): chmod 600 {path}")
    return _key(path, data)


def _read(path: Path) -> tuple[os.stat_result, bytes]:
    """A file's status and first bytes, of one handle: what is checked is what is read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not wait
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise KeyFileError(f"{path}: not a file")
            return found, os.read(handle, _MOST_BYTES)
        finally:
            os.close(handle)
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror or error}") from None


def _key(path: Path, data: bytes) -> str:
    text = data.decode("ascii", "replace").strip()
    if not is_key(text):
        raise KeyFileError(f"{path}: not a CURVE key (40 characters); make one with kvring keygen")
    return text


def write_key(path: Path, key: str, mode: int, *, force: bool) -> None:
    """Write a key file of that mode: whole or not at all, and over no other one without `force`.

    Raises FileExistsError, or any other OSError.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # of mode 0600
    try:
        with open(handle, "w", encoding="ascii") as file:
            file.write(key + "\n")
            file.flush()
            os.fchmod(handle, mode)
            os.fsync(handle)
        if force:
            os.replace(name, path)
        else:
            os.link(name, path)  # unlike a rename, it fails where the path is taken
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)

"""Owns API keys: their file, their hashes at rest, and whose a given key is. Knows no request.

A line of the file is `NAME:KEY` or `NAME:blake2b$SALT$HASH`, with ` admin` behind it for a key
that sees everything, and ` turns=N` for one that may run N turns at once. The name is the tenant:
two keys of one name share their prefixes, so that a key can be replaced without losing them. Keys
that `new_key` draws have 256 random bits, so a fast hash protects them as well as a slow one would.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

_SALT_BYTES = 16
_HASH_BYTES = 32
_SCHEME = "blake2b"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASHED = re.compile(
    rf"{_SCHEME}\$([0-9a-f]{{{2 * _SALT_BYTES}}})\$([0-9a-f]{{{2 * _HASH_BYTES}}})"
)
_ADMIN = "admin"
SESSION_CHARS = 8  # of a hint: enough for a client to know its own session by
_TURNS = re.compile(r"turns=([1-9][0-9]{0,5})")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request. tenant: the key's name in UTF-8; b"" where no keys are configured.

    turns: so many may run and wait at once; None for as many as the server's default says.
    """

    tenant: bytes
    admin: bool
    turns: int | None = None


ANYBODY = Caller(b"", admin=True)  # no keys are configured: there is nobody to hide from


@dataclass(frozen=True, slots=True)
class Key:
    """One key as it is kept: never its text."""

    caller: Caller
    salt: bytes
    hash: bytes

    def line(self) -> str:
        """The line of the key file."""
        name = self.caller.tenant.decode("utf-8")
        marks = f" {_ADMIN}" if self.caller.admin else ""
        if self.caller.turns is not None:
            marks += f" turns={self.caller.turns}"
        return f"{name}:{_SCHEME}${self.salt.hex()}${self.hash.hex()}{marks}"


class Keyring:
    """All keys of one server."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = tuple(keys)

    def caller(self, given: bytes) -> Caller | None:
        """Whose key this is, or None. Compares bytes (case 45), and every key each time."""
        matches = [hmac.compare_digest(_hash(key.salt, given), key.hash) for key in self._keys]
        return next(
            (key.caller for key, same in zip(self._keys, matches, strict=True) if same), None
        )

    def __bool__(self) -> bool:
        return bool(self._keys)


def hold(name: str, key: str, *, admin: bool = False, turns: int | None = None) -> Key:
    """A key to be checked against. ValueError for a name that is none, or an empty key."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"a key's name is 1 to 64 of A-Z a-z 0-9 . _ -, not {name!r}")
    if not key:
        raise ValueError(f"the key of {name} is empty")
    salt = secrets.token_bytes(_SALT_BYTES)
    return Key(Caller(name.encode(), admin, turns), salt, _hash(salt, key.encode("utf-8")))


def new_key(name: str, *, admin: bool = False, turns: int | None = None) -> tuple[str, Key]:
    """Draw a key: its text, to be shown once, and what is kept of it."""
    key = f"kvr-{secrets.token_urlsafe(32)}"
    return key, hold(name, key, admin=admin, turns=turns)


def parse_keys(text: str) -> tuple[Key, ...]:
    """The keys of a file; # begins a comment line. ValueError names the line."""
    keys = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        entry, *marks = line.split()
        name, colon, secret = entry.partition(":")
        if not colon or not secret:
            raise ValueError(f"line {number}: must be NAME:KEY or NAME:{_SCHEME}$SALT$HASH")
        admin, turns = _read_marks(marks, number)
        hashed = _HASHED.fullmatch(secret)
        if hashed is None and secret.startswith((f"{_SCHEME}$", "scrypt$")):
            raise ValueError(f"line {number}: only hashes that `kvring apikey` writes are known")
        try:
            key = hold(name, secret, admin=admin, turns=turns)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if hashed is not None:
            key = Key(key.caller, bytes.fromhex(hashed[1]), bytes.fromhex(hashed[2]))
        keys.append(key)
    return tuple(keys)


def holds_plain_keys(text: str) -> bool:
    """True when a line of a valid file is a key itself, and not its hash."""
    lines = [line.strip() for line in text.splitlines()]
    entries = [line.split(None, 1)[0] for line in lines if line and not line.startswith("#")]
    return not all(_HASHED.fullmatch(entry.partition(":")[2]) for entry in entries)


def _read_marks(marks: Sequence[str], number: int) -> tuple[bool, int | None]:
    """What stands behind a key, each at most once. ValueError names the line."""
    counts = [found[1] for mark in marks if (found := _TURNS.fullmatch(mark))]
    admins = marks.count(_ADMIN)
    if admins > 1 or len(counts) > 1 or admins + len(counts) != len(marks):
        raise ValueError(
            f"line {number}: only {_ADMIN!r} and 'turns=N' (1 to 999999) may follow a key"
        )
    return bool(admins), int(counts[0]) if counts else None


def _hash(salt: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(
        key, digest_size=_HASH_BYTES, salt=salt, person=b"kvring-apikey"
    ).digest()


# ---- what a key gives apart: salts and hints ----------------------------------------------------


def tenant_tag(tenant: bytes) -> bytes:
    """What the salts of a tenant begin with, 16 bytes."""
    return _digest(16, b"kvring-tenant", tenant)


def derive_salt(tenant: bytes, cache_salt: str | None) -> bytes:
    """The salt of a prefix-hash chain: tenants and salts never share by accident (case 20).

    b"" where there is neither key nor salt; else tenant_tag and a hash of both, each with its
    length before it.
    """
    if not tenant and cache_salt is None:
        return b""
    return tenant_tag(tenant) + _digest(32, b"kvring-salt", tenant, (cache_salt or "").encode())


def derive_hint(tenant: bytes, session: str | None, opening: str = "") -> str:
    """The scheduler's name for a client's session: 32 characters, or "" where it gave none.

    opening: how the conversation begins. Clients give one name to many conversations, and those
    must not overwrite each other as branches of one would.
    """
    if session is None:
        return ""
    parts = (text.encode("utf-8", "surrogatepass") for text in (session, opening))
    return _digest(16, b"kvring-hint", tenant, *parts).hex()


def owns(tenant: bytes, salt: bytes) -> bool:
    """True if a chain under this salt is the tenant's."""
    return salt.startswith(tenant_tag(tenant)) if tenant else not salt


def _digest(size: int, person: bytes, *parts: bytes) -> bytes:
    state = hashlib.blake2b(digest_size=size, person=person)
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.digest()

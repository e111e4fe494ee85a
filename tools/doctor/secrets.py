"""Owns the checks of who may come in: CURVE keys, API keys, and addresses that others reach."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from tools.doctor.checks import Check, See, fail, ok, warn
from tools.doctor.places import is_own
from transport.address import exposed
from transport.config import Config
from transport.keys import KeyFileError, read_secret
from transport.link import public_of

WRITTEN = "put the file there that kvring keygen wrote for it"


def key_checks(config: Config, *, insecure: bool) -> Iterator[Check]:
    """The ring's keys. insecure: it is meant to run without."""
    own = config.coordinator
    if own.public_key is None:
        yield from _without_keys(config, insecure=insecure)
        return
    here = any(is_own(ring.verdicts) for ring in config.rings)
    yield _pair("coordinator", own.public_key, own.secret_key_file, here=here)
    for ring in config.rings:
        for stage in ring.stages:
            here = is_own(stage.address)
            yield _pair(f"stage {stage.name}", stage.public_key, stage.secret_key_file, here=here)


def _without_keys(config: Config, *, insecure: bool) -> Iterator[Check]:
    listens = [ring.listen for ring in config.rings]
    listens += [stage.listen for ring in config.rings for stage in ring.stages]
    open_ones = [address for address in listens if exposed(address)]
    if not open_ones:
        yield ok("keys", "none, and every link is on this machine alone")
        return
    said = f"none, and other machines reach {', '.join(open_ones)}"
    advice = "kvring keygen --ring FILE; without keys every process must say --insecure"
    yield (warn if insecure else fail)("keys", said, advice, See.KEYS)


def _pair(who: str, public: str | None, file: str | None, *, here: bool) -> Check:
    """A process's secret against its public key; the secret itself is never said."""
    what = f"key {who.removeprefix('stage ')}"
    if file is None or (not here and not Path(file).exists()):
        return ok(what, f"public {public}, its secret is on another machine")
    try:
        secret = read_secret(Path(file))
    except KeyFileError as error:
        return (fail if here else warn)(what, str(error), _todo(Path(file)), See.KEYS)
    if public_of(secret) != public:
        said = f"{file} is not the secret to the public key {public}"
        return fail(what, said, WRITTEN, See.KEYS)
    return ok(what, f"public {public}, {file} is its secret, and only you can read it")


def _todo(file: Path) -> str:
    """For a secret that can't be taken; nothing where the error says it: chmod, chown."""
    try:
        found = file.stat()
    except OSError:
        return WRITTEN
    return "" if found.st_uid != os.geteuid() or found.st_mode & 0o077 else WRITTEN


def api_checks(http: str, file: Path | None) -> Iterator[Check]:
    """Of the HTTP API: who reaches it, and the file of its keys."""
    from coord.http.keys import holds_plain_keys, parse_keys

    if file is None:
        if exposed(http):
            said = f"other machines reach {http}, and no --api-key-file was given to look at"
            advice = "start kvring coord with --api-key-file FILE (kvring apikey NAME)"
            yield warn("api keys", said, advice, See.KEYS)
        else:
            yield ok("api keys", f"{http} is on this machine alone: needs none")
        return
    try:
        text = file.read_text(encoding="utf-8")
        found = parse_keys(text)
        mode = file.stat().st_mode
    except (OSError, UnicodeDecodeError, ValueError) as error:
        said = f"{file}: {getattr(error, 'strerror', None) or error}"
        yield fail("api keys", said, "kvring apikey NAME makes its lines", See.KEYS)
        return
    shown = f"{file}: {len(found)} keys, mode {stat.S_IMODE(mode):04o}"
    if not found:
        yield fail("api keys", shown, "kvring apikey NAME makes its lines", See.KEYS)
    elif mode & 0o077 and holds_plain_keys(text):
        said = f"{shown}: others read keys in plain text there"
        yield fail("api keys", said, f"chmod 600 {file}, or keep hashes", See.KEYS)
    else:
        yield ok("api keys", shown)

"""Owns what stands for a secret in a redacted log: keyed, the same in all files under one key.

Token ids go through a permutation of the vocabulary, texts become keyed digests. A permutation is a
substitution cipher: it keeps a log from being read, not from being attacked with statistics.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b
from pathlib import PurePath

from transport.chain import DIGEST_BYTES
from transport.config import TOY, Config, ConfigError, Model, Ring, dumps, loads

MIN_KEY_BYTES = 16
_MARK = "# redacted by kvring log redact\n"  # how the ring.toml in a redacted log begins
_LAST_ID = 2**31 - 1  # of any field that holds a token id
_PLACES = re.compile(r"\w+://\S+|(?:/[\w.+@~-]+){2,}/?")
_TOKEN = re.compile(r"\btoken \d+")


def is_redacted(config: str) -> bool:
    """Whether the ring.toml of a log's header is a redacted log's."""
    return config.startswith(_MARK)


class Hiding:
    """One key, one vocabulary."""

    def __init__(self, key: bytes, vocabulary: int) -> None:
        """key: any length; it is hashed first."""
        self._key = blake2b(key, digest_size=32).digest()
        self._vocabulary = vocabulary
        # a keyed shuffle: ids in order of their keyed hashes; 50,000 of them take 0.1 s
        order = sorted(range(vocabulary), key=lambda token: self._mark(b"token", _packed(token)))
        self._tokens = order

    def token(self, token: int) -> int:
        """What stands for a token id; ids outside the vocabulary stay outside."""
        if token < self._vocabulary:
            return self._tokens[token]
        room = max(1, _LAST_ID + 1 - self._vocabulary)
        drawn = int.from_bytes(self._mark(b"beyond", _packed(token))[:8], "little")
        return min(_LAST_ID, self._vocabulary + drawn % room)

    def tokens(self, tokens: Iterable[int]) -> tuple[int, ...]:
        """The same for many."""
        return tuple(map(self.token, tokens))

    def salt(self, salt: bytes) -> bytes:
        """A keyed digest; no salt stays none."""
        return self._mark(b"salt", salt) if salt else b""

    def hash(self, digest: bytes) -> bytes:
        """What stands for a prefix hash whose prefix is not known."""
        return self._mark(b"hash", digest)

    def name(self, name: str) -> str:
        """What stands for an address or a session's name; none stays none."""
        return f"x{self._mark(b'name', name.encode()).hex()[:12]}" if name else ""

    def link(self, link: str) -> str:
        """A link's name: an address is hidden, a ring's or stage's name stays."""
        return self.name(link) if "://" in link else link

    def text(self, detail: str) -> str:
        """A detail for people without its addresses, paths and token ids."""
        hidden = _PLACES.sub(lambda match: self.name(match[0]), detail)
        return _TOKEN.sub("token ?", hidden)

    def config(self, text: str) -> str:
        """A ring.toml without addresses and paths, marked; empty where it can't be read."""
        try:
            return _MARK + dumps(self._config(loads(text))) if text else ""
        except ConfigError:
            return ""

    def _config(self, config: Config) -> Config:
        coordinator = config.coordinator
        draft = None if coordinator.draft_model is None else self._path(coordinator.draft_model)
        return replace(
            config,
            model=self._model(config.model),
            rings=tuple(self._ring(ring) for ring in config.rings),
            coordinator=replace(coordinator, http="127.0.0.1:8000", draft_model=draft),
        )

    def _model(self, model: Model) -> Model:
        return replace(model, path=self._path(model.path))

    def _path(self, path: str) -> str:
        return path if path == TOY else f"/{PurePath(path).name or 'model'}"

    def _ring(self, ring: Ring) -> Ring:
        stages = tuple(
            replace(stage, address=self._address(stage.address), bind=None) for stage in ring.stages
        )
        return replace(ring, verdicts=self._address(ring.verdicts), bind=None, stages=stages)

    def _address(self, address: str) -> str:
        return f"tcp://{self.name(address)}:1"

    def _mark(self, what: bytes, data: bytes) -> bytes:
        return blake2b(
            data, digest_size=DIGEST_BYTES, key=self._key, person=what.ljust(16, b"\0")
        ).digest()


def _packed(token: int) -> bytes:
    return token.to_bytes(8, "little")

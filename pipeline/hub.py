"""Owns what a stage fetches from a model hub: a repository's small files, and its block's shards.

A model hf://org/name[@revision] is kept below the hub client's cache, in kvring/org--name/COMMIT/.
A file that was cut off is gone on with from its last byte; what is whole is never asked for again,
so a stage that has all it needs starts without a network. Knows no tensor.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import huggingface_hub
from huggingface_hub import constants, file_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils.tqdm import disable_progress_bars

from pipeline.model import ModelError
from transport.toml_table import HUB

Progress = Callable[[float, str], None]
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SMALL = (".json", ".jinja", ".model", ".txt")
_HASHED_AT_ONCE = 1 << 22
# The last is the base class of its HTTP library, whatever that is called.
_LIBRARYS: Any = HfHubHTTPError.__bases__[0]
_HUB_ERRORS: tuple[type[Exception], ...] = (HfHubHTTPError, OSError, ValueError, _LIBRARYS)


def is_hub(path: str) -> bool:
    """True for a model's name on a hub."""
    return path.startswith(HUB)


@dataclass(frozen=True, slots=True)
class Repository:
    """One commit of a repository on this machine. files: what the hub has of it."""

    name: str
    commit: str
    folder: Path
    files: tuple[str, ...]

    @property
    def path(self) -> str:
        """How ring.toml names exactly this commit."""
        return f"{HUB}{self.name}@{self.commit}"


def find(path: str) -> Repository:
    """The repository that hf://org/name[@revision] means now; ModelError where it can't be told.

    A branch or tag is looked up; where the hub can't be reached, what it was at the last time.
    """
    name, _, revision = path.removeprefix(HUB).partition("@")
    revision = revision or constants.DEFAULT_REVISION
    base = Path(constants.HF_HUB_CACHE) / "kvring" / name.replace("/", "--")
    known = base / "refs" / revision.replace("/", "--")
    commit = revision if _COMMIT.fullmatch(revision) else ""
    listed = base / commit / ".files.json"
    if commit and listed.is_file():
        return _known(name, commit, base)
    try:
        info: Any = huggingface_hub.HfApi(constants.ENDPOINT).model_info(name, revision=revision)
    except _HUB_ERRORS as error:
        if known.is_file():
            return _known(name, known.read_text(), base)
        raise _fault(path, error) from error
    folder = base / str(info.sha)
    folder.mkdir(parents=True, exist_ok=True)
    files = [str(each.rfilename) for each in info.siblings or ()]
    _write(folder / ".files.json", json.dumps(files))
    known.parent.mkdir(exist_ok=True)
    _write(known, str(info.sha))
    return Repository(name, str(info.sha), folder, tuple(files))


def _known(name: str, commit: str, base: Path) -> Repository:
    files = json.loads((base / commit / ".files.json").read_text())
    return Repository(name, commit, base / commit, tuple(files))


def _write(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text)
    os.replace(part, path)  # stages of one machine do this at once


def fetch_small(repository: Repository) -> Path:
    """The folder with its config, tokenizer and index, but no weights."""
    small = [each for each in repository.files if "/" not in each and each.endswith(_SMALL)]
    fetch(repository, small, lambda _share, _what: None)
    return repository.folder


def fetch(repository: Repository, files: list[str], progress: Progress) -> None:
    """Have these files in the folder. progress: as StageModel's loading. Raises ModelError."""
    missing = [each for each in files if not (repository.folder / each).is_file()]
    if not missing:
        return
    disable_progress_bars("huggingface_hub.http_get")
    try:
        metas = {
            name: file_download.get_hf_file_metadata(_url(repository, name)) for name in missing
        }
        total, before = sum(int(meta.size or 0) for meta in metas.values()), 0
        for name, meta in metas.items():
            start, size = before, int(meta.size or 0)

            def report(have: int, name: str = name, start: int = start, size: int = size) -> None:
                text = f"fetching {name}: {have / 1e6:.0f} of {size / 1e6:.0f} MB"
                progress((start + have) / max(1, total), text)

            _download(repository, name, meta, report)
            before += size
    except _HUB_ERRORS as error:
        raise _fault(repository.path, error) from error


def _url(repository: Repository, name: str) -> str:
    found: str = huggingface_hub.hf_hub_url(repository.name, name, revision=repository.commit)
    return found


def _download(repository: Repository, name: str, meta: Any, report: Callable[[int], None]) -> None:
    target = repository.folder / name
    part = target.with_name(f".{name}.part")
    with _locked(target.with_name(f".{name}.lock")):
        if target.is_file():  # another stage of this machine was first
            return
        with part.open("ab") as sink:
            have = sink.tell()
            if meta.size is not None and have > meta.size:
                have = sink.truncate(0)
            file_download.http_get(
                _url(repository, name),
                _Counted(sink, have, report),  # type: ignore[arg-type]
                resume_size=have,
                headers=build_hf_headers(),
                expected_size=meta.size,
            )
        if _SHA256.fullmatch(meta.etag or "") and _digest(part) != meta.etag:
            part.unlink()
            raise ValueError(f"{name} came damaged: its sha256 is not {meta.etag}")
        os.replace(part, target)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Stages of one machine fetch a file once."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest(path: Path) -> str:
    state = hashlib.sha256()
    with path.open("rb") as source:
        while chunk := source.read(_HASHED_AT_ONCE):
            state.update(chunk)
    return state.hexdigest()


class _Counted:
    """A file that says how far it has been written; what the hub's client needs of one."""

    def __init__(self, sink: BinaryIO, have: int, report: Callable[[int], None]) -> None:
        self._sink, self._have, self._report = sink, have, report

    def write(self, data: bytes) -> int:
        self._have += len(data)
        self._report(self._have)
        return self._sink.write(data)

    def tell(self) -> int:
        return self._sink.tell()

    def seek(self, at: int) -> int:
        self._have = at
        return self._sink.seek(at)

    def truncate(self) -> int:
        return self._sink.truncate()


def _fault(path: str, error: Exception) -> ModelError:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ModelError(f"{path}: could not be fetched: {first}")

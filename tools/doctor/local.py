"""Owns the checks of this machine alone: Python, torch, devices, the model's file, limits, disk."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.load import described
from pipeline.measure import device_memory, device_name
from pipeline.model import ModelError
from tools.doctor.checks import Check, See, fail, ok, size, warn
from tools.doctor.need import Need, need_of
from transport.config import TOY, Limits, Stage
from transport.memory import open_files

PYTHON = ((3, 11), (3, 14))  # as in pyproject.toml: [first, last)
COORDINATOR_FILES = 128  # beside its HTTP connections: links, logs, the state file
STAGE_FILES = 128
RECORD_BYTES = 1 << 30  # what one process's frame logs may come to: docs/frames.md
STATE_BYTES = 64 << 20


def python_check() -> Check:
    """Of this interpreter."""
    first, last = PYTHON
    here = sys.version_info[:2]
    if first <= here < last:
        return ok("python", f"{platform.python_version()} on {platform.platform(terse=True)}")
    want = f"{first[0]}.{first[1]} to {last[0]}.{last[1] - 1}"
    return fail("python", platform.python_version(), f"kvring needs {want}")


def torch_checks(threads: int | None, wanted: Sequence[str] = ()) -> Iterator[Check]:
    """Torch's version, and what it can compute on.

    threads: the most that one of this machine's stages has. wanted: the devices that ring.toml
    gives them.
    """
    try:
        import torch
    except (ImportError, OSError) as error:
        advice = "install it again: https://pytorch.org/get-started"
        yield fail("torch", f"it can't be imported ({error})", advice, See.TORCH)
        return
    kinds = ["cpu"]
    if torch.cuda.is_available():
        kinds += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    elif torch.version.cuda is not None:
        said = f"{torch.__version__} is built for CUDA {torch.version.cuda} and sees no device"
        advice = "look at nvidia-smi: driver, and CUDA_VISIBLE_DEVICES"
        yield warn("torch", said, advice, See.TORCH)
    if torch.backends.mps.is_available():
        kinds.append("mps")
    yield ok("torch", f"{torch.__version__}, computes on {', '.join(kinds)}")
    cores = os.cpu_count() or 1
    yield _threads(threads, cores, torch.get_num_threads())
    if "cpu" in wanted or (not wanted and kinds == ["cpu"]):
        yield kernels_check()
    for kind in dict.fromkeys((*kinds, *wanted)):
        yield device_check(kind)


def kernels_check() -> Check:
    """Whether stages on this CPU will have native kernels."""
    from pipeline.native.library import NativeError, cached, compiler, library

    try:
        if not cached():
            return ok("kernels", f"{compiler()} will compile native ones when a stage starts")
        return ok("kernels", library().describe())
    except NativeError as error:
        advice = "install one (g++); until then torch's kernels serve, at twice the time and more"
        return warn("kernels", str(error), advice, See.TORCH)


def _threads(threads: int | None, cores: int, usual: int) -> Check:
    if threads is None:
        return ok("threads", f"{cores} cores; torch would use {usual} threads in one process")
    said = f"a stage of this machine has {threads} threads, and it has {cores} cores"
    if threads <= cores:
        return ok("threads", said)
    return warn("threads", said, "more threads than cores only wait for each other")


def device_check(device: str) -> Check:
    """Whether a device is there, and what it has left."""
    try:
        free, total = device_memory(device)
        name = device_name(device)
    except (RuntimeError, AssertionError, ImportError, AttributeError) as error:
        first = str(error).strip().splitlines()[:1]
        advice = "choose one that the line `torch` names, in ring.toml's `device`"
        return fail(f"device {device}", f"it can't be used ({''.join(first)})", advice, See.TORCH)
    return ok(f"device {name}", f"{size(free)} free of {size(total)}")


@dataclass(frozen=True, slots=True)
class ModelFound:
    """A model's check, and what its blocks take; None where that can't be told."""

    check: Check
    need: Need | None = None


def model_check(path: str, dtype: str, weights: str = "dtype", kv: str = "dtype") -> ModelFound:
    """Whether the model's files are here, whole, and of a family that stages can run."""
    if path == TOY:
        return ModelFound(ok("model", "toy: needs no file"))
    try:
        source = described(path)
        need = need_of(source, dtype, weights, kv)
    except (ModelError, ImportError, OSError) as error:
        advice = "fetch it with kvring pull, or name another in ring.toml's [model] path"
        return ModelFound(fail("model", str(error), advice, See.MODEL))
    layers, kind, form = source.layers_total, source.family.name, dtype
    form += "" if weights == "dtype" else f" and {weights}"
    said = f"{path}: {kind}, {layers} layers, {size(need.whole)} of weights as {form}"
    return ModelFound(ok("model", said), need)


def memory_checks(
    stages: Sequence[Stage], limits: Limits, need: Need, running: Sequence[str]
) -> Iterator[Check]:
    """Whether the blocks of this machine's stages fit their devices; those that run have it."""
    waiting = [stage for stage in stages if stage.name not in running]
    for device in dict.fromkeys(stage.device for stage in waiting):
        mine = [stage for stage in waiting if stage.device == device]
        blocks = [need.block(stage.layers, limits) for stage in mine]
        names = ", ".join(f"{s.name} {size(b)}" for s, b in zip(mine, blocks, strict=True))
        try:
            free, _ = device_memory(device)
        except (RuntimeError, AssertionError, ImportError, AttributeError):
            continue  # the device's own line says it
        what = f"memory {device}"
        said = f"{names} (weights and {limits.slots} slots of {limits.max_model_len} tokens)"
        said += f", {size(free)} free"
        advice = "fewer layers here (kvring plan), limits.slots or limits.max_model_len"
        if sum(blocks) > free:
            yield fail(what, said, advice, See.MEMORY)
        elif sum(blocks) > 0.9 * free:
            yield warn(what, said, advice, See.MEMORY)
        else:
            yield ok(what, said)


def files_check(connections: int | None) -> Check:
    """The limit of open files; connections: of the coordinator's HTTP API, if it runs here."""
    most = open_files()
    wanted = STAGE_FILES if connections is None else 2 * connections + COORDINATOR_FILES
    said = f"a process may have {most:,} open files"
    if most >= wanted:
        return ok("open files", said)
    whom = "a stage" if connections is None else f"{connections} HTTP connections and as many more"
    advice = f"{whom} may need {wanted:,}: ulimit -n {wanted}, or LimitNOFILE= of the service"
    level = fail if most < STAGE_FILES else warn
    return level("open files", said, advice, See.FILES)


def disk_check(what: str, folder: Path, wanted: int, why: str) -> Check:
    """Whether a folder that a process writes in is writable and has room."""
    at = folder
    while not at.exists() and at != at.parent:
        at = at.parent
    if not at.is_dir() or not os.access(at, os.W_OK):
        return fail(what, f"{folder} can't be written", f"chown or choose another: {why}")
    free = shutil.disk_usage(at).free
    said = f"{folder}: {size(free)} free"
    if free < wanted // 16:
        return fail(what, said, f"{why} may come to {size(wanted)}")
    if free < wanted:
        return warn(what, said, f"{why} may come to {size(wanted)}")
    return ok(what, said)

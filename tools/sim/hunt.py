"""Owns the hunt: many seeds, one after another or on several processors; what a failure says.

The command `kvring sim`. Knows how a world is played, not what is in it.
"""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools.errors import USAGE, ToolError
from tools.framelogs.residency import Violation
from tools.sim.check import ViolationError
from tools.sim.draw import Options, draw
from tools.sim.script import FAULTS, Script
from tools.sim.shrink import shrink
from tools.sim.world import World

LOGS = Path("logs") / "sim"
BATCH = 50  # seeds that a process is given at once
MAX_RINGS, MAX_STAGES, MAX_CLIENTS = 8, 16, 64


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a world failed. name: the violated property, or the file and line of a core's assert."""

    seed: int
    name: str
    detail: str


@dataclass(frozen=True, slots=True)
class Tally:
    """What some seeds came to."""

    seeds: int = 0
    frames: int = 0
    seconds: float = 0.0  # of processor time
    failures: tuple[Failure, ...] = ()

    def plus(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(
            self.seeds + other.seeds,
            self.frames + other.frames,
            self.seconds + other.seconds,
            self.failures + other.failures,
        )


def play(script: Script, logs: Path | None = None) -> tuple[Failure | None, int]:
    """Play a script; why it failed, if it did, and how many frames reached a core."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return _play(script, logs)
    finally:
        gc.collect(0)  # the whole world in one sweep: many while it lives took a tenth of the time
        if enabled:
            gc.enable()


def _play(script: Script, logs: Path | None) -> tuple[Failure | None, int]:
    world = World(script, logs)
    failure = None
    try:
        world.play()
    except ViolationError as error:
        failure = Failure(script.shape.seed, error.name, error.detail)
    except Violation as error:
        failure = Failure(
            script.shape.seed, f"log check {error.rule}", f"{error.place}: {error.text}"
        )
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        name = f"{type(error).__name__} in {Path(where.filename).name}:{where.lineno}"
        failure = Failure(script.shape.seed, name, " ".join(f"{where.line} {error}".split()))
    except ValueError as error:
        failure = Failure(script.shape.seed, type(error).__name__, str(error))
    return failure, world.checks.frames


def play_seeds(seeds: range, options: Options) -> Tally:
    """Play them all."""
    started, frames, failures = time.process_time(), 0, []
    for seed in seeds:
        failure, count = play(draw(seed, options))
        frames += count
        if failure is not None:
            failures.append(failure)
    return Tally(len(seeds), frames, time.process_time() - started, tuple(failures))


def minimal(failure: Failure, options: Options) -> tuple[Script, int]:
    """The failing seed's script, cut down to what fails by the same name; and the tries."""

    def fails(script: Script) -> bool:
        found, _ = play(script)
        return found is not None and found.name == failure.name

    return shrink(draw(failure.seed, options), fails)


def run_sim(
    *,
    seeds: int | None,
    seed: int | None,
    faults: str,
    stages: str,
    rings: str,
    clients: str,
    jobs: int,
    log: Path | None,
    as_json: bool,
) -> int:
    """Play seeds; 1 when one failed."""
    options = Options(
        _faults(faults),
        _range("stages", stages, MAX_STAGES),
        _range("rings", rings, MAX_RINGS),
        _range("clients", clients, MAX_CLIENTS),
    )
    first = seed or 0
    count = seeds if seeds is not None else 100 if seed is None else 1
    total = Tally()
    for tally in _tallies(range(first, first + count), options, jobs):
        total = total.plus(tally)
        if not as_json:
            _progress(total, count)
        if total.failures:
            break
    found = [_report(each, options, log, quiet=as_json) for each in total.failures[:1]]
    if log is not None and count == 1 and not total.failures:
        play(draw(first, options), _fresh(log))
        if not as_json:
            print(f"frame logs: {log}")
    if as_json:
        said = {"seeds": total.seeds, "frames": total.frames, "failures": found}
        print(json.dumps(said | {"frames_per_s": round(_rate(total))}))
    elif not total.failures:
        print(_sum(total))
    return 1 if total.failures else 0


def _tallies(seeds: range, options: Options, jobs: int) -> Iterator[Tally]:
    parts = [seeds[at : at + BATCH] for at in range(0, len(seeds), BATCH)]
    work = partial(play_seeds, options=options)
    if jobs == 1:
        yield from map(work, parts)
        return
    with ProcessPoolExecutor(jobs) as pool:
        futures = [pool.submit(work, part) for part in parts]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def _report(
    failure: Failure, options: Options, log: Path | None, *, quiet: bool
) -> dict[str, object]:
    """Shrink a failure, write its frame logs, say all of it."""
    if not quiet:
        print(f"seed {failure.seed} violates: {failure.name}\n  {failure.detail}")
    whole = draw(failure.seed, options)
    script, tries = minimal(failure, options)
    folder = _fresh((log or LOGS) / f"seed-{failure.seed}")
    found, _ = play(script, folder)
    detail = found.detail if found is not None else failure.detail
    if not quiet:
        counts = f"{len(whole.entries)} to {len(script.entries)}"
        print(f"shrunk from {counts} entries in {tries} tries; it still violates: {failure.name}")
        print(f"  {detail}")
        for line in script.lines():
            print(f"    {line}")
        print(f"frame logs: {folder} (kvring log show {folder}; kvring replay)")
        print(f"again: kvring sim --seed {failure.seed}{_again(options)}")
    return {
        "seed": failure.seed,
        "violates": failure.name,
        "detail": detail,
        "script": list(script.lines()),
        "logs": str(folder),
    }


def _again(options: Options) -> str:
    """The options that are not the default ones."""
    plain, said = Options(), ""
    if options.faults != plain.faults:
        said += f" --faults {','.join(options.faults) or 'none'}"
    for name in ("stages", "rings", "clients"):
        low, high = getattr(options, name)
        if (low, high) != getattr(plain, name):
            said += f" --{name} {low}-{high}"
    return said


def _fresh(folder: Path) -> Path:
    """A folder without the frame logs of an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.kvrlog"):
        old.unlink()
    return folder


def _rate(total: Tally) -> float:
    return total.frames / total.seconds if total.seconds else 0.0


def _sum(total: Tally) -> str:
    return (
        f"{total.seeds} seeds, {total.frames} frames, {total.seconds:.1f} s of processor time "
        f"({_rate(total):.0f} frames/s): {'no' if not total.failures else 'a'} failure"
    )


def _progress(total: Tally, count: int) -> None:
    every = max(1, count // 20 // BATCH) * BATCH
    if total.seeds % every == 0 and total.seeds < count:
        print(_sum(total), flush=True)


def _faults(text: str) -> tuple[str, ...]:
    if text in ("all", "none"):
        return FAULTS if text == "all" else ()
    names = tuple(text.split(","))
    for name in names:
        if name not in FAULTS:
            raise ToolError(f"--faults {name}: must be one of {', '.join(FAULTS)}", code=USAGE)
    return names


def _range(option: str, text: str, most: int) -> tuple[int, int]:
    low, _, high = text.partition("-")
    ends = low, high or low
    if not all(end.isdecimal() and end.isascii() for end in ends):
        raise ToolError(f"--{option} {text}: must be N or LOW-HIGH", code=USAGE)
    found = int(ends[0]), int(ends[1])
    if not 1 <= found[0] <= found[1] <= most:
        raise ToolError(f"--{option} {text}: must be from 1 to {most}, ascending", code=USAGE)
    return found

"""Owns `kvring replay`: which replay of which processes, what is printed, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tools.errors import USAGE, ToolError
from tools.framelogs.hiding import is_redacted
from tools.framelogs.read import Process, processes
from tools.options import check_ring
from tools.replay.core import DifferenceError, Replayer
from tools.replay.fresh import COORDINATOR, config_of
from tools.replay.links import compare_links
from tools.replay.state import describe, in_words
from tools.replay.where import Where, parse_where

DIFFERENT = 1  # exit code


def run_replay(
    *,
    paths: Sequence[Path],
    stage: str | None,
    device: str | None,
    model: str | None,
    tolerance: float,
    ring: str | None,
    speed: float,
    until: str | None,
    as_json: bool,
) -> int:
    """0 where the replay is equal, 1 where it differs (printed), ToolError where it can't be."""
    where = None if until is None else parse_where(until)
    read = processes(paths)
    found = [each for each in read if each.header.config]  # not the turns that verify mode writes
    if not found:
        config_of(read[0])  # says what its header lacks
    for option, wanted in (("--stage", stage), ("--ring", ring)):
        if wanted is not None:
            _refuse_redacted(found, f"{option} {wanted}")
    try:
        if stage is not None:
            return _compute(found, stage, device, model, tolerance, where, as_json)
        if ring is not None:
            return _ring(found, ring, speed, where, as_json)
        if where is not None:
            return _until(found, where, until or "", as_json)
        return _cores(found, as_json)
    except DifferenceError as error:
        return _differs([error], as_json)


def _refuse_redacted(found: list[Process], option: str) -> None:
    """A model makes nothing of token ids that were replaced."""
    for each in found:
        if is_redacted(each.header.config):
            text = f"{each.paths[0]} is redacted: its token ids and activations are not the model's"
            raise ToolError(f"{option}: {text}; core replay works on it", code=USAGE)


def _cores(found: list[Process], as_json: bool) -> int:
    lines = []
    compared, wrong = compare_links(found)
    differences = [] if wrong is None else [wrong]
    for process in found:
        replayer = Replayer(process)
        try:
            for _ in replayer:
                pass
        except DifferenceError as error:
            differences.append(error)
            continue
        lines.append(_counts(replayer))
    if differences:
        return _differs(differences, as_json, lines)
    said = {"equal": True, "processes": lines, "frames_compared_at_both_ends": compared}
    _say(said, as_json, [*map(_counted, lines), _both_ends(compared, len(found))])
    return 0


def _counts(replayer: Replayer) -> dict[str, object]:
    process = replayer.process
    return {
        "process": process.name,
        "role": process.header.role,
        "incarnation": process.header.incarnation,
        "inputs": replayer.inputs,
        "sends": replayer.sends,
        "unsent": replayer.unsent,
        "other_actions": replayer.others,
        "cut_sends": replayer.cut,
        "torn_bytes": process.torn_bytes,
    }


def _counted(counts: dict[str, object]) -> str:
    line = (
        f"{counts['process']}: {counts['inputs']} inputs, {counts['sends']} frames sent: all equal "
        f"({counts['other_actions']} actions that leave no record)"
    )
    for name, words in (
        ("unsent", "that its link did not take"),
        ("cut_sends", "behind the log's end"),
        ("torn_bytes", "bytes torn off the end"),
    ):
        line += f"; {counts[name]} {words}" if counts[name] else ""
    return line


def _both_ends(compared: int, count: int) -> str:
    if count < 2:
        return "one process: no link was compared at both ends"
    return f"links: {compared} frames recorded at both ends: all equal"


def _differs(
    errors: list[DifferenceError], as_json: bool, equal: Sequence[dict[str, object]] = ()
) -> int:
    """Print the difference that is first in time, with its story, and name the others."""
    first, *others = sorted(errors, key=lambda error: error.at.at_ns)
    said: dict[str, object] = {
        "equal": False,
        "process": first.at.process.name,
        "record": first.at.index,
        "place": first.at.place,
        "difference": first.what,
        "story": first.story,
        "others": [error.message for error in others],
    }
    lines = [first.message, "", *first.story] if first.story else [first.message]
    lines += [f"later: {error.message}" for error in others]
    _say(said, as_json, [*lines, *map(_counted, equal)])
    return DIFFERENT


def _until(found: list[Process], where: Where, text: str, as_json: bool) -> int:
    if where.file is not None:
        names = [path.name for process in found for path in process.paths]
        if where.file not in names:
            raise ToolError(
                f"--until {text}: {where.file} is none of {', '.join(names)}", code=USAGE
            )
        found = [each for each in found if where.file in [path.name for path in each.paths]]
    if where.index is not None and len(found) > 1:
        advice = "which process's? give one's files, or EPOCH,SEQ or FILE:BYTE"
        raise ToolError(f"--until {text}: {advice}", code=USAGE)
    reached = 0
    for process in found:
        replayer = Replayer(process)
        step = replayer.run_until(where)
        if step is None:
            continue
        reached += 1
        now = step.input.record.mono_ns / 1e9
        state = {"process": process.name, "after": step.input.place, **describe(replayer.core, now)}
        _say(state, as_json, ["", *in_words(state)] if reached > 1 else in_words(state))
    if not reached:
        raise ToolError(f"--until {text}: no such frame in the log", code=USAGE)
    return 0


def _compute(
    found: list[Process],
    stage: str,
    device: str | None,
    model: str | None,
    tolerance: float,
    until: Where | None,
    as_json: bool,
) -> int:
    from tools.replay.compute import choose_process, compute, load_block

    process = choose_process(found, stage)
    where = device or config_of(process).find(stage)[1].device
    block = load_block(process, where, model)
    done = compute(process, block, device=where, tolerance=tolerance, until=until)
    how = "equal to the bit" if done.exact else f"within {tolerance:g}"
    apart = "" if done.exact else f"; largest difference {done.largest:.6g}, {done.ties} ties"
    what = f"{done.tokens} tokens" if block.info.tail else f"{done.rows} rows"
    said = {
        "equal": True,
        "stage": stage,
        "device": where,
        "exact": done.exact,
        "frames": done.frames,
        "rows": done.rows,
        "tokens": done.tokens,
        "ties": done.ties,
        "largest_difference": done.largest,
        "kernel": block.info.kernel,
    }
    line = f"{stage} on {where}: {done.frames} forwards, {what}: {how}{apart}"
    _say(said, as_json, [line, f"kernel: {block.info.kernel}"])
    return 0


def _ring(found: list[Process], ring: str, speed: float, until: Where | None, as_json: bool) -> int:
    from tools import events
    from tools.replay.ring import drive, read_script
    from tools.serve import load_config

    if "://" in ring:
        text = "a log holds token ids and HTTP takes text: name the ring.toml of stages that run"
        raise ToolError(f"--ring {ring}: {text} without a coordinator", code=USAGE)
    path = Path(ring)
    check_ring(path)
    mine = [each for each in found if each.header.role == COORDINATOR]
    if len(mine) != 1:
        raise ToolError(f"{len(mine)} coordinators' logs: a ring is driven by exactly one")
    config = load_config(path)
    events.configure()
    done = drive(read_script(mine[0], until), config, speed)
    said = {
        "equal": not done.differences,
        "turns": done.turns,
        "tokens": done.tokens,
        "cancelled": done.cancelled,
        "left_out": done.left_out,
        "differences": done.differences,
    }
    counts = f"{done.turns} turns, {done.tokens} tokens compared"
    more = f" ({done.cancelled} cancelled, {done.left_out} left out: they never got a slot)"
    result = f"{len(done.differences)} turns differ" if done.differences else "all equal"
    _say(said, as_json, [*done.differences, f"{counts}{more}: {result}"])
    return DIFFERENT if done.differences else 0


def _say(value: dict[str, object], as_json: bool, lines: list[str]) -> None:
    print(json.dumps(value) if as_json else "\n".join(lines))

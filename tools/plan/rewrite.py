"""Owns how a ring.toml gets another split: its text with other layers, its comments kept.

Where the order changes, each `[[ring.stage]]` table moves with all its lines. What can't be edited
so (layers over several lines, tables written inline) is written anew from the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transport.config import Config, ConfigError, Stage, dumps, loads

_STAGE = re.compile(r"\s*\[\[\s*ring\s*\.\s*stage\s*\]\]")
_RING = re.compile(r"\s*\[\[\s*ring\s*\]\]")
_TABLE = re.compile(r"\s*\[")
_LAYERS = re.compile(r"(\s*layers\s*=\s*)\[[^\[\]]*\]")


def planned(config: Config, ring: str, stages: Sequence[tuple[str, tuple[int, int]]]) -> Config:
    """The configuration with a ring's stages in another order, with other layers."""
    rings = []
    for each in config.rings:
        if each.name == ring:
            by_name = {stage.name: stage for stage in each.stages}
            moved = [replace(by_name[name], layers=layers) for name, layers in stages]
            rings.append(replace(each, stages=tuple(moved)))
        else:
            rings.append(each)
    return replace(config, rings=tuple(rings))


def rewritten(text: str, folder: Path, before: Config, after: Config) -> str:
    """A ring.toml's text for `after`, where it was `before`'s."""
    try:
        edited = _edited(text, before, after)
        if loads(edited, folder=folder) == after:
            return edited
    except (ConfigError, LookupError):
        pass
    return dumps(after)


def _edited(text: str, before: Config, after: Config) -> str:
    """Raises LookupError where the text is not laid out as expected."""
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    starts = [at for at, line in enumerate(lines) if _RING.match(line)] + [len(lines)]
    out = lines[: starts[0]]
    for index, (old, new) in enumerate(zip(before.rings, after.rings, strict=True)):
        out += _ring(lines[starts[index] : starts[index + 1]], old.stages, new.stages)
    return "".join(out)


def _ring(lines: list[str], old: Sequence[Stage], new: Sequence[Stage]) -> list[str]:
    heads = [at for at, line in enumerate(lines) if _STAGE.match(line)]
    blocks = {}
    for at, stage in zip(heads, old, strict=False):
        later = (n for n in range(at + 1, len(lines)) if _TABLE.match(lines[n]))
        blocks[stage.name] = lines[at : next(later, len(lines))]
    last = heads[-1] + len(blocks[old[-1].name])
    out = lines[: heads[0]]
    for stage in new:
        block = [_LAYERS.sub(_with(stage), line) for line in blocks[stage.name]]
        out += block if block[-1].endswith("\n") else [*block, "\n"]
    return out + lines[last:]


def _with(stage: Stage) -> str:
    first, last = stage.layers
    return rf"\g<1>[{first}, {last}]"

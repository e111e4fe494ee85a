"""Owns what a running daemon takes from a ring.toml that has changed: the others' addresses.

SIGUSR1 asks for it, so that a stage can come back on another machine while the rest of its ring
runs on. Everything else in the file needs a restart.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog

from transport.config import Config, ConfigError, Ring, load


def on_moved(file: Path, config: Config, move: Callable[[Config], None]) -> None:
    """At every SIGUSR1: read the file again and hand it to `move`, if only addresses changed.

    And now: whoever starts this process with SIGUSR1 ignored may ask before anybody listens.
    """
    last = config

    def look() -> None:
        nonlocal last
        log = structlog.get_logger()
        try:
            found = load(file)
        except (ConfigError, OSError) as error:
            log.warning("ring_not_read", reason=str(error))
            return
        if _fixed(found) != _fixed(config):
            why = "names, layers, keys or verdicts changed: that needs a restart"
            log.warning("ring_not_read", file=str(file), reason=why)
            return
        if found != last:
            last = found
            move(found)
            log.info("ring_read", file=str(file))

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, look)
    look()


def as_seen_by(name: str, before: Ring, after: Config) -> Ring:
    """The ring with the new addresses, for its stage `name`: its own entry stays as it was."""
    own = {stage.name: stage for stage in before.stages if stage.name == name}
    (ring,) = [ring for ring in after.rings if ring.name == before.name]
    return replace(ring, stages=tuple(own.get(stage.name, stage) for stage in ring.stages))


def _fixed(config: Config) -> list[object]:
    """What can't change while a daemon runs."""
    return [
        (ring.name, ring.verdicts, [(s.name, s.layers, s.public_key) for s in ring.stages])
        for ring in config.rings
    ]

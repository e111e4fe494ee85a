"""Owns how the core that a process ran is made again from what its log says of itself."""

from __future__ import annotations

from coord.coordinator import fresh_scheduler
from coord.scheduler import Scheduler
from pipeline.model import ModelInfo
from pipeline.stage import Stage
from tools.errors import ToolError
from tools.framelogs.read import Process, entries
from transport.config import Config, ConfigError, loads
from transport.frame import RollCall, StageEntry
from transport.framelog import Direction

COORDINATOR = "coordinator"
STAGE = "stage"
Core = Scheduler | Stage


def config_of(process: Process) -> Config:
    """The ring.toml that the process ran with. Raises ToolError where its log has none."""
    header = process.header
    where = process.paths[0]
    if not header.config:
        raise ToolError(f"{where}: it does not say which ring.toml {header.name} ran with")
    try:
        return loads(header.config, file=f"{where} (its ring.toml)")
    except ConfigError as error:
        raise ToolError(str(error)) from None


def fresh_core(process: Process) -> Core:
    """A core as it was when the recording began. Raises ToolError where the log can't tell."""
    header, config = process.header, config_of(process)
    where = process.paths[0]
    if header.role == COORDINATOR:
        return fresh_scheduler(config, header.first_epoch, header.vocabulary)
    if header.role != STAGE:
        raise ToolError(f"{where}: recorded by a {header.role!r}, not by a coordinator or stage")
    try:
        ring, spec = config.find(header.name)
    except KeyError as error:
        raise ToolError(f"{where}: {error.args[0]}") from None
    said = own_entry(process)
    if said is None and process.missing:
        raise ToolError(f"{where}: begins in the middle, and no roll call says what {spec.name} is")
    limits = config.limits
    if said is None:  # no roll call reached it, so it refused whatever came
        info = ModelInfo(
            spec.layers, ring.layers_total, b"?", limits.slots, limits.max_model_len, 1, "unknown"
        )
        return Stage(ring.name, spec.name, header.incarnation, info, limits.park_bytes)
    return Stage(ring.name, spec.name, header.incarnation, info_of(said), said.park_bytes)


def own_entry(process: Process) -> StageEntry | None:
    """What the stage said of itself in the first roll call that it passed on; None: in none."""
    for entry in entries(process):
        passed = entry.record.direction in (Direction.OUT, Direction.UNSENT)
        if passed and isinstance(entry.frame, RollCall) and entry.frame.entries:
            return entry.frame.entries[-1]
    return None


def info_of(entry: StageEntry) -> ModelInfo:
    """The block that a stage described in a roll call."""
    return ModelInfo(
        entry.layers,
        entry.layers_total,
        entry.fingerprint,
        entry.slots,
        entry.capacity,
        entry.vocabulary,
        entry.kernel,
        entry.row_bytes,
    )

"""Owns what is made of a measured ring: machines, memory, clocks, links. Asks nobody itself."""

from __future__ import annotations

from collections.abc import Iterator

from tools.doctor.checks import Check, See, fail, ok, size, warn
from tools.doctor.local import STAGE_FILES
from tools.measuring import Link, Machine, Measured
from transport.config import Config, Ring, Stage

CLOCK_WARN_S, CLOCK_FAIL_S = 0.5, 30.0  # logs of machines are laid side by side by their clocks
TRIP_WARN_S = 0.1  # a token waits for every link once
CHUNK_WARN_S = 0.25  # a prefill's chunk on a link, beside what the stages compute
LEFT_SHARE = 0.02  # of a device's memory that should be left beside weights and rows


def measured_checks(config: Config, ring: Ring, found: Measured) -> Iterator[Check]:
    """A line for each stage, its memory, its clock, and each link of the ring."""
    names = [stage.name for stage in ring.stages]
    if [machine.name for machine in found.machines] != names:
        said = (
            f"its stages are {[each.name for each in found.machines]}, and ring.toml says {names}"
        )
        yield fail(f"ring {ring.name}", said, "copy ring.toml to all machines", See.WEIGHTS)
        return
    for stage, machine in zip(ring.stages, found.machines, strict=True):
        yield _machine(config, stage, machine, found.machines[0])
        yield _memory(machine)
        if machine.files < STAGE_FILES:
            said = f"a process may have {machine.files} open files there"
            yield fail(f"open files {machine.name}", said, f"ulimit -n {STAGE_FILES}", See.FILES)
    yield from _clocks(found)
    yield from _weights(found)
    for link in found.links:
        yield _link(config, link, found)
    yield ok(f"ring {ring.name}", f"a small frame goes round in {found.round_trip_s * 1e3:.2f} ms")


def _machine(config: Config, stage: Stage, found: Machine, first: Machine) -> Check:
    what = f"runs {found.name}"
    if found.layers != stage.layers:
        said = f"it runs layers {list(found.layers)}, and ring.toml says {list(stage.layers)}"
        return fail(what, said, "copy ring.toml to its machine and start it again", See.WEIGHTS)
    if (found.slots, found.capacity) != (first.slots, first.capacity):
        said = f"it has {found.slots} slots of {found.capacity} rows, and {first.name} has "
        said += f"{first.slots} of {first.capacity}"
        return fail(what, said, "copy ring.toml to its machine and start it again", See.WEIGHTS)
    if found.slots != config.limits.slots or found.capacity < config.limits.max_model_len:
        said = f"it has {found.slots} slots of {found.capacity} rows, and ring.toml says "
        said += f"{config.limits.slots} of {config.limits.max_model_len}"
        return fail(what, said, "start it again: it was started with another file", See.WEIGHTS)
    speed = f"{found.decode_s * 1e3:.2f} ms for a row" if found.decode_s else "no room to try it"
    said = f"layers {list(found.layers)} on {found.device}, {speed}"
    return ok(what, said)


def _memory(found: Machine) -> Check:
    what = f"memory {found.name}"
    rows = found.slots * found.capacity * found.row_bytes
    said = f"weights {size(found.weight_bytes)}, rows {size(rows)}, then {size(found.free_bytes)} "
    said += f"free of {size(found.total_bytes)}"
    if found.free_bytes < LEFT_SHARE * found.total_bytes:
        advice = "fewer layers here (kvring plan), limits.slots or limits.max_model_len"
        return fail(what, said, advice, See.MEMORY)
    return ok(what, said)


def _clocks(found: Measured) -> Iterator[Check]:
    """One line for each machine, by the first stage that runs there."""
    seen: dict[str, None] = {}
    for machine in found.machines:
        if machine.machine in seen:
            continue
        seen[machine.machine] = None
        off, error = machine.clock_offset_s, machine.clock_error_s
        said = f"{off * 1e3:+.0f} ms against the coordinator's, give or take {error * 1e3:.0f} ms"
        what, advice = f"clock {machine.name}", "let chrony or systemd-timesyncd set it"
        if abs(off) - error > CLOCK_FAIL_S:
            yield fail(what, said, advice, See.CLOCK)
        elif abs(off) - error > CLOCK_WARN_S:
            yield warn(what, said, advice, See.CLOCK)
        else:
            yield ok(what, said)


def _weights(found: Measured) -> Iterator[Check]:
    first = found.machines[0]
    others = [each for each in found.machines if each.fingerprint != first.fingerprint]
    for each in others:
        said = f"{each.name} has {each.fingerprint[:12]} ({each.software}), "
        said += f"{first.name} has {first.fingerprint[:12]} ({first.software})"
        advice = "same model file, dtype, torch and kind of processor on all machines"
        yield fail(f"weights {each.name}", said, advice, See.WEIGHTS)
    if not others:
        yield ok(
            "weights", f"all stages have {first.fingerprint[:12]}, {first.name} {first.software}"
        )


def _link(config: Config, link: Link, found: Measured) -> Check:
    ends = link.source or "coordinator", link.target or "coordinator"
    what = f"link {ends[0]} to {ends[1]}"
    if link.round_trip_s is None:
        said = f"{ends[0]} can't connect to {ends[1]}, though frames arrive"
        return warn(what, said, "a proxy or a firewall between them", See.LINK)
    width = max((each.wire_bytes for each in found.machines), default=0)
    inner = bool(link.source) and bool(link.target)
    chunk = config.limits.chunk_tokens * (width if inner else 4)
    chunk_s = chunk * 8 / (link.mbit * 1e6) if link.mbit else 0.0
    rate = f"{link.mbit:,.0f} Mbit/s" if link.mbit else "no rate"
    said = f"{link.round_trip_s * 1e3:.2f} ms there and back, {rate}"
    if chunk_s > CHUNK_WARN_S:
        said += f": a chunk of {config.limits.chunk_tokens} tokens takes {chunk_s:.2f} s"
        return warn(what, said, "a faster link, or smaller limits.chunk_tokens", See.LINK)
    if link.round_trip_s > TRIP_WARN_S:
        return warn(what, said, "every token waits for it: put the stages nearer", See.LINK)
    return ok(what, said)

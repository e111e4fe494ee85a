"""Owns `kvring plan`: measures a ring, splits its layers, prints both, and writes a ring.toml."""

from __future__ import annotations

import sys
from dataclasses import asdict
from json import dumps as json_text
from pathlib import Path

from tools.client import Client
from tools.doctor.checks import size
from tools.errors import USAGE, ToolError
from tools.measuring import Measured, ask, join
from tools.plan.costs import NOISE, PROMPT_TOKENS, Block, Costs, Prediction
from tools.plan.rewrite import planned, rewritten
from tools.plan.split import MOST_ORDERED
from tools.security import trust_of_coordinator
from tools.serve import load_config
from tools.terminal import GAP, pieces, width
from transport.config import Config, Ring
from transport.link import LinkError


def run_plan(
    *,
    ring: Path,
    name: str | None,
    url: str | None,
    api_key: str | None,
    turns: int | None,
    alone: bool,
    write: Path | None,
    as_json: bool,
) -> int:
    """Print the plan; 0, or ToolError where nothing could be measured or nothing fits."""
    config = load_config(ring)
    spec = _which(config, name)
    if write is not None and write.exists() and not write.samefile(ring):
        text = f"--write {write}: it is there already; only {ring} itself is written over"
        raise ToolError(text, code=USAGE)
    found = measure(config, spec, url, api_key)
    costs = Costs(found, config.limits, turns or config.limits.slots, alone=alone)
    now, best = costs.now(), costs.best()
    if as_json:
        said = {"now": _json(now), "planned": _json(best), "worth_a_restart": best != now}
        print(json_text(said, indent=2))
    else:
        columns = width(sys.stdout) if sys.stdout.isatty() else None
        sys.stdout.write("\n".join(_report(found, now, best, columns)) + "\n")
    if write is not None:
        stages = [(block.machine.name, block.layers) for block in best.blocks]
        after = planned(config, spec.name, stages)
        text = ring.read_text(encoding="utf-8")
        write.write_text(rewritten(text, ring.parent, config, after), encoding="utf-8")
        then = (
            "the layers are the present ones: nothing has to be started again"
            if best == now
            else "copy it to every machine, then restart all stages, then the coordinator"
        )
        print(f"wrote {write}: {then}", file=sys.stderr)
    return 0


def _which(config: Config, name: str | None) -> Ring:
    known = ", ".join(ring.name for ring in config.rings)
    if name is None:
        if len(config.rings) > 1:
            raise ToolError(f"say which ring with --name: {known}", code=USAGE)
        return config.rings[0]
    for ring in config.rings:
        if ring.name == name:
            return ring
    raise ToolError(f"--name {name}: no such ring in ring.toml; there are {known}", code=USAGE)


def measure(config: Config, ring: Ring, url: str | None, api_key: str | None) -> Measured:
    """Through the coordinator where one runs, else from the stages. Raises ToolError."""
    base = url or f"http://{config.coordinator.http}".replace("//0.0.0.0:", "//127.0.0.1:")
    with Client(base, api_key) as client:
        try:
            client.ready()
        except ToolError:
            if url is not None:
                raise
        else:
            return _same(ask(client, ring.name, wide=True), ring)
    try:
        heard = join(config, ring, trust_of_coordinator(config), wide=True)
    except LinkError as error:
        text = f"{error}: run this on the coordinator's machine, or give its --url"
        raise ToolError(text) from None
    if heard.measured is None:
        missing = [stage.name for stage in ring.stages if stage.name not in heard.beats]
        whom = f": not heard of {', '.join(missing)}" if missing else ""
        raise ToolError(f"ring {ring.name}: {heard.fault}{whom}; see: kvring doctor --ring FILE")
    return _same(heard.measured, ring)


def _same(found: Measured, ring: Ring) -> Measured:
    runs = ", ".join(f"{each.name} {list(each.layers)}" for each in found.machines)
    wanted = ", ".join(f"{stage.name} {list(stage.layers)}" for stage in ring.stages)
    if runs != wanted:
        raise ToolError(f"the stages run {runs}, and ring.toml says {wanted}: start them again")
    return found


# ---- what is printed -----------------------------------------------------------------------------


def _report(
    found: Measured, now: Prediction, best: Prediction, columns: int | None = None
) -> list[str]:
    """columns: of the terminal, in which the table is folded; None where there is none."""
    header = [
        "stage",
        "device",
        "room",
        "needs",
        "layers",
        "planned",
        "decode ms",
        "planned ms",
        "row ms",
    ]
    measured = {block.machine.name: block for block in now.blocks}
    rows = [header, *(_row(measured[block.machine.name], block) for block in best.blocks)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = []
    for piece in pieces(widths, columns):
        for row in rows:
            cells = [row[column].ljust(widths[column]) for column in piece]
            lines.append((" " * GAP).join(cells).rstrip())
        lines.append("")
    for link in found.links:
        ends = f"{link.source or 'coordinator'} to {link.target or 'coordinator'}"
        trip = (
            "-" if link.round_trip_s is None else f"{link.round_trip_s * 1e3:.2f} ms there and back"
        )
        rate = "" if link.mbit is None else f", {link.mbit:,.0f} Mbit/s"
        lines.append(f"link {ends}: {trip}{rate}")
    lines.append(f"a small frame goes round in {found.round_trip_s * 1e3:.2f} ms")
    if len(found.machines) > MOST_ORDERED:
        lines.append(f"the order stays: every order is tried for up to {MOST_ORDERED} stages")
    lines.append("")
    for what, each in (("now", now), ("planned", best)):
        lines.append(
            f"{what + ':':<9}{each.one_rate:8.1f} tokens/s of one turn, {each.many_rate:8.1f} of "
            f"{each.turns} turns, first token of {PROMPT_TOKENS:,} after {each.ttft_s:.2f} s"
        )
    order = [block.machine.name for block in best.blocks]
    if order != [block.machine.name for block in now.blocks]:
        lines.append(f"in another order: {', '.join(order)}")
    if best == now:
        lines.append(
            f"the present split is as good: none gains more than {NOISE:.0%}, and measurements "
            "differ by as much"
        )
    if not now.fits:
        lines.append("now: a block leaves its device less than a twentieth of its memory")
    return lines


def _row(before: Block, after: Block) -> list[str]:
    return [
        after.machine.name,
        after.machine.device,
        size(after.room),
        size(after.bytes),
        f"[{before.layers[0]}, {before.layers[1]})",
        f"[{after.layers[0]}, {after.layers[1]})",
        f"{before.decode_s * 1e3:.2f}",
        f"{after.decode_s * 1e3:.2f}",
        f"{after.row_s * 1e3:.3f}",
    ]


def _json(made: Prediction) -> dict[str, object]:
    said = {**asdict(made), "bottleneck_s": made.bottleneck_s, "fits": made.fits}
    said["blocks"] = [
        {
            "stage": block.machine.name,
            "layers": list(block.layers),
            "decode_s": block.decode_s,
            "row_s": block.row_s,
            "bytes": block.bytes,
            "room_bytes": block.room,
        }
        for block in made.blocks
    ]
    return said

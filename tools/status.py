"""Owns `kvring status`: GET /ring as text for a person, or as it is for a script."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from coord.help import pointed
from tools.client import Client, Json, Readiness, ServerError, integer, number
from tools.errors import USAGE, ToolError
from tools.terminal import (
    GAP,
    Painter,
    in_place,
    laid_out,
    paint,
    painted,
    pieces,
    printable,
    region,
    width,
    wrapped,
)

NOT_READY = 3  # exit code: the server answers but has no ring to run a turn on
BAR_CELLS = 24
STATE_STYLES = {
    "ready": "green",
    "failed": "red",
    "lost": "red",
    "loading": "yellow",
    "waiting": "yellow",
    "forming": "yellow",
    "probing": "yellow",
}
PATIENCE_S = 5.0  # for an answer to one look of --watch
NARROW = 80  # columns; with fewer, bars are short and addresses left out
NARROW_BAR_CELLS = 8
INDENT = "  "  # of tables

if TYPE_CHECKING:
    from rich.console import RenderableType


def run_status(
    *,
    url: str,
    api_key: str | None,
    as_json: bool,
    preview: bool = False,
    evict: int | None = None,
    keep: tuple[int, float] | None = None,
    ring: str | None = None,
    watch_s: float | None = None,
) -> int:
    """Print the state of the server; 0 ready, 3 not ready, ToolError (exit 1) unreachable.

    evict, keep: do that first. A refusal (409: a turn writes there) is a ToolError, too. watch_s:
    look again and again, so many seconds apart, until Ctrl-C: 0.
    """
    with Client(url, api_key) as client:
        where = {} if ring is None else {"ring": ring}
        if evict is not None:
            client.change("DELETE", f"/ring/slots/{evict}", where)
        if keep is not None:
            client.change("PUT", f"/ring/slots/{keep[0]}", where, {"keep_s": keep[1]})
        path = "/ring?preview=1" if preview else "/ring"
        if watch_s is not None:
            _watch(client, path, watch_s, as_json=as_json)
            return 0
        readiness, body = client.ready(), client.get(path)
    if as_json:
        print(json.dumps(body, indent=2, ensure_ascii=False))
    else:
        columns = width(sys.stdout) if in_place(sys.stdout) else None
        lines = render(
            body, readiness, lambda text, style: paint(text, style, sys.stdout), columns=columns
        )
        for line in lines:
            table = line.startswith(INDENT)
            print("\n".join([line] if columns is None or table else wrapped(line, columns)))
    return 0 if readiness.ready else NOT_READY


# ---- again and again ---------------------------------------------------------------------------


def _watch(client: Client, path: str, every_s: float, *, as_json: bool) -> None:
    """Look until Ctrl-C. A server that is away is waited for; one that refuses is a ToolError."""
    try:
        with _shown(as_json=as_json) as show:
            while True:
                try:
                    show(client.ready(), client.get(path, PATIENCE_S), "")
                except ServerError as error:
                    if error.status < 500:  # the key is wrong, or it is another kind of server
                        raise
                    show(None, {}, error.told)
                except ToolError as error:
                    if error.code == USAGE:
                        raise
                    show(None, {}, error.told)
                time.sleep(every_s)
    except KeyboardInterrupt:
        return


Show = Callable[[Readiness | None, Json, str], None]  # None: away, and why


@contextmanager
def _shown(*, as_json: bool) -> Iterator[Show]:
    """In place on a terminal; elsewhere one under the other, JSON a line each."""
    if not as_json and in_place(sys.stdout):
        with region(sys.stdout, leave=True) as draw:
            yield _InPlace(draw)
        return

    away = ""

    def show(readiness: Readiness | None, body: Json, trouble: str) -> None:
        nonlocal away
        if trouble:
            if trouble != away:
                print(f"kvring: {printable(trouble)}", file=sys.stderr, flush=True)
        elif as_json:
            print(json.dumps(body, ensure_ascii=False), flush=True)
        elif readiness is not None:
            lines = render(body, readiness, lambda text, _: text)
            print("\n".join([*lines, ""]), flush=True)
        away = trouble

    yield show


class _InPlace:
    """The last that the server said; while it is away dimmed, below the reason."""

    def __init__(self, draw: Callable[[RenderableType], None]) -> None:
        self._draw = draw
        self._readiness = Readiness(ready=False, detail="", progress=None)
        self._body: Json = {}
        self._heard_at: float | None = None

    def __call__(self, readiness: Readiness | None, body: Json, trouble: str) -> None:
        """Draw it."""
        columns, now = width(sys.stdout), time.monotonic()
        if readiness is not None:
            self._readiness, self._body, self._heard_at = readiness, body, now
            lines = render(body, readiness, painted, columns=columns)
        else:
            lines = [painted(printable(trouble), "red")]
            if self._heard_at is not None:
                lines.append(f"waiting for it; {_duration(now - self._heard_at)} ago it said:")
                last = render(self._body, self._readiness, lambda text, _: text, columns=columns)
                lines += ["", *(painted(line, "dim") for line in last)]
        self._draw(laid_out(lines, columns))


# ---- as text -----------------------------------------------------------------------------------


def render(
    body: Json, readiness: Readiness, painter: Painter, *, columns: int | None = None
) -> list[str]:
    """The lines of text; whatever the server leaves out is shown as "-".

    columns: of the terminal, in which tables are folded; None where they may be of any width.
    """
    turns = _object(body.get("turns"))
    state = painter("ready", "green") if readiness.ready else painter("not ready", "yellow")
    parts = [
        painter(_text(body.get("model")), "bold"),
        state,
        f"up {_duration(body.get('uptime_s'))}",
        f"{_count(body.get('max_model_len'))} tokens per slot",
        f"{_count(turns.get('running'))} running",
        f"{_count(turns.get('waiting'))} waiting",
    ]
    lines = [" · ".join(parts)]
    if not readiness.ready:
        lines.append(painter(f"  {pointed(str(readiness))}", "yellow"))
    for ring in _objects(body.get("rings")):
        lines += ["", *_ring(ring, painter, columns)]
    return lines


def _ring(ring: Json, painter: Painter, columns: int | None) -> list[str]:
    narrow = columns is not None and columns < NARROW
    frames = f"{_count(ring.get('frames_in_flight'))}/{_count(ring.get('window_frames'))}"
    parts = [
        f"ring {_text(ring.get('name'))}",
        _state(ring.get("state"), painter),
        f"epoch {_text(ring.get('epoch'))}",
        "exact" if ring.get("exact") is True else "not exact" if "exact" in ring else "-",
        f"reuse {_switch(ring.get('reuse'))}",
        f"{frames} frames in flight",
        f"hop {_decimal(ring.get('hop_ms'), 2)} ms",
        f"model {_text(ring.get('fingerprint'))[:12]}",
    ]
    lines = [" · ".join(parts)]
    if ring.get("detail"):
        lines.append(f"  {_text(ring['detail'])}")
    stages = _objects(ring.get("stages"))
    if stages:
        header = ["stage", "layers", "state", "pid", "memory", "busy", "heard", "address"]
        shown = len(header) - narrow  # without the address
        told = [_stage(stage)[:shown] for stage in stages]
        lines += _table(header[:shown], told, stages, painter, columns)
    slots = _objects(ring.get("slots"))
    if slots:
        cells = NARROW_BAR_CELLS if narrow else BAR_CELLS
        header = ["slot", "resident", "", "turn", "idle", "kept", "session"]
        told = [_slot(slot, cells) for slot in slots]
        lines += _table(header, told, slots, painter, columns)
    lines += _parked(ring, painter, columns)
    evictions = _object(ring.get("evictions"))
    if evictions:
        counts = [f"{_count(count)} {reason}" for reason, count in evictions.items()]
        lines.append(f"  evictions: {', '.join(counts)}")
    return lines


def _parked(ring: Json, painter: Painter, columns: int | None) -> list[str]:
    parked = _objects(ring.get("parked"))
    if not parked:
        return []
    limit = ring.get("park_limit_rows")
    rows = [
        [
            _text(each.get("slot")),
            _count(each.get("resident")),
            _duration(each.get("idle_s")),
            _text(each.get("session")),
            _preview(each),
        ]
        for each in parked
    ]
    lines = _table(["parked", "rows", "idle", "session", ""], rows, parked, painter, columns)
    if "parked_rows" in ring:
        lines.append(f"  {_count(ring['parked_rows'])} of {_count(limit)} rows are parked")
    return lines


def _preview(item: Json) -> str:
    """The first words on one line, without characters that would steer the terminal."""
    text = str(item.get("preview") or "")
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _stage(stage: Json) -> list[str]:
    state = _text(stage.get("state"))
    progress = number(stage.get("progress"))
    if progress is not None and state == "loading":
        state += f" {progress:.0%}"
    if stage.get("detail") and state != "ready":
        state += f" ({_text(stage['detail'])})"
    return [
        _text(stage.get("name")),
        _layers(stage.get("layers")),
        state,
        _text(stage.get("pid")),
        _megabytes(stage.get("rss_bytes")),
        _percent(stage.get("busy_share")),
        _age(stage.get("heartbeat_age_s")),
        _text(stage.get("address")),
    ]


def _slot(slot: Json, cells: int) -> list[str]:
    resident, capacity = integer(slot.get("resident")) or 0, integer(slot.get("capacity")) or 0
    if slot.get("occupied") is True and "resident" not in slot:
        return [_text(slot.get("slot")), "another's", "", "-", "-", "-", "-"]
    kept_s = number(slot.get("kept_s"))
    return [
        _text(slot.get("slot")),
        bar(resident, capacity, cells),
        f"{resident:,}/{capacity:,}",
        _text(slot.get("turn")),
        _duration(slot.get("idle_s")) if resident else "-",
        _duration(kept_s) if kept_s else "-",
        " ".join(part for part in (_text(slot.get("session")), _preview(slot)) if part),
    ]


def bar(value: int, limit: int, cells: int = BAR_CELLS) -> str:
    """A bar of so many cells; any resident token shows, and only a full slot looks full."""
    if limit <= 0:
        return "·" * cells
    filled = min(cells, value * cells // limit)
    if value > 0:
        filled = max(1, filled)
    return "█" * filled + "·" * (cells - filled)


def _table(
    header: list[str],
    rows: list[list[str]],
    items: list[Json],
    painter: Painter,
    columns: int | None,
) -> list[str]:
    """Columns padded to their widest cell; the state's cell is painted after the padding."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for piece in pieces(widths, columns, len(INDENT)):
        lines.append(painter(INDENT + _padded(header, widths, piece), "dim"))
        for row, item in zip(rows, items, strict=True):
            cells = list(row)
            if "state" in item and "state" in header:
                at = header.index("state")
                cells[at] = painter(
                    row[at].ljust(widths[at]), STATE_STYLES.get(str(item["state"]), "bold")
                )
            lines.append(INDENT + _padded(cells, widths, piece))
    return lines


def _padded(row: list[str], widths: list[int], piece: list[int]) -> str:
    return (" " * GAP).join(row[column].ljust(widths[column]) for column in piece).rstrip()


def _state(value: object, painter: Painter) -> str:
    text = _text(value)
    return painter(text, STATE_STYLES.get(text, "bold"))


# ---- values that may be missing ------------------------------------------------------------------


def _object(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _objects(value: object) -> list[Json]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _layers(value: object) -> str:
    """[first, last) as the first and the last layer of a block, counted from 0."""
    if not isinstance(value, list) or len(value) != 2:
        return "-"
    first, last = integer(value[0]), integer(value[1])
    return "-" if first is None or last is None else f"{first}-{last - 1}"


def _text(value: object) -> str:
    return "-" if value is None or value == "" else str(value)


def _count(value: object) -> str:
    count = integer(value)
    return "-" if count is None else f"{count:,}"


def _decimal(value: object, digits: int) -> str:
    real = number(value)
    return "-" if real is None else f"{real:.{digits}f}"


def _age(value: object) -> str:
    real = number(value)
    return "-" if real is None else f"{real:.1f} s ago"


def _switch(value: object) -> str:
    return "on" if value is True else "off" if value is False else "-"


def _percent(value: object) -> str:
    real = number(value)
    return "-" if real is None else f"{real:.0%}"


def _megabytes(value: object) -> str:
    real = number(value)
    return "-" if real is None else f"{real / 1e6:,.0f} MB"


def _duration(value: object) -> str:
    seconds = number(value)
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"

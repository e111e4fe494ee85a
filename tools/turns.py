"""Owns how what turns cost is shown: the line under a reply, and the table of all of them.

Names and numbers are those of the page and of the response's `kvring` object (docs/api.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tools.client import Json, Reply, integer, number
from tools.conversation import Turn

if TYPE_CHECKING:
    from rich.table import Table

WIDE = 84  # columns from which the table has room for why reuse ended
NARROW = 72  # and with fewer, headings that are longer than their numbers take two lines
SHORTER = {"first token": "first\ntoken", "tokens/s": "tokens\n/s", "prefilled": "pre-\nfilled"}
COLUMNS = ("turn", "cached", "prefilled", "first token", "tokens/s", "drafts")
REASONS = {
    "new": "what follows is new",
    "edited": "another text stands there",
    "template": "the same text, in other tokens",
    "salt": "another cache salt",
    "evicted": "given up for another prompt",
    "replaced": "overwritten by another branch",
    "parked": "parked, and not brought back",
    "parked too long": "was parked for too long",
    "ttl": "given up after being idle",
    "request": "given up on request",
    "self-check": "given up for the self-check",
    "ring lost": "a stage lost it",
    "refused": "a stage refused it",
    "busy ring": "it is on a ring that was busy",
    "reuse off": "reuse was switched off",
}


def cost(reply: Reply) -> list[str]:
    """The parts of the line below a reply."""
    parts = []
    if reply.cached is not None or reply.prefilled is not None:
        parts = [f"cached {_count(reply.cached)}", f"prefilled {_count(reply.prefilled)}"]
    parts += [f"first token {_first(reply)}", f"{_rate(reply.tokens_per_s)} tokens/s"]
    if _drafts(reply.kvring) != "-":
        parts.append(f"drafts {_drafts(reply.kvring)}")
    if reply.stopped:
        parts.append("stopped")
    elif reply.finish_reason == "length":
        parts.append("cut at the longest reply")
    return parts


def table(turns: Sequence[Turn], columns: int) -> Table:
    """A row for each turn and one for all. columns: of the place where it is shown."""
    from rich.table import Table

    made = Table(
        box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", footer_style="dim"
    )
    made.show_footer = len(turns) > 1
    cached = sum(turn.reply.cached or 0 for turn in turns)
    prefilled = sum(turn.reply.prefilled or 0 for turn in turns)
    footers = ("all", _share(cached, prefilled), _count(prefilled), "", "", "")
    for name, footer in zip(COLUMNS, footers, strict=True):
        heading = name if columns >= NARROW else SHORTER.get(name, name)
        made.add_column(heading, footer, justify="right", no_wrap=True)
    wide = columns >= WIDE
    if wide:
        made.add_column("reuse ended", no_wrap=True, overflow="ellipsis")
    for index, turn in enumerate(turns, 1):
        reply = turn.reply
        cells = [
            f"again {index}" if turn.again else str(index),
            _count(reply.cached),
            _count(reply.prefilled),
            _first(reply),
            _rate(reply.tokens_per_s),
            _drafts(reply.kvring),
        ]
        made.add_row(*cells, *([_miss(reply.kvring)] if wide else []))
    return made


def _share(cached: int, prefilled: int) -> str:
    total = cached + prefilled
    return f"{_count(cached)} ({cached / total:.0%})" if total else "-"


def _first(reply: Reply) -> str:
    """Time to the first token: the server's number, else this client's."""
    told = number(reply.kvring.get("ttft_ms"))
    seen = None if reply.ttft_s is None else reply.ttft_s * 1e3
    return milliseconds(seen if told is None else told)


def milliseconds(value: float | None) -> str:
    """As the page says them."""
    if value is None:
        return "-"
    if value < 10:
        return f"{value:.1f} ms"
    return f"{value:.0f} ms" if value < 1000 else f"{value / 1e3:.{2 if value < 1e4 else 1}f} s"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _drafts(kvring: Json) -> str:
    accepted = integer(kvring.get("drafts_accepted")) or 0
    judged = accepted + (integer(kvring.get("drafts_rejected")) or 0)
    return f"{accepted:,}/{judged:,}" if judged else "-"


def _miss(kvring: Json) -> str:
    """Where reuse of what was resident ended, and why."""
    miss = kvring.get("miss")
    if not isinstance(miss, dict):
        return ""
    reason = str(miss.get("reason"))
    return f"at {_count(integer(miss.get('position')))}: {REASONS.get(reason, reason)}"

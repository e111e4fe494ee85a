"""Owns how the scheduler looks from outside: metrics by name, rings and slots as JSON values.

Reads only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from coord.actions import TurnError
from coord.http.engine import Resident
from coord.http.keys import SESSION_CHARS
from coord.ledger import Holding
from coord.ring import Phase, Ring
from coord.scheduler import Scheduler
from transport.config import Ring as RingSpec
from transport.frame import Heartbeat, Run
from transport.numbering import LinkCounts

FIRST_TOKENS = 24  # of a resident prefix, for GET /ring?preview=1
NOBODY = b"\0"  # no tenant's salt


def counters(scheduler: Scheduler) -> dict[str, float]:
    """Counters and gauges for GET /metrics, by name without prefix."""
    rings = list(scheduler.rings.values())
    slots = [slot for ring in rings for slot in ring.ledger.slots]
    rows = sum(ring.ledger.capacity * len(ring.ledger.slots) for ring in rings)
    totals = scheduler.totals
    found: dict[str, float] = {
        "num_requests_running": scheduler.running(),
        "num_requests_waiting": scheduler.waiting(),
        "kv_cache_usage_perc": sum(slot.resident for slot in slots) / rows if rows else 0.0,
        "frames_in_flight": sum(len(ring.in_flight) for ring in rings),
        "rings_ready": sum(ring.phase is Phase.READY for ring in rings),
        "rings_lost_total": sum(ring.stats.lost for ring in rings),
        "stale_verdicts_total": sum(ring.stats.stale for ring in rings),
        "rejects_total": sum(ring.stats.refused for ring in rings),
    }
    for field in fields(totals):
        found[f"{field.name}_total"] = getattr(totals, field.name)
    found["slots"] = len(slots)
    found["slots_occupied"] = sum(bool(slot.resident) for slot in slots)
    found["slot_rows"] = rows
    found["resident_rows"] = sum(slot.resident for slot in slots)
    for ring in rings:
        for stage in ring.spec.stages:
            where = f'{{ring="{ring.name}",stage="{stage.name}"}}'
            computed_us = ring.stats.forward_us.get(stage.name, 0)
            found[f"stage_busy_seconds_total{where}"] = computed_us / 1e6
        if ring.stats.hop_s is not None:
            found[f'hop_seconds{{ring="{ring.name}"}}'] = ring.stats.hop_s
    found["parked_prefixes"] = sum(len(ring.ledger.parked) for ring in rings)
    found["parked_rows"] = sum(_parked_rows(ring) for ring in rings)
    reasons: dict[str, int] = {}
    for ring in rings:
        for reason, count in ring.ledger.evictions.items():
            reasons[reason] = reasons.get(reason, 0) + count
    for reason, count in reasons.items():
        found[f'evictions_total{{reason="{reason}"}}'] = count
    return found


def link_counters(links: Sequence[LinkCounts]) -> dict[str, float]:
    """What the coordinator's links dropped, by reason, and which frames never came."""
    found: dict[str, float] = {
        f'frames_dropped_total{{reason="{reason}"}}': sum(getattr(link, field) for link in links)
        for reason, field in (
            ("undecodable", "undecodable"),
            ("local", "local"),
            ("duplicate", "duplicates"),
            ("stale", "stale"),
        )
    }
    found["frames_lost_total"] = sum(link.lost for link in links)
    return found


def describe_ring(ring: Ring, now: float) -> dict[str, object]:
    """One ring of GET /ring; now: seconds on the scheduler's clock."""
    kernels = {entry.name: entry.kernel for entry in ring.entries}
    return {
        "name": ring.name,
        "spare": ring.spec.spare,
        "state": ring.phase.value,
        "detail": ring.detail,
        "epoch": ring.epoch,
        "fingerprint": ring.fingerprint.hex(),
        "exact": ring.exact,
        "kernel": " | ".join(dict.fromkeys(kernels.values())),
        "reuse": ring.reuse,
        "frames_in_flight": len(ring.in_flight),
        "window_frames": ring.window,
        "frames": ring.stats.verdicts,
        "hop_ms": None if ring.stats.hop_s is None else round(ring.stats.hop_s * 1e3, 3),
        "stages": [
            {
                "name": stage.name,
                "address": stage.address,
                "layers": list(stage.layers),
                "kernel": kernels.get(stage.name, ""),
                "busy_share": ring.busy.get(stage.name),
                **beat(ring.heartbeats.get(stage.name), now),
                "forward_s": round(ring.stats.forward_us.get(stage.name, 0) / 1e6, 3),
                "wait_s": round(ring.stats.wait_us.get(stage.name, 0) / 1e6, 3),
            }
            for stage in ring.spec.stages
        ],
        "slots": [
            {**_describe_holding(index, slot, now), "capacity": ring.ledger.capacity}
            for index, slot in enumerate(ring.ledger.slots)
        ],
        "parked": [
            _describe_holding(index, parked, now) for index, parked in ring.ledger.parked.items()
        ],
        "parked_rows": _parked_rows(ring),
        "park_limit_rows": ring.ledger.park_rows,
        "evictions": dict(ring.ledger.evictions),
        "rates": {  # what routing predicts with, of the slowest stage
            "row_ms": round(ring.row_s * 1e3, 4) or None,
            "frame_ms": round(ring.frame_s * 1e3, 3) or None,
        },
    }


def idle_ring(scheduler: Scheduler, name: str, now: float) -> RingSpec:
    """The ring of that name, whose stages are there and which no turn uses. Raises TurnError."""
    ring = scheduler.rings.get(name)
    if ring is None:
        known = ", ".join(scheduler.rings)
        raise TurnError(404, "ring_not_found", f"no ring {name!r} here, only {known}", "ring")
    missing = ring.missing(now)
    if missing is not None:
        raise TurnError(503, "not_ready", f"ring {name}: {missing}")
    runs = sum(isinstance(record.frame, Run) for record in ring.in_flight.values())
    turns = scheduler.running() + scheduler.waiting()
    if turns or runs:
        text = f"busy with turns ({turns}): a ring is measured while none runs"
        raise TurnError(409, "ring_busy", text)
    return ring.spec


def holdings(ring: Ring) -> list[tuple[int, Holding]]:
    """Slots and parked prefixes with their numbers."""
    return [*enumerate(ring.ledger.slots), *ring.ledger.parked.items()]


def residents(scheduler: Scheduler, salts: Mapping[bytes, bytes]) -> list[Resident]:
    """Every slot and parked prefix. salts: whose rows a chain's are, by its root."""

    def salt(holding: Holding) -> bytes | None:
        """NOBODY should it have been forgotten."""
        if holding.turn is not None:
            return scheduler.turns[holding.turn].submit.salt
        if holding.chain is None:
            return NOBODY if holding.coming else None
        return salts.get(holding.chain.root, NOBODY)

    return [
        Resident(
            name,
            index,
            holding.resident,
            holding.turn is not None,
            index >= len(ring.ledger.slots),
            salt(holding),
            () if holding.chain is None else holding.chain.tokens(0, FIRST_TOKENS),
        )
        for name, ring in scheduler.rings.items()
        for index, holding in holdings(ring)
    ]


def _parked_rows(ring: Ring) -> int:
    return sum(parked.resident for parked in ring.ledger.parked.values())


def _describe_holding(index: int, holding: Holding, now: float) -> dict[str, object]:
    return {
        "slot": index,
        "resident": holding.resident,
        "turn": holding.turn,
        "idle_s": None if holding.turn is not None else round(now - holding.used, 1),
        "proven": holding.proven,
        "kept_s": round(max(0.0, holding.keep_until - now), 1),
        "session": holding.hint[:SESSION_CHARS] or None,
    }


def beat(heard: tuple[Heartbeat, float] | None, now: float) -> dict[str, object]:
    """What a stage last said of itself, and how long ago."""
    if heard is None:
        return {"state": "unknown", "progress": 0.0, "detail": "not heard of", "pid": None}
    said, at = heard
    return {
        "state": said.state.value,
        "progress": round(said.progress, 3),
        "detail": said.detail,
        "pid": said.pid,
        "rss_bytes": said.rss_bytes,
        "heartbeat_age_s": round(now - at, 1),
    }

"""Owns how a core's state is shown at the frame where a replay stopped: JSON values, and words."""

from __future__ import annotations

from typing import TypeGuard

from coord.inflight import InFlight
from coord.ring import Ring
from coord.scheduler import Scheduler
from coord.turn import Turn
from coord.view import holdings
from pipeline.stage import Stage
from tools.replay import words
from tools.replay.fresh import Core
from transport.chain import Chain

State = dict[str, object]
LAST = 8  # token ids shown of a prefix's end


def describe(core: Core, now: float) -> State:
    """The state as JSON values; now: of the last frame, on the recorder's monotonic clock."""
    return _stage(core) if isinstance(core, Stage) else _scheduler(core, now)


def in_words(state: State, depth: int = 0) -> list[str]:
    """The same as lines: an item's plain values on one line, its tables below it."""
    pad = "  " * depth
    plain = {name: value for name, value in state.items() if not _is_table(value)}
    lines = [f"{pad}{_flat(plain)}"] if plain else []
    for name, value in state.items():
        if _is_table(value):
            lines.append(f"{pad}{name.replace('_', ' ')}:")
            for each in value:
                lines += in_words(each, depth + 1)
    return lines


def _is_table(value: object) -> TypeGuard[list[State]]:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _flat(value: object) -> str:
    if isinstance(value, dict):
        shown = {name: each for name, each in value.items() if each not in (None, [], "")}
        return ", ".join(f"{name.replace('_', ' ')} {_flat(each)}" for name, each in shown.items())
    if isinstance(value, list):
        return f"<{' '.join(map(str, value))}>"
    return str(value)


def _scheduler(core: Scheduler, now: float) -> State:
    return {
        "turns": [_turn(turn) for turn in core.turns.values()],
        "rings": [_ring(ring, now) for ring in core.rings.values()],
    }


def _ring(ring: Ring, now: float) -> State:
    return {
        "ring": ring.name,
        "state": ring.phase.value,
        "detail": ring.detail,
        "epoch": ring.epoch,
        "window": ring.window,
        "in_flight": [_flying(each, now) for each in ring.in_flight.values()],
        "ledger": _ledger(ring),
    }


def _turn(turn: Turn) -> State:
    return {
        "turn": turn.id,
        "state": turn.phase.value,
        "ring": turn.ring,
        "slot": turn.slot,
        "prompt": len(turn.submit.prompt),
        "committed": turn.committed,
        "budget": turn.budget,
        "sent": turn.sent,
        "in_flight": turn.in_flight,
        "drafts": turn.pending,
        "last_tokens": [] if turn.chain is None else _end(turn.chain.tokens(0, turn.known)),
    }


def _flying(record: InFlight, now: float) -> State:
    return {"frame": words.of_frame(record.frame), "for_s": round(now - record.sent_at, 4)}


def _ledger(ring: Ring) -> list[State]:
    return [
        {
            "slot": index,
            "resident": holding.resident,
            "turn": holding.turn,
            "hash": None if holding.chain is None else _hash(holding.chain),
            "last_tokens": [] if holding.chain is None else _end(holding.chain.tokens()),
        }
        for index, holding in holdings(ring)
    ]


def _hash(chain: Chain) -> str:
    return chain.hash_before(len(chain)).hex()[:8]


def _stage(core: Stage) -> State:
    table = core.slots
    running = core.running
    return {
        "stage": core.name,
        "epoch": core.epoch,
        "dropped": core.dropped,
        "running": None if running is None else words.of_frame(running),
        "slots": [
            {
                "slot": slot,
                "rows": table.length(slot),
                "last_tokens": _end(table.tokens(slot)),
            }
            for slot in range(len(table))
        ],
        "parked": [{"parked": each, "rows": len(table.tokens(each))} for each in table.parked],
    }


def _end(tokens: tuple[int, ...]) -> list[int]:
    return list(tokens[-LAST:])

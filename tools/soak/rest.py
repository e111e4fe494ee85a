"""Owns what must hold once nobody asks any more: no turn, no held slot, and true ledger claims."""

from __future__ import annotations

from tools.client import Json


def at_rest(ring: Json) -> list[str]:
    """What GET /ring says is still going on; [] at rest."""
    found = [f"{count} turns {state}" for state, count in ring["turns"].items() if count]
    for each in ring["rings"]:
        for slot in each["slots"]:
            if slot["turn"] is not None:
                found.append(
                    f"slot {slot['slot']} of {each['name']} is held by turn {slot['turn']}"
                )
        if each["frames_in_flight"]:
            found.append(f"{each['frames_in_flight']} frames in flight on {each['name']}")
    return found


def claims(ring: Json) -> dict[tuple[str, int], int]:
    """Rows that the ledgers claim: (ring, slot or parked prefix) -> rows."""
    return {
        (each["name"], holding["slot"]): holding["resident"]
        for each in ring["rings"]
        for holding in (*each["slots"], *each["parked"])
        if holding["resident"]
    }


def beyond_bounds(ring: Json) -> list[str]:
    """Claims that cannot be true: more rows than there is room for."""
    found = []
    for each in ring["rings"]:
        for slot in each["slots"]:
            if slot["resident"] > slot["capacity"]:
                found.append(f"slot {slot['slot']} of {each['name']}: {slot['resident']} rows")
        if each["parked_rows"] > each["park_limit_rows"]:
            found.append(f"{each['name']} parks {each['parked_rows']} rows, more than it may")
    return found


def refuted(before: Json, after: Json) -> list[str]:
    """Claims that the stages did not confirm to a coordinator that started anew.

    after: that coordinator's GET /ring; its claims were written down by the one before, and proven
    by every stage's chain hashes in a roll call.
    """
    proven = claims(after)
    return [
        f"slot {slot} of {ring}: {rows} rows claimed, {proven.get((ring, slot), 0)} proven"
        for (ring, slot), rows in claims(before).items()
        if proven.get((ring, slot), 0) != rows
    ]

"""Owns the judgement of a roll call: whether the stages make one whole ring, and what it holds."""

from __future__ import annotations

from collections.abc import Mapping

from coord.ledger import Holding, Ledger
from transport.codec import MAX_SLOTS
from transport.config import Limits, Ring
from transport.frame import Claim, RollCall, StageEntry


def claims(held: Mapping[int, Holding]) -> tuple[Claim, ...]:
    """What the stages are asked to confirm."""
    chains = ((number, each.chain) for number, each in held.items())
    return tuple(
        Claim(number, len(chain), chain.hash_before(len(chain)))
        for number, chain in chains
        if chain is not None
    )


def renewed(
    ledger: Ledger, held: Mapping[int, Holding], call: RollCall, reason: str
) -> tuple[Ledger, list[int]]:
    """The ledger after a roll call: of `held`, what every stage confirmed. The rest is lost.

    Also the parked numbers among the lost: stages before the one that struck them out keep them.
    """
    first = call.entries[0]
    park_rows = min(
        entry.park_bytes // entry.row_bytes if entry.row_bytes else 0 for entry in call.entries
    )
    fresh = ledger.emptied(first.slots, first.capacity, park_rows)
    confirmed = dict.fromkeys(call.claims)
    kept = [claim.number for claim in claims(held) if claim in confirmed]
    kept = [number for number in kept if fresh.adopt(number, held[number])]
    stays = dict.fromkeys(kept)
    lost = {n: each.chain for n, each in held.items() if n not in stays and each.chain is not None}
    for chain in lost.values():
        fresh.lose(chain, reason)
    return fresh, [number for number in lost if number >= first.slots]


def faults(
    entries: tuple[StageEntry, ...], ring: Ring, limits: Limits, vocabulary: int
) -> str | None:
    """Why these stages are no ring, in words that name them; None when they are one.

    entries: in the order in which the roll call met them. vocabulary: ids the tokenizer may give.
    """
    expected = [stage.name for stage in ring.stages]
    if [entry.name for entry in entries] != expected:
        return f"the roll call met {[entry.name for entry in entries]}, not {expected}"
    first = entries[0]
    at = 0
    for entry, stage in zip(entries, ring.stages, strict=True):
        if entry.layers != tuple(stage.layers):
            return f"stage {entry.name} runs layers {entry.layers}, not {stage.layers}"
        if entry.layers[0] != at:
            return f"stage {entry.name} begins at layer {entry.layers[0]}, not {at}"
        at = entry.layers[1]
        if entry.fingerprint != first.fingerprint or entry.layers_total != first.layers_total:
            return (
                f"stages {first.name} and {entry.name} have different weights or precision "
                f"({first.fingerprint.hex()[:12]} {first.kernel}, "
                f"{entry.fingerprint.hex()[:12]} {entry.kernel})"
            )
        if (entry.slots, entry.capacity) != (first.slots, first.capacity):
            return (
                f"stage {first.name} has {first.slots} slots of {first.capacity} rows, "
                f"{entry.name} has {entry.slots} of {entry.capacity}"
            )
    if not 1 <= first.slots <= MAX_SLOTS:
        return (
            f"stage {first.name} says that it has {first.slots} slots: 1 to {MAX_SLOTS} are legal"
        )
    if first.capacity < limits.max_model_len:
        return f"slots of {first.capacity} rows, max_model_len {limits.max_model_len}"
    if first.vocabulary < vocabulary:
        return f"a model of {first.vocabulary} tokens, the tokenizer has {vocabulary}"
    if at != first.layers_total:
        return f"the last stage ends at layer {at}, the model has {first.layers_total}"
    return None

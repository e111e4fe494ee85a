"""Owns whose key opens which link of a ring: a stage trusts the process before it and no other.

    coordinator -> head -> ... -> tail -> coordinator, and every stage's heartbeats -> coordinator

Knows no socket and reads no file.
"""

from __future__ import annotations

from dataclasses import dataclass

from transport.config import Config, Ring, Stage
from transport.keys import Security


@dataclass(frozen=True, slots=True)
class StageTrust:
    """A stage's links: its frames come in, go out, and its heartbeats go to the coordinator."""

    incoming: Security
    outgoing: Security
    control: Security


@dataclass(frozen=True, slots=True)
class CoordinatorTrust:
    """The coordinator's links by ring: verdicts and heartbeats come in, frames go to the head."""

    verdicts: dict[str, Security]
    heads: dict[str, Security]


def stage_trust(config: Config, ring: Ring, stage: Stage, secret: str) -> StageTrust:
    """The links of a stage of a configuration with keys; secret: the stage's own."""
    own = _given(stage.public_key)
    coordinator = _given(config.coordinator.public_key)
    keys = [coordinator, *(_given(each.public_key) for each in ring.stages), coordinator]
    place = 1 + ring.stages.index(stage)
    return StageTrust(
        incoming=Security(own, secret, allowed=(keys[place - 1],)),
        outgoing=Security(own, secret, server_key=keys[place + 1]),
        control=Security(own, secret, server_key=coordinator),
    )


def coordinator_trust(config: Config, secret: str) -> CoordinatorTrust:
    """The links of the coordinator of a configuration with keys; secret: its own."""
    own = _given(config.coordinator.public_key)
    verdicts, heads = {}, {}
    for ring in config.rings:
        stages = tuple(_given(stage.public_key) for stage in ring.stages)
        verdicts[ring.name] = Security(own, secret, allowed=stages)
        heads[ring.name] = Security(own, secret, server_key=stages[0])
    return CoordinatorTrust(verdicts, heads)


def _given(key: str | None) -> str:
    assert key is not None, "keys for all or for nobody: transport.config has checked it"
    return key

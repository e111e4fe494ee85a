"""Owns the choice of a stage's model: the toy, or a torch block from files."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.model import StageModel, ToyModel
from transport.config import TOY, Config, Ring, Stage

TOY_LAYERS = 6
TOY_CONTEXT = 4096


def load_model(
    config: Config,
    ring: Ring,
    spec: Stage,
    device: str,
    progress: Callable[[float, str], None],
) -> StageModel:
    """The block that `spec` names. Raises ModelError naming what is wrong with the files."""
    limits = config.limits
    if config.model.path == TOY:
        return ToyModel(
            spec.layers, ring.layers_total, slots=limits.slots, capacity=limits.max_model_len
        )
    raise NotImplementedError

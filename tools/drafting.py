"""Owns the draft model's loading: checks that it speaks the served model's tokens, and wraps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coord.drafting import DraftModel
from coord.tokenizer import load_tokenizer
from pipeline.load import describe_model, load_model, vocabulary_of
from pipeline.model import ModelError, StageModel
from transport.config import Config, Model, Ring, Stage
from transport.frame import Kind, Segment


class WholeModel:
    """All layers of a StageModel as coord.drafting's DraftModel."""

    def __init__(self, model: StageModel) -> None:
        assert model.info.head, model.info
        assert model.info.tail, model.info
        self._model = model

    @property
    def slots(self) -> int:
        """See DraftModel."""
        return self._model.info.slots

    @property
    def capacity(self) -> int:
        """See DraftModel."""
        return self._model.info.capacity

    def pick(self, slot: int, start: int, tokens: Sequence[int]) -> int:
        """See DraftModel."""
        segment = Segment(0, slot, start, tuple(tokens), Kind.VERIFY, b"", 1)
        return self._model.forward([segment], None).results[0].tokens[0]


def load_draft_model(config: Config, vocabulary: int) -> tuple[DraftModel, int]:
    """The model at [coordinator] draft_model, and how many token ids the served model has.

    vocabulary: of the served model's tokenizer. Raises ModelError where the two differ in size.
    """
    path = config.coordinator.draft_model
    assert path is not None, config.coordinator
    try:
        theirs = load_tokenizer(path).vocabulary
    except (ValueError, OSError) as error:
        raise ModelError(f"draft model {path}: {error}") from None
    for what, mine, draft in (
        ("tokenizer", vocabulary, theirs),
        ("vocabulary", vocabulary_of(config.model.path), vocabulary_of(path)),
    ):
        if mine != draft:
            text = f"its {what} has {draft} tokens and the served model's {mine}"
            raise ModelError(f"draft model {path}: {text}; it must be a model of the same family")
    layers, context = describe_model(path)
    ring = config.rings[0]
    spec = Stage("draft", "", (0, layers), threads=ring.head.threads, kernels=ring.head.kernels)
    limits = replace(
        config.limits,
        slots=config.limits.slots * len(config.rings),
        max_model_len=min(config.limits.max_model_len, context),
    )
    # exact: what it proposes must not depend on what its slots held before
    own = Config(
        Model(path, "draft", config.model.dtype), (Ring("draft", "", (spec,)),), limits=limits
    )
    made = load_model(own, own.rings[0], spec, "cpu", lambda _share, _what: None)
    return WholeModel(made), vocabulary_of(config.model.path)

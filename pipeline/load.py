"""Owns the choice of a stage's model: the toy, or a torch block from files.

torch is imported only where a file is opened, so that a toy ring starts at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.model import ModelError, StageModel, ToyModel
from transport.config import TOY, Config, Ring, Stage

TOY_LAYERS = 6
TOY_CONTEXT = 4096
TOY_VOCABULARY = 256


def load_model(
    config: Config,
    ring: Ring,
    spec: Stage,
    device: str,
    progress: Callable[[float, str], None],
) -> StageModel:
    """The block that `spec` names, on `device`. Raises ModelError naming what is wrong.

    progress is called with (share done in [0, 1], what is being done).
    """
    limits = config.limits
    if config.model.path == TOY:
        progress(1.0, "the toy needs no file")
        return ToyModel(
            spec.layers, ring.layers_total, slots=limits.slots, capacity=limits.max_model_len
        )
    progress(0.0, "importing torch")
    from pipeline.torch_model import DTYPES, TorchModel
    from pipeline.weights import open_model

    check_device(device)
    progress(0.0, f"opening {Path(config.model.path).name}")
    try:
        return TorchModel(
            open_model(config.model.path),
            spec.layers,
            slots=limits.slots,
            capacity=limits.max_model_len,
            dtype=DTYPES[config.model.dtype],
            device=device,
            exact=config.model.exact,
            threads=spec.threads,
            progress=progress,
        )
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"not enough memory on {device} for layers [{spec.layers[0]}, {spec.layers[1]}) with "
            f"{limits.slots} slots of {limits.max_model_len} rows"
        ) from error


def check_device(device: str) -> None:
    """ModelError where torch cannot compute on that device, before anything is read."""
    import torch

    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise ModelError(f"device {device}: torch knows none of that name (cpu, cuda:0)") from None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted.type == "cuda" and (wanted.index or 0) >= count:
        raise ModelError(
            f"device {device}: this installation of torch ({torch.__version__}) sees {count} GPUs"
        )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch failed for want of memory; on a CPU it says so in words alone."""
    import torch

    words = ("can't allocate memory", "not enough memory")
    return isinstance(error, torch.OutOfMemoryError) or any(each in str(error) for each in words)


def describe_model(path: str) -> tuple[int, int]:
    """Layers and longest context (tokens) of a model; loads no weights. Raises ModelError."""
    if path == TOY:
        return TOY_LAYERS, TOY_CONTEXT
    from pipeline.weights import open_model

    source = open_model(path)
    return source.layers_total, int(source.config.max_position_embeddings)


def vocabulary_of(path: str) -> int:
    """How many token ids a model has; loads no weights. Raises ModelError."""
    if path == TOY:
        return TOY_VOCABULARY
    from pipeline.weights import open_model

    return open_model(path).vocabulary

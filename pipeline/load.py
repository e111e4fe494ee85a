"""Owns the choice of a stage's model: the toy, or a torch block from files.

torch is imported only where a file is opened, so that a toy ring starts at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.model import ModelError, StageModel, ToyModel
from transport.config import HUB, TOY, Config, Ring, Stage

if TYPE_CHECKING:
    from pipeline.weights import Source

TOY_LAYERS = 6
TOY_CONTEXT = 4096
TOY_VOCABULARY = 256
FETCHED = 0.5  # of the progress, where files are fetched first


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

    check_device(device)
    progress(0.0, f"opening {config.model.path}")
    source, progress = _open(config.model.path, spec.layers, progress)
    try:
        return TorchModel(
            source,
            spec.layers,
            slots=limits.slots,
            capacity=limits.max_model_len,
            dtype=DTYPES[config.model.dtype],
            weights=config.model.weights,
            activations=config.model.activations,
            kv=config.model.kv,
            device=device,
            exact=config.model.exact,
            threads=spec.threads,
            progress=progress,
        )
    except (RuntimeError, MemoryError) as error:
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


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Whether there was no room; torch on a CPU says so in words alone."""
    import torch

    words = ("can't allocate memory", "not enough memory")
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or any(each in str(error) for each in words)


def _open(
    path: str, layers: tuple[int, int], progress: Callable[[float, str], None]
) -> tuple[Source, Callable[[float, str], None]]:
    """The model, and where to report from here on: the second half, if its shards were fetched."""
    from pipeline.weights import open_model

    if not path.startswith(HUB):
        return open_model(path), progress
    from pipeline.hub import fetch, fetch_small, find
    from pipeline.safetensors_dir import SafetensorsSource, shards_of

    repository = find(path)
    folder = fetch_small(repository)
    wanted = shards_of(folder, layers)
    fetch(repository, wanted, lambda share, what: progress(share * FETCHED, what))
    source = SafetensorsSource(folder, revision=repository.commit, layers=layers)
    return source, lambda share, what: progress(FETCHED + share * (1 - FETCHED), what)


def describe_model(path: str) -> tuple[int, int]:
    """Layers and longest context (tokens) of a model; loads no weights. Raises ModelError."""
    if path == TOY:
        return TOY_LAYERS, TOY_CONTEXT
    source = described(path)
    return source.layers_total, source.context


def vocabulary_of(path: str) -> int:
    """How many token ids a model has; loads no weights. Raises ModelError."""
    return TOY_VOCABULARY if path == TOY else described(path).vocabulary


def described(path: str) -> Source:
    """A model whose weights nobody will read; of a hub's, only the small files are fetched."""
    from pipeline.weights import open_model

    if not path.startswith(HUB):
        return open_model(path)
    from pipeline.safetensors_dir import SafetensorsSource

    folder = Path(text_path(path))
    return SafetensorsSource(folder, revision=folder.name, layers=(0, 0))


def text_path(path: str) -> str:
    """Where a tokenizer reads a model's files; a hub's small ones are fetched. ModelError."""
    if not path.startswith(HUB):
        return path
    from pipeline.hub import fetch_small, find

    return str(fetch_small(find(path)))


def pinned(path: str) -> str:
    """A hub's model with the commit that its name means now, so that all stages have the same."""
    if not path.startswith(HUB):
        return path
    from pipeline.hub import find

    return find(path).path

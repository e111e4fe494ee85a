"""Owns the options of the command line that are long to say: their types, bounds and help."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tools.errors import USAGE, ToolError


class Dtype(StrEnum):
    """Precision of weights and KV rows."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT16 = "float16"


class WeightKind(StrEnum):
    """How the weights of the layers' linears are held."""

    DTYPE = "dtype"
    INT8 = "int8"
    INT4 = "int4"


class KernelKind(StrEnum):
    """What a stage computes with on a CPU."""

    AUTO = "auto"
    TORCH = "torch"
    NATIVE = "native"


class ActivationKind(StrEnum):
    """How rows go from stage to stage."""

    DTYPE = "dtype"
    FP8 = "fp8"


class KvKind(StrEnum):
    """How keys and values lie in the slots."""

    DTYPE = "dtype"
    INT8 = "int8"
    FP8 = "fp8"


class DrafterKind(StrEnum):
    """How next tokens are guessed ahead."""

    OFF = "off"
    LOOKUP = "lookup"
    MODEL = "model"


class Payloads(StrEnum):
    """How much of the activations a frame log keeps."""

    NONE = "none"
    DIGEST = "digest"
    FULL = "full"


class On(StrEnum):
    """Where the stages of `kvring up` run."""

    HERE = "here"
    RAY = "ray"


class RayPlacing(StrEnum):
    """How Ray chooses nodes."""

    SPREAD = "spread"
    PACK = "pack"


RunOn = Annotated[On, typer.Option("--on", help="Where the stages run: docs/ray.md.")]
RayAddress = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="The cluster [default: the one this machine is in]."),
]
RayPlace = Annotated[
    RayPlacing | None,
    typer.Option(help="Over many nodes or on few [default: spread]."),
]
RayGpus = Annotated[
    int | None,
    typer.Option(min=0, max=1, help="Per stage [default: 1 where the cluster has enough]."),
]
RayCpus = Annotated[float | None, typer.Option(min=0.01, help="Per stage [default: 1].")]
RayWait = Annotated[
    float | None, typer.Option(min=1, help="For the cluster to have room [default: 60].")
]
DEFAULT_URL = "http://127.0.0.1:8000"
Http = Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the HTTP API listens.")]
ApiKey = Annotated[str | None, typer.Option(metavar="KEY", help="Bearer token of the HTTP API.")]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="API keys, one NAME:KEY or NAME:HASH a line; see apikey."),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Let other machines reach it without keys.")
]
State = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|off",
        help="What is resident, kept for a restart [default: .kvring/NAME.sqlite beside --ring].",
    ),
]
WithParent = Annotated[
    bool, typer.Option("--with-parent", hidden=True, help="End when standard input ends.")
]
Record = Annotated[Path | None, typer.Option(metavar="DIR", help="Write frame logs there.")]
RecordPayloads = Annotated[Payloads, typer.Option(help="What the logs keep of activations.")]
RingFile = Annotated[Path, typer.Option(metavar="FILE", help="ring.toml of this ring.")]
Url = Annotated[str, typer.Option(metavar="URL", help="The kvring server.")]
Model = Annotated[
    str,
    typer.Option(
        metavar="NAME|DIR|FILE.gguf|hf://ORG/NAME", help='Model to serve; "toy" needs no file.'
    ),
]
Stages = Annotated[int, typer.Option(min=1, max=256, help="Stage processes.")]
Slots = Annotated[int, typer.Option(min=1, help="Conversations kept resident.")]
MaxModelLen = Annotated[
    int | None, typer.Option(min=1, help="Tokens per slot [default: what the model allows].")
]
Precision = Annotated[Dtype, typer.Option(help="Precision of weights and KV.")]
Weights = Annotated[
    WeightKind, typer.Option(help="Of the layers' linears: as --dtype, or smaller.")
]
Activations = Annotated[
    ActivationKind, typer.Option(help="Between stages: as --dtype, or 1 byte a number.")
]
Kernels = Annotated[
    KernelKind, typer.Option(help="On a CPU: native ones are compiled once, else torch's.")
]
Kv = Annotated[
    KvKind, typer.Option(help="Rows in slots: as --dtype, or 1 byte a number for twice the rows.")
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Per stage [default: its share of the cores, or 2].")
]
Drafter = Annotated[DrafterKind, typer.Option(help="How next tokens are guessed ahead.")]
DraftModel = Annotated[
    str | None,
    typer.Option(metavar="NAME|DIR|FILE.gguf", help="The small model of --drafter model."),
]
Rings = Annotated[int, typer.Option(min=1, max=64, help="Rings; each holds the whole model.")]
ParkMb = Annotated[
    int, typer.Option(min=0, help="Host memory (MB) per stage for evicted conversations.")
]
IdleTtl = Annotated[
    float, typer.Option(min=0.0, help="Free what nobody used for so long; 0 for never.")
]
VerifyShare = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Warm turns run again cold when idle.")
]
ServedModelName = Annotated[
    str | None, typer.Option(metavar="NAME", help="Model name in the API [default: --model].")
]
Delay = Annotated[
    float, typer.Option(min=0, max=60_000, help="Every link takes so much longer, one way.")
]
Jitter = Annotated[
    float, typer.Option(min=0, max=60_000, help="And up to so much more, at random.")
]
Mbit = Annotated[
    float, typer.Option(min=0, max=1e6, help="Every link carries so much, 0 for no limit.")
]
DraftDepth = Annotated[
    int | None, typer.Option(min=1, max=64, hidden=True, help="Verify frames in flight.")
]
DraftTokens = Annotated[
    int | None, typer.Option(min=0, max=64, hidden=True, help="Drafts of one frame.")
]


def check_ring(path: Path) -> None:
    """ToolError where --ring names no file."""
    if path.is_dir():
        said = f"--ring {path}: is a directory, not a ring.toml"
        inside = path / "ring.toml"
        raise ToolError(f"{said}: --ring {inside}?" if inside.is_file() else said, code=USAGE)
    if not path.is_file():
        raise ToolError(f"--ring {path}: no such file", code=USAGE)

"""Owns a mixture's experts and its router, computed so that a row's bits are its own.

The library's layer calls both; the router is the library's own, eight rows at a time, and so is the
experts' gate. Only their products are ours: a row goes through each of its experts in calls that
pipeline.kernels has probed, whichever other rows the same expert got. Knows no file and no slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.kernels import MAX_SHARE, ROWS, Kernels, in_vectors, padded
from pipeline.linears import Linear

Read = Callable[[str], Tensor]


def is_experts(module: nn.Module) -> bool:
    """True for the library's stacked experts (what its use_experts_implementation decorates)."""
    return hasattr(module, "is_transposed") and hasattr(module, "gate_up_proj")


def is_router(module: nn.Module) -> bool:
    """True for the library's routers; they share no base class, but how their names end."""
    return type(module).__name__.endswith("TopKRouter")


def expert_shapes(experts: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one expert's tensors, [out, in] and [out]."""
    up, down = experts.gate_up_proj.shape[1:], experts.down_proj.shape[1:]
    if experts.is_transposed:
        up, down = reversed(up), reversed(down)
    shapes = {"gate_up_proj.weight": tuple(up), "down_proj.weight": tuple(down)}
    if experts.has_bias:
        biases = {name: (shape[0],) for name, shape in shapes.items()}
        shapes |= {name.replace("weight", "bias"): shape for name, shape in biases.items()}
    return shapes


class Experts(nn.Module):
    """In the place of the library's experts. rows: how many of the next call's count; others get 0.

    library: that module, on the meta device: only its gate is used. read: a tensor by its name
    below this module, see pipeline.tensors.
    """

    def __init__(self, library: Any, read: Read, kernels: Kernels) -> None:
        super().__init__()
        self.rows: int | None = None
        if hasattr(library, "act_fn"):
            library.act_fn = Activation(library.act_fn)
        self._gate = library._apply_gate
        self._exact = kernels.exact
        self._up: list[Linear] = []
        self._down: list[Linear] = []
        for index in range(library.num_experts):
            for name, linears in (("gate_up_proj", self._up), ("down_proj", self._down)):
                bias = read(f"{index}.{name}.bias") if library.has_bias else None
                linears.append(Linear(read(f"{index}.{name}.weight"), bias, kernels))
        for name in [name for name, _ in library.named_parameters(recurse=False)]:
            delattr(library, name)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Hidden [rows, in]; chosen (expert numbers) and weights [rows, k] -> [rows, in]."""
        counted = chosen if self.rows is None else chosen[: self.rows]
        made = hidden.new_zeros(*chosen.shape, hidden.shape[1])
        for expert in torch.unique(counted).tolist():
            row, place = torch.where(counted == expert)
            x = hidden[row]
            if self._exact:
                x = nn.functional.pad(x, (0, 0, 0, padded(len(row), ROWS) - len(row)))
            inner = self._up[expert](x[None])
            # gpt_oss's gate has no module to put in_vectors into: so few that one thread does them
            few = max(ROWS, MAX_SHARE // inner.shape[-1] // ROWS * ROWS)
            gated = torch.cat([self._gate(part) for part in torch.split(inner, few, 1)], 1)
            y = self._down[expert](gated)[0, : len(row)]
            made[row, place] = (y * weights[row, place, None]).to(hidden.dtype)
        total = made[:, 0]
        for other in range(1, made.shape[1]):  # in the order of the row's own choice
            total = total + made[:, other]
        return total


class Activation(nn.Module):
    """The library's activation; an element's bits are its own, see in_vectors."""

    def __init__(self, library: nn.Module) -> None:
        super().__init__()
        self.library = library

    def forward(self, values: Tensor) -> Tensor:
        """Any shape -> the same."""
        return in_vectors(self.library, values)


class Router(nn.Module):
    """The library's router, eight rows at a time.

    A plain product in float32 differs by how many there are.
    """

    def __init__(self, library: nn.Module) -> None:
        super().__init__()
        self.library = library

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """[rows, in], rows a multiple of 8 -> what the library's gives, its rows in order."""
        hidden = hidden.reshape(-1, hidden.shape[-1])
        parts = [self.library(part) for part in torch.split(hidden, ROWS)]
        return tuple(torch.cat(each) for each in zip(*parts, strict=True))

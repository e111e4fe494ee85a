"""Owns a fused layer as one call of the native kernels; knows no slot, no frame and no file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pipeline.attention import Plan
from pipeline.fused import Fused, suits
from pipeline.kernels import PLAIN, Kernels
from pipeline.linears import Linear
from pipeline.native.library import Heads, Layer, Library, Step


class Native(Fused):
    """A library's decoder layer, consumed, for the models that `suits_native` finds.

    Its arithmetic is the library's, rounded to the dtype where that rounds, but for the rotary
    embedding, which rounds once, and what is inside of attention.
    """

    paired = True

    def __init__(self, layer: Any, kernels: Kernels) -> None:
        super().__init__(layer, kernels)
        assert kernels.native is not None
        self._native = kernels.native
        heads = Heads(self.heads, self.groups, self.size, 0, self.window or 0, None, self.scaling)
        norms = (self.norm, self.norm_2, *(self.head_norms or (None, None)))
        linears = (self.qkv, self.out, self.gate_up, self.down)
        self._layer = Layer(
            heads,
            _weight(self.out).outputs,
            self.width,
            self.norm.eps,
            *(each and each.weight.data_ptr() for each in norms),
            *(_weight(each) for each in linears),
        )

    def forward(
        self, hidden: Tensor, *, position_embeddings: tuple[Tensor, Tensor], plan: Plan
    ) -> Tensor:
        """hidden: [1, rows, width], overwritten; position_embeddings: as Fused's."""
        keys, values = plan.caches[self.index]
        self._layer.heads.capacity = keys.shape[2]
        table = plan.table()
        cos, sin = (each.contiguous() for each in position_embeddings)
        step = Step(
            hidden.shape[1],
            len(table),
            table.data_ptr(),
            hidden.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
        )
        self._native.layer(self._layer, step, hidden.itemsize)
        return hidden


def suits_native(family: Any, config: Any, dtype: torch.dtype, native: Library) -> bool:
    """fused.suits of Native layers: in float32, where mistakes show, and in the model's dtype."""
    kernels = replace(PLAIN, exact=True, native=native)
    return all(
        suits(family, config, lambda layer: Native(layer, kernels), each)
        for each in {torch.float32, dtype}
    )


def _weight(linear: Linear) -> Any:
    assert linear.weight is not None
    return linear.weight.packed

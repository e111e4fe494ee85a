"""Owns a decoder layer with fewer and larger operations than the library's, where both agree.

Queries, keys and values are one product, gate and up another; the norms are one pass. It takes the
place of layers whose modules are those of a llama (also mistral, qwen2, qwen3), and only of models
for which `suits` found it equal to the library's own layer: that one stays the definition. Knows no
slot, no frame and no file.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.attention import ATTENTION, Part, Plan, attention
from pipeline.kernels import KEYS, PLAIN, ROWS, Kernels, in_vectors, spans
from pipeline.linears import Linear

# of the largest value: of 12 roundings; in float32 a wrong detail is 1e-2 and more
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
Make = Callable[[Any], nn.Module]
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PRODUCTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


class Norm(nn.Module):
    """RMS norm (Zhang and Sennrich 2019) of [..., width], as the library's but in 7 passes, not 9.

    Only operations that round once per element: a row's bits can't depend on where a thread's or a
    vector's share of the rows ends, which a fused multiply-add in some shares would make them.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self.scale = float(weight.shape[0]) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        size = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
        size.mul_(self.scale).square_().add_(self.eps).rsqrt_()
        out = torch.empty_like(x)
        torch.mul(x, size, out=out)
        return out.mul_(self.weight)


class Fused(nn.Module):
    """A library's decoder layer, consumed, as `suits` describes it.

    Called like it, with the forward's `plan`.
    """

    paired = False  # the weights of gate and up alternate, as native kernels take them

    def __init__(self, layer: Any, kernels: Kernels) -> None:
        super().__init__()
        attn, mlp = layer.self_attn, layer.mlp
        self.index: int = attn.layer_idx
        self.scaling: float = attn.scaling
        self.window: int | None = _window(attn)
        self.size: int = attn.head_dim
        self.heads = attn.q_proj.out_features // self.size
        self.groups = attn.k_proj.out_features // self.size
        self.width: int = mlp.gate_proj.out_features
        self.norm, self.norm_2 = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.head_norms: tuple[Norm, Norm] | None = None
        if hasattr(attn, "q_norm"):
            self.head_norms = _norm(attn.q_norm), _norm(attn.k_norm)
        self.act = mlp.act_fn
        self.exact = kernels.exact
        self.qkv = _product(attn, ("q_proj", "k_proj", "v_proj"), kernels)
        self.out = _product(attn, ("o_proj",), kernels)
        self.gate_up = _product(mlp, ("gate_proj", "up_proj"), kernels, paired=self.paired)
        self.down = _product(mlp, ("down_proj",), kernels)

    def forward(
        self, hidden: Tensor, *, position_embeddings: tuple[Tensor, Tensor], plan: Plan
    ) -> Tensor:
        """hidden: [1, rows, width] -> the same; position_embeddings: two of [1, rows, head_dim]."""
        rows = hidden.shape[1]
        qkv = self.qkv(self.norm(hidden)).view(rows, -1, self.size)
        turning = qkv[:, : self.heads + self.groups]
        if self.head_norms is not None:
            for norm, part in zip(
                self.head_norms, (turning[:, : self.heads], turning[:, self.heads :]), strict=True
            ):
                part.copy_(norm(part))
        turned = _turned(turning, *position_embeddings).transpose(0, 1)
        value = qkv[:, self.heads + self.groups :].transpose(0, 1)
        found = attention(
            plan,
            self.index,
            turned[: self.heads],
            turned[self.heads :],
            value,
            scaling=self.scaling,
            window=self.window,
        )
        hidden = self.out(found.view(1, rows, -1)).add_(hidden)
        both = self.gate_up(self.norm_2(hidden))
        gate = both[..., : self.width]
        gated = (in_vectors(self.act, gate) if self.exact else self.act(gate)).mul_(
            both[..., self.width :]
        )
        down: Tensor = self.down(gated)
        return down.add_(hidden)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [rows, heads, head_dim]; the halves of a head turn as one pair."""
    cos, (low_sin, high_sin) = cos[0, :, None], sin[0, :, None].chunk(2, -1)
    low, high = x.chunk(2, -1)
    out = x * cos
    low_out, high_out = out.chunk(2, -1)
    low_out.sub_(high * low_sin)
    high_out.add_(low * high_sin)
    return out


def _norm(norm: Any) -> Norm:
    return Norm(norm.weight.data, norm.variance_epsilon)


def _window(attn: Any) -> int | None:
    holder = attn if hasattr(attn, "sliding_window") else attn.config
    window: int | None = getattr(holder, "sliding_window", None)
    return window


def _product(
    module: Any, names: tuple[str, ...], kernels: Kernels, *, paired: bool = False
) -> Linear:
    """One product with the weights of several, which `module` loses one by one."""
    parts = [getattr(module, name) for name in names]
    biases = [part.bias.data for part in parts if part.bias is not None]
    outputs = sum(part.out_features for part in parts)
    weight = parts[0].weight.new_empty(outputs, parts[0].in_features)
    at = 0
    for name in names:
        part = parts.pop(0).weight.data
        delattr(module, name)
        weight[at : at + len(part)] = part
        at += len(part)
        del part
    return Linear(weight, torch.cat(biases) if biases else None, kernels, paired=paired)


# ---- where it is the same ------------------------------------------------------------------------


def products(layer: Any) -> list[tuple[int, int]]:
    """The [out, in] shapes of a Fused layer's products, of the library's layer."""
    attn, mlp = layer.self_attn, layer.mlp
    groups = (
        (attn.q_proj, attn.k_proj, attn.v_proj),
        (attn.o_proj,),
        (mlp.gate_proj, mlp.up_proj),
        (mlp.down_proj,),
    )
    return [(sum(each.out_features for each in g), g[0].in_features) for g in groups]


def suits(
    family: Any, config: Any, make: Make | None = None, dtype: torch.dtype = torch.float32
) -> bool:
    """True when the model's layers may be Fused: on a tiny layer of each type both give the same.

    The tiny layer has the config's own switches (biases, activation, norms of heads, window) and
    random weights; the same for every stage of a model. make: another kind of layer, which
    consumes the library's; dtype: what it computes in, the library's in float32.
    """
    make = make or (lambda layer: Fused(layer, PLAIN))
    tiny = copy.deepcopy(config)
    for name, size in _TINY.items():
        setattr(tiny, name, size)
    if getattr(tiny, "sliding_window", None) is not None:
        tiny.sliding_window = ROWS // 2
    tiny._attn_implementation = ATTENTION
    types = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    firsts = {kind: index for index, kind in reversed(list(enumerate(types)))}
    with torch.device("meta"):  # a mixture's experts are not tiny
        if not all(_llama_like(family.layer(tiny, index)) for index in firsts.values()):
            return False
    return all(_same(family.layer(tiny, index), make, dtype) for index in firsts.values())


def _same(layer: nn.Module, make: Make, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> Tensor:  # as the dtype has them, so that both compute with the same
        return torch.randn(shape, generator=generator).to(dtype).float()

    for value in layer.state_dict().values():  # norms and biases too: ones and zeros hide mistakes
        value.copy_(random(*value.shape).mul_(value.shape[-1] ** -0.5).to(dtype))
    layer.eval().requires_grad_(False)
    rows, size = 2 * ROWS, _TINY["head_dim"]
    first = random(1, rows, _TINY["hidden_size"])
    turn = random(2, 1, rows, size)
    found = []
    for module, kind in ((layer, torch.float32), (None, dtype)):
        hidden, (cos, sin) = first.to(kind, copy=True), turn.to(kind)
        pair = torch.zeros(2, 1, _TINY["num_key_value_heads"], KEYS, size, dtype=kind)
        part = Part(0, 0, rows, 0, spans(0, rows, 2, PLAIN))
        index: int = layer.self_attn.layer_idx  # type: ignore[assignment,union-attr]
        plan = Plan([part], {index: (pair[0], pair[1])})
        run = module or make(layer.to(kind))
        found.append((run(hidden, position_embeddings=(cos, sin), plan=plan), pair))
    return all(
        bool((ours.float() - theirs).abs().max() <= TOLERANCE[dtype] * theirs.abs().max())
        for theirs, ours in zip(*found, strict=True)
    )


def _llama_like(layer: Any) -> bool:
    """True for the modules that Fused knows, linears with biases on all of a product or none."""
    if {name for name, _ in layer.named_children()} != _LAYER:
        return False
    attn = dict(layer.self_attn.named_children())
    mlp = dict(layer.mlp.named_children())
    if set(attn) - _HEAD_NORMS != _PRODUCTS or set(mlp) != _MLP:
        return False
    if len(set(attn) & _HEAD_NORMS) == 1:
        return False
    if not all(type(x) is nn.Linear for n, x in (attn | mlp).items() if n.endswith("_proj")):
        return False
    joined = [[attn[n] for n in ("q_proj", "k_proj", "v_proj")], [mlp["gate_proj"], mlp["up_proj"]]]
    return all(len({each.bias is None for each in some}) == 1 for some in joined)

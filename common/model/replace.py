"""Puts our kernels into a transformers model by module type: no model is forked, what is not known stays as
it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pagerelay.common.model.mapped import MappedWeights
from pagerelay.common.model.ops import PagedOps


class PackedLinear(nn.Module):
    """``nn.Linear`` on packed weights. Tied modules share one packed copy, and the original is dropped."""

    def __init__(self, ops: PagedOps, packed: Any, bias: Tensor | None) -> None:
        super().__init__()
        self._ops, self._packed, self._bias = ops, packed, bias

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self._packed, self._bias)


class PackedEmbedding(nn.Module):
    """``nn.Embedding`` read from the packed weights of the output layer it is tied to."""

    def __init__(self, ops: PagedOps, packed: Any) -> None:
        super().__init__()
        self._ops, self._packed = ops, packed

    def forward(self, ids: Tensor) -> Tensor:
        return self._ops.embed(ids.reshape(-1), self._packed).view(*ids.shape, -1)


class FusedNorm(nn.Module):
    """RMSNorm ``x / rms(x) * weight``, with ``weight`` as the model stores it."""

    def __init__(self, ops: PagedOps, weight: Tensor, eps: float) -> None:
        super().__init__()
        self._ops, self._weight, self._eps = ops, weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self._weight, self._eps)


class FusedMlp(nn.Module):
    """The gated MLP ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, ops: PagedOps, gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self._ops = ops
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self._ops.silu_mul(self.gate_proj(x), self.up_proj(x)))
        return out


# Norms that compute exactly x / rms(x) * weight. Others (Gemma adds 1 to the weight) keep their own code.
_PLAIN_NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "SmolLM3RMSNorm"}
_SILU_MLPS = {"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "SmolLM3MLP"}


def use_ops(model: nn.Module, ops: PagedOps) -> nn.Module:
    """Replaces linears, embeddings tied to one, plain RMSNorms and SiLU MLPs, in place; returns the model.

    The torch twins need no replacement: they are what the modules do already.
    """
    if ops.name == "torch":
        return model
    shared = {id(m): m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)}
    packed: dict[int, Any] = {}
    """Where a weight was → its packed form, once for all modules that share it."""
    mapped = MappedWeights()
    # Large ones first: a weight is held twice while it is packed, and then little else is held yet.
    for parent, name, child in sorted(_children(model), key=_weight_bytes, reverse=True):
        if type(child) is nn.Linear:
            where = shared[id(child)]
            if where not in packed:
                packed[where] = ops.pack(child.weight.detach())
                mapped.release(child.weight)
            bias: Tensor | None = child.bias
            setattr(parent, name, PackedLinear(ops, packed[where], bias))
            child.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # the original goes at once
        elif type(child).__name__ in _PLAIN_NORMS:
            norm: Any = child
            setattr(parent, name, FusedNorm(ops, norm.weight.detach().clone(), float(norm.variance_epsilon)))
    # Only now: an embedding is replaced if it is tied to a linear, and these are known by now.
    for parent, name, child in _children(model):
        if type(child) is nn.Embedding and shared[id(child)] in packed:
            setattr(parent, name, PackedEmbedding(ops, packed[shared[id(child)]]))
        elif type(child).__name__ in _SILU_MLPS:
            mlp: Any = child
            if type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation"):
                setattr(parent, name, FusedMlp(ops, mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    return model


def _weight_bytes(found: tuple[nn.Module, str, nn.Module]) -> int:
    child = found[2]
    return child.weight.nbytes if isinstance(child, nn.Linear) else 0


def _children(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    return [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]

"""Puts our kernels into a transformers model by module type: no model is forked, what is not known stays as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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
        return self.down_proj(self._ops.silu_mul(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


# Norms that compute exactly x / rms(x) * weight. Others (Gemma adds 1 to the weight) keep their own code.
_PLAIN_NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "SmolLM3RMSNorm"}
_SILU_MLPS = {"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "SmolLM3MLP"}


def use_ops(model: nn.Module, ops: PagedOps) -> nn.Module:
    """Replaces linears, embeddings tied to one, plain RMSNorms and SiLU MLPs, in place; returns the model.

    The torch twins need no replacement: they are what the modules do already.
    """
    if ops.name == "torch":
        return model
    packed: dict[int, Any] = {}
    pointers = {id(module): module.weight.data_ptr() for module in model.modules() if _has_weight(module)}
    _replace(model, ops, packed, pointers)
    return model


def _has_weight(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding)


def _replace(parent: nn.Module, ops: PagedOps, packed: dict[int, Any], pointers: dict[int, int]) -> None:
    # Linears first, so that an embedding tied to one finds the packed weights.
    linear_pointers = {pointers[id(m)] for m in parent.modules() if type(m) is nn.Linear}
    for module in list(parent.modules()):
        for name, child in list(module.named_children()):
            kind = type(child)
            if kind is nn.Linear:
                pointer = pointers[id(child)]
                if pointer not in packed:
                    packed[pointer] = ops.pack(child.weight.detach())
                bias = child.bias.detach() if child.bias is not None else None
                setattr(module, name, PackedLinear(ops, packed[pointer], bias))
                child.weight = nn.Parameter(torch.empty(0), requires_grad=False)
            elif kind.__name__ in _PLAIN_NORMS:
                setattr(module, name, FusedNorm(ops, child.weight.detach(), float(child.variance_epsilon)))  # type: ignore[arg-type, operator, union-attr]
    for module in list(parent.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Embedding and pointers[id(child)] in linear_pointers:
                setattr(module, name, PackedEmbedding(ops, packed[pointers[id(child)]]))
            elif (
                type(child).__name__ in _SILU_MLPS and getattr(child.act_fn, "__class__", None) is nn.SiLU
            ) or (
                type(child).__name__ in _SILU_MLPS
                and type(child.act_fn).__name__ in ("SiLUActivation", "SiLU")
            ):
                setattr(module, name, FusedMlp(ops, child.gate_proj, child.up_proj, child.down_proj))  # type: ignore[arg-type]

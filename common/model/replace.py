"""Puts our kernels into a transformers model by module type: no model is forked, what is not known stays as
it is.

Known attention and MLP modules become one module each with their input projections merged, so that a layer
reads its weights in four long runs; known layers of such parts become one call for all of them, where the
operations have one. The rest goes linear by linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from pagerelay.common.model.batch import StepContext
from pagerelay.common.model.mapped import MappedWeights
from pagerelay.common.model.ops import LayerParts, PagedOps, StackOps


class PackedLinear(nn.Module):
    """``nn.Linear`` on packed weights. Tied modules share one packed copy, and the original is dropped."""

    def __init__(self, ops: PagedOps, packed: Any, bias: Tensor | None) -> None:
        super().__init__()
        self._ops = ops
        self.packed, self.bias = packed, bias

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self.packed, self.bias)


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
        self._ops = ops
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self.weight, self.eps)


class FusedMlp(nn.Module):
    """The gated MLP ``down(silu(gate(x)) * up(x))``, gate and up as one linear."""

    def __init__(self, ops: PagedOps, gate_up: PackedLinear, down: PackedLinear) -> None:
        super().__init__()
        self._ops = ops
        self.gate_up, self.down = gate_up, down

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self._ops.silu_mul(self.gate_up(x)))
        return out


class FusedAttention(nn.Module):
    """Rotary attention over the paged pool, the three input projections as one linear."""

    def __init__(self, ops: PagedOps, of: Any, qkv: PackedLinear, out: PackedLinear) -> None:
        super().__init__()
        self._ops, self._layer = ops, int(of.layer_idx)
        self.scale = float(of.scaling)
        self._head_dim: int = of.head_dim
        self.window: int | None = _ROTARY_ATTENTIONS[type(of).__name__](of)
        self.qkv, self.out = qkv, out

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *,
        paged: StepContext,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states ``[1, T, hidden]``, position embeddings ``[1, T, head_dim]`` → ``[1, T, hidden]``."""
        ops, batch = self._ops, paged.batch
        cos, sin = position_embeddings
        qkv = self.qkv(hidden_states).view(hidden_states.shape[1], -1, self._head_dim)
        query = ops.rotate_write(paged.pool, self._layer, qkv, cos[0], sin[0], batch.slots)
        context = ops.attend(
            *(paged.pool, self._layer, query, batch.tables, batch.seq_lens, batch.query_starts),
            *(self.scale, self.window),
        )
        return self.out(context.view(1, hidden_states.shape[1], -1)), None


class FusedStack(nn.Module):
    """All decoder layers in one call, in the place of the first."""

    def __init__(self, ops: StackOps, layers: list[LayerParts]) -> None:
        super().__init__()
        self._ops, self._stack = ops, ops.stack(layers)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        paged: StepContext,
        **_: Any,
    ) -> Tensor:
        """hidden_states ``[1, T, hidden]``, position embeddings ``[1, T, head_dim]`` → ``[1, T, hidden]``."""
        batch, (cos, sin) = paged.batch, position_embeddings
        return self._ops.run_stack(
            *(self._stack, hidden_states[0], paged.pool, cos[0], sin[0], batch.slots),
            *(batch.tables, batch.seq_lens, batch.query_starts),
        )[None]


# Norms that compute exactly x / rms(x) * weight. Others (Gemma adds 1 to the weight) keep their own code.
_PLAIN_NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "SmolLM3RMSNorm"}
_SILU_MLPS = {"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "SmolLM3MLP"}
# Plain rotary attention: nothing between the projections, the embedding and the scores. Where each has its
# window: a configuration may carry one that the model never reads.
_ROTARY_ATTENTIONS: dict[str, Callable[[Any], int | None]] = {
    "LlamaAttention": lambda attention: None,
    "MistralAttention": lambda attention: attention.config.sliding_window,
    "Qwen2Attention": lambda attention: attention.sliding_window,
}
_WHOLES = {*_ROTARY_ATTENTIONS, *_SILU_MLPS}
# Norm, attention, sum, norm, MLP, sum, and nothing else.
_PLAIN_LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"}


class _Packer:
    """Packs every weight once, however many modules share it; the originals go at once."""

    def __init__(self, model: nn.Module, ops: PagedOps, files: Iterable[Path]) -> None:
        self._ops = ops
        self._place = {
            id(m): m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)
        }
        self._packed: dict[int, Any] = {}
        """Where a weight was → its packed form."""
        self._mapped = MappedWeights(files)

    def linear(self, *linears: nn.Linear) -> PackedLinear:
        """One linear of the outputs of all, in their order."""
        place = self._place[id(linears[0])]
        packed = self._packed.get(place) if len(linears) == 1 else None
        if packed is None:
            packed = self._ops.pack(_joined([linear.weight.detach() for linear in linears]))
            if len(linears) == 1:
                self._packed[place] = packed
        biases: list[Tensor] = [linear.bias for linear in linears if _has_bias(linear)]
        for linear in linears:
            self._mapped.release(linear.weight)
            linear.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        return PackedLinear(self._ops, packed, torch.cat(biases) if biases else None)

    def embedding(self, embedding: nn.Embedding) -> PackedEmbedding | None:
        """None where no linear that was packed before shares its weight."""
        packed = self._packed.get(self._place[id(embedding)])
        return None if packed is None else PackedEmbedding(self._ops, packed)


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def use_ops(model: nn.Module, ops: PagedOps, files: Iterable[Path] = ()) -> nn.Module:
    """Replaces attentions, MLPs, norms, linears and embeddings tied to one, in place; returns the model.

    ``files`` are those that its weights may be mapped from.

    The torch twins need no replacement: they are what the modules do already.
    """
    if ops.name == "torch":
        return model
    packer = _Packer(model, ops, files)
    # Large ones first: a weight is held twice while it is packed, and then little else is held yet.
    wholes = [child for _, _, child in _children(model) if type(child).__name__ in _WHOLES]
    inside = {id(part) for whole in wholes for part in whole.modules()}
    for parent, name, child in sorted(_children(model), key=_weight_bytes, reverse=True):
        if type(child) is nn.Linear and id(child) not in inside:
            setattr(parent, name, packer.linear(child))
    for parent, name, child in _children(model):
        if (fused := _fused(child, packer, ops)) is not None:
            setattr(parent, name, fused)
    for parent, name, child in _children(model):  # of wholes that were not quite as they should be
        if type(child) is nn.Linear:
            setattr(parent, name, packer.linear(child))
    for parent, name, child in _children(model):  # the linears that an embedding may be tied to are known now
        if type(child) is nn.Embedding and (tied := packer.embedding(child)) is not None:
            setattr(parent, name, tied)
    if getattr(ops, "stack", None) is not None:
        stacking = cast(StackOps, ops)
        for parent, name, child in _children(model):
            if isinstance(child, nn.ModuleList) and (parts := _layer_parts(child)):
                setattr(parent, name, nn.ModuleList([FusedStack(stacking, parts)]))
    return model


def _layer_parts(layers: nn.ModuleList) -> list[LayerParts]:
    """Empty where they are not all decoder layers that are known, of parts that are known."""
    found = []
    for layer in layers:
        whole: Any = layer
        if type(layer).__name__ not in _PLAIN_LAYERS:
            return []
        first, attention = whole.input_layernorm, whole.self_attn
        second, mlp = whole.post_attention_layernorm, whole.mlp
        if not (
            isinstance(first, FusedNorm)
            and isinstance(attention, FusedAttention)
            and isinstance(second, FusedNorm)
            and isinstance(mlp, FusedMlp)
            and first.eps == second.eps
        ):
            return []
        linears = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
        qkv, out, gate_up, down = ((linear.packed, linear.bias) for linear in linears)
        found.append(
            LayerParts(
                *(first.weight, second.weight, first.eps, qkv, out, gate_up, down),
                *(attention.scale, attention.window),
            )
        )
    return found


def _fused(module: Any, packer: _Packer, ops: PagedOps) -> nn.Module | None:
    kind = type(module).__name__
    if kind in _PLAIN_NORMS:
        return FusedNorm(ops, module.weight.detach().clone(), float(module.variance_epsilon))
    if kind in _ROTARY_ATTENTIONS and _same_bias(module.q_proj, module.k_proj, module.v_proj):
        qkv = packer.linear(module.q_proj, module.k_proj, module.v_proj)
        return FusedAttention(ops, module, qkv, packer.linear(module.o_proj))
    silu = kind in _SILU_MLPS and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")
    if silu and _same_bias(module.gate_proj, module.up_proj):
        gate_up = packer.linear(module.gate_proj, module.up_proj)
        return FusedMlp(ops, gate_up, packer.linear(module.down_proj))
    return None


def _same_bias(*linears: nn.Linear) -> bool:
    """All have a bias or none has; otherwise their outputs are not one linear's."""
    return len({_has_bias(linear) for linear in linears}) == 1


def _has_bias(linear: nn.Module) -> bool:
    return getattr(linear, "bias", None) is not None


def _weight_bytes(found: tuple[nn.Module, str, nn.Module]) -> int:
    child = found[2]
    return child.weight.nbytes if isinstance(child, nn.Linear) else 0


def _children(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    return [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]

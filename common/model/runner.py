"""A model folder, loaded once, and the one call that computes a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from pagerelay.common.errors import StartupError
from pagerelay.common.hashing import model_digest
from pagerelay.common.model.attention import IMPLEMENTATION
from pagerelay.common.model.batch import Batch, StepContext
from pagerelay.common.model.feed import Feed, current
from pagerelay.common.model.graphs import Capture, DecodeGraphs
from pagerelay.common.model.ops import PagedOps
from pagerelay.common.model.replace import use_ops
from pagerelay.common.wire.messages import PROTOCOL, Layout

# transformers computes their angles from the largest position of the whole call, and keeps them.
_STEP_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the rest of a worker needs to know of the model."""

    digest: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    weights: str = "fp32"
    dtype: str = "float32"
    """Of weights, activations and KV: float32, float16 or bfloat16."""
    folder: Path | None = None
    """Where the model's files are."""

    def layout(self, block_size: int) -> Layout:
        return Layout(
            protocol=PROTOCOL,
            model_digest=self.digest,
            dtype=self.dtype,
            block_size=block_size,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            weights=self.weights,
        )


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    """The one part of ``tokenizer.json`` that is needed here; the megabytes of vocabulary and merges are
    skipped."""

    added_tokens: list[_AddedToken] = []


def _eos_token_ids(folder: Path, *configs: Any) -> tuple[int, ...]:
    """The union of every source: the model's config, its generation config, and the tokenizer's own end
    token."""
    found: set[int] = set()
    generation = folder / "generation_config.json"
    sources = [getattr(config, "eos_token_id", None) for config in configs]
    if generation.is_file():
        sources.append(json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id"))
    for source in sources:
        found.update([source] if isinstance(source, int) else source or [])
    tokenizer_config, tokenizer = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if tokenizer_config.is_file() and tokenizer.is_file():
        end = json.loads(tokenizer_config.read_text(encoding="utf-8")).get("eos_token")
        end = end.get("content") if isinstance(end, dict) else end
        added = msgspec.json.decode(tokenizer.read_bytes(), type=_AddedTokens).added_tokens
        found.update(token.id for token in added if token.content == end)
    return tuple(sorted(found))


def read_facts(
    folder: Path, max_model_len: int | None, weights: str = "fp32", dtype: str = "float32"
) -> ModelFacts:
    """Reads a model folder's configuration. ``dtype`` ``auto`` is the model's own, bfloat16 for float32.

    Raises :class:`StartupError` where it is no model we can serve."""
    try:
        whole = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise StartupError(
            f"model {folder}: its config.json cannot be used: {str(error).splitlines()[0]}"
        ) from error
    config = whole.get_text_config(decoder=True)
    if getattr(whole, "is_encoder_decoder", False) or not getattr(config, "num_attention_heads", None):
        raise StartupError(
            f"model {folder}: {whole.model_type} is not a decoder-only model with attention layers"
        )
    if refused := _STEP_ROPE & set(_rope_types(config)):
        raise StartupError(
            f"model {folder}: rope type {', '.join(sorted(refused))} turns every token by the "
            "longest context in its step, so answers would depend on who else is served; not supported"
        )
    heads = config.num_attention_heads
    limit = int(getattr(config, "max_position_embeddings", 0) or 2048)
    return ModelFacts(
        digest=model_digest(folder),
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        max_model_len=min(limit, max_model_len or limit),
        # An end token of the tokenizer's own may have no logit.
        eos_token_ids=tuple(t for t in _eos_token_ids(folder, whole, config) if t < config.vocab_size),
        weights=weights,
        dtype=_own_dtype(config) if dtype == "auto" else dtype,
        folder=folder,
    )


def _own_dtype(config: Any) -> str:
    own = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return "float16" if own == "float16" else "bfloat16"


def _rope_types(config: Any) -> list[str]:
    """Of all kinds of layers; a model may have one set of parameters, or one for each."""
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return [found["rope_type"] for found in sets if "rope_type" in found]


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Raises :class:`StartupError` where the folder's weights cannot be loaded, or do not fit."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=IMPLEMENTATION, use_safetensors=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise StartupError(f"model {folder} cannot be loaded: {str(error).splitlines()[0]}") from error
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        size = sum(parameter.nbytes for parameter in model.parameters()) >> 20
        raise StartupError(
            f"model {folder}: its {size} MiB of weights do not fit on {device}; choose a smaller model or "
            "dtype, or another GPU with engine.device"
        ) from error


Load = Callable[[Path, torch.dtype, torch.device], nn.Module]


class ModelRunner:
    """Weights and kernels. ``run`` is its verb in service; all are called by one thread at a time."""

    def __init__(
        self,
        folder: Path,
        ops: PagedOps,
        *,
        dtype: str = "float32",
        feed: Feed | None = None,
        load: Load = load_model,
    ) -> None:
        """``feed`` names the device of a model that is not on the CPU, and takes the batches there."""
        self.ops = ops
        self._feed = feed
        self._device = feed.device if feed is not None else torch.device("cpu")
        self._graphs: DecodeGraphs | None = None
        model = load(folder, getattr(torch, dtype), self._device)
        model.requires_grad_(False).train(False)
        try:
            self.model = use_ops(model, ops, folder.glob("*.safetensors"))
        except ValueError as error:
            raise StartupError(f"model {folder} cannot be served: {error}") from error

    @torch.inference_mode()
    def run(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        """Computes one step, writing its KV into ``pool``. Returns fp32 logits ``[batch.num_logits,
        vocab]``, which are valid until the next step."""
        with current(self._device):
            if self._graphs is not None and self._graphs.takes(batch):
                return self._graphs.run(batch)
            if not batch.num_logits:
                # A step that samples nothing still runs the head on one row: transformers has no way to leave
                # it out.
                batch = replace(batch, logits_rows=torch.zeros(1, dtype=torch.int64))
            if self._feed is not None:
                batch = batch.sent(self._feed)
            return self._forward(batch, pool)[: batch.num_logits]

    def _forward(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        """fp32 logits of the batch's ``logits_rows``."""
        output = self.model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.logits_rows,
            paged=StepContext(batch, pool, self.ops),
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits

    @torch.inference_mode()
    def record_decode_steps(
        self, pool: torch.Tensor, sizes: Sequence[int], max_model_len: int, capture: Capture
    ) -> None:
        """From now on steps of decoding sequences alone, up to the largest of ``sizes``, are played from CUDA
        graphs. They read and write this ``pool``, which has to stay where it is."""
        if self._feed is None:
            raise ValueError("graphs need a feed: on the CPU there is nothing to record")
        with current(self._device):
            self._graphs = DecodeGraphs(
                lambda batch: self._forward(batch, pool),
                self._feed,
                sizes,
                -(-max_model_len // pool.shape[4]),
                capture,
            )

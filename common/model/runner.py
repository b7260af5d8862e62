"""A model folder, loaded once, and the one call that computes a step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from pagerelay.common.errors import StartupError
from pagerelay.common.hashing import model_digest
from pagerelay.common.model.attention import IMPLEMENTATION
from pagerelay.common.model.batch import Batch, StepContext
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

    def layout(self, block_size: int) -> Layout:
        return Layout(
            protocol=PROTOCOL,
            model_digest=self.digest,
            dtype="float32",
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


def read_facts(folder: Path, max_model_len: int | None, weights: str = "fp32") -> ModelFacts:
    """Reads a model folder's configuration. Raises :class:`StartupError` where it is no model we can
    serve."""
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
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    if kinds & _STEP_ROPE:
        raise StartupError(
            f"model {folder}: rope type {', '.join(sorted(kinds & _STEP_ROPE))} turns every token by the "
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
        eos_token_ids=_eos_token_ids(folder, whole, config),
        weights=weights,
    )


class ModelRunner:
    """Weights and kernels. ``run`` is its only verb; it is called from one thread."""

    def __init__(self, folder: Path, ops: PagedOps) -> None:
        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.ops = ops
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation=IMPLEMENTATION, use_safetensors=True
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise StartupError(f"model {folder} cannot be loaded: {str(error).splitlines()[0]}") from error
        model.requires_grad_(False).train(False)
        try:
            self.model = use_ops(model, ops, folder.glob("*.safetensors"))
        except ValueError as error:
            raise StartupError(f"model {folder} cannot be served: {error}") from error

    @torch.inference_mode()
    def run(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        """Computes one step, writing its KV into ``pool``. Returns fp32 logits ``[batch.num_logits,
        vocab]``."""
        # A step that samples nothing still runs the head on one row: transformers has no way to leave it out.
        keep = batch.logits_rows if batch.num_logits else torch.zeros(1, dtype=torch.int64)
        output = self.model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=keep,
            paged=StepContext(batch, pool, self.ops),
        )
        logits: torch.Tensor = output.logits[0, : batch.num_logits].float()
        return logits

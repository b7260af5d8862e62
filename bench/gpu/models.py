"""Models without weights to download: a shape, and random numbers that are the same in every process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from pagerelay.common.model.attention import IMPLEMENTATION

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
"""Llama-3.1-8B, with plain rotary embedding."""
SMALL = LLAMA_8B | {
    "dtype": "float32",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "vocab_size": 300,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_folder(folder: Path, dry: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SMALL if dry else LLAMA_8B), encoding="utf-8")
    return folder


def random_model(
    folder: Path, dtype: torch.dtype, device: torch.device, implementation: str = IMPLEMENTATION
) -> nn.Module:
    """A :data:`~pagerelay.common.model.runner.Load`: made on the device, transformers' own initialisation."""
    torch.manual_seed(0)
    with torch.device(device):
        config = AutoConfig.from_pretrained(folder)
        model: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=implementation
        )
    return model

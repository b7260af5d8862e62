"""What the router reads of a model folder: names and numbers, never weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pagerelay.common.config import ModelConfig
from pagerelay.common.errors import StartupError


@dataclass(frozen=True, slots=True)
class ModelFiles:
    folder: Path
    served_name: str
    vocab_size: int
    max_model_len: int


def read_model_files(folder: Path, config: ModelConfig) -> ModelFiles:
    """Raises :class:`StartupError` where the folder's config.json does not describe a language model."""
    try:
        whole = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = whole.get("text_config") or whole
        vocab_size = int(text["vocab_size"])
        limit = int(text.get("max_position_embeddings") or 2048)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise StartupError(f"model {folder}: its config.json is missing or names no vocab_size") from error
    return ModelFiles(
        folder=folder,
        served_name=config.served_name or folder.name,
        vocab_size=vocab_size,
        max_model_len=min(limit, config.max_model_len or limit),
    )

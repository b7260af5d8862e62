"""Converts a llama-architecture GGUF file into a Hugging Face folder: fp32 safetensors, config and tokenizer.

Needed once, for the default model. Imports neither torch nor transformers, so that any role may fetch. Three
things that a plain conversion gets wrong are put right here:

* q and k rows are stored in llama.cpp's rotary order (pairs side by side); transformers wants the two halves
  apart.
* ``tokenizer.ggml.pre = smollm`` means: split digits one by one, then GPT-2's regex. Without the ``Digits``
  step a digit after a run of blanks gets other ids, which short test strings do not show.
* The tokenizer adds no BOS; the chat template writes its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagerelay.common.errors import StartupError

Progress = Callable[[str], None]

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_KIND = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
_CONTROL_TOKEN = 3  # GGUF's token type of special tokens


def convert_gguf(gguf_file: Path, folder: Path, progress: Progress) -> None:
    """Writes ``folder`` (existing, empty) from ``gguf_file``; the same file gives the same bytes.

    Raises :class:`StartupError` for a file that is not a llama with SmolLM's GPT-2 style tokenizer.
    """
    reader, meta = _read(gguf_file)
    kind = tuple(
        meta.get(f"{key}") for key in ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre")
    )
    if kind != ("llama", "gpt2", "smollm"):
        raise StartupError(
            f"{gguf_file.name}: cannot convert a GGUF of kind {kind}, only ('llama', 'gpt2', 'smollm')"
        )
    weights = _weights(reader, meta)
    tied = "lm_head.weight" not in weights
    write_weights(folder, weights)
    progress(f"converted {len(weights)} tensors to fp32")
    write_json(folder / "config.json", _config(meta, tied))
    write_json(folder / "generation_config.json", _special_ids(meta))
    write_json(folder / "tokenizer.json", _tokenizer(meta))
    write_json(folder / "tokenizer_config.json", _tokenizer_config(meta))
    (folder / "chat_template.jinja").write_text(meta["tokenizer.chat_template"], encoding="utf-8")


def hub_weights(gguf_file: Path) -> dict[str, NDArray[np.float32]]:
    """The fp32 weights of a llama's GGUF under the names, and in the row order, of a Hugging Face folder."""
    return _weights(*_read(gguf_file))


def _read(gguf_file: Path) -> tuple[Any, dict[str, Any]]:
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    return reader, {name: field.contents() for name, field in reader.fields.items()}


def write_weights(folder: Path, weights: dict[str, NDArray[np.float32]]) -> None:
    """``model.safetensors``, readable by every user (the library makes it private)."""
    from safetensors.numpy import save_file

    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, ensure_ascii=False, indent=1), encoding="utf-8")


def _weights(reader: Any, meta: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    from gguf import dequantize

    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    weights = {}
    for tensor in reader.tensors:
        value = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        name = tensor.name
        if name in _GLOBAL_NAMES:
            weights[_GLOBAL_NAMES[name]] = value
            continue
        _, layer, part, _ = name.split(".")  # blk.<layer>.<part>.weight
        if part in ("attn_q", "attn_k"):
            value = _halves_apart(value, heads if part == "attn_q" else kv_heads)
        weights[f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"] = value
    return weights


def _halves_apart(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """[heads * head_dim, hidden], rotary pairs (0,1)(2,3)… per head → all first, then all second elements."""
    paired = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)


def _special_ids(meta: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def _config(meta: dict[str, Any], tied: bool) -> dict[str, Any]:
    hidden, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_theta": meta["llama.rope.freq_base"], "rope_type": "default"},
        "tie_word_embeddings": tied,
        "use_cache": True,
        "vocab_size": meta["llama.vocab_size"],
        **_special_ids(meta),
    }


def _tokenizer(meta: dict[str, Any]) -> dict[str, Any]:
    """``tokenizer.json``: byte-level BPE behind the digit splitter, special tokens by GGUF's token types."""
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    special = [i for i, kind in enumerate(meta["tokenizer.ggml.token_type"]) if kind == _CONTROL_TOKEN]
    return bpe_tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[merge.split(" ", 1) for merge in meta["tokenizer.ggml.merges"]],
        special={tokens[i]: i for i in special},
    )


def bpe_tokenizer(vocab: dict[str, int], merges: list[list[str]], special: dict[str, int]) -> dict[str, Any]:
    """``tokenizer.json`` of a byte-level BPE with one-by-one digits that adds no tokens of its own."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token, i in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "backend": "tokenizers",
        "tokenizer_class": "TokenizersBackend",
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }

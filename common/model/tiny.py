"""A seeded two-layer Llama for tests: every mechanism of a real model, in milliseconds.

Scaled so that a greedy answer depends on the whole prompt: what attention and the MLP add outweighs the
token's own embedding (else tied weights repeat the last token for ever), and the logits spread widely enough
that the two best ones are rarely within rounding of each other.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagerelay.common.model.gguf import bpe_tokenizer, write_json, write_weights

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 2, 64, 4, 2, 16, 128
CONTEXT = 8192
_EMBEDDING_STD, _BRANCH_STD = 0.5, 1.0  # logits have std ~ _EMBEDDING_STD * sqrt(HIDDEN) = 4
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_SPECIAL = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_model(folder: Path, tokenizer_from: Path | None = None, *, seed: int = 0) -> None:
    """Writes a Hugging Face folder; the same seed and tokenizer give the same bytes.

    The tokenizer is copied from the model folder ``tokenizer_from``; without one, each byte is a token.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer_from is None:
        _write_byte_tokenizer(folder)
    else:
        for name in _TOKENIZER_FILES:
            shutil.copyfile(tokenizer_from / name, folder / name)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab_size = 1 + max(tokenizer["model"]["vocab"].values())
    write_weights(folder, _weights(vocab_size, np.random.Generator(np.random.PCG64(seed))))
    special_ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "dtype": "float32",
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "max_position_embeddings": CONTEXT,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": HEADS,
            "num_hidden_layers": LAYERS,
            "num_key_value_heads": KV_HEADS,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": vocab_size,
            **special_ids,
        },
    )
    # Two end tokens here, one in config.json: a server has to honour the union of both.
    write_json(folder / "generation_config.json", {**special_ids, "eos_token_id": [2, 0]})


def _weights(vocab_size: int, rng: np.random.Generator) -> dict[str, NDArray[np.float32]]:
    def normal(rows: int, columns: int, std: float) -> NDArray[np.float32]:
        return (std * rng.standard_normal((rows, columns))).astype(np.float32)

    weights = {"model.embed_tokens.weight": normal(vocab_size, HIDDEN, _EMBEDDING_STD)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        unit = HIDDEN**-0.5  # keeps a normalised input's scale
        for name, rows, columns, std in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN, 1.5 * unit),
            ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN, 1.5 * unit),
            ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN, unit),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM, 4 * _BRANCH_STD * (HEADS * HEAD_DIM) ** -0.5),
            ("mlp.gate_proj", INTERMEDIATE, HIDDEN, unit),
            ("mlp.up_proj", INTERMEDIATE, HIDDEN, unit),
            ("mlp.down_proj", HIDDEN, INTERMEDIATE, 4 * _BRANCH_STD * INTERMEDIATE**-0.5),
        ):
            weights[f"{prefix}{name}.weight"] = normal(rows, columns, std)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = np.ones(HIDDEN, np.float32)
    weights["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    return weights


def _write_byte_tokenizer(folder: Path) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    vocab = {**_SPECIAL, **{char: i for i, char in enumerate(sorted(ByteLevel.alphabet()), len(_SPECIAL))}}
    write_json(folder / "tokenizer.json", bpe_tokenizer(vocab, [], _SPECIAL))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "TokenizersBackend",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
        },
    )
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")

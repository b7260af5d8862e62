"""Our kernels inside transformers' models: which modules they take over, and that they change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from pagerelay.common.errors import StartupError
from pagerelay.common.model.batch import Row, build_batch
from pagerelay.common.model.replace import FusedMlp, FusedStack, PackedEmbedding, PackedLinear
from pagerelay.common.model.runner import ModelRunner, read_facts
from pagerelay.kernels.cpu_build import KernelUnavailable, find_compiler
from pagerelay.kernels.cpu_ops import CpuOps
from pagerelay.kernels.torch_ops import TorchOps

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-biased": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-stray-window": LlamaConfig(**SIZES, sliding_window=20),  # a setting that the model never reads
    "llama-one-kv-head": LlamaConfig(**SIZES | {"num_key_value_heads": 1}),
    "llama-gelu": LlamaConfig(**SIZES, hidden_act="gelu"),
    "llama3-rope": LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama-yarn": LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "mistral-window": MistralConfig(**SIZES, sliding_window=20),
    "qwen2-window": Qwen2Config(**SIZES, **WINDOWED),
    "qwen3": Qwen3Config(**SIZES),  # norms between the projections and the embedding: linear by linear
}
UNSTACKED = {"qwen3", "llama-gelu"}


class Unstacked:
    """The C operations without the call that runs all layers."""

    def __init__(self, ops: CpuOps) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        if name in ("stack", "run_stack"):
            raise AttributeError(name)
        return getattr(self._ops, name)


@pytest.fixture(scope="module")
def c_ops(tmp_path_factory: pytest.TempPathFactory) -> CpuOps:
    try:
        find_compiler()
    except KernelUnavailable as error:
        pytest.skip(error.reason)
    return CpuOps(tmp_path_factory.mktemp("kernels"), 2)


@pytest.fixture(scope="module", params=list(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[request.param])
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    path = tmp_path_factory.mktemp(request.param) / request.param
    model.save_pretrained(path)
    return path


def logits(folder: Path, ops: Any, token_ids: list[int]) -> Tensor:
    """Of every position: a chunk of 50 with a neighbour's row in between, then one by one."""
    kv_heads = read_facts(folder, None).num_kv_heads
    runner, pool = ModelRunner(folder, ops), torch.full((40, 3, 2, kv_heads, 16, 24), float("nan"))
    blocks, other = list(range(3, 20)), list(range(20, 37))
    rows = []
    for start in [0, *range(50, len(token_ids))]:
        chunk = token_ids[start : start + 50] if start == 0 else token_ids[start : start + 1]
        batch = build_batch(
            [Row(chunk, start, blocks, True), Row(chunk, start, other, True)], 16, ops.min_rows
        )
        rows.append(runner.run(batch, pool)[:1].clone())
    return torch.cat(rows)


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    return torch.randint(0, 97, (70,), generator=torch.Generator().manual_seed(1)).tolist()


def test_the_models_own_logits(folder: Path, c_ops: CpuOps, token_ids: list[int]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0, 49:]
    for ops in (c_ops, Unstacked(c_ops), TorchOps()):
        got = logits(folder, ops, token_ids).double()
        assert (got - expected).norm(dim=-1).max() <= 1e-5 * expected.norm(dim=-1).min(), type(ops).__name__


def test_one_call_has_the_bits_of_the_single_operations(
    folder: Path, c_ops: CpuOps, token_ids: list[int]
) -> None:
    assert torch.equal(logits(folder, c_ops, token_ids), logits(folder, Unstacked(c_ops), token_ids))


def test_what_is_taken_over(folder: Path, c_ops: CpuOps) -> None:
    model: Any = ModelRunner(folder, c_ops).model
    kinds = {type(module) for module in model.modules()}
    assert (FusedStack in kinds) == (folder.name not in UNSTACKED)
    assert (FusedMlp in kinds) == (folder.name == "qwen3")  # else it is in the stack, or not known
    assert type(model.lm_head) is PackedLinear
    assert (PackedEmbedding in kinds) == (folder.name == "llama")
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(
        module.weight.numel() for module in model.modules() if type(module) is torch.nn.Embedding
    )  # no second copy of what was packed
    assert type(ModelRunner(folder, TorchOps()).model.lm_head) is torch.nn.Linear


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_angles_that_depend_on_the_step_are_refused(tmp_path: Path, kind: str) -> None:
    factors = [1.0] * 12
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    if kind == "longrope":
        rope |= {"short_factor": factors, "long_factor": factors}
    config = LlamaConfig(**SIZES).to_dict() | {"rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(StartupError, match=f"rope type {kind}"):
        read_facts(tmp_path, None)

"""What one undisturbed process says: transformers' own generate in fp32, its logits in fp64; and prompts to
ask it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM

NEAR_TIE = 1e-4
EDGES = (1, 15, 16, 17, 31, 32, 33, 600)


@dataclass(frozen=True)
class Expected:
    """``ids``: greedy; ``sure``: how many of them come before the first near-tie of the two best logits."""

    ids: list[int]
    sure: int


def prompts(folder: Path, count: int, longest: int = 600) -> list[list[int]]:
    """``count`` prompts of English text, 1 to ``longest`` tokens, the block edges among them; the same every
    time."""
    licence = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(licence, add_special_tokens=False).ids
    rng = random.Random(20)
    edges = [length for length in EDGES if length <= longest][:count]
    # Mostly short, some long: the product of two uniform numbers.
    lengths = edges + [1 + int(longest * rng.random() * rng.random()) for _ in range(count - len(edges))]
    starts = [rng.randrange(len(ids) - longest) for _ in lengths]
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def greedy(folder: Path, wanted: list[list[int]], num_tokens: int) -> Iterator[Expected]:
    """``generate`` without sampling and without stopping, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt in wanted:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=None,
            eos_token_id=model.config.vocab_size,  # an id that is never sampled: never stop
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        ids = out.sequences[0, len(prompt) :].tolist()
        # It did not stop early, and nothing of the model's own generation settings bent its choice.
        assert ids == [int(logits[0].argmax()) for logits in out.logits]
        assert len(ids) == num_tokens
        gaps = [float(top[0] - top[1]) for top in (logits[0].topk(2).values for logits in out.logits)]
        sure = next((index for index, gap in enumerate(gaps) if gap < NEAR_TIE), num_tokens)
        yield Expected(ids, sure)


@dataclass(frozen=True)
class ExpectedBeam:
    """``score``: the answer's worth, as transformers reckons it."""

    ids: list[int]
    score: float


class BeamReference:
    """``generate`` by beam search, one prompt at a time; scores of sums of fp32 logarithms."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def __call__(
        self, prompt: list[int], num_tokens: int, width: int, eos: list[int] | None = None, **settings: Any
    ) -> list[ExpectedBeam]:
        """The answers, best first. ``eos``: ids that end one, none by default; ``settings`` are
        transformers' own."""
        out = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=num_tokens,
            eos_token_id=eos,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **settings,
        )
        found = []
        for row, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores, strict=True):
            ends = [at for at, token in enumerate(row) if token in (eos or [])]
            found.append(ExpectedBeam(row[: ends[0] + 1] if ends else row, float(score)))
        return found


class _Norm64(nn.Module):
    """RMSNorm in the precision of its input; transformers' own computes in fp32 whatever it is given."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self._norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self._norm.variance_epsilon)
        out: torch.Tensor = x * scale * self._norm.weight
        return out


def logits64(folder: Path) -> Callable[[list[int], int], torch.Tensor]:
    """``(tokens, count)`` → transformers' fp64 logits ``[count, vocab]`` at the last ``count`` of the tokens.

    All is fp64 but the angles of the rotary embedding, whose fp32 rounding is part of the model's definition.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="sdpa"
    ).eval()
    for parent, name, child in [(p, n, c) for p in model.modules() for n, c in p.named_children()]:
        if type(child).__name__ == "LlamaRMSNorm":
            setattr(parent, name, _Norm64(child))

    @torch.inference_mode()
    def logits(tokens: list[int], count: int) -> torch.Tensor:
        rows: torch.Tensor = model(torch.tensor([tokens]), use_cache=False, logits_to_keep=count).logits[0]
        assert rows.dtype is torch.float64
        return rows

    return logits

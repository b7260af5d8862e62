"""Every way of choosing tokens, across the split: what one worker alone says, and what transformers says.
Beside all else: test_pairs.py; after a loss: test_recovered.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import Cluster, running
from features import SAMPLING, TOKENS, together
from reference import prompts
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

PAIRS = list(itertools.combinations(SAMPLING, 2))


@pytest.fixture(scope="module")
def split_tcp(tiny_dir: Path) -> Iterator[Cluster]:
    with running(tiny_dir, worker__transport="tcp") as cluster:
        yield cluster


async def said(cluster: Cluster, prompt: list[int], fields: dict[str, Any]) -> list[dict[str, Any]]:
    return (await cluster.generate(prompt, TOKENS, **fields))["choices"]


@pytest.mark.parametrize("length", [1, 16, 37])
async def test_each_feature_and_each_pair_says_the_same_on_both_sides_of_the_split(
    split: Cluster, split_tcp: Cluster, colocated: Cluster, tiny_dir: Path, length: int
) -> None:
    (prompt,) = [one for one in prompts(tiny_dir, 40) if len(one) >= length][:1]
    prompt = prompt[:length]
    seen = set()
    # All pairs once, spread over the lengths; each feature alone at each of them.
    spread = PAIRS[[1, 16, 37].index(length) :: 3]
    for names in [(name,) for name in SAMPLING] + spread:
        body = together(*names)
        alone = await said(colocated, prompt, body)
        assert await said(split, prompt, body) == alone, names
        if len(names) == 1:
            assert await said(split_tcp, prompt, body) == alone, names
        seen.add(str(alone[0]["token_ids"]))
    assert len(seen) > 6  # the features do something
    for cluster in (split, split_tcp, colocated):
        await cluster.idle()


OF_TRANSFORMERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "repetition": ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    "bias": (
        {"logit_bias": {"260": 1.5, "7": 0.75}},
        {"sequence_bias": {(260,): 1.5, (7,): 0.75}},
    ),
    "repetition and bias": (
        {"repetition_penalty": 1.3, "logit_bias": {"260": 2.0}},
        {"repetition_penalty": 1.3, "sequence_bias": {(260,): 2.0}},
    ),
}


def generated(model: Any, prompt: list[int], **settings: Any) -> list[int]:
    """The greedy answer of transformers; without an id that ends it unless the settings name one."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=TOKENS,
        pad_token_id=0,
        **{"eos_token_id": model.config.vocab_size} | settings,
    )
    ids: list[int] = out[0, len(prompt) :].tolist()
    return ids


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
async def test_ids_and_logprobs_are_those_of_transformers(split: Cluster, tiny_dir: Path, name: str) -> None:
    ours, theirs = OF_TRANSFORMERS[name]
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32).eval()
    for prompt in prompts(tiny_dir, 5, longest=60):
        (choice,) = await said(split, prompt, ours | {"logprobs": 3, "prompt_logprobs": 3})
        assert choice["token_ids"] == generated(model, prompt, **theirs)
        whole = torch.tensor([prompt + choice["token_ids"]])
        with torch.inference_mode():
            table = model(whole).logits[0].double().log_softmax(-1)
        told = choice["prompt_logprobs"] + choice["logprobs"]
        assert [one["token_id"] for one in told] == whole[0].tolist()
        assert told[0]["logprob"] is None
        assert told[0]["top"] == []
        for at, one in enumerate(told[1:]):
            assert one["logprob"] == pytest.approx(float(table[at, one["token_id"]]), abs=1e-4)
            best = table[at].topk(3)
            assert [top["logprob"] for top in one["top"]] == pytest.approx(best.values.tolist(), abs=1e-4)


async def test_ends_and_bans_are_those_of_transformers(split: Cluster, tiny_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))
    for prompt in prompts(tiny_dir, 5, longest=60):
        plain = await split.ids(prompt, TOKENS)
        stops = [plain[8], plain[3]]
        words = [tokenizer.decode(plain[2:3]), tokenizer.decode(plain[5:7])]
        bad = [
            tokenizer.encode(before + word.lstrip(), add_special_tokens=False).ids
            for word in words
            for before in ("", " ")
        ]
        ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"stop_token_ids": stops}, {"eos_token_id": stops}),
            ({"stop_token_ids": stops, "min_tokens": 6}, {"eos_token_id": stops, "min_new_tokens": 6}),
            ({"bad_words": words}, {"bad_words_ids": bad}),
            (
                {"bad_words": words, "stop_token_ids": stops, "min_tokens": 5, "repetition_penalty": 1.3},
                {"bad_words_ids": bad, "eos_token_id": stops, "min_new_tokens": 5, "repetition_penalty": 1.3},
            ),
        ]
        answers = []
        for ours, theirs in ways:
            (choice,) = await said(split, prompt, ours)
            assert choice["token_ids"] == generated(model, prompt, **theirs), (ours, len(prompt))
            answers.append(choice)
        assert answers[0]["finish_reason"] == "stop"
        assert len(answers[0]["token_ids"]) <= 4
        assert len(answers[1]["token_ids"]) > 6
        assert answers[2]["token_ids"][:3] != plain[:3]


async def test_a_token_that_is_forbidden_never_comes(split: Cluster) -> None:
    prompt = [5, 6, 7]
    plain = await split.ids(prompt, TOKENS)
    (choice,) = await said(split, prompt, {"logit_bias": {str(plain[0]): -100}})
    assert plain[0] not in choice["token_ids"]
    (choice,) = await said(split, prompt, {"allowed_token_ids": [9, 8]})
    assert set(choice["token_ids"]) <= {8, 9}
    (choice,) = await said(split, prompt, {"allowed_token_ids": [9], "presence_penalty": 2})
    assert choice["token_ids"] == [9] * TOKENS


@pytest.mark.parametrize("length", [15, 16, 33, 512])
async def test_several_answers_ship_the_prompt_once(split: Cluster, length: int) -> None:
    async def shipped(n: int, start: int) -> float:
        before = await split.metric("pagerelay_handover_bytes_total")
        prompt = [start + at % 900 for at in range(length)]
        choices = await said(split, prompt, {"n": n, "temperature": 1.0, "seed": 7})
        await split.idle()
        assert [choice["index"] for choice in choices] == list(range(n))
        alone = await said(split, prompt, {"n": 1, "temperature": 1.0, "seed": 7})
        assert alone[0]["token_ids"] == choices[0]["token_ids"]
        assert len({str(choice["token_ids"]) for choice in choices}) > n // 2
        return await split.metric("pagerelay_handover_bytes_total") - before

    # Both ask for one answer more, whose prompt is known by then: what is shipped twice is at most a tail.
    assert await shipped(8, 2000 + length) == await shipped(1, 4000 + length) > 0

"""The tokenizer as a service, and the small routes that tell what the server is."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, post
from strict_sse import check_answer

from pagerelay.router.openapi import document
from pagerelay.router.text import Tokenizer
from pagerelay.router.validate import Limits

TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi <|im_end|>"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_dir)


async def tokenize(cluster: Cluster, **body: Any) -> dict[str, Any]:
    status, answer, _ = await post(cluster, "/tokenize", body)
    assert status == 200, answer
    check_answer("Tokenized", answer)
    assert answer["count"] == len(answer["tokens"])
    return dict(answer)


async def test_tokenize_gives_the_ids_that_are_computed(split: Cluster, tokenizer: Tokenizer) -> None:
    text = "Four words and 🦜. <|im_end|>"
    answer = await tokenize(split, prompt=text, return_token_strs=True)
    assert answer["tokens"] == tokenizer.encode(text)
    assert answer["max_model_len"] == (await split.get("/cluster"))["context_len"]
    assert answer["token_strs"][0] == "Four"
    assert len(answer["token_strs"]) == answer["count"]
    assert (await split.generate(text, 1))["usage"]["prompt_tokens"] == answer["count"]
    plain = await tokenize(split, prompt=text, add_special_tokens=False)
    assert plain["tokens"] == tokenizer.encode(text, None, False)
    assert plain["token_strs"] is None
    assert (await tokenize(split, prompt=""))["tokens"] == tokenizer.encode("")


async def test_tokenize_renders_conversations(split: Cluster, tokenizer: Tokenizer) -> None:
    model = (await split.get("/v1/models"))["data"][0]["id"]
    answer = await tokenize(split, model=model, messages=TURNS)
    assert answer["tokens"] == tokenizer.encode_chat(TURNS)
    status, chat, _ = await post(
        split, "/v1/chat/completions", {"model": model, "messages": TURNS, "max_tokens": 1}
    )
    assert (status, chat["usage"]["prompt_tokens"]) == (200, answer["count"])
    unbegun = await tokenize(split, messages=TURNS, add_generation_prompt=False)
    assert unbegun["tokens"] == answer["tokens"][: unbegun["count"]]
    assert unbegun["count"] < answer["count"]


async def test_detokenize_is_the_way_back(split: Cluster, tokenizer: Tokenizer) -> None:
    for text in ("", "a", "ok 🦜🦜 日本語 العربية 👩‍👩‍👧 <|im_end|>\r\n  end"):
        status, answer, _ = await post(split, "/detokenize", {"tokens": tokenizer.encode(text)})
        assert (status, answer) == (200, {"prompt": text})


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": TURNS}, 400, "messages"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "poet", "content": "a"}]}, 400, "messages[0].role"),
        ("/tokenize", {"messages": TURNS, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a" * 5_000_000}, 400, "prompt"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, 10**9]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [5] * 300_000}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_refusals(split: Cluster, path: str, body: Any, status: int, param: str | None) -> None:
    got, answer, _ = await post(split, path, body)
    assert (got, answer["error"]["param"]) == (status, param)
    check_answer("Error", answer)


async def test_what_the_server_is(split: Cluster) -> None:
    models = await split.get("/v1/models")
    check_answer("Models", models)
    one = models["data"][0]
    assert await split.get(f"/v1/models/{one['id']}") == one
    assert (await split.get("/v1/models/some/other"))["error"]["code"] == "model_not_found"
    assert await split.get("/version") == {"version": version("pagerelay")}
    cluster = await split.get("/cluster")
    vocab = (await split.get("/openapi.json"))["components"]["schemas"]["DetokenizeRequest"]
    limits = Limits(
        served_name=one["id"],
        vocab_size=vocab["properties"]["tokens"]["items"]["maximum"] + 1,
        context_len=cluster["context_len"],
        max_choices=128,
    )
    assert await split.get("/openapi.json") == document(limits)
    status, answer, headers = await post(split, "/livez", {})
    assert (status, answer["error"]["code"]) == (405, "method_not_allowed")
    assert headers["Allow"] == "GET,HEAD"

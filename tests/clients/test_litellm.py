"""litellm, as its users name an OpenAI-compatible server: ``openai/MODEL`` with ``api_base``."""

from __future__ import annotations

from typing import Any

import pytest
from cluster import Cluster

litellm = pytest.importorskip("litellm")

TURNS = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def options(served: Cluster, key: str) -> dict[str, Any]:
    model = (await served.get("/cluster"))["model"]
    return {
        "model": f"openai/{model}",
        "api_base": served.url + "/v1",
        "api_key": key,
        "max_tokens": 5,
        "temperature": 0,
    }


async def test_chats(options: dict[str, Any]) -> None:
    whole = await litellm.acompletion(messages=TURNS, **options)
    assert whole.usage.completion_tokens == 5
    assert whole.choices[0].finish_reason == "length"
    stream = await litellm.acompletion(
        messages=TURNS, stream=True, stream_options={"include_usage": True}, **options
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 5


async def test_sync_chat(options: dict[str, Any]) -> None:
    import asyncio

    whole = await asyncio.to_thread(litellm.completion, messages=TURNS, **options)
    assert whole.choices[0].message.content


async def test_text_completions(options: dict[str, Any]) -> None:
    options["model"] = options["model"].replace("openai/", "text-completion-openai/")
    whole = await litellm.atext_completion(prompt="The licence says that", **options)
    assert whole.choices[0].text
    stream = await litellm.atext_completion(prompt="The licence says that", stream=True, **options)
    text = "".join([chunk.choices[0].text or "" async for chunk in stream])
    assert text == whole.choices[0].text


async def test_errors_have_their_classes(options: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        await litellm.acompletion(messages=TURNS, **options | {"temperature": -1})
    with pytest.raises(litellm.AuthenticationError):
        await litellm.acompletion(messages=TURNS, **options | {"api_key": "wrong"})
    with pytest.raises(litellm.NotFoundError):
        await litellm.acompletion(messages=TURNS, **options | {"model": "openai/other"})
    long = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        await litellm.acompletion(messages=long, **options)

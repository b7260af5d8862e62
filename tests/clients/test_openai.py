"""The official client: sync and async, streams, its exception classes, its retries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from chat_templates import FIRST_MARK, beginning, terse
from cluster import Cluster
from fake_router import FakeRouter, events, piece, refusal

openai = pytest.importorskip("openai")

from pydantic import BaseModel, Field  # noqa: E402

PROMPT = "The licence says that"
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
FEW: dict[str, Any] = {"max_tokens": 5, "temperature": 0}


@pytest.fixture
def client(served: Cluster, key: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key=key, max_retries=0) as made:
        yield made


def strict(client: Any) -> Any:
    """Checks each answer against the client's types; those of a streamed text want a finish reason in every
    piece, which OpenAI's own pieces do not have either."""
    return client.with_options(_extra_kwargs={"_strict_response_validation": True})


@pytest.fixture
def model(client: Any) -> str:
    [entry] = client.models.list().data
    assert entry.object == "model"
    return entry.id


def test_completions_whole_and_streamed(client: Any, model: str) -> None:
    whole = strict(client).completions.create(model=model, prompt=PROMPT, **FEW)
    assert whole.usage.completion_tokens == 5
    assert whole.choices[0].finish_reason == "length"
    stream = client.completions.create(
        model=model, prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **FEW
    )
    chunks = list(stream)
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_prompts_as_ids_and_lists(client: Any, model: str) -> None:
    texts = client.completions.create(model=model, prompt=[PROMPT, "Alphabet:"], n=2, **FEW)
    assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]
    ids = client.completions.create(model=model, prompt=[[5, 6, 7], [8]], **FEW)
    assert ids.usage.prompt_tokens == 4


def test_chats_whole_and_streamed(client: Any, model: str) -> None:
    whole = strict(client).chat.completions.create(model=model, messages=TURNS, **FEW)
    assert whole.choices[0].message.role == "assistant"
    stream = strict(client).chat.completions.create(model=model, messages=TURNS, stream=True, **FEW)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content


def test_logprobs_in_both_shapes(client: Any, model: str) -> None:
    text = client.completions.create(model=model, prompt=PROMPT, logprobs=2, **FEW).choices[0]
    assert len(text.logprobs.tokens) == len(text.logprobs.token_logprobs) == 5
    chat = client.chat.completions.create(
        model=model, messages=TURNS, logprobs=True, top_logprobs=2, **FEW
    ).choices[0]
    assert [len(token.top_logprobs) for token in chat.logprobs.content] == [2] * 5
    assert b"".join(bytes(t.bytes) for t in chat.logprobs.content).decode() == chat.message.content


def test_the_clients_own_stream_helper(client: Any, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=TURNS, **FEW).choices[0].message.content
    stop = whole[-4:]  # the helper takes a cut answer for an error
    with client.chat.completions.stream(
        model=model, messages=TURNS, stop=stop, stream_options={"include_usage": True}, **FEW
    ) as stream:
        seen = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= seen
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].message.content == whole[: whole.index(stop)]
    assert final.usage.completion_tokens <= 5


async def test_async(served: Cluster, key: str) -> None:
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key=key, max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        whole = await client.chat.completions.create(model=model, messages=TURNS, **FEW)
        stream = await client.chat.completions.create(model=model, messages=TURNS, stream=True, **FEW)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == whole.choices[0].message.content
        assert (await client.completions.create(model=model, prompt=PROMPT, **FEW)).choices[0].text


def test_a_raw_response_shows_the_request_id(client: Any, model: str) -> None:
    raw = client.completions.with_raw_response.create(model=model, prompt=PROMPT, **FEW)
    assert raw.headers["x-request-id"] == raw.parse().id


def test_a_stream_that_is_left_frees_the_cluster(served: Cluster, client: Any, model: str) -> None:
    import asyncio

    with client.completions.create(model=model, prompt=PROMPT, stream=True, max_tokens=4000) as stream:
        next(iter(stream))
    asyncio.run(served.idle())


@pytest.mark.parametrize(
    ("fields", "kind", "code", "param"),
    [
        ({"temperature": -1}, "BadRequestError", "invalid_value", "temperature"),
        ({"prompt": ""}, "BadRequestError", "empty_prompt", "prompt"),
        ({"prompt": [5] * 9000}, "BadRequestError", "context_length_exceeded", None),
        ({"model": "other"}, "NotFoundError", "model_not_found", "model"),
    ],
)
def test_errors_have_their_classes(
    client: Any, model: str, fields: dict[str, Any], kind: str, code: str, param: str | None
) -> None:
    for stream in (False, True):
        with pytest.raises(getattr(openai, kind)) as caught:
            client.completions.create(**{"model": model, "prompt": "a", "stream": stream} | fields)
        assert caught.value.code == code
        assert param is None or caught.value.param == param


def test_a_wrong_key_and_an_endpoint_that_is_not_served(served: Cluster, client: Any, model: str) -> None:
    with (
        openai.OpenAI(base_url=served.url + "/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model=model, input="a")
    assert caught.value.code == "unsupported_endpoint"


# ------------------------------------------------------------------------------------ tools, parsed answers


class Person(BaseModel):
    name: Literal["Ann", "Zoë"]
    age: int = Field(ge=0, le=150)


class Pay(BaseModel):
    """Pays somebody."""

    to: Person
    cents: int = Field(ge=0, le=9999)
    urgent: bool


FORCED: dict[str, Any] = {"max_tokens": 200, "seed": 3, "temperature": 0.8, "logit_bias": terse()}
CALLED = FORCED | {"logit_bias": terse() | {str(FIRST_MARK): 100}}
"""With a bias for the token that begins a call."""


@pytest.fixture
def caller(calling: Cluster, key: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=calling.url + "/v1", api_key=key, max_retries=0) as made:
        yield made.chat.completions


def test_an_answer_is_parsed(caller: Any) -> None:
    fields = {"model": "tiny-llama", "messages": TURNS, "response_format": Person, **FORCED}
    whole = caller.parse(**fields)
    assert isinstance(whole.choices[0].message.parsed, Person)
    with caller.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed


@pytest.mark.parametrize(
    "choice",
    ["auto", "required", {"type": "function", "function": {"name": "Pay"}}, None],
    ids=["auto", "required", "named", "left out"],
)
def test_strict_functions_are_called_and_parsed(caller: Any, choice: Any) -> None:
    """``pydantic_function_tool`` makes every function strict."""
    fields = {
        "model": "tiny-llama",
        "messages": TURNS,
        "tools": [openai.pydantic_function_tool(Pay), openai.pydantic_function_tool(Person)],
        "parallel_tool_calls": False,
        **(CALLED if choice in (None, "auto") else FORCED),
        **({} if choice is None else {"tool_choice": choice}),
    }
    whole = caller.parse(**fields).choices[0]
    (call,) = whole.message.tool_calls
    assert call.id.startswith("call_")
    assert isinstance(call.function.parsed_arguments, Pay | Person)
    assert whole.finish_reason == ("stop" if isinstance(choice, dict) else "tool_calls")
    assert whole.message.content is None
    with caller.stream(**fields, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    kinds = {event.type for event in events}
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    (streamed,) = final.choices[0].message.tool_calls
    assert streamed.function.parsed_arguments == call.function.parsed_arguments
    assert final.choices[0].finish_reason == whole.finish_reason
    assert final.usage.completion_tokens > 0
    # The call goes back with its result.
    turns = [*TURNS, whole.message.model_dump(exclude_none=True, exclude={"parsed"})]
    for made in turns[-1]["tool_calls"]:
        made["function"].pop("parsed_arguments", None)
    turns += [{"role": "tool", "tool_call_id": call.id, "content": "done"}]
    again = caller.create(model="tiny-llama", messages=turns, tools=fields["tools"], max_tokens=2)
    assert again.usage.prompt_tokens > 20


def test_several_calls_and_an_answer_of_a_schema(caller: Any) -> None:
    fields = {
        "model": "tiny-llama",
        "messages": TURNS,
        "tools": [openai.pydantic_function_tool(Pay)],
        "response_format": Person,
        "max_tokens": 400,
    }
    answered = caller.parse(**FORCED | {"logit_bias": terse() | beginning("{", 100)} | fields).choices[0]
    assert isinstance(answered.message.parsed, Person)
    assert not answered.message.tool_calls
    free = {"response_format": {"type": "text"}, "max_tokens": 150}
    called = caller.create(**CALLED | fields | free).choices[0]
    assert len(called.message.tool_calls) > 1
    assert called.finish_reason == "length"


def test_endpoints_of_other_apis_are_refused_by_name(client: Any, model: str) -> None:
    for call in (
        lambda: client.responses.create(model=model, input="hi"),
        lambda: client.beta.assistants.create(model=model),
        lambda: client.beta.threads.create(),
        lambda: client.batches.list(),
        lambda: client.audio.speech.create(model=model, voice="alloy", input="hi"),
        lambda: client.images.generate(model=model, prompt="hi"),
        lambda: client.moderations.create(input="hi"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert caught.value.code == "unsupported_endpoint"
        assert "/v1/" in caught.value.message


def test_it_comes_again_after_429_and_503_and_tells_an_error_in_a_stream() -> None:
    fake = FakeRouter()
    try:
        with openai.OpenAI(base_url=fake.url + "/v1", api_key="none", max_retries=2) as client:
            answer = {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": []}
            fake.answers = [refusal(429, "queue_full", "1"), refusal(503, "no_worker", "1"), answer]
            assert client.completions.create(model="m", prompt="a").id == "c"
            assert len(fake.seen) == 3
            error = {
                "error": {"message": "gone", "type": "server_error", "param": None, "code": "worker_lost"}
            }
            fake.answers = [events(piece("a"), error, done=False)]
            with pytest.raises(openai.APIError, match="gone"):
                list(client.completions.create(model="m", prompt="a", stream=True))
    finally:
        fake.close()

"""Outputs with calls on their way from token ids to events; the tags are special tokens."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from chat_templates import NAMED, SPECIALS, TEMPLATES
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pagerelay.common.config import Config
from pagerelay.router.answer import Answer
from pagerelay.router.replies import Timings, reply_for
from pagerelay.router.text import Tokenizer
from pagerelay.router.tool_calls import detect_family
from pagerelay.router.validate import Limits, ParsedRequest, parse_request

CALLS = [("add", '{"a": 1, "b": "日本 🦜"}'), ("now", "{}")]
JSON = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in CALLS]
OUTPUTS = {
    "hermes": f"Well 🦜.\n<tool_call>\n{JSON[0]}\n</tool_call>\n<tool_call>\n{JSON[1]}\n</tool_call>",
    "llama3_json": f"Well 🦜.<|python_tag|>{JSON[0]}; {JSON[1]}",
    "mistral": f"Well 🦜. [TOOL_CALLS] [{JSON[0]}, {JSON[1]}]",
    "mistral_args": f"Well 🦜.[TOOL_CALLS]add[CALL_ID]0[ARGS]{CALLS[0][1]}[TOOL_CALLS]now[ARGS]{CALLS[1][1]}",
    "qwen3_coder": "Well 🦜.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n"
    "日本 🦜\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now></function></tool_call>",
}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name, _ in CALLS]


class ScriptedFlow:
    """Gives token ids as a worker would, ``size`` a message, and then the end."""

    def __init__(self, ids: list[int], size: int, reason: str) -> None:
        self._messages = [ids[at : at + size] for at in range(0, len(ids), size)]
        self._reason = reason
        self.ended_by_router = False
        self.journal = SimpleNamespace(logprobs=[], prompt=[1], prompt_scores=[])

    async def start(self) -> None:
        pass

    async def next(self) -> tuple[list[int], str | None]:
        tokens = self._messages.pop(0)
        return tokens, None if self._messages else self._reason

    def finished_by_router(self) -> None:
        self.ended_by_router = True

    async def close(self) -> None:
        pass


class Anything:
    """Metrics that nobody reads."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *values: Any) -> None:
        pass


@pytest.fixture(params=sorted(OUTPUTS))
def tokenizer(request: pytest.FixtureRequest, make_folder, byte_backend: Backend) -> Tokenizer:
    backend = Backend.from_str(byte_backend.to_str())
    tags = ["<tool_call>", "</tool_call>"] if request.param == "hermes" else []
    backend.add_special_tokens([AddedToken(text, special=True) for text in [*SPECIALS[request.param], *tags]])
    return Tokenizer.load(make_folder(backend, TEMPLATES[request.param], **NAMED[request.param]))


def ask(tokenizer: Tokenizer, **fields: Any) -> ParsedRequest:
    assert tokenizer.template is not None
    limits = Limits(
        served_name="m",
        vocab_size=tokenizer.vocab_size,
        context_len=4096,
        max_choices=8,
        abilities=tokenizer.abilities,
        tool_family=detect_family(tokenizer.template.source),
    )
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS} | fields
    return parse_request("chat", json.dumps(body).encode(), limits)


def output(tokenizer: Tokenizer) -> list[int]:
    assert tokenizer.template is not None
    text = OUTPUTS[detect_family(tokenizer.template.source) or ""] + "<|endoftext|>"
    return tokenizer.encode(text)


def answer(tokenizer: Tokenizer, parsed: ParsedRequest, flow: ScriptedFlow) -> tuple[Any, list[Any]]:
    """(the plain body's choice, the stream's choices)"""
    service: Any = SimpleNamespace(
        tokenizer=tokenizer, metrics=Anything(), clock=time.monotonic, config=Config()
    )

    async def run() -> tuple[Any, list[Any]]:
        whole = Answer(service, parsed, [[1]], [flow])  # type: ignore[list-item]
        reply, events = reply_for(parsed, tokenizer), b""
        async for piece in whole.pieces():
            if piece is not None:
                events += reply.delta(piece)
        await whole.close()
        body = reply.whole(whole.outputs(), whole.usage(), Timings())
        chunks = [json.loads(line[6:])["choices"][0] for line in events.decode().split("\n\n")[:-1]]
        return json.loads(body)["choices"][0], chunks

    return asyncio.run(run())


def add_up(chunks: list[Any]) -> tuple[str, list[tuple[str, str]], str]:
    text, calls = "", []
    for chunk in chunks:
        text += chunk["delta"].get("content", "")
        for piece in chunk["delta"].get("tool_calls", ()):
            if "id" in piece:
                assert piece["index"] == len(calls)
                calls.append([piece["function"]["name"], ""])
            calls[piece["index"]][1] += piece["function"]["arguments"]
    return text, [(name, arguments) for name, arguments in calls], chunks[-1]["finish_reason"]


def whole(choice: Any) -> tuple[str, list[tuple[str, str]], str]:
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return message["content"] or "", [(c["name"], c["arguments"]) for c in calls], choice["finish_reason"]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_stream_and_plain_answer_hold_the_same_calls(tokenizer: Tokenizer, size: int) -> None:
    choice, chunks = answer(tokenizer, ask(tokenizer), ScriptedFlow(output(tokenizer), size, "stop"))
    assert whole(choice) == add_up(chunks) == ("Well 🦜.", CALLS, "tool_calls")
    if size == 1:
        assert sum("tool_calls" in chunk["delta"] for chunk in chunks) > 6  # as they come


def test_cut_off_by_the_limit(tokenizer: Tokenizer) -> None:
    ids = output(tokenizer)
    for end in range(1, len(ids) - 1, 5):
        choice, chunks = answer(tokenizer, ask(tokenizer), ScriptedFlow(ids[:end], 4, "length"))
        assert whole(choice) == add_up(chunks)
        assert choice["finish_reason"] == "length"


def test_one_call_only_ends_the_answer(tokenizer: Tokenizer) -> None:
    flow = ScriptedFlow(output(tokenizer), 2, "length")
    choice, chunks = answer(tokenizer, ask(tokenizer, parallel_tool_calls=False), flow)
    assert whole(choice) == add_up(chunks) == ("Well 🦜.", CALLS[:1], "tool_calls")
    assert flow.ended_by_router


@pytest.mark.parametrize("fields", [{"tools": None}, {"tool_choice": "none"}])
def test_without_tools_it_is_text(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    ids = output(tokenizer)
    choice, chunks = answer(tokenizer, ask(tokenizer, **fields), ScriptedFlow(ids, 2, "stop"))
    text = tokenizer._encoder.decode(ids, skip_special_tokens=True)
    assert whole(choice) == add_up(chunks) == (text, [], "stop")


def test_a_stop_string_ends_a_call(tokenizer: Tokenizer) -> None:
    flow = ScriptedFlow(output(tokenizer), 2, "stop")
    choice, chunks = answer(tokenizer, ask(tokenizer, stop="日本"), flow)
    assert whole(choice) == add_up(chunks) == ("Well 🦜.", [("add", '{"a": 1, "b": "')], "tool_calls")
    assert flow.ended_by_router


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "add"}}, "stop")],
)
def test_the_end_of_forced_calls(tokenizer: Tokenizer, choice: Any, reason: str) -> None:
    """As OpenAI has it; ids are those that the model's template takes."""
    assert tokenizer.template is not None
    ids = tokenizer.encode(f"[{JSON[0]}]<|endoftext|>")
    parsed = ask(tokenizer, tool_choice=choice)
    for end, wanted in ((len(ids), reason), (len(ids) - 3, "length")):
        flow = ScriptedFlow(ids[:end], 3, "stop" if end == len(ids) else "length")
        plain, chunks = answer(tokenizer, parsed, flow)
        assert whole(plain)[2] == add_up(chunks)[2] == wanted
    plain, chunks = answer(tokenizer, parsed, ScriptedFlow(ids, 3, "stop"))
    assert whole(plain) == add_up(chunks) == ("", CALLS[:1], reason)
    ids_of_calls = [call["id"] for call in plain["message"]["tool_calls"]]
    ids_of_calls += [c["id"] for chunk in chunks for c in chunk["delta"].get("tool_calls", ()) if "id" in c]
    short = (detect_family(tokenizer.template.source) or "").startswith("mistral")
    assert [len(one) for one in ids_of_calls] == [9 if short else 29] * 2
    assert all(one.startswith("call_") != short for one in ids_of_calls)

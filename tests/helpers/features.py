"""What a request can ask for, feature by feature, and whatever two of them make together."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import reduce
from typing import Any

import aiohttp
from cluster import Cluster, sse
from strict_sse import check_answer

Fields = dict[str, Any]

SERVED = "tiny-tools"
"""Folder and name of the tiny model with a template that knows tools."""
TOKENS = 12
# 260 and 1000 are likely for the tiny model after these prompts, so that forbidding or lifting them tells.
SAMPLING: dict[str, Fields] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -1.2},
    "repetition": {"repetition_penalty": 1.7},
    "bias": {"logit_bias": {"260": 1.5, "1000": -100.0, "7": 0.75}},
    "bad words": {"bad_words": ["the", "a long one", "\n"]},
    "allowed": {"allowed_token_ids": list(range(200, 1500))},
    "least": {"min_tokens": TOKENS, "ignore_eos": False},
    "seeded": {"temperature": 0.8, "seed": 11},
    "filters": {"temperature": 1.3, "seed": 5, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "logprobs": {"logprobs": 5},
    "prompt logprobs": {"prompt_logprobs": 2},
    "n": {"n": 3},
    "best": {"n": 2, "best_of": 4, "temperature": 0.9, "seed": 3},
}

_OBJECT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9999}},
    "required": ["x"],
}
_TOOLS = [{"type": "function", "function": {"name": name, "parameters": _OBJECT}} for name in ("f", "go")]
_WRITTEN = r'<tool_call>\{"name": "f", "arguments": \{"x": [0-9]{1,9}\}\}</tool_call>'
_ROOM = {"max_tokens": 40}
GRAMMARS: dict[str, Fields] = {
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": _OBJECT}}} | _ROOM,
    "json_object": {"structured_outputs": {"json_object": True}} | _ROOM,
    "regex": {"guided_regex": r"([a-z]{2,4} ){2,5}\."} | _ROOM,
    "choice": {"guided_choice": ["yes", "no", "perhaps tomorrow"]} | _ROOM,
    "lark": {"guided_grammar": 'start: "(" start ")" | /[a-z]{3,9}/'} | _ROOM,
    "gbnf": {"structured_outputs": {"grammar": 'root ::= ("- " [a-z]{2,6} "\\n"){2,4}'}} | _ROOM,
}
TOOLS: dict[str, Fields] = {
    "tools": {"tools": _TOOLS},
    "tools called": {"tools": _TOOLS, "structured_outputs": {"regex": _WRITTEN}} | _ROOM,
    "tools forced": {
        "tools": _TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 100,
    },
}
OTHERS: dict[str, Fields] = {
    "beams": {"num_beams": 3, "n": 2},
    "echo": {"echo": True},
    "truncate": {"truncate_prompt_tokens": 9},
    "stop": {"stop": ["er", " a"]},
    "stop kept": {"stop": ["er", " a"], "include_stop_str_in_output": True},
    "stop ids": {"stop_token_ids": [260, 1000], "logit_bias": {"260": 4.0}},
    "eos heard": {"ignore_eos": False, "logit_bias": {"2": 9.0}},
    "specials": {"skip_special_tokens": False, "logit_bias": {"1": 9.0}},
    "stream": {"stream": True, "stream_options": {"include_usage": True}},
}
FEATURES = SAMPLING | GRAMMARS | TOOLS | OTHERS

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
_COMPONENTS = {CHAT: "ChatCompletion", COMPLETIONS: "Completion", GENERATE: "Generation"}
_RANDOM = ("id", "created", "timings")
_PER_FORM = ("object", "type", "index", "role")
"""What a stream says in other words, or more often, than a plain answer."""


def refused() -> set[frozenset[str]]:
    """The pairs that cannot be had, as docs/api.md says."""
    alone = (*GRAMMARS, "tools called", "tools forced")  # each says by itself what the answer is
    pairs = {frozenset(pair) for pair in itertools.combinations(alone, 2)}
    of_one = {
        "beams": ("presence", "frequency", "seeded", "filters", "best", "logprobs", "prompt logprobs"),
        "echo": ("prompt logprobs", *TOOLS),
        "stream": ("prompt logprobs", "best", "beams"),
        "best": TOOLS,
    }
    of_one["beams"] += ("echo", "stop", "stop kept", *GRAMMARS, *TOOLS)
    return pairs | {frozenset((one, other)) for one, others in of_one.items() for other in others}


def together(*names: str) -> Fields:
    """The fields of all these features; of two values for one field the later counts."""
    merged: Fields = reduce(_joined_fields, (FEATURES[name] for name in names), {})
    if "n" in merged and merged.get("best_of", merged["n"]) < merged["n"]:
        merged["best_of"] = merged["n"]
    return merged


def _joined_fields(one: Fields, other: Fields) -> Fields:
    return {
        key: _joined_fields(one[key], other[key])
        if isinstance(one.get(key), dict) and isinstance(other.get(key), dict)
        else (other if key in other else one)[key]
        for key in one | other
    }


def request(prompt: list[int], text: str, fields: Fields) -> tuple[str, Fields]:
    """(route, body): the one that has all the fields. ``text`` is what a chat is asked."""
    body: Fields = {"model": SERVED, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True} | fields
    if "tools" in fields:
        count = body.pop("logprobs", None)
        body |= {} if count is None else {"logprobs": True, "top_logprobs": count}
        return CHAT, body | {"messages": [{"role": "user", "content": text}], "return_token_ids": True}
    if "echo" in fields:
        return COMPLETIONS, body | {"prompt": prompt, "return_token_ids": True}
    return GENERATE, body | {"prompt": prompt}


async def ask(cluster: Cluster, route: str, body: Fields, heard: Callable[[Any], None] | None = None) -> Any:
    """The answer less what is random in it, a stream joined to what it would be without; or, of one that is
    refused, (status, code, param). ``heard`` gets each event of a stream as it comes."""
    async with aiohttp.ClientSession() as session, session.post(cluster.url + route, json=body) as response:
        if response.status != 200:
            error = (await response.json())["error"]
            return response.status, error["code"], error["param"]
        if body.get("stream"):
            events = []
            async for event in sse(response, body):
                assert "error" not in event, event
                events.append(event)
                if heard is not None:
                    heard(event)
            return joined(events)
        answer = await response.json()
    check_answer(_COMPONENTS[route], answer)
    return joined([answer])


def joined(events: list[Any]) -> Any:
    """The plain form of an answer that came in so many pieces."""
    told = [{"choices": event["choices"], "usage": event.get("usage")} for event in events]
    return _plain(reduce(_merged, told, None))


def _merged(one: Any, other: Any) -> Any:
    if other is None:
        return one
    if isinstance(other, dict):
        one = one or {}
        return {key: _merged(one.get(key), other.get(key)) for key in one | other}
    if not isinstance(other, list):
        return one + other if isinstance(one, str) else other
    one = one or []
    if not any(isinstance(item, dict) and isinstance(item.get("index"), int) for item in one + other):
        return one + other
    by_index: dict[int, Any] = {}
    for item in one + other:  # one event may have several pieces of the same call
        by_index[item["index"]] = _merged(by_index.get(item["index"]), item)
    return [by_index[index] for index in sorted(by_index)]


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    plain = {
        "message" if key == "delta" else key: _plain(item)
        for key, item in value.items()
        if key not in (*_RANDOM, *_PER_FORM)
    }
    return {key: item for key, item in plain.items() if item not in (None, "", {})}

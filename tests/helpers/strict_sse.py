"""The one reader of pagerelay's streams in tests: every byte is checked, every event against /openapi.json.

A stream is events of one ``data:`` line and a blank line; comments are keep-alives and nothing else. All
chunks have one id, model and creation time. Each choice has text, then one finish, then nothing. A chat's
first chunk of a choice has the role, no other has. Usage comes as the request asked for it. A stream ends
with ``[DONE]`` when all choices have finished, or with an error event, and nothing follows either.
"""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator
from functools import lru_cache
from typing import Any

import aiohttp
import jsonschema_rs

from pagerelay.router.openapi import document
from pagerelay.router.validate import Limits

Event = dict[str, Any]
KINDS = {None: "Generation", "text_completion": "Completion", "chat.completion.chunk": "ChatCompletionChunk"}
OF_PATH = {
    "/generate": "Generation",
    "/v1/completions": "Completion",
    "/v1/chat/completions": "ChatCompletionChunk",
}


@lru_cache(1)
def components() -> dict[str, Any]:
    """Schemas of /openapi.json, made stricter: an answer has no field that the document does not name."""
    shown = document(Limits(served_name="m", vocab_size=2**31, context_len=2**31, max_choices=2**31))
    schemas = copy.deepcopy(shown["components"]["schemas"])
    for schema in schemas.values():
        if "properties" in schema:
            schema["additionalProperties"] = False
    return schemas


@lru_cache(32)
def validator(component: str) -> Any:
    """``validate(value)`` raises what differs from that component of the document."""
    schema = {"$ref": f"#/components/schemas/{component}", "components": {"schemas": components()}}
    return jsonschema_rs.Draft202012Validator(schema)


def strict_json(text: str) -> Any:
    """JSON without NaN and Infinity, each key once."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        assert len(made) == len(pairs), f"a key twice in {text}"
        return made

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in {text}")

    return json.loads(text, parse_constant=refuse, object_pairs_hook=once)


class StrictStream:
    """Feed it the bytes of one answer as they come; :meth:`close` when they have ended by themselves.

    ``path`` and ``request`` are what was asked, as far as is known: each makes the check stricter.
    """

    def __init__(self, path: str | None = None, request: Event | None = None) -> None:
        self._kind = OF_PATH[path] if path else None
        self._request = request
        self._rest = b""
        self._same: tuple[Any, ...] | None = None
        self._with_usage: bool | None = None
        self.texts: dict[int, str] = {}
        self.token_ids: dict[int, list[int]] = {}
        self.calls: dict[int, list[Event]] = {}
        self.finish: dict[int, str] = {}
        self.usage: Event | None = None
        self.timings: Event | None = None
        self.error: Event | None = None
        self.done = False
        self.num_comments = 0

    def feed(self, data: bytes) -> list[Event]:
        """The events that are complete with these bytes."""
        events = []
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        for block in blocks:
            assert not self._over, f"after the end: {block!r}"
            if block.startswith(b":"):
                assert block == b": keep-alive", block
                self.num_comments += 1
                continue
            assert block.startswith(b"data: "), block
            line = block.removeprefix(b"data: ").decode("utf-8")
            assert line.splitlines() == [line], f"more than one line: {block!r}"
            if line == "[DONE]":
                self._finished()
                self.done = True
                continue
            event = strict_json(line)
            self._check(event)
            events.append(event)
        assert not (self._rest and self._over), f"after the end: {self._rest!r}"
        return events

    def close(self) -> None:
        assert self._rest == b"", f"half an event at the end: {self._rest!r}"
        assert self._over, "the stream ended without [DONE] and without an error"

    @property
    def _over(self) -> bool:
        return self.done or self.error is not None

    def _check(self, event: Event) -> None:
        if "error" in event:
            validator("Error").validate(event)
            self.error = event["error"]
            return
        kind = KINDS[event.get("object")]
        assert self._kind in (None, kind), f"a {kind} where {self._kind} was asked"
        self._kind = kind
        validator(kind).validate(event)
        same = event["id"], event["model"], event.get("created"), event.get("object")
        assert self._same in (None, same), f"{same} after {self._same}"
        self._same = same
        assert self.usage is None, f"after the usage: {event}"
        self._check_usage(event, first=self._with_usage is None)
        for choice in event["choices"]:
            self._check_choice(choice)

    def _check_usage(self, event: Event, first: bool) -> None:
        if self._kind == "Generation":
            assert ("usage" in event) == ("timings" in event) == (not event["choices"]), event
            self.timings = event.get("timings")
        elif first:
            self._with_usage = "usage" in event
            if self._request is not None:
                asked = (self._request.get("stream_options") or {}).get("include_usage") is True
                assert self._with_usage is asked, f"usage asked: {asked}; {event}"
        else:
            assert ("usage" in event) is self._with_usage, event
        if event.get("usage") is not None:
            assert event["choices"] == [], event
            usage = self.usage = event["usage"]
            assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
            if self.token_ids and self._kind == "Generation":
                assert usage["completion_tokens"] == sum(map(len, self.token_ids.values()))
        else:
            assert event["choices"], f"neither choices nor usage: {event}"

    def _check_choice(self, choice: Event) -> None:
        index = choice["index"]
        assert index not in self.finish, f"choice {index} goes on after its end: {choice}"
        if self._kind == "ChatCompletionChunk":
            delta = choice["delta"]
            assert ("role" in delta) == (index not in self.texts), f"role: {choice}"
            text = delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                self._add_call(index, call)
        else:
            text = choice["text"]
        self.texts[index] = self.texts.get(index, "") + text
        if choice.get("token_ids") is not None:
            self.token_ids.setdefault(index, []).extend(choice["token_ids"])
        if choice["finish_reason"] is not None:
            self.finish[index] = choice["finish_reason"]

    def _add_call(self, index: int, part: Event) -> None:
        """A call begins with id, type and name; what follows adds to its arguments alone."""
        calls = self.calls.setdefault(index, [])
        begins = part["index"] == len(calls)
        assert begins or part["index"] == len(calls) - 1, f"calls out of order: {part}"
        assert begins == ("id" in part) == ("type" in part) == ("name" in part["function"]), part
        if begins:
            calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
        else:
            calls[-1]["function"]["arguments"] += part["function"]["arguments"]

    def _finished(self) -> None:
        """What must have come before [DONE]."""
        assert self.texts, "[DONE] without anything before it"
        assert sorted(self.texts) == list(range(len(self.texts))), f"choices {sorted(self.texts)}"
        assert self.finish.keys() == self.texts.keys(), f"{self.finish} of {len(self.texts)} choices ended"
        for index, reason in self.finish.items():
            choice = (self._request or {}).get("tool_choice")
            called = index in self.calls and not isinstance(choice, dict)  # a named function's call: stop
            assert reason == "length" or (reason == "tool_calls") == called, reason
        assert (self.usage is not None) is (self._kind == "Generation" or self._with_usage), "usage"
        if self._request is not None and (count := num_choices(self._request)) is not None:
            assert len(self.texts) == count, f"{len(self.texts)} choices of {count}"

    def assert_same_as(self, whole: Event) -> None:
        """Text, ids, finish reasons and usage of the answer to the same request without streaming."""
        for choice in whole["choices"]:
            index = choice["index"]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            assert self.texts[index] == (text or "")
            assert self.finish[index] == choice["finish_reason"]
            assert self.calls.get(index, []) == choice.get("message", {}).get("tool_calls", [])
            if choice.get("token_ids") is not None:
                assert self.token_ids[index] == choice["token_ids"]
        assert len(whole["choices"]) == len(self.texts)
        assert self.usage in (None, whole["usage"])


def num_choices(request: Event) -> int | None:
    """How many choices a request asks for; ``None`` where only the server can tell."""
    prompt = request.get("prompt")
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    if {"n", "prompt", "messages"}.isdisjoint(request):
        return None
    return (request.get("n") or 1) * (len(prompt) if several else 1)


reading: set[int] = set()
"""aiohttp readers whose bytes go through :func:`events`."""


async def events(response: aiohttp.ClientResponse, checked: StrictStream) -> AsyncIterator[Event]:
    """Events of a whole answer; the caller may leave before its end."""
    reading.add(id(response.content))
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert response.headers["Cache-Control"] == "no-cache"
    assert response.headers["X-Accel-Buffering"] == "no"
    async for data in response.content.iter_any():
        for event in checked.feed(data):
            yield event
    checked.close()


def check_stream(data: bytes, path: str | None = None, request: Event | None = None) -> StrictStream:
    """A stream that has been read whole."""
    checked = StrictStream(path, request)
    checked.feed(data)
    checked.close()
    return checked


def check_answer(component: str, answer: Any) -> None:
    """An answer without streaming, against /openapi.json."""
    validator(component).validate(answer)

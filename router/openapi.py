"""``GET /openapi.json``: every route with its bodies, answers and errors, made from the very structures that
decode requests and encode answers, and from what the running cluster allows (model, vocabulary, limits).

What the structures cannot say is added by hand in :func:`_narrow`: fields that must be there, fields that
only take neutral values, the shapes that ``prompt`` has. Of a stream it is the event that has a schema
(``itemSchema``, hence OpenAPI 3.2); only an error or ``[DONE]`` is the last one.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version
from typing import Any, Final

import msgspec
from msgspec import Struct

from pagerelay.common.errors import (
    ApiError,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    Unauthorized,
    Unavailable,
    WorkerLost,
)
from pagerelay.common.wire.sampling import MAX_LOGPROBS
from pagerelay.router import dialects, replies, schemas, tokenization
from pagerelay.router.api_keys import OPEN
from pagerelay.router.prompts import ROLES
from pagerelay.router.validate import Kind, Limits

_REF: Final = "#/components/schemas/"


class ErrorDetail(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct, frozen=True):
    error: ErrorDetail


class Status(Struct, frozen=True):
    status: str
    reason: str | None = None


class Version(Struct, frozen=True):
    version: str


class Route(Struct, frozen=True):
    """``answer`` of status 200: a structure, "object" for one without a fixed shape, or a media type."""

    method: str
    path: str
    summary: str
    answer: Any = "object"
    request: Any = None
    event: Any = None
    statuses: tuple[int, ...] = ()


_BODY: Final = (400, 404, 408, 413, 415, 429, 503)
_GENERATES: Final = (*_BODY, 500, 502, 504)
_COMPLETION: Final = replies._OpenAi[replies._TextChoice]
_CHAT: Final = replies._OpenAi[replies._ChatChoice]
_CHUNK: Final = replies._OpenAi[replies._ChatChunkChoice]

ROUTES: Final = (
    Route(
        "post", "/generate", "Continue prompts; pagerelay's own shape",
        replies._Generation, dialects.AnyGenerateRequest, replies._Generation, _GENERATES,
    ),
    Route(
        "post", "/v1/completions", "Continue prompts; OpenAI's shape",
        _COMPLETION, schemas.CompletionRequest, _COMPLETION, _GENERATES,
    ),
    Route(
        "post", "/v1/chat/completions", "Answer a conversation; OpenAI's shape",
        _CHAT, schemas.ChatRequest, _CHUNK, _GENERATES,
    ),
    Route(
        "post", "/tokenize", "Token ids of a prompt or a conversation",
        tokenization.Tokenized, tokenization.TokenizeRequest, None, _BODY,
    ),
    Route(
        "post", "/detokenize", "Text of token ids",
        tokenization.Detokenized, tokenization.DetokenizeRequest, None, _BODY,
    ),
    Route("post", "/v1/embeddings", "Refused: this server generates text", None, None, None, (404,)),
    Route("get", "/v1/models", "The served model", replies.Models),
    Route("get", "/v1/models/{model}", "The served model by its name", replies.Model, statuses=(404,)),
    Route("get", "/version", "Version of pagerelay", Version),
    Route("get", "/openapi.json", "This document"),
    Route("get", "/livez", "Does the process answer?", Status),
    Route("get", "/readyz", "Could a request be served?", Status, statuses=(503,)),
    Route("get", "/health", "The same under another name", Status, statuses=(503,)),
    Route("get", "/metrics", "Prometheus metrics", "text/plain"),
    Route("get", "/cluster", "Workers as the router sees them"),
)  # fmt: skip

_ERRORS: Final[dict[int, str]] = {
    **{error.status: error.__name__ for error in (InvalidRequest, Unauthorized, NotFound, PayloadTooLarge)},
    **{error.status: error.__name__ for error in (Overloaded, WorkerLost, Unavailable, DeadlineExceeded)},
    ApiError.status: "InternalError",
    408: "BodyTimeout",
    415: "UnsupportedEncoding",
}


@lru_cache(4)
def document(limits: Limits) -> dict[str, Any]:
    """The OpenAPI 3.2 document. ``limits`` stand in it as bounds, so it is as strict as the server."""
    used = [kind for route in ROUTES for kind in (route.answer, route.request, route.event)]
    types = list(dict.fromkeys(kind for kind in used if kind is not None and not isinstance(kind, str)))
    refs, components = msgspec.json.schema_components([*types, Error], ref_template=_REF + "{name}")
    ref_of = dict(zip([*types, Error], refs, strict=True))
    for component in components.values():
        component.pop("title", None)
    _narrow(components, limits)
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route, ref_of)
    shown: dict[str, Any] = {
        "openapi": "3.2.0",
        "info": {"title": "pagerelay", "version": version("pagerelay")},
        "paths": paths,
        "components": {
            "schemas": {_name(name): component for name, component in components.items()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return {part: _public(value) for part, value in shown.items()}


def _operation(route: Route, ref_of: dict[Any, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"summary": route.summary, "responses": {}}
    if "{" in route.path:
        made["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    if route.request is not None:
        made["requestBody"] = {"required": True, "content": _json(ref_of[route.request])}
    statuses = route.statuses
    if route.path not in OPEN:
        statuses = (401, *statuses)
        made["security"] = [{"key": []}, {}]
    for status in sorted(statuses):
        schema = ref_of[Status if route.answer is Status else Error]
        made["responses"][str(status)] = {"description": _ERRORS[status], "content": _json(schema)}
        if status == 429:
            made["responses"]["429"]["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    if route.answer is not None:
        made["responses"]["200"] = {"description": "OK", "content": _content(route, ref_of)}
    return made


def _content(route: Route, ref_of: dict[Any, Any]) -> dict[str, Any]:
    if route.answer == "text/plain":
        return {"text/plain": {"schema": {"type": "string"}}}
    content = _json({"type": "object"} if route.answer == "object" else ref_of[route.answer])
    if route.event is not None:
        event = {"anyOf": [ref_of[route.event], ref_of[Error]]}
        data = {"contentMediaType": "application/json", "contentSchema": event}
        content["text/event-stream"] = {
            "itemSchema": {
                "type": "object",
                "required": ["data"],
                "properties": {"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, data]}},
            }
        }
    return content


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


# ------------------------------------------------------------------------------------------------ narrower


def _narrow(components: dict[str, Any], limits: Limits) -> None:
    """Says what :mod:`validate` and :mod:`prompts` ask beyond types and bounds."""
    token_id = {"type": "integer", "minimum": 0, "maximum": limits.vocab_size - 1}
    ids = {"type": "array", "items": token_id, "minItems": 1}
    text = {"type": "string", "minLength": 1}
    own: dict[str, Any] = {
        "model": {"enum": [limits.served_name]},
        "prompt": {"anyOf": [text, {**ids, "items": text}, ids, {**ids, "items": ids}]},
        "text": {"anyOf": [text, {**ids, "items": text}]},
        "input_ids": {"anyOf": [ids, {**ids, "items": ids}]},
        "inputs": text,
        "messages": {
            "type": "array",
            "items": {"$ref": _REF + "ChatMessage"},
            "minItems": 1,
            "maxItems": schemas.MAX_MESSAGES,
        },
        "tokens": {"type": "array", "items": token_id, "maxItems": limits.context_len},
        "stop_token_ids": {"type": "array", "items": token_id, "maxItems": 128},
        "allowed_token_ids": {**ids, "maxItems": 16384},
        "n": {"type": "integer", "minimum": 1, "maximum": limits.max_choices},
    }
    number = {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS}
    requests: dict[str, tuple[Kind | None, list[str]]] = {
        "AnyGenerateRequest": ("generate", []),
        "Nested": ("generate", []),
        "CompletionRequest": ("completions", ["model", "prompt"]),
        "ChatRequest": ("chat", ["model", "messages"]),
        "TokenizeRequest": (None, []),
        "DetokenizeRequest": (None, ["tokens"]),
    }
    for name, (kind, needed) in requests.items():
        fields, components[name]["required"] = components[name]["properties"], needed
        for field in fields.keys() & own.keys():
            schema = {"type": "string"} if (name, field) == ("TokenizeRequest", "prompt") else own[field]
            fields[field] = schema if field in needed else {"anyOf": [schema, {"type": "null"}]}
        if kind is None:
            continue
        fields["logprobs"] = {"type": ["boolean", "null"]}
        if kind != "chat":
            fields["logprobs"] = {"anyOf": [number, {"enum": [False, None]}]}
        fields["logit_bias"]["anyOf"][0]["propertyNames"] = {"pattern": "^(0|[1-9][0-9]{0,8})$"}
        for field, neutral in schemas.NOT_YET.items():
            if schemas.HONOURED_BY.get(field) != kind:
                fields[field] = {"enum": [None, *neutral], "description": "other values are not supported"}
        for field in fields.keys() & dialects.NEUTRAL.keys():
            fields[field] = {"enum": [None, *dialects.NEUTRAL[field]]}
        components[name]["if"] = {
            "required": ["stream_options"],
            "properties": {"stream_options": {"type": "object"}},
        }
        components[name]["then"] = {"required": ["stream"], "properties": {"stream": {"const": True}}}
    components["ChatRequest"]["properties"]["add_special_tokens"] = {"enum": [False, None]}
    prompts = ["prompt", "text", "input_ids", "inputs"]
    components["AnyGenerateRequest"]["oneOf"] = [
        {
            "required": [one],
            "properties": {field: own[one] if field == one else {"type": "null"} for field in prompts},
        }
        for one in prompts
    ]
    variables = {"enum": sorted({"enable_thinking", *limits.abilities.variables})}
    for name in ("ChatRequest", "TokenizeRequest"):
        components[name]["properties"]["chat_template_kwargs"]["anyOf"][0]["propertyNames"] = variables
    if limits.tool_family is None or not limits.abilities.tools:
        components["ChatRequest"]["properties"]["tools"] = {"enum": [[], None]}
        components["ChatRequest"]["properties"]["tool_choice"] = {"enum": ["none", "auto", None]}
        components["TokenizeRequest"]["properties"]["tools"] = {"enum": [[], None]}
    message, part = (components[name] for name in ("ChatMessage", "ContentPart"))
    message["properties"] |= {"function_call": {"type": "null"}, "audio": {"type": "null"}}
    message["properties"]["role"] = {
        "enum": [role for role in ROLES if limits.abilities.calls or role != "tool"]
    }
    if not limits.abilities.calls:
        parts = {"type": "array", "items": {"$ref": _REF + "ContentPart"}, "minItems": 1}
        message["required"] = ["role", "content"]
        message["properties"]["content"] = {"anyOf": [{"type": "string"}, parts]}
        message["properties"]["tool_calls"] = {"enum": [[], None]}
    part["required"] = ["type", "text"]
    part["properties"] |= {"type": {"enum": ["text"]}, "text": {"type": "string"}}


_NAMES: Final = {
    "AnyGenerateRequest": "GenerateRequest",
    "Nested": "GenerateParameters",
    "_ToolCall": "AnsweredToolCall",
    "_Function": "AnsweredFunction",
    "_OpenAi__TextChoice_": "Completion",
    "_OpenAi__ChatChoice_": "ChatCompletion",
    "_OpenAi__ChatChunkChoice_": "ChatCompletionChunk",
}


def _public(part: Any) -> Any:
    """The same with components under names for readers."""
    if isinstance(part, list):
        return [_public(item) for item in part]
    if not isinstance(part, dict):
        return part
    made = {key: _public(value) for key, value in part.items()}
    if isinstance(made.get("$ref"), str):
        made["$ref"] = _REF + _name(made["$ref"].removeprefix(_REF))
    return made


def _name(name: str) -> str:
    return _NAMES.get(name, name.strip("_"))

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from pagerelay.common.config import Config
from pagerelay.common.errors import (
    ApiError,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    Unauthorized,
    Unavailable,
    WorkerLost,
)
from pagerelay.router.app import make_app
from pagerelay.router.metrics import RouterMetrics
from pagerelay.router.openapi import ROUTES, Error, document
from pagerelay.router.schemas import NOT_YET
from pagerelay.router.validate import Kind, Limits, parse_request

LIMITS = Limits(served_name="smol", vocab_size=100, context_len=50, max_choices=8)
REQUESTS: dict[str, Kind] = {
    "GenerateRequest": "generate",
    "CompletionRequest": "completions",
    "ChatRequest": "chat",
}
TURN = {"role": "user", "content": "hi"}
SMALLEST: dict[str, dict[str, Any]] = {
    "GenerateRequest": {"prompt": "a"},
    "CompletionRequest": {"model": "smol", "prompt": "a"},
    "ChatRequest": {"model": "smol", "messages": [TURN]},
}


def validator(component: str) -> Any:
    schema = {
        "$ref": f"#/components/schemas/{component}",
        "components": document(LIMITS)["components"],
    }
    return jsonschema_rs.Draft202012Validator(schema)


def accepted(component: str, body: dict[str, Any]) -> bool:
    try:
        parse_request(REQUESTS[component], json.dumps(body).encode(), LIMITS)
    except InvalidRequest:
        return False
    except NotFound:
        return False
    return True


class Service:
    """As much of a router as building its routes asks for."""

    config = Config()
    metrics = RouterMetrics.__new__(RouterMetrics)


def test_routes_and_document_are_the_same() -> None:
    app = make_app(Service())  # type: ignore[arg-type]
    served = {
        (route.method.lower(), "" if route.resource is None else route.resource.canonical)
        for route in app.router.routes()
        if route.method != "HEAD"
    }
    assert served == {(route.method, route.path) for route in ROUTES}
    shown = document(LIMITS)["paths"]
    assert {(method, path) for path, methods in shown.items() for method in methods} == served


def test_every_error_has_its_status_where_requests_are_answered() -> None:
    kinds = (ApiError, InvalidRequest, ContextLengthExceeded, Unauthorized, NotFound, PayloadTooLarge)
    kinds += (Overloaded, Unavailable, WorkerLost, DeadlineExceeded)
    wanted = {str(error.status) for error in kinds} | {"200", "408", "415"}
    for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
        responses = document(LIMITS)["paths"][path]["post"]["responses"]
        assert set(responses) == wanted
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}


def test_every_reference_leads_somewhere() -> None:
    shown = document(LIMITS)
    text = json.dumps(shown)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= shown["components"]["schemas"].keys()
    used = [kind for route in ROUTES for kind in (route.answer, route.request, route.event)]
    structs = [kind for kind in used if kind is not None and not isinstance(kind, str)]
    assert len(shown["components"]["schemas"]) == len(msgspec.json.schema_components([*structs, Error])[1])
    assert not any(name.startswith("_") for name in shown["components"]["schemas"])
    for name in shown["components"]["schemas"]:
        validator(name)


@pytest.mark.parametrize("component", REQUESTS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"model": "smol"},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream_options": {}},
        {"stream": False, "stream_options": {}},
        {"stream_options": None},
        {"n": 8},
        {"n": 9},
        {"n": 0},
        {"stop_token_ids": [99]},
        {"stop_token_ids": [100]},
        {"max_tokens": True},
        {"logprobs": 5},
        {"logprobs": 21},
        {"logprobs": True},
        {"logprobs": False},
        {"logit_bias": {"99": 1}},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"5": 101}},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [100]},
        {"temperature": "hot"},
        {"prompt": "", "messages": []},
        {"prompt": None, "messages": None},
        {"prompt": [], "messages": [{"role": "poet", "content": "a"}]},
        {"prompt": [1, 99], "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"prompt": [1, 100], "messages": [{"role": "user", "content": []}]},
        {"prompt": ["a", 1], "messages": [{"role": "user", "content": None}]},
        {"prompt": [[1], [2]], "messages": [{"content": "a"}]},
        {"prompt": [[1], []], "messages": [TURN] * 3},
        {"prompt": ["a", "b"], "messages": [{"role": "user", "content": [{"type": "text"}]}]},
    ],
    ids=str,
)
def test_document_and_server_agree(component: str, fields: dict[str, Any]) -> None:
    body = SMALLEST[component] | fields
    if {"prompt", "messages"} <= fields.keys():
        del body["messages" if component != "ChatRequest" else "prompt"]
    fits = validator(component).is_valid(body)
    if fields.get("prompt") == "":  # empty texts are refused once they are tokenised
        fits = fits or component != "ChatRequest"
    assert fits is accepted(component, body)


@pytest.mark.parametrize("component", REQUESTS)
@pytest.mark.parametrize("field", [*NOT_YET, "add_special_tokens"])
def test_unsupported_fields_take_what_the_document_says(component: str, field: str) -> None:
    schema = document(LIMITS)["components"]["schemas"][component]["properties"][field]
    for value in [*schema.get("enum", ()), "nothing that it could be", {"a": 1}, [7]]:
        body = SMALLEST[component] | {field: value}
        assert validator(component).is_valid(body) is accepted(component, body), body


def test_limits_of_the_cluster_stand_in_it() -> None:
    tokens = document(LIMITS)["components"]["schemas"]["DetokenizeRequest"]["properties"]["tokens"]
    assert tokens["maxItems"] == 50
    assert tokens["items"] == {"type": "integer", "minimum": 0, "maximum": 99}


def test_a_route_says_whether_it_needs_a_key() -> None:
    for path, methods in document(LIMITS)["paths"].items():
        for operation in methods.values():
            guarded = path not in ("/livez", "/readyz", "/health", "/metrics", "/cluster")
            assert ("401" in operation["responses"]) is guarded is ("security" in operation)

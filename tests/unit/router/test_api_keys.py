"""Keys of the HTTP API: who gets in, what the others hear."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from flows import Clock
from flows import registry as make_registry

from pagerelay.router.api_keys import OPEN, ApiKeys, guard
from pagerelay.router.app import errors_as_json
from pagerelay.router.metrics import RouterMetrics

KEYS = ApiKeys(["key-number-one", "key-number-two"])
WRONG = [
    None,
    "",
    "Bearer",
    "Bearer ",
    "Basic key-number-one",
    "key-number-one",
    "Bearer key-number",
    "Bearer key-number-one-and-more",
    "Bearer KEY-NUMBER-ONE",
    "Bearer key-number-one key-number-two",
    "Bearer clé",
    "Bearer " + "x" * 7000,
]


async def served(request: web.Request) -> web.Response:
    return web.Response(text="served")


@pytest.fixture
def refused() -> list[str]:
    """Routes of the requests that were refused."""
    return []


@pytest.fixture
async def client(refused: list[str]) -> AsyncIterator[Any]:
    app = web.Application(middlewares=[errors_as_json, guard(KEYS, refused.append)])
    for path in (*OPEN, "/generate", "/v1/models"):
        app.router.add_route("*", path, served)
    async with TestClient(TestServer(app)) as made:
        yield made


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER "])
@pytest.mark.parametrize("key", ["key-number-one", "key-number-two "])
async def test_one_with_a_key_gets_in(client: Any, scheme: str, key: str) -> None:
    response = await client.post("/generate", headers={"Authorization": f"{scheme} {key}"})
    assert response.status == 200


@pytest.mark.parametrize("header", WRONG)
@pytest.mark.parametrize(("method", "path"), [("POST", "/generate"), ("GET", "/v1/models"), ("PUT", "/no")])
async def test_everybody_else_hears_the_same(client: Any, method: str, path: str, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    response = await client.request(method, path, headers=headers)
    assert response.status == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    error = json.loads(await response.text())["error"]
    assert error["type"] == "invalid_request_error"
    assert (error["param"], error["code"]) == (None, "invalid_api_key")
    assert "key-number" not in error["message"]


async def test_the_refused_are_counted_by_routes_that_there_are(client: Any, refused: list[str]) -> None:
    for path in ("/generate", "/v1/models?of=mine", "/made/up"):
        await client.post(path)
    assert refused == ["/generate", "/v1/models", "other"]
    metrics = RouterMetrics(make_registry(Clock()))
    metrics.unauthorized("/generate")
    assert b'pagerelay_requests_total{outcome="unauthorized",route="/generate"} 1.0' in metrics.expose()


@pytest.mark.parametrize("path", sorted(OPEN))
async def test_what_tells_the_servers_state_is_open(client: Any, refused: list[str], path: str) -> None:
    assert (await client.get(path)).status == 200
    assert refused == []


def test_bytes_that_are_no_text_are_a_wrong_key() -> None:
    assert not KEYS.admits("Bearer \udcff\udcfe")
    assert KEYS.admits("Bearer key-number-two")
    assert not ApiKeys([])

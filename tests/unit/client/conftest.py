"""A client and the scripted router that it talks to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_router import FakeRouter

from pagerelay.client import LLM


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    fake = FakeRouter()
    yield fake
    fake.hold = False
    fake.close()


@pytest.fixture
def llm(router: FakeRouter) -> Iterator[LLM]:
    with LLM(base_url=router.url, max_retries=2) as client:
        yield client

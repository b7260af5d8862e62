"""langchain-openai under LangChain's own standard tests of chat models.

Left out by the properties that the suite has for it: images, PDFs and audio (the model reads text), tool
calls and structured output (a random model calls no tool and means nothing; their wire format is tested
elsewhere), recorded traffic (``test_stream_time``), and the snapshot of ``test_serdes``.
"""

from __future__ import annotations

from typing import Any

import pytest
from cluster import Cluster

pytest.importorskip("langchain_tests")
langchain_openai = pytest.importorskip("langchain_openai")

from langchain_tests.integration_tests import ChatModelIntegrationTests  # noqa: E402
from langchain_tests.unit_tests import ChatModelUnitTests  # noqa: E402


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[Any]:
        return langchain_openai.ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "tiny-llama", "base_url": "http://127.0.0.1:8000/v1", "api_key": "unused"}


class TestIntegration(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _server(self, served: Cluster, key: str) -> None:
        self.url, self.key, self.name = served.url, key, "tiny-llama"

    @property
    def chat_model_class(self) -> type[Any]:
        return langchain_openai.ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "base_url": self.url + "/v1",
            "api_key": self.key,
            "max_tokens": 8,
            "temperature": 0,
            "stream_usage": True,
        }

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "tiny-llama"

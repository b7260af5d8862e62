"""langchain-openai under LangChain's own standard tests of chat models.

Left out by the properties that the suite has for it: images, PDFs and audio (the model reads text), and
recorded traffic (``test_stream_time``). Left out by name (``conftest.py``): the snapshot of ``test_serdes``,
and tests whose model must understand what it is told. A random one writes calls and JSON all the same, where
it is forced to.
"""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import FIRST_MARK, terse
from cluster import Cluster

pytest.importorskip("langchain_tests")
langchain_openai = pytest.importorskip("langchain_openai")

from langchain_core.messages import ToolMessage  # noqa: E402
from langchain_tests.integration_tests import ChatModelIntegrationTests  # noqa: E402
from langchain_tests.unit_tests import ChatModelUnitTests  # noqa: E402
from pydantic import BaseModel, Field  # noqa: E402


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[Any]:
        return langchain_openai.ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "tiny-llama", "base_url": "http://127.0.0.1:8000/v1", "api_key": "unused"}


class TestIntegration(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _server(self, calling: Cluster, key: str) -> None:
        self.url, self.key, self.name = calling.url, key, "tiny-llama"

    @property
    def chat_model_class(self) -> type[Any]:
        return langchain_openai.ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "base_url": self.url + "/v1",
            "api_key": self.key,
            "max_tokens": 400,
            "temperature": 1,
            "seed": 1,
            "logit_bias": terse(),
            "model_kwargs": {"parallel_tool_calls": False},  # most tests want one call
            "stream_usage": True,
        }

    @property
    def has_tool_calling(self) -> bool:
        return True

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "tiny-llama"


class Person(BaseModel):
    """Someone."""

    name: str | None = None
    age: int | None = Field(None, ge=0, le=150)


METHODS = ("function_calling", "json_schema", "json_mode")


class TestMore:
    """What users build on and the suite does not run."""

    @pytest.fixture
    def model(self, calling: Cluster, key: str) -> Any:
        return langchain_openai.ChatOpenAI(
            model="tiny-llama",
            base_url=calling.url + "/v1",
            api_key=key,
            max_tokens=400,
            seed=2,
            logit_bias=terse(),
            stream_usage=True,
        )

    @pytest.mark.parametrize("strict", [None, True])
    @pytest.mark.parametrize("method", METHODS)
    def test_structured_output(self, model: Any, method: str, strict: bool | None) -> None:
        kwargs = {} if method == "json_mode" else {"strict": strict}
        chain = model.with_structured_output(Person, method=method, include_raw=True, **kwargs)
        streamed = {key: value for chunk in chain.stream("Who?") for key, value in chunk.items()}
        for answer in (chain.invoke("Who?"), streamed):
            assert answer["parsing_error"] is None
            assert isinstance(answer["parsed"], Person)
        plain = model.with_structured_output(Person.model_json_schema(), method=method, **kwargs).invoke(
            "Who?"
        )
        assert isinstance(plain, dict)
        if kwargs.get("strict"):
            assert plain.keys() == {"name", "age"}

    @pytest.mark.parametrize("strict", [None, True])
    def test_tools_that_may_be_called(self, model: Any, strict: bool | None) -> None:
        """A bias for the token that begins a call has strict ones called, as their schema wants it."""
        bias = terse() | {str(FIRST_MARK): 100} if strict else terse()
        bound = model.bind_tools([Person], strict=strict, parallel_tool_calls=False)
        bound = bound.bind(logit_bias=bias)
        whole, chunks = bound.invoke("hi"), list(bound.stream("hi"))
        streamed = chunks[0]
        for chunk in chunks[1:]:
            streamed += chunk
        assert streamed.content == whole.content
        assert [call["args"] for call in streamed.tool_calls] == [call["args"] for call in whole.tool_calls]
        assert streamed.usage_metadata["input_tokens"] == whole.usage_metadata["input_tokens"]
        if strict:
            (call,) = whole.tool_calls
            Person(**call["args"])
            again = bound.invoke(
                [("user", "hi"), whole, ToolMessage("done", tool_call_id=call["id"])], max_tokens=2
            )
            assert again.usage_metadata["input_tokens"] > whole.usage_metadata["input_tokens"]

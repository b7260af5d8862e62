"""The Python client: ``LLM(model)`` runs a cluster here, ``LLM(base_url=…)`` talks to a running one.

::

    from pagerelay.client import LLM, SamplingParams

    with LLM("smollm2-135m-instruct") as llm:
        for output in llm.generate(["The capital of France is", "2 + 2 ="], SamplingParams(temperature=0)):
            print(output.prompt, output.outputs[0].text)
"""

from pagerelay.client.errors import (
    ApiError,
    ClientClosed,
    ConnectionLost,
    ContextLengthExceeded,
    DeadlineExceeded,
    IncompleteAnswer,
    InvalidRequest,
    NotFound,
    Overloaded,
    PagerelayError,
    PayloadTooLarge,
    StartupError,
    Unauthorized,
    Unavailable,
    WorkerLost,
)
from pagerelay.client.llm import LLM
from pagerelay.client.outputs import CompletionOutput, RequestOutput
from pagerelay.client.params import SamplingParams

__all__ = [
    "LLM",
    "ApiError",
    "ClientClosed",
    "CompletionOutput",
    "ConnectionLost",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "IncompleteAnswer",
    "InvalidRequest",
    "NotFound",
    "Overloaded",
    "PagerelayError",
    "PayloadTooLarge",
    "RequestOutput",
    "SamplingParams",
    "StartupError",
    "Unauthorized",
    "Unavailable",
    "WorkerLost",
]

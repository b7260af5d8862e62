"""Every error pagerelay raises on purpose.

::

    PagerelayError
    ├── ConfigError                  the operator wrote something that cannot work          exit code 2
    ├── StartupError                 a resource is missing at start (port, memory, model)   exit code 3
    ├── ApiError                     ends one request; carries HTTP status, type, code, param
    │   ├── InvalidRequest           400  invalid_request_error
    │   ├── ContextLengthExceeded    400  context_length_exceeded
    │   ├── Unauthorized             401  invalid_api_key
    │   ├── NotFound                 404  model_not_found / not_found
    │   ├── PayloadTooLarge          413
    │   ├── Overloaded               429  with Retry-After
    │   ├── Unavailable              503  no worker that could serve it
    │   ├── WorkerLost               502  lost its worker more often than recovery allows
    │   └── DeadlineExceeded         504
    ├── GrammarError                 a grammar that cannot be used, or not any further
    ├── WireError                    a frame that does not decode, or comes from a stranger
    ├── TransferError                a KV block could not be fetched
    │   └── CudaError                a CUDA call failed, or cannot work here
    └── IllegalMove                  a state machine was asked for a move that is not drawn

Messages are our own words: they name what is wrong, where, and how to fix it, and never carry an exception's
name, a path of the server or a stack line to a client.
"""

from __future__ import annotations


class PagerelayError(Exception):
    """Root of the tree."""


class ConfigError(PagerelayError):
    """Configuration that cannot work. The message names the setting and where it came from."""


class StartupError(PagerelayError):
    """Something needed at start is not there. The message gives need, have and remedy."""


class GrammarError(PagerelayError):
    """A grammar that the library cannot use, or cannot follow any further; why, in a line of bounded length:
    the first of what the library says, and the one that it calls the error."""

    def __init__(self, message: str) -> None:
        first, *rest = message.strip().splitlines() or ["no reason given"]
        lines = [first, *(line for line in rest if line.startswith("error: "))][:2]
        super().__init__("; ".join(" ".join(line[:200].split()).rstrip(":") for line in lines))


class WireError(PagerelayError):
    """A message that does not decode or breaks a limit; it is dropped and counted."""


class TransferError(PagerelayError):
    """KV blocks could not be fetched; the request recovers elsewhere."""


class CudaError(TransferError):
    """A CUDA call failed, or GPU memory cannot be used here; says which call, and why."""


class IllegalMove(PagerelayError):
    """A state machine was asked for a move that its table does not have."""


class ApiError(PagerelayError):
    """Ends one request. ``status`` is the HTTP status, ``type``/``code``/``param`` follow OpenAI's error
    object."""

    status = 500
    type = "internal_error"
    code: str | None = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON object that a client gets, the same with and without streaming."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(ApiError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class Unauthorized(ApiError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class NotFound(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class PayloadTooLarge(ApiError):
    status = 413
    type = "invalid_request_error"
    code = "payload_too_large"


class Overloaded(ApiError):
    status = 429
    type = "overloaded_error"
    code = "queue_full"


class Unavailable(ApiError):
    status = 503
    type = "service_unavailable"
    code = "no_worker"


class WorkerLost(ApiError):
    status = 502
    type = "server_error"
    code = "worker_lost"


class DeadlineExceeded(ApiError):
    status = 504
    type = "server_error"
    code = "deadline_exceeded"

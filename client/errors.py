"""What a call of the client can raise.

::

    PagerelayError
    ├── ApiError                     the server's own words, with status, type, code and param
    │   ├── InvalidRequest … DeadlineExceeded    by status: see :mod:`pagerelay.common.errors`
    ├── ConnectionLost               no server there, or the connection broke
    │   └── IncompleteAnswer         the answer ended before it was whole
    ├── ClientClosed                 the client was closed, before or while it was asked
    └── StartupError                 the local cluster did not start

An error that comes as the last event of a stream has no status line; its status is that of its class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagerelay.common.errors import (
    ApiError,
    ContextLengthExceeded,
    DeadlineExceeded,
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

__all__ = [
    "ApiError",
    "ClientClosed",
    "ConnectionLost",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "IncompleteAnswer",
    "InvalidRequest",
    "NotFound",
    "Overloaded",
    "PagerelayError",
    "PayloadTooLarge",
    "StartupError",
    "Unauthorized",
    "Unavailable",
    "WorkerLost",
    "error_from",
]


class ConnectionLost(PagerelayError):
    """There is no server at the address, or the connection to it broke."""


class IncompleteAnswer(ConnectionLost):
    """The answer ended before it was whole: a stream without ``[DONE]``, or a body that is no answer."""


class ClientClosed(PagerelayError):
    """The client was closed; make another one."""


_CLASSES: tuple[type[ApiError], ...] = (
    ContextLengthExceeded,
    InvalidRequest,
    Unauthorized,
    NotFound,
    PayloadTooLarge,
    Overloaded,
    Unavailable,
    WorkerLost,
    DeadlineExceeded,
)
_BY_STATUS: dict[int, type[ApiError]] = {kind.status: kind for kind in _CLASSES}
_BY_CODE: dict[str | None, type[ApiError]] = {kind.code: kind for kind in _CLASSES}
_BY_TYPE: dict[str, type[ApiError]] = {kind.type: kind for kind in (InvalidRequest, Overloaded, Unavailable)}


def error_from(body: object, status: int | None = None, retry_after_s: int | None = None) -> ApiError:
    """The error that ``{"error": {message, type, code, param}}`` stands for; ``status`` is ``None`` within a
    stream. A body of another shape (a proxy's page) becomes an error that quotes its beginning."""
    found = body.get("error") if isinstance(body, Mapping) else None
    if not isinstance(found, Mapping):
        error = _BY_STATUS.get(status or 500, ApiError)(
            f"the server answered {status} with {str(body)[:200]!r}", retry_after_s=retry_after_s
        )
        error.status, error.code = status or 500, None
        return error
    code, kind = _text(found, "code"), _text(found, "type")
    by_code = _BY_CODE.get(code)
    if status is not None and (by_code is None or by_code.status != status):
        by_code = _BY_STATUS.get(status, ApiError)
    error = (by_code or _BY_TYPE.get(kind or "", ApiError))(
        _text(found, "message") or "the server gave no reason",
        param=_text(found, "param"),
        retry_after_s=retry_after_s,
    )
    error.code = code
    error.type = kind or error.type
    error.status = status or error.status
    return error


def _text(found: Mapping[str, Any], name: str) -> str | None:
    value = found.get(name)
    return None if value is None else str(value)

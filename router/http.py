"""What aiohttp answers by itself, before any route is found, in the shape of all other errors: a request that
is not HTTP, whose line or headers are too long, or do not come to an end."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler

from pagerelay.common.errors import ApiError, DeadlineExceeded, InvalidRequest
from pagerelay.router.app import SERVICE, error_response
from pagerelay.router.metrics import RouterMetrics
from pagerelay.router.sse import json_body

log = logging.getLogger(__name__)
NO_ACCESS_LOG: dict[str, Any] = {"access_log": None}
HEAD_TIMEOUT_S = 30.0
"""From the connection, or from the first byte of a later request, to the end of a request's headers."""


class _Connection(RequestHandler):
    __slots__ = ("_head_timer", "metrics")
    metrics: RouterMetrics
    _head_timer: asyncio.TimerHandle | None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._await_head()
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        heads = self._request_count
        super().data_received(data)
        if self._request_count > heads:
            self._stop_waiting()
        elif self._head_timer is None and self._waiter is not None and not self._waiter.done():
            self._await_head()  # it has begun: no request runs whose body this could be

    def _await_head(self) -> None:
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        text = f"the headers did not arrive within {HEAD_TIMEOUT_S:g} s"
        error = DeadlineExceeded(text, code="header_timeout")
        self.metrics.timeouts.labels(limit=error.code).inc()
        if self.transport is not None:
            body = json_body(error.body())
            head = "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
            self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The connection closes afterwards: nobody knows where the next request would begin."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        error: ApiError
        if status >= 500:
            log.error("a request failed in an unforeseen way", exc_info=exc)
            error = ApiError("the server failed; its log says why")
        elif isinstance(exc, LineTooLong):
            text = "the request line or a header is too long; send what is long in the body"
            error = InvalidRequest(text, code="header_too_large")
            error.status = 431
        else:
            error = InvalidRequest("this is not a well-formed HTTP request", code="malformed_http")
            error.status = status
        response = error_response(error)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """A body that is not as its headers say, found when nobody reads it any more, is no fault of ours."""
        if isinstance(kw.get("exc_info"), web.RequestPayloadError):
            self.log_debug("the rest of a body was malformed")
        else:
            super().log_exception(*args, **kw)


class _Server(web.Server):
    metrics: RouterMetrics

    def __call__(self) -> RequestHandler:
        # Compressed bodies are refused: nothing is unpacked to find that out.
        made = _Connection(self, loop=asyncio.get_running_loop(), auto_decompress=False, **NO_ACCESS_LOG)
        made.metrics = self.metrics
        return made


class Runner(web.AppRunner):
    """Serves an application; a handler whose client has left is cancelled."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        server = _Server(
            made.request_handler, request_factory=made.request_factory, handler_cancellation=True
        )
        server.metrics = self.app[SERVICE].metrics
        return server

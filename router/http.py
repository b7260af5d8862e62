"""What aiohttp answers by itself, before any route is found, in the shape of all other errors: a request that
is not HTTP, or whose line or headers are too long."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler

from pagerelay.common.errors import ApiError, InvalidRequest
from pagerelay.router.sse import json_body

log = logging.getLogger(__name__)
NO_ACCESS_LOG: dict[str, Any] = {"access_log": None}


class _Connection(RequestHandler):
    __slots__ = ()

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
        body = json_body(error.body())
        response = web.Response(body=body, status=error.status, content_type="application/json")
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """A body that is not as its headers say, found when nobody reads it any more, is no fault of ours."""
        if isinstance(kw.get("exc_info"), web.RequestPayloadError):
            self.log_debug("the rest of a body was malformed")
        else:
            super().log_exception(*args, **kw)


class _Server(web.Server):
    def __call__(self) -> RequestHandler:
        # Compressed bodies are refused: nothing is unpacked to find that out.
        settings = {"auto_decompress": False, **NO_ACCESS_LOG}
        return _Connection(self, loop=asyncio.get_running_loop(), **settings)


class Runner(web.AppRunner):
    """Serves an application; a handler whose client has left is cancelled."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(made.request_handler, request_factory=made.request_factory, handler_cancellation=True)

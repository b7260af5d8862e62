"""HTTP: routes, and how an answer is written. Everything that is known before the first token is a plain
status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import metadata

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from pagerelay.common.errors import ApiError, DeadlineExceeded, NotFound, PayloadTooLarge
from pagerelay.router.answer import Answer
from pagerelay.router.api_keys import ApiKeys, guard
from pagerelay.router.openapi import Version, document
from pagerelay.router.pieces import Piece
from pagerelay.router.replies import Model, Reply, models_body, reply_for
from pagerelay.router.service import RouterService, outcome
from pagerelay.router.sse import HEADERS, KEEPALIVE, error_event, json_body
from pagerelay.router.tokenization import detokenize, tokenize
from pagerelay.router.validate import Kind, check_model

log = logging.getLogger(__name__)
SERVICE = web.AppKey("service", RouterService)
COUNTED = web.RequestKey("counted", bool)

VERSION = metadata.version("pagerelay")
BODY_TIMEOUT_S = 30.0
SEND_BUFFER_BYTES = 64 * 1024
"""What the kernel may hold of a stream: by itself it takes megabytes before a reader that stopped is seen."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_response(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def error_response(error: ApiError) -> web.Response:
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s is not None else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(json_body(error.body()), error.status, headers)


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """One error shape, whatever went wrong and wherever."""
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except web.HTTPRequestEntityTooLarge:
        limit = request.app[SERVICE].config.router.max_body_bytes
        return error_response(PayloadTooLarge(f"the body is larger than {limit} bytes"))
    except web.HTTPException as error:
        found = NotFound(f"{request.method} {error.reason}: no such route")
        if error.status != found.status:
            found.status, found.code = error.status, "_".join(error.reason.lower().split())
        elif request.path.startswith("/v1/"):  # OpenAI has more of them
            message = f"{request.path[:64]!a} is not served; see /openapi.json for what is"
            found = NotFound(message, code="unsupported_endpoint")
        refusal = error_response(found)
        if "Allow" in error.headers:
            refusal.headers["Allow"] = error.headers["Allow"]
        return refusal
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception:
        log.exception("a request failed in an unforeseen way")
        return error_response(ApiError("the server failed; its log says why"))


# ------------------------------------------------------------------------------------------------ generation


def generation(kind: Kind) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        service = request.app[SERVICE]
        try:
            with service.in_house():
                response = await _generate(service, request, kind)
        except BaseException as error:
            _count(service, request, error)
            raise
        return response

    return handle


def _count(service: RouterService, request: web.Request, error: BaseException | None) -> None:
    """A request ends once: a client that leaves when it has read all it wanted is no second end."""
    if COUNTED not in request:
        request[COUNTED] = True
        service.metrics.requests.labels(route=request.path, outcome=outcome(error)).inc()
        if isinstance(error, DeadlineExceeded):
            service.metrics.timeouts.labels(limit=error.code).inc()


async def _generate(service: RouterService, request: web.Request, kind: Kind) -> web.StreamResponse:
    seconds = service.config.router.request_timeout_s
    deadline = asyncio.get_running_loop().time() + seconds
    try:
        service.check_workers()
        body = await _body(request)
        async with asyncio.timeout_at(deadline):
            parsed = await service.parse(kind, body, limits := service.limits())
            await service.grammars.check(parsed.grammar, parsed.grammar_param)
            prompts = await service.encode(parsed, limits.context_len)
        answer = Answer(service, parsed, prompts, await service.flows(parsed, prompts, limits.context_len))
        reply = reply_for(parsed, service.tokenizer)
        async with _closing(answer):
            pieces = answer.pieces()
            async with asyncio.timeout_at(deadline):
                # Whatever fails before the first token is a plain status, with and without streaming.
                first = await anext(pieces)
                if not parsed.stream:
                    async for _ in pieces:
                        pass
            if parsed.stream:
                return await _stream(service, request, answer, reply, first, pieces, deadline)
            whole = reply.whole(answer.outputs(), answer.usage(), answer.timings())
            _count(service, request, None)
            return json_response(whole, headers={"X-Request-Id": reply.id})
    except TimeoutError:
        raise _too_long(seconds) from None


def _too_long(seconds: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"the request took longer than {seconds:g} s")


@contextlib.asynccontextmanager
async def _closing(answer: Answer) -> AsyncIterator[None]:
    """Releases the workers also when the client's disconnect cancels us: the release itself is not
    cancelled."""
    try:
        yield
    finally:
        await asyncio.shield(asyncio.ensure_future(answer.close()))


async def _body(request: web.Request) -> bytes:
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        error: ApiError = PayloadTooLarge("compressed bodies are not accepted", code="unsupported_encoding")
        error.status = 415
        raise error
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        error = DeadlineExceeded(f"the body did not arrive within {BODY_TIMEOUT_S:g} s", code="body_timeout")
        error.status = 408
        raise error from None


async def _stream(
    service: RouterService,
    request: web.Request,
    answer: Answer,
    reply: Reply,
    first: Piece | None,
    pieces: AsyncIterator[Piece | None],
    deadline: float,
) -> web.StreamResponse:
    """Server-sent events. The status line has waited for the first token or error, or for the keep-alive's
    time; what goes wrong from here on is an event of its own, and then the stream closes."""
    response = web.StreamResponse(headers={**HEADERS, "X-Request-Id": reply.id})
    await response.prepare(request)
    if request.transport is not None and (connection := request.transport.get_extra_info("socket")):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    out = [reply.start(len(answer.choices)), _chunk(reply, first)]
    ended: BaseException | None = None
    try:
        async with asyncio.timeout_at(deadline):
            await _write(service, response, out)
            async for piece in pieces:
                out.append(_chunk(reply, piece))
                if not answer.more_waiting():  # several tokens are here: one write carries them all
                    await _write(service, response, out)
        out.append(reply.end(answer.usage(), answer.timings()))
    except ApiError as error:
        ended = error
    except TimeoutError:
        ended = _too_long(service.config.router.request_timeout_s)
    except ConnectionError:
        # The client is gone or does not read; what is queued for it goes with its connection.
        if request.transport is not None:
            request.transport.abort()
        raise
    except Exception:
        log.exception("a stream failed in an unforeseen way")
        ended = ApiError("the server failed; its log says why")
    _count(service, request, ended)
    if isinstance(ended, ApiError):
        out.append(error_event(ended))
    with contextlib.suppress(ConnectionError):
        await _write(service, response, out)
        await response.write_eof()
    return response


def _chunk(reply: Reply, piece: Piece | None) -> bytes:
    if piece is None:
        return KEEPALIVE
    return reply.delta(piece)


async def _write(service: RouterService, response: web.StreamResponse, out: list[bytes]) -> None:
    """Sends and empties ``out``. A reader that takes nothing for ``write_timeout_s`` loses its stream."""
    data = b"".join(out)
    out.clear()
    if not data:
        return
    try:
        async with asyncio.timeout(service.config.router.write_timeout_s):
            await response.write(data)
    except TimeoutError:
        service.metrics.timeouts.labels(limit="write_timeout").inc()
        raise ConnectionResetError("the client does not read") from None


# ------------------------------------------------------------------------------------------------ the rest


def answering(make: Callable[[RouterService, bytes], Awaitable[bytes]]) -> Handler:
    """A route whose answer is made from the body alone, without a worker."""

    async def handle(request: web.Request) -> web.StreamResponse:
        service, ended = request.app[SERVICE], None
        try:
            with service.in_house():
                return json_response(await make(service, await _body(request)))
        except BaseException as error:
            ended = error
            raise
        finally:
            _count(service, request, ended)

    return handle


def _model(service: RouterService) -> Model:
    return Model(service.model.served_name, int(service.started_at), service.registry.context_len)


async def models(request: web.Request) -> web.Response:
    return json_response(models_body(_model(request.app[SERVICE])))


async def model(request: web.Request) -> web.Response:
    shown = _model(request.app[SERVICE])
    check_model(request.match_info["model"], "generate", shown.id)
    return json_response(json_body(shown))


async def version(request: web.Request) -> web.Response:
    return json_response(json_body(Version(VERSION)))


async def openapi(request: web.Request) -> web.Response:
    return json_response(json_body(document(request.app[SERVICE].limits())))


async def livez(request: web.Request) -> web.Response:
    return json_response(b'{"status":"live"}')


async def readyz(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    reason = "draining" if service.draining else service.registry.not_ready()
    if reason is not None:
        return json_response(json_body({"status": "not_ready", "reason": reason}), 503)
    return json_response(b'{"status":"ready"}')


async def metrics(request: web.Request) -> web.Response:
    body = request.app[SERVICE].metrics.expose()
    return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def cluster(request: web.Request) -> web.Response:
    """The workers as the router sees them."""
    service = request.app[SERVICE]
    registry, now = service.registry, service.clock()
    workers = [
        {
            "id": entry.worker_id,
            "role": entry.hello.role,
            "state": registry.state(entry),
            "host": entry.hello.host,
            "pid": entry.hello.pid,
            "ops": entry.hello.ops,
            "up_s": round(now - entry.joined_at, 1),
            "silent_s": round(now - entry.last_heard, 2),
            "requests": len(entry.bound),
            "load": msgspec.to_builtins(entry.load),
            "pool": entry.hello.transport,
            "transports_in_use": entry.counters.fetched_blocks,
            "counters": msgspec.to_builtins(entry.counters),
        }
        for entry in registry.entries()
    ]
    layout = registry.layout()
    shown = {
        "model": service.model.served_name,
        "context_len": registry.context_len,
        "requests_running": service.running,
        "layout": msgspec.to_builtins(layout) if layout is not None else None,
        "workers": workers,
    }
    return json_response(json_body(shown))


async def refuse_embeddings(request: web.Request) -> web.Response:
    raise NotFound("embeddings are not served; this server generates text", code="unsupported_endpoint")


def make_app(service: RouterService) -> web.Application:
    keys = ApiKeys(service.config.client_keys())
    middlewares: list[Middleware] = [
        errors_as_json,
        *([guard(keys, service.metrics.unauthorized)] if keys else []),
    ]
    app = web.Application(middlewares=middlewares, client_max_size=service.config.router.max_body_bytes)
    app[SERVICE] = service
    app.router.add_post("/generate", generation("generate"))
    app.router.add_post("/v1/completions", generation("completions"))
    app.router.add_post("/v1/chat/completions", generation("chat"))
    app.router.add_post("/v1/embeddings", refuse_embeddings)
    app.router.add_post("/tokenize", answering(tokenize))
    app.router.add_post("/detokenize", answering(detokenize))
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{model:.+}", model)
    app.router.add_get("/version", version)
    app.router.add_get("/openapi.json", openapi)
    app.router.add_get("/livez", livez)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/health", readyz)  # the name that load tools and other servers know
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/cluster", cluster)
    return app

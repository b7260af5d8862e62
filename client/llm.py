"""The client itself: blocking calls, on an event loop in a thread of its own.

``generate`` asks ``POST /generate`` once a prompt, ``chat`` asks ``POST /v1/chat/completions`` once a
conversation; at most ``max_concurrency`` of them are under way, and answers come in the prompts' order.
The first error ends the whole call and cancels the rest. A local cluster ends with the ``with`` block,
``close()``, garbage collection and the end of the process, however it ends. Ctrl-C cancels the call
under way; the server sees a client that has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

from pagerelay.client.errors import ConnectionLost, IncompleteAnswer
from pagerelay.client.http import Connection
from pagerelay.client.local import LocalCluster
from pagerelay.client.loop import LoopThread
from pagerelay.client.outputs import CompletionOutput, RequestOutput
from pagerelay.client.params import SamplingParams

T = TypeVar("T")

READ_AHEAD = 64
"""Events of a stream that are read before they are asked for."""

Prompt = str | Sequence[int]
"""A text, or token ids."""
Message = Mapping[str, Any]
"""One turn of a chat: ``{"role": "user", "content": "…"}``."""


class LLM:
    """A cluster to ask: one of its own on this machine, or a running one."""

    def __init__(
        self,
        model: str | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        settings: Mapping[str, object] | None = None,
        max_concurrency: int = 64,
        max_retries: int = 5,
        timeout_s: float = 900.0,
    ) -> None:
        """
        model: a model folder, hub id or known name (default: the configured one); with ``base_url`` the name
            in the API (default: the one that is served)
        base_url: of a running router, with or without ``/v1``; without it a local cluster is started
        api_key: for a running router; a local cluster makes its own
        settings: of a local cluster, as ``{"cluster.decode": 2, "engine.threads": 1}``
        max_retries: how often a request is sent again after 429 or 503 with ``Retry-After``, or when a server
            that has answered before refuses the connection
        timeout_s: longest duration of one request, from asking to its last byte

        Raises :class:`StartupError` if the local cluster does not start.
        """
        if base_url is not None and settings:
            raise ValueError("settings are for a local cluster; a running one at base_url has its own")
        self._model = model if base_url is not None else None
        self._max_concurrency = max_concurrency
        self._local: LocalCluster | None = None
        self._loop = LoopThread()
        try:
            if base_url is None:
                api_key = api_key or secrets.token_hex(16)
                self._local = LocalCluster(model, api_key, settings or {})
                base_url = self._local.start(self._loop)
            self.base_url = base_url.rstrip("/").removesuffix("/v1")
            self.api_key = api_key
            connection = self._loop.run(_connect(self.base_url, api_key, max_retries, timeout_s))
        except BaseException:
            _shut(os.getpid(), self._loop, None, self._local)
            raise
        self._connection = connection
        self.close: Callable[[], object] = weakref.finalize(
            self, _shut, os.getpid(), self._loop, connection, self._local
        )
        """Cancels what runs, and stops a local cluster. May be repeated."""

    # ------------------------------------------------------------------ asking

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """The answers to a prompt or a list of prompts, in their order. One ``SamplingParams`` holds for all
        prompts, a list has one for each. Raises the tree of :mod:`pagerelay.client.errors`."""
        asked = _prompts(prompts)
        params = _one_each(sampling_params, len(asked))
        bodies = [self._body(p.body(), prompt=prompt) for prompt, p in zip(asked, params, strict=True)]
        answers = self._ask("/generate", bodies)
        return [self._output(answer, prompt) for answer, prompt in zip(answers, asked, strict=True)]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> list[RequestOutput]:
        """The answers to a conversation or a list of conversations; ``fields`` (``tools``, …) go into each
        request's body as they are."""
        chats = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        params = _one_each(sampling_params, len(chats))
        model = self.model
        bodies = [
            {"model": model, **p.chat_body(), **fields, "messages": chat}
            for chat, p in zip(chats, params, strict=True)
        ]
        return [self._output(answer) for answer in self._ask("/v1/chat/completions", bodies)]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[CompletionOutput]:
        """The answer to one prompt as it comes: each piece holds what is new in one choice. A stream that is
        left early is cancelled on the server."""
        params = sampling_params or SamplingParams()
        return self._pieces("/generate", self._body(params.body(), prompt=prompt))

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **fields: Any
    ) -> Iterator[CompletionOutput]:
        """The answer to a conversation as it comes; see :meth:`stream`."""
        params = sampling_params or SamplingParams()
        body = {"model": self.model, **params.chat_body(), **fields, "messages": messages}
        return self._pieces("/v1/chat/completions", body)

    @property
    def model(self) -> str:
        """The name of the served model; asked for once."""
        if self._model is None:
            answer = self._run(self._connection.json("GET", "/v1/models"))
            try:
                self._model = str(answer["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise IncompleteAnswer(f"{self.base_url}/v1/models names no model") from None
        return self._model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _body(self, fields: dict[str, Any], prompt: Prompt) -> dict[str, Any]:
        return {**({} if self._model is None else {"model": self._model}), **fields, "prompt": prompt}

    def _ask(self, path: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self._run(_ask_all(self._connection, path, bodies, self._max_concurrency))

    def _output(self, answer: dict[str, Any], prompt: Prompt | None = None) -> RequestOutput:
        return _checked(RequestOutput.of, answer, prompt)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return self._loop.run(work)
        except ConnectionLost as lost:
            code = self._local.ended() if self._local is not None else None
            if code is None:
                raise
            raise ConnectionLost(f"the local cluster has ended (exit code {code}); it has said why") from lost

    def _pieces(self, path: str, body: dict[str, Any]) -> Iterator[CompletionOutput]:
        stream = _Stream(self._connection.events(path, body))
        try:
            while (event := self._run(stream.next())) is not None:
                for choice in event.get("choices") or ():
                    yield _checked(CompletionOutput.of, choice)
        finally:
            self._loop.clean_up(stream.close())


class _Stream:
    """Events that one task reads ahead, so that a caller who is interrupted leaves no half-read answer."""

    def __init__(self, events: AsyncGenerator[dict[str, Any]]) -> None:
        self._events = events
        self._ahead: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue(READ_AHEAD)
        self._task: asyncio.Task[None] | None = None

    async def next(self) -> dict[str, Any] | None:
        """The next event, or ``None`` at the end."""
        if self._task is None:
            self._task = asyncio.create_task(self._read())
        event = await self._ahead.get()
        if isinstance(event, Exception):
            raise event
        return event

    async def _read(self) -> None:
        try:
            # Closed here whatever happens: the loop's end would close it and what it stands on in any order.
            async with contextlib.aclosing(self._events) as events:
                async for event in events:
                    await self._ahead.put(event)
        except Exception as error:
            await self._ahead.put(error)  # raised where the event was asked for
        else:
            await self._ahead.put(None)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


async def _ask_all(
    connection: Connection, path: str, bodies: list[dict[str, Any]], max_concurrency: int
) -> list[dict[str, Any]]:
    """One answer a body, in their order; the first error cancels the rest."""
    answers: list[dict[str, Any]] = [{}] * len(bodies)
    waiting = iter(enumerate(bodies))

    async def work() -> None:
        for index, body in waiting:
            answers[index] = await connection.json("POST", path, body)

    tasks = [asyncio.create_task(work()) for _ in range(min(max_concurrency, len(bodies)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return answers


async def _connect(base_url: str, api_key: str | None, max_retries: int, timeout_s: float) -> Connection:
    return Connection(base_url, api_key, max_retries=max_retries, timeout_s=timeout_s)


async def _close(connection: Connection | None) -> None:
    if connection is not None:
        await connection.close()


def _shut(owner: int, loop: LoopThread, connection: Connection | None, local: LocalCluster | None) -> None:
    """Ends everything an :class:`LLM` holds; in a fork of the process ``owner``, nothing."""
    if os.getpid() != owner:
        return
    if loop.here:  # garbage collection runs in any thread; this one cannot wait for itself
        threading.Thread(target=_shut, args=(owner, loop, connection, local)).start()
        return
    try:
        loop.cancel(_close(connection))  # first, or the router would wait for what runs
        if local is not None:
            local.stop()
    finally:
        loop.end()


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from what may be one: a text, or a list of numbers."""
    if isinstance(prompts, str):
        return [prompts]
    one = bool(prompts) and isinstance(prompts[0], int)
    several: list[Any] = [prompts] if one else list(prompts)
    return [prompt if isinstance(prompt, str) else list(prompt) for prompt in several]


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling_params for {count} prompts; give one, or one for each")
    return params


def _checked(make: Callable[..., T], *given: object) -> T:
    try:
        return make(*given)
    except (KeyError, TypeError, AttributeError, IndexError) as wrong:
        raise IncompleteAnswer("the server's answer lacks what an answer of pagerelay has") from wrong

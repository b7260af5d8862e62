"""What every route shares: the model's text side, the workers, the limits."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeVar

from pagerelay.common.config import Config
from pagerelay.common.errors import ApiError, Overloaded, Unavailable
from pagerelay.common.hashing import model_digest
from pagerelay.common.wire.auth import CurveKeys
from pagerelay.router.beam_flow import BeamFlow
from pagerelay.router.chat_template import num_chars
from pagerelay.router.flow import FlowSettings, RequestFlow
from pagerelay.router.grammar_check import GrammarChecker
from pagerelay.router.links import WorkerLinks
from pagerelay.router.metrics import RouterMetrics
from pagerelay.router.model_files import ModelFiles
from pagerelay.router.policy import LeastLoad, RoutingPolicy
from pagerelay.router.registry import WorkerRegistry
from pagerelay.router.sharing import PromptShare
from pagerelay.router.text import Tokenizer
from pagerelay.router.tools import tool_family
from pagerelay.router.validate import Kind, Limits, ParsedRequest, check_prompts, finalize, parse_request

log = logging.getLogger(__name__)
T = TypeVar("T")

LONG: Final = 64 * 1024
"""Bytes or characters from which on a body or text is long: about 1 ms to decode, 50 ms to tokenise."""


class RouterService:
    """Created once; ``start`` before the first request, ``stop`` after the last."""

    def __init__(self, config: Config, model: ModelFiles, keys: CurveKeys | None) -> None:
        self.config = config
        self.model = model
        self.clock = time.monotonic
        self.started_at = time.time()
        self.tokenizer = Tokenizer.load(model.folder)
        self.grammars = GrammarChecker(model.folder, model.vocab_size)
        self._whole_tokens = tuple(
            (text, token) for text, token in self.tokenizer.whole_tokens.items() if token < model.vocab_size
        )
        self._tool_family = tool_family(config.router.tool_parser, self.tokenizer.template)
        self.registry = WorkerRegistry(
            model_digest=model_digest(model.folder),
            clock=self.clock,
            heartbeat_s=config.router.heartbeat_s,
            dead_s=config.router.dead_after_s,
            stuck_s=config.router.stuck_after_s,
            context_len=model.max_model_len,
        )
        self.metrics = RouterMetrics(self.registry)
        self.links = WorkerLinks(self.registry, keys, self.metrics.drop, self.clock)
        self.policy: RoutingPolicy = LeastLoad()
        self.draining = False
        self.running = 0
        self._flow_settings = FlowSettings(
            queue_timeout_s=config.router.queue_timeout_s,
            stall_timeout_s=config.router.stall_timeout_s,
            max_recoveries=config.router.max_recoveries,
            probe_s=config.router.probe_s,
        )
        # Long texts have a thread of their own, so that short ones never wait behind many of them.
        self._encoders = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="tokenize-long")
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self.links.receive_forever()),
            asyncio.create_task(self.links.expire_forever(self.config.router.heartbeat_s / 2)),
            asyncio.create_task(self._watch_lag()),
        ]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    @staticmethod
    def _task_ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            # Without this task no worker is heard: ending loudly beats answering nothing for ever.
            log.critical("a task of the router failed", exc_info=task.exception())
            raise SystemExit(1)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.links.close()
        await self.grammars.close()
        for pool in (self._encoders, self._slow):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _watch_lag(self) -> None:
        while True:
            before = self.clock()
            await asyncio.sleep(0.5)
            self.metrics.loop_lag.set(max(0.0, self.clock() - before - 0.5))

    # ------------------------------------------------------------------ requests

    def limits(self) -> Limits:
        return Limits(
            served_name=self.model.served_name,
            vocab_size=self.model.vocab_size,
            context_len=self.registry.context_len,
            max_choices=self.config.router.max_choices,
            abilities=self.tokenizer.abilities,
            tool_family=self._tool_family,
            whole_tokens=self._whole_tokens,
        )

    @contextmanager
    def in_house(self) -> Iterator[None]:
        """One more request runs; raises where it may not come in."""
        if self.draining:
            raise Unavailable("this server is shutting down", code="draining", retry_after_s=5)
        if self.running >= self.config.router.max_requests:
            raise Overloaded(
                f"{self.running} requests are in the house already; try again later", retry_after_s=1
            )
        self.running += 1
        self.metrics.running.set(self.running)
        try:
            yield
        finally:
            self.running -= 1
            self.metrics.running.set(self.running)

    def check_workers(self) -> None:
        """Raises where no worker could ever take a request."""
        reason = self.registry.not_ready()
        if reason is not None and not self.registry.entries("prefill"):
            raise Unavailable("no worker is available", code=reason, retry_after_s=1)

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Runs ``work`` on ``size`` bytes or characters in a thread: the event loop has all streams to
        serve."""
        pool = self._encoders if size < LONG else self._slow
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    async def parse(self, kind: Kind, body: bytes, limits: Limits) -> ParsedRequest:
        """:func:`parse_request`, off the event loop where a body is so large that it would be felt."""
        if len(body) < LONG:
            return parse_request(kind, body, limits)
        return await self.off_loop(len(body), partial(parse_request, kind, body, limits))

    async def encode(self, parsed: ParsedRequest, context_len: int) -> list[list[int]]:
        """Token ids of every prompt, made off the event loop and checked against the context."""
        if parsed.kind == "chat":
            chat = parsed.chat
            size = num_chars(chat.messages) + num_chars(chat.variables)
            work = partial(
                self.tokenizer.encode_chat, chat.messages, context_len, chat.variables, chat.continue_final
            )
            ids = [await self.off_loop(size, work)]
        else:
            encode = partial(self.tokenizer.encode, add_special_tokens=parsed.add_special_tokens)
            several = parsed.num_prompts > 1
            ids = [
                await self.off_loop(
                    len(prompt),
                    partial(encode, prompt, context_len, param=f"prompt[{at}]" if several else "prompt"),
                )
                if isinstance(prompt, str)
                else prompt
                for at, prompt in enumerate(parsed.prompts)
            ]
        if parsed.truncate_prompt_tokens is not None:
            ids = [prompt[-parsed.truncate_prompt_tokens :] for prompt in ids]
        check_prompts(parsed, ids, context_len)
        return ids

    async def flows(
        self, parsed: ParsedRequest, prompts: list[list[int]], context_len: int
    ) -> list[RequestFlow]:
        """One flow a choice, in the order of their indexes."""
        request = secrets.token_hex(12)
        bad_words: tuple[tuple[int, ...], ...] = ()
        if parsed.bad_words:
            make = partial(self.tokenizer.bad_words, parsed.bad_words)
            bad_words = await self.off_loop(sum(map(len, parsed.bad_words)), make)
        made: list[RequestFlow] = []
        kind = BeamFlow if parsed.beam_width else RequestFlow
        share: PromptShare | None = None
        for index in range(parsed.num_choices):
            prompt = prompts[index // parsed.best_of]
            leads = index % parsed.best_of == 0
            if leads:
                share = PromptShare() if parsed.best_of > 1 else None
            made.append(
                kind(
                    request_id=f"{request}-{index}",
                    prompt=prompt,
                    sampling=finalize(parsed, len(prompt), context_len, index, bad_words),
                    links=self.links,
                    policy=self.policy,
                    metrics=self.metrics,
                    settings=self._flow_settings,
                    clock=self.clock,
                    share=share,
                    leads=leads,
                )
            )
        return made


def outcome(error: BaseException | None) -> str:
    """The ``outcome`` label of a request's end."""
    if error is None:
        return "ok"
    if isinstance(error, ApiError):
        return "overloaded" if error.status == 429 else "refused" if error.status < 500 else "error"
    return "aborted" if isinstance(error, asyncio.CancelledError | ConnectionError) else "error"

"""From a checked request to its answer: choices run side by side, their text comes out as one ordered
stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from pagerelay.common.wire.messages import FinishReason
from pagerelay.router.flow import RequestFlow
from pagerelay.router.replies import Output, Timings, Usage
from pagerelay.router.service import RouterService
from pagerelay.router.stops import StopMatcher
from pagerelay.router.tool_calls import CallDelta, ToolParser
from pagerelay.router.validate import ParsedRequest


@dataclass(frozen=True, slots=True)
class Piece:
    """New text and tokens of one choice."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    calls: list[CallDelta]


@dataclass(slots=True)
class Choice:
    """One choice's text side: decoder, stop strings, and what it has said so far."""

    index: int
    flow: RequestFlow
    parts: list[str] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Answer:
    """The cancel scope of one HTTP request: whatever ends it, :meth:`close` releases every worker exactly
    once."""

    def __init__(
        self,
        service: RouterService,
        parsed: ParsedRequest,
        prompts: list[list[int]],
        flows: list[RequestFlow],
    ):
        self._service = service
        self._parsed = parsed
        self._prompt_tokens = sum(len(prompt) for prompt in prompts)
        self.choices = [Choice(index, flow) for index, flow in enumerate(flows)]
        self._pieces: asyncio.Queue[Piece | BaseException] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._began = service.clock()
        self._first_token_s: float | None = None
        service.metrics.prompt_tokens.inc(self._prompt_tokens)

    async def pieces(self) -> AsyncIterator[Piece | None]:
        """Pieces as they come; ``None`` whenever nothing came for ``keepalive_s``. Raises what ended a
        choice."""
        self._tasks = [asyncio.create_task(self._run(choice)) for choice in self.choices]
        left = len(self.choices)
        while left:
            try:
                item = self._pieces.get_nowait()
            except asyncio.QueueEmpty:
                try:
                    async with asyncio.timeout(self._service.config.router.keepalive_s):
                        item = await self._pieces.get()
                except TimeoutError:
                    yield None
                    continue
            if isinstance(item, BaseException):
                raise item
            if item.finish_reason is not None:
                left -= 1
            yield item

    def more_waiting(self) -> bool:
        return not self._pieces.empty()

    async def _run(self, choice: Choice) -> None:
        try:
            await choice.flow.start()
            await self._read(choice)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._pieces.put_nowait(error)

    async def _read(self, choice: Choice) -> None:
        parsed, metrics, clock = self._parsed, self._service.metrics, self._service.clock
        parser = ToolParser(parsed.tool_rules)
        detokenizer = self._service.tokenizer.detokenizer(parsed.skip_special_tokens, parser.marks)
        stops = StopMatcher(parsed.stop, parsed.include_stop_str_in_output)
        last: float | None = None
        while choice.finish_reason is None:
            tokens, reason = await choice.flow.next()
            now = clock()
            if last is None:
                metrics.ttft.observe(now - self._began)
                self._first_token_s = self._first_token_s or now - self._began
            else:
                metrics.itl.observe(now - last)
            last = now
            text: list[str] = []
            calls: list[CallDelta] = []
            taken = 0
            for token in tokens:
                taken += 1
                ends_here = reason is not None and taken == len(tokens)
                # A token that stops the answer (EOS, stop_token_ids) has no text of its own.
                silent = ends_here and reason == "stop"
                new = "" if silent else detokenizer.push(token)
                if ends_here:
                    new += detokenizer.flush()
                count = len(choice.token_ids) + taken
                sent, stopped = stops.push(new, armed=count >= parsed.min_tokens)
                said, called = parser.push(sent)
                text.append(said)
                calls += called
                if stopped or parser.done:
                    reason = "stop"
                    choice.flow.finished_by_router()
                    break
            if reason is not None:
                said, called = parser.push(stops.flush(), last=True)
                text.append(said)
                calls += called
            fresh = tokens[:taken]
            metrics.output_tokens.inc(len(fresh))
            choice.token_ids += fresh
            choice.parts.append("".join(text))
            choice.calls += calls
            choice.finish_reason = reason
            if reason is not None:
                await choice.flow.close()  # after a stop string the worker does not know yet that it is over
            self._pieces.put_nowait(Piece(choice.index, choice.parts[-1], fresh, reason, calls))

    async def close(self) -> None:
        """Safe to call at any time; after it no worker holds anything for this request."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for choice in self.choices:
            await choice.flow.close()

    # ------------------------------------------------------------------ summing up

    def outputs(self) -> list[Output]:
        return [
            Output(
                choice.index,
                "".join(choice.parts),
                choice.token_ids,
                choice.finish_reason or "length",
                choice.calls,
            )
            for choice in self.choices
        ]

    def usage(self) -> Usage:
        return Usage.of(self._prompt_tokens, sum(len(choice.token_ids) for choice in self.choices))

    def timings(self) -> Timings:
        """Of the first choice, and of the whole."""
        flow = self.choices[0].flow
        total = self._service.clock() - self._began
        self._service.metrics.e2e.observe(total)
        return Timings(
            queue_ms=_ms(flow.times.queue_s),
            prefill_ms=_ms(flow.times.prefill_s),
            handover_ms=_ms(flow.times.handover_s),
            handover_phases_ms={name: round(s * 1e3, 3) for name, s in flow.times.phases.items()} or None,
            ttft_ms=_ms(self._first_token_s),
            total_ms=_ms(total),
            recoveries=sum(choice.flow.recoveries for choice in self.choices),
        )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 2)

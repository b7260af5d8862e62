"""From a checked request to its answer: choices run side by side, their text comes out as one ordered
stream."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from pagerelay.common.wire.sampling import FinishReason, TokenLogprobs
from pagerelay.router.beam_flow import BeamFlow
from pagerelay.router.flow import RequestFlow
from pagerelay.router.pieces import Piece, Told
from pagerelay.router.replies import Timings, Usage
from pagerelay.router.service import RouterService
from pagerelay.router.stops import StopMatcher
from pagerelay.router.tool_calls import CallDelta, ToolParser
from pagerelay.router.validate import ParsedRequest


@dataclass(slots=True)
class Choice:
    """One choice's text side: decoder, stop strings, and what it has said so far."""

    index: int
    flow: RequestFlow
    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    told: list[Told] = field(default_factory=list)
    prompt_told: list[Told] = field(default_factory=list)
    found: list[Piece] = field(default_factory=list)
    """What a beam search has found, the best first; the rest stays empty then."""
    calls: list[CallDelta] = field(default_factory=list)


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
            if isinstance(choice.flow, BeamFlow):
                await self._read_beams(choice, choice.flow)
            else:
                await self._read(choice)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._pieces.put_nowait(error)

    async def _read(self, choice: Choice) -> None:
        parsed, metrics, clock = self._parsed, self._service.metrics, self._service.clock
        tokenizer = self._service.tokenizer
        parser = ToolParser(parsed.tool_rules)
        detokenizer = tokenizer.detokenizer(parsed.skip_special_tokens, parser.marks, self._before(choice))
        stops = StopMatcher(parsed.stop, parsed.include_stop_str_in_output)
        last: float | None = None
        offset = 0
        """Characters of text before the next token."""
        while choice.finish_reason is None:
            tokens, reason = await choice.flow.next()
            now = clock()
            if last is None:
                metrics.ttft.observe(now - self._began)
                self._first_token_s = self._first_token_s or now - self._began
            else:
                metrics.itl.observe(now - last)
            text: list[str] = []
            told: list[Told] = []
            calls: list[CallDelta] = []
            if last is None:
                offset = self._tell_prompt(choice, text, told)
            last = now
            if parsed.max_tokens == 0:
                tokens, reason = [], "length"
            logprobs = choice.flow.journal.logprobs[len(choice.token_ids) :]
            taken = 0
            for token in tokens:
                taken += 1
                ends_here = reason is not None and taken == len(tokens)
                # A token that stops the answer (EOS, stop_token_ids) has no text of its own.
                silent = ends_here and reason == "stop"
                new = "" if silent else detokenizer.push(token)
                if parsed.logprobs is not None:
                    silent = silent or (parsed.skip_special_tokens and token in tokenizer.special_ids)
                    told.append(Told(token, offset, logprobs[taken - 1], silent))
                offset += len(new)
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
            choice.finish_reason = reason
            if reason is not None:
                await choice.flow.close()  # after a stop string the worker does not know yet that it is over
            choice.told += told
            choice.calls += calls
            piece = Piece(choice.index, choice.parts[-1], fresh, reason, told, calls=calls)
            self._pieces.put_nowait(piece)

    async def _read_beams(self, choice: Choice, flow: BeamFlow) -> None:
        """All at once, and no text before the last step."""
        tokenizer, skip = self._service.tokenizer, self._parsed.skip_special_tokens
        for one in (await flow.hypotheses())[: self._parsed.n]:
            detokenizer = tokenizer.detokenizer(skip, after=self._before(choice))
            told = one.token_ids[:-1] if one.finish_reason == "stop" else one.token_ids
            text = "".join(map(detokenizer.push, told)) + detokenizer.flush()
            choice.found.append(Piece(0, text, one.token_ids, one.finish_reason, score=one.score))
            self._service.metrics.output_tokens.inc(len(one.token_ids))
        await flow.close()
        self._pieces.put_nowait(Piece(choice.index, "", [], "stop"))

    def _before(self, choice: Choice) -> list[int]:
        """The tokens that the text goes on from; an answer in a chat is a text of its own."""
        begins = self._parsed.kind == "chat" and not self._parsed.chat.continue_final
        return [] if begins else choice.flow.journal.prompt

    def _tell_prompt(self, choice: Choice, text: list[str], told: list[Told]) -> int:
        """What is said of the prompt, once its first token is here. Returns the characters that it has in the
        answer's text."""
        parsed, prompt = self._parsed, choice.flow.journal.prompt
        if parsed.scores_prompt is None and not parsed.echo:
            return 0
        tokenizer = self._service.tokenizer
        detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
        given = parsed.prompts[choice.index // parsed.best_of] if parsed.prompts else ""
        as_text = given if isinstance(given, str) and parsed.truncate_prompt_tokens is None else None
        # Only one answer to the prompt has asked for its scores; the others begin later.
        leader = self.choices[choice.index - choice.index % parsed.best_of]
        scores: list[TokenLogprobs | None] = [None, *leader.flow.journal.prompt_scores]
        offset, parts = 0, []
        of_prompt: list[Told] = []
        for token, logprobs in itertools.zip_longest(prompt, scores):
            of_prompt.append(Told(token, offset, logprobs))
            new = detokenizer.push(token)
            if as_text and token in tokenizer.special_ids and not as_text[offset:].startswith(new):
                new = ""  # the tokenizer has added it
            parts.append(new)
            offset += len(new)
        if not parsed.echo:
            choice.prompt_told = of_prompt
            return 0
        told += of_prompt if parsed.logprobs is not None else []
        text.append(as_text if as_text is not None else "".join(parts) + detokenizer.flush())
        return len(text[-1])

    async def close(self) -> None:
        """Safe to call at any time; after it no worker holds anything for this request."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for choice in self.choices:
            await choice.flow.close()

    # ------------------------------------------------------------------ summing up

    def outputs(self) -> list[Piece]:
        """The answers, in order; of ``best_of`` to a prompt the ``n`` likeliest, the best first."""
        n, best_of = self._parsed.n, self._parsed.best_of
        if self._parsed.beam_width:
            found = [piece for choice in self.choices for piece in choice.found]
            return [replace(piece, index=at) for at, piece in enumerate(found)]
        whole = [
            Piece(
                choice.index,
                "".join(choice.parts),
                choice.token_ids,
                choice.finish_reason or "length",
                choice.told,
                choice.prompt_told,
                calls=choice.calls,
            )
            for choice in self.choices
        ]
        if best_of == n:
            return whole
        best: list[Piece] = []
        for first in range(0, len(whole), best_of):
            ranked = sorted(whole[first : first + best_of], key=self._mean_logprob, reverse=True)
            best += [replace(piece, index=len(best) + at) for at, piece in enumerate(ranked[:n])]
        return best

    def _mean_logprob(self, piece: Piece) -> float:
        logprobs = self.choices[piece.index].flow.journal.logprobs[: len(piece.token_ids)]
        return sum(one.logprob for one in logprobs) / max(len(logprobs), 1)

    def usage(self) -> Usage:
        found = [choice.token_ids for choice in self.choices]
        found += [piece.token_ids for choice in self.choices for piece in choice.found]
        return Usage.of(self._prompt_tokens, sum(map(len, found)))

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

"""A request body → one checked value, the same for all endpoints; nothing goes on that has not passed here.

Three steps, each of which may raise an :class:`ApiError` and none of which has begun anything yet::

    parsed = parse_request("chat", body, limits)      # types, bounds, unsupported fields, model name
    ids = tokenizer.encode_chat(parsed.chat.messages) # text.py, off the event loop
    check_prompts(parsed, [ids], limits.context_len)  # empty or too long prompts
    sampling = finalize(parsed, len(ids), limits.context_len, choice_index)
"""

from __future__ import annotations

import logging
import secrets
from typing import Final, Literal, TypeVar

import msgspec
from msgspec import Struct

from pagerelay.common.errors import ContextLengthExceeded, InvalidRequest, NotFound
from pagerelay.common.wire.messages import SamplingParams
from pagerelay.common.wire.sampling import MAX_BEAM_TOKENS, Grammar
from pagerelay.router.beam_fields import beam_width
from pagerelay.router.chat_template import ChatAbilities, Message
from pagerelay.router.dialects import AnyGenerateRequest, fold
from pagerelay.router.json_body import decode_body, object_keys
from pagerelay.router.prompts import (
    Chat,
    missing,
    outside_vocabulary,
    read_chat,
    read_prompts,
    same,
    unsupported,
)
from pagerelay.router.schemas import (
    HONOURED_BY,
    NOT_YET,
    ChatRequest,
    Common,
    CompletionRequest,
    GenerateRequest,
)
from pagerelay.router.structured import read_grammar
from pagerelay.router.tool_calls import ToolFamily, ToolRules
from pagerelay.router.tools import read_tools

log = logging.getLogger(__name__)

Kind = Literal["generate", "completions", "chat"]
V = TypeVar("V")

DEFAULT_MAX_TOKENS: Final[dict[Kind, int | None]] = {"generate": 128, "completions": 16, "chat": None}
"""``None``: all that the context leaves."""
MAX_PROMPT_SCORES: Final = 1_000_000
"""Of all prompts, for each of the answers, alternatives included."""
GREEDY_BELOW: Final = 1e-5
"""Temperatures under this are greedy: dividing by them would leave nothing but the largest logit anyway."""

_generate = msgspec.json.Decoder(AnyGenerateRequest)
_completions = msgspec.json.Decoder(CompletionRequest)
_chat = msgspec.json.Decoder(ChatRequest)


class Limits(Struct, frozen=True, kw_only=True):
    """What the running cluster allows."""

    served_name: str
    vocab_size: int
    context_len: int
    max_choices: int
    abilities: ChatAbilities = ChatAbilities()
    tool_family: ToolFamily | None = None
    whole_tokens: tuple[tuple[str, int], ...] = ()  # control tokens, and others beside the vocabulary proper


class ParsedRequest(Struct, frozen=True, kw_only=True):
    """One request, checked. ``prompts`` has one entry a prompt; a chat has ``chat`` instead, and is one
    prompt.
    """

    kind: Kind
    model: str
    prompts: list[str | list[int]]
    chat: Chat
    tool_rules: ToolRules | None
    n: int
    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    stream: bool
    include_usage: bool
    user: str | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    bad_words: tuple[str, ...]
    allowed_token_ids: tuple[int, ...]
    logprobs: int | None
    """Alternatives beside each token; ``None``: nothing is told of them."""
    prompt_logprobs: int | None
    echo: bool
    best_of: int
    """Answers to a prompt, of which the best ``n`` are given."""
    grammar: Grammar | None
    grammar_param: str
    """The field that it came in."""
    beam_width: int
    """Above 0: ``n`` answers of one beam search are given, which takes the place of ``best_of`` answers."""
    length_penalty: float
    early_stopping: bool | Literal["never"]
    truncate_prompt_tokens: int | None
    add_special_tokens: bool
    return_token_ids: bool

    @property
    def messages(self) -> list[Message]:
        return self.chat.messages

    @property
    def num_prompts(self) -> int:
        return 1 if self.kind == "chat" else len(self.prompts)

    @property
    def num_choices(self) -> int:
        """Choice ``i`` answers prompt ``i // best_of``."""
        return self.num_prompts * self.best_of

    @property
    def scores_prompt(self) -> int | None:
        """Alternatives beside each token of the prompt, if these are told of."""
        return self.logprobs if self.echo else self.prompt_logprobs


def parse_request(kind: Kind, body: bytes, limits: Limits) -> ParsedRequest:
    """Decodes and checks a body. Raises :class:`InvalidRequest`, or :class:`NotFound` for another model's
    name.
    """
    known: Common
    request: GenerateRequest | CompletionRequest | ChatRequest
    match kind:
        case "generate":
            known = decode_body(body, _generate)
            request = fold(known)
        case "completions":
            known = request = decode_body(body, _completions)
        case "chat":
            known = request = decode_body(body, _chat)
    if log.isEnabledFor(logging.DEBUG):
        _log_unknown(body, known)
    check_model(request.model, kind, limits.served_name)
    _refuse_unsupported(request, kind)
    prompts: list[str | list[int]] = []
    chat, tools, tool_rules = Chat(messages=[]), None, None
    if isinstance(request, ChatRequest):
        if request.add_special_tokens:
            raise unsupported("add_special_tokens", "the chat template writes all special tokens itself")
        tools, tool_rules = read_tools(request, limits.abilities, limits.tool_family)
        chat = read_chat(request, limits.abilities, tools)
    else:
        prompts = read_prompts(request.prompt, limits.vocab_size)
    n = 1 if request.n is None else request.n
    width = beam_width(request, n)
    best_of = 1 if width else _best_of(request, kind, n)
    _check_choices(max(best_of, width), 1 if kind == "chat" else len(prompts), limits.max_choices)
    max_tokens, min_tokens = _token_limits(request, kind)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options is allowed only beside stream: true", param="stream_options")
    stop_ids = tuple(dict.fromkeys(request.stop_token_ids or ()))
    for field, named in (
        ("stop_token_ids", stop_ids),
        ("logit_bias", request.logit_bias or ()),
        ("allowed_token_ids", request.allowed_token_ids or ()),
    ):
        for position, token_id in enumerate(named):
            if token_id >= limits.vocab_size:
                raise outside_vocabulary(f"{field}[{position}]", token_id, limits.vocab_size)
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(dict.fromkeys(request.stop or ()))
    grammar, grammar_param = read_grammar(request, tools or [], tool_rules, limits.whole_tokens)
    if grammar is not None and width:
        raise InvalidRequest("a beam search follows no grammar; leave one out", param=grammar_param)
    return ParsedRequest(
        kind=kind,
        model=limits.served_name,
        prompts=prompts,
        chat=chat,
        tool_rules=tool_rules,
        n=n,
        max_tokens=max_tokens,
        temperature=_or(request.temperature, 1.0),
        top_k=max(_or(request.top_k, 0), 0),
        top_p=_or(request.top_p, 1.0),
        min_p=_or(request.min_p, 0.0),
        seed=request.seed,
        min_tokens=min_tokens,
        ignore_eos=request.ignore_eos is True,
        stop=stop,
        stop_token_ids=stop_ids,
        include_stop_str_in_output=request.include_stop_str_in_output is True,
        skip_special_tokens=request.skip_special_tokens is not False,
        stream=request.stream is True,
        include_usage=request.stream_options is not None and request.stream_options.include_usage is True,
        user=request.user,
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        logit_bias=tuple(sorted((request.logit_bias or {}).items())),
        bad_words=tuple(dict.fromkeys(request.bad_words or ())),
        allowed_token_ids=tuple(dict.fromkeys(request.allowed_token_ids or ())),
        logprobs=_logprobs(request, kind),
        prompt_logprobs=_prompt_logprobs(request),
        echo=isinstance(request, CompletionRequest) and request.echo is True,
        best_of=best_of,
        grammar=grammar,
        grammar_param=grammar_param,
        beam_width=width,
        length_penalty=_or(request.length_penalty, 1.0),
        early_stopping=_or(request.early_stopping, False),
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        add_special_tokens=kind == "chat" or request.add_special_tokens is not False,
        return_token_ids=request.return_token_ids is True,
    )


def check_prompts(parsed: ParsedRequest, token_ids: list[list[int]], context_len: int) -> None:
    """All prompts of a request, tokenised: none empty, none that fills the context. Names the one that is.
    Nor may more be told of them than can be written while others wait."""
    if parsed.scores_prompt is not None:
        told = sum(map(len, token_ids)) * parsed.best_of * (1 + parsed.scores_prompt)
        if told > MAX_PROMPT_SCORES:
            message = f"{told} log-probabilities of prompts are more than {MAX_PROMPT_SCORES}; ask for fewer"
            raise InvalidRequest(message, param="logprobs" if parsed.echo else "prompt_logprobs")
    for index, ids in enumerate(token_ids):
        param = "messages" if parsed.kind == "chat" else "prompt"
        if parsed.num_prompts > 1:
            param = f"prompt[{index}]"
        if not ids:
            raise InvalidRequest(f"{param} has no tokens", param=param, code="empty_prompt")
        check_context(len(ids), context_len, param)


def check_context(num_prompt_tokens: int, context_len: int, param: str | None = None) -> None:
    """A prompt must leave room for one token. Raises :class:`ContextLengthExceeded` with both numbers."""
    if num_prompt_tokens >= context_len:
        raise ContextLengthExceeded(
            # In words by which clients that retry with a shorter prompt know it.
            f"this model's maximum context length is {context_len} tokens, prompt and answer together, "
            f"but the prompt has {num_prompt_tokens}; shorten the prompt",
            param=param,
        )


def finalize(
    parsed: ParsedRequest,
    num_prompt_tokens: int,
    context_len: int,
    choice_index: int,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> SamplingParams:
    """The sampling of one choice (0 ≤ ``choice_index`` < ``num_choices``), its limits fitted to the context.

    Given a seed, random numbers depend on (seed, ``choice_index % best_of``): a prompt of a batch is answered
    as if alone. Without one each choice draws its own. ``bad_words``: those of ``parsed``, as token ids.
    """
    check_context(num_prompt_tokens, context_len)
    room = context_len - num_prompt_tokens
    if parsed.beam_width:
        room = min(room, MAX_BEAM_TOKENS // parsed.beam_width)
    # Where nothing but the prompt is wanted, one token is computed all the same: its row of logits is there.
    max_tokens = room if parsed.max_tokens is None else min(max(parsed.max_tokens, 1), room)
    greedy = parsed.temperature < GREEDY_BELOW or parsed.beam_width > 0
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if greedy else parsed.temperature,
        top_k=0 if greedy else parsed.top_k,
        top_p=1.0 if greedy else parsed.top_p,
        min_p=0.0 if greedy else parsed.min_p,
        seed=secrets.randbits(64) if parsed.seed is None else parsed.seed % 2**64,
        choice=choice_index % parsed.best_of,
        min_tokens=min(parsed.min_tokens, max_tokens),
        ignore_eos=parsed.ignore_eos,
        stop_token_ids=parsed.stop_token_ids,
        presence_penalty=parsed.presence_penalty,
        frequency_penalty=parsed.frequency_penalty,
        repetition_penalty=parsed.repetition_penalty,
        logit_bias=parsed.logit_bias,
        bad_words=bad_words,
        allowed_token_ids=parsed.allowed_token_ids,
        grammar=parsed.grammar,
        # The best of several are those whose tokens are the likeliest.
        logprobs=0 if parsed.logprobs is None and parsed.best_of > parsed.n else parsed.logprobs,
        # Of one of its answers: they all begin with the same prompt.
        prompt_logprobs=parsed.scores_prompt if choice_index % parsed.best_of == 0 else None,
        beam_width=parsed.beam_width,
        length_penalty=parsed.length_penalty,
        early_stopping=parsed.early_stopping,
    )


# ------------------------------------------------------------------------------------------------ parts


def _or(value: V | None, default: V) -> V:
    return default if value is None else value


def check_model(model: str | None, kind: Kind, served_name: str) -> None:
    if model is None:
        if kind != "generate":
            raise missing("model")
    elif model != served_name:
        shown = ascii(model if len(model) <= 64 else model[:64] + "...")
        message = f"no model {shown} here; this server has {served_name!r}"
        raise NotFound(message, param="model", code="model_not_found")


def _refuse_unsupported(request: Common, kind: Kind) -> None:
    for name, neutral in NOT_YET.items():
        value = getattr(request, name) if HONOURED_BY.get(name) != kind else None
        if value is None or any(same(value, other) for other in neutral):
            continue
        raise unsupported(name, f"{name} is not supported with this value; leave it out")


def _best_of(request: Common, kind: Kind, n: int) -> int:
    best_of = _or(request.best_of, n)
    if best_of == n:
        return n
    if kind == "chat":
        raise unsupported("best_of", "best_of is not supported for chats; ask for n answers")
    if best_of < n:
        raise InvalidRequest(f"best_of is {best_of}, below n, which is {n}", param="best_of")
    if request.stream:
        raise InvalidRequest("best_of above n cannot be streamed: the best are known last", param="best_of")
    return best_of


def _logprobs(request: Common, kind: Kind) -> int | None:
    """``false`` is absence everywhere. Chats say whether, and how many in another field; the others how
    many."""
    wanted = None if request.logprobs is False else request.logprobs
    if not isinstance(request, ChatRequest):
        if wanted is True:
            raise InvalidRequest("logprobs is a number here: of alternatives, 0 to 20", param="logprobs")
        return wanted
    if wanted is not None and wanted is not True:
        raise InvalidRequest("logprobs is true or false here; the number is top_logprobs", param="logprobs")
    if wanted is None and request.top_logprobs:
        raise InvalidRequest("top_logprobs is allowed only beside logprobs: true", param="top_logprobs")
    return None if wanted is None else _or(request.top_logprobs, 0)


def _prompt_logprobs(request: Common) -> int | None:
    if request.prompt_logprobs is not None and isinstance(request, CompletionRequest) and request.echo:
        raise InvalidRequest("beside echo the prompt's are those of logprobs", param="prompt_logprobs")
    if request.prompt_logprobs is not None and request.stream:
        message = "prompt_logprobs cannot be streamed; on /v1/completions echo with logprobs can"
        raise InvalidRequest(message, param="prompt_logprobs")
    return request.prompt_logprobs


def _check_choices(n: int, num_prompts: int, max_choices: int) -> None:
    if n * num_prompts > max_choices:
        message = (
            f"{num_prompts} prompts x {n} choices are more than the {max_choices} that one request may have"
        )
        raise InvalidRequest(message, param="n" if n > 1 else "prompt")


def _token_limits(request: Common, kind: Kind) -> tuple[int | None, int]:
    """(max_tokens, min_tokens), which must not contradict each other, the default included."""
    name, given = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        name, given = "max_completion_tokens", request.max_completion_tokens
    max_tokens = DEFAULT_MAX_TOKENS[kind] if given is None else given
    min_tokens = _or(request.min_tokens, 0)
    if max_tokens == 0 and not (isinstance(request, CompletionRequest) and request.echo):
        raise InvalidRequest("max_tokens is 0, which is allowed only beside echo: true", param="max_tokens")
    if max_tokens is not None and min_tokens > max_tokens:
        default = " (the default)" if given is None else ""
        message = f"min_tokens is {min_tokens}, above {name}, which is {max_tokens}{default}"
        raise InvalidRequest(message, param="min_tokens")
    return max_tokens, min_tokens


def _log_unknown(body: bytes, request: Common) -> None:
    unknown = sorted(set(object_keys(body)) - set(request.__struct_fields__))
    if unknown:
        shown = ", ".join(ascii(key[:40]) for key in unknown[:8])
        log.debug("%d unknown fields ignored: %s", len(unknown), shown)

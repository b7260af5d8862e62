"""``POST /tokenize`` and ``POST /detokenize``: the model's tokenizer as a service, in vLLM's shapes.

Ids are those that the generating endpoints would use: a ``prompt`` is encoded as theirs, ``messages`` go
through the model's chat template. A text that is longer than the context is counted too, unless its bytes
alone say that no model of this context could take it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from pagerelay.common.errors import InvalidRequest
from pagerelay.router.json_body import decode_body
from pagerelay.router.prompts import check_ids, missing, read_chat, unsupported
from pagerelay.router.schemas import MAX_MESSAGES, MAX_TOOLS, ChatMessage, ChatRequest, TokenId, Tool
from pagerelay.router.service import RouterService
from pagerelay.router.sse import json_body
from pagerelay.router.tools import read_tools
from pagerelay.router.validate import check_context, check_model


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """``POST /tokenize``: exactly one of ``prompt`` and ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    """Those of the tokenizer's post-processor, default true; messages get those of their template alone."""
    add_generation_prompt: bool | None = None
    """Messages: whether the assistant's turn is begun, default true. Nothing to a prompt."""
    continue_final_message: bool | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """``POST /detokenize``"""

    model: str | None = None
    tokens: list[TokenId] | None = None


class Tokenized(Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    """Each token as the vocabulary spells it."""


class Detokenized(Struct, frozen=True):
    prompt: str


_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


def _as_chat(request: TokenizeRequest) -> ChatRequest:
    return ChatRequest(
        messages=request.messages,
        tools=request.tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template_kwargs=request.chat_template_kwargs,
    )


async def tokenize(service: RouterService, body: bytes) -> bytes:
    limits = service.limits()

    def work() -> bytes:
        request = decode_body(body, _tokenize)
        check_model(request.model, "generate", limits.served_name)
        special, tokenizer = request.add_special_tokens, service.tokenizer
        if request.messages is None:
            if request.prompt is None:
                raise missing("prompt")
            ids = tokenizer.encode(request.prompt, limits.context_len, special is not False)
        else:
            if request.prompt is not None:
                raise InvalidRequest("prompt and messages exclude each other; send one", param="messages")
            if special:
                raise unsupported("add_special_tokens", "messages get the special tokens of their template")
            tools, _ = read_tools(_as_chat(request), limits.abilities, limits.tool_family)
            chat = read_chat(_as_chat(request), limits.abilities, tools)
            ids = tokenizer.encode_chat(
                chat.messages, limits.context_len, chat.variables, chat.continue_final
            )
        strings = tokenizer.token_strings(ids) if request.return_token_strs else None
        return json_body(Tokenized(len(ids), limits.context_len, ids, strings))

    return await service.off_loop(len(body), work)


async def detokenize(service: RouterService, body: bytes) -> bytes:
    limits = service.limits()

    def work() -> bytes:
        request = decode_body(body, _detokenize)
        check_model(request.model, "generate", limits.served_name)
        if request.tokens is None:
            raise missing("tokens")
        check_context(len(request.tokens) - 1, limits.context_len, "tokens")
        check_ids(request.tokens, limits.vocab_size, "tokens")
        return json_body(Detokenized(service.tokenizer.decode(request.tokens)))

    return await service.off_loop(len(body), work)

"""How to sample: the fields of the API under the names that vLLM's ``SamplingParams`` has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """A field that is ``None`` is not sent, so the server's default holds (``max_tokens``: 128, in a chat all
    that fits). The server checks the rest, and refuses by name what it does not serve.
    """

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    """Without one each choice draws its own."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None

    logprobs: int | None = None
    """So many of the most likely tokens at each position, with their log-probabilities."""
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None

    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None

    structured_outputs: Mapping[str, Any] | None = None
    guided_json: str | Mapping[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Sequence[str] | None = None
    guided_grammar: str | None = None

    extra_args: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request's body, as they are."""

    def body(self) -> dict[str, Any]:
        """The fields of a request to ``/generate``."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "extra_args"}
        return {name: value for name, value in own.items() if value is not None} | dict(self.extra_args)

    def chat_body(self) -> dict[str, Any]:
        """The fields of a request to ``/v1/chat/completions``, where ``logprobs`` is a switch."""
        body = self.body()
        count = body.get("logprobs")
        if count is not None and not isinstance(count, bool):
            body |= {"logprobs": True, "top_logprobs": count}
        return body

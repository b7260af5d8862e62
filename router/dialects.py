"""``/generate`` in the words of other servers' users, folded into one request; the answer is always ours.

* vLLM's ``/generate``: ``prompt`` and all of sampling at the top, which is what pagerelay's own names are.
* SGLang: ``text`` or ``input_ids``, sampling under ``sampling_params``, ``return_logprob`` with
  ``top_logprobs_num``.
* TGI: ``inputs``, sampling under ``parameters``; ``details`` changes nothing: an answer always has them.

A prompt that is said twice is refused, and so are two values for one field, and what others do and pagerelay
cannot.
What is left out has pagerelay's default, not the other server's.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from pagerelay.common.errors import InvalidRequest
from pagerelay.router.prompts import same, unsupported
from pagerelay.router.schemas import (
    INT32_MAX,
    Common,
    GenerateRequest,
    JsonSchemaFormat,
    NumLogprobs,
    Pattern,
    TokenId,
    Tokens,
)


class JsonGrammar(Struct, frozen=True, tag_field="type", tag="json"):
    """TGI's ways to say what an answer must look like."""

    value: dict[str, Any] | str


class NamedJsonGrammar(Struct, frozen=True, tag_field="type", tag="json_schema"):
    value: JsonSchemaFormat


class RegexGrammar(Struct, frozen=True, tag_field="type", tag="regex"):
    value: Pattern


class Nested(Common, frozen=True, kw_only=True):
    """``sampling_params`` and ``parameters``: all fields of sampling, and the names that SGLang and TGI have
    for some.
    """

    max_new_tokens: Tokens | None = None
    min_new_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    sampling_seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    no_stop_trim: bool | None = None
    truncate: Tokens | None = None
    top_n_tokens: NumLogprobs | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: Pattern | None = None
    ebnf: Pattern | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    do_sample: bool | None = None
    return_full_text: Any = None
    typical_p: Any = None
    watermark: Any = None
    adapter_id: Any = None
    grammar: JsonGrammar | NamedJsonGrammar | RegexGrammar | None = None
    structural_tag: Any = None


class AnyGenerateRequest(GenerateRequest, frozen=True, kw_only=True):
    """``POST /generate``"""

    text: str | list[str] | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    inputs: str | None = None
    sampling_params: Nested | None = None
    parameters: Nested | None = None
    return_logprob: bool | None = None
    top_logprobs_num: NumLogprobs | None = None
    image_data: Any = None
    audio_data: Any = None
    lora_path: Any = None
    return_hidden_states: Any = None
    custom_logit_processor: Any = None
    logprob_start_len: Any = None


SAME: Final = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
    "truncate": "truncate_prompt_tokens",
    "top_n_tokens": "logprobs",
    "json_schema": "guided_json",
    "regex": "guided_regex",
    "ebnf": "guided_grammar",
    "text": "prompt",
    "input_ids": "prompt",
    "inputs": "prompt",
}
"""Another server's name → ours."""

NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "return_full_text": (False,),
    "typical_p": (1.0,),
    "watermark": (False,),
    "adapter_id": (),
    "structural_tag": (),
    "image_data": ([],),
    "audio_data": ([],),
    "lora_path": (),
    "return_hidden_states": (False,),
    "custom_logit_processor": (),
    "logprob_start_len": (-1,),
}
"""Fields without a meaning here → the values (beside null) that mean the same as absence."""

_OURS: Final = GenerateRequest.__struct_fields__


def fold(request: AnyGenerateRequest) -> GenerateRequest:
    """The request in our own names. Raises :class:`InvalidRequest` for a field that is said in two ways."""
    said: dict[str, tuple[str, Any]] = {}

    def say(name: str, value: Any, where: str) -> None:
        if value is None:
            return
        before, known = said.setdefault(name, (where, value))
        if known != value or (name == "prompt" and before != where):
            raise InvalidRequest(f"{before} and {where} are two ways to say {name}; send one", param=where)

    for prefix, part in (
        ("", request),
        ("sampling_params.", request.sampling_params),
        ("parameters.", request.parameters),
    ):
        for field in () if part is None else part.__struct_fields__:
            value, where = getattr(part, field), prefix + field
            neutral = NEUTRAL.get(field)
            if value is not None and neutral is not None and not any(same(value, one) for one in neutral):
                raise unsupported(where, f"{where} is not supported with this value; leave it out")
            if (name := SAME.get(field, field)) in _OURS:
                say(name, value, where)
        if isinstance(part, Nested) and part.do_sample is False:
            say("temperature", 0.0, prefix + "do_sample")
        if isinstance(part, Nested) and part.decoder_input_details:
            say("prompt_logprobs", 0, prefix + "decoder_input_details")
        match part.grammar if isinstance(part, Nested) else None:
            case RegexGrammar(value):
                say("guided_regex", value, prefix + "grammar")
            case JsonGrammar(schema):
                say("guided_json", schema, prefix + "grammar")
            case NamedJsonGrammar(named):
                say("guided_json", named.schema or {}, prefix + "grammar")
            case None:
                pass
    if request.return_logprob:
        say("logprobs", request.top_logprobs_num or 0, "return_logprob")
    elif request.top_logprobs_num:
        raise InvalidRequest(
            "top_logprobs_num is allowed only beside return_logprob: true", param="top_logprobs_num"
        )
    return GenerateRequest(**{name: value for name, (_, value) in said.items()})

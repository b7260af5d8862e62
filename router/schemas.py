"""What the three endpoints accept: one typed, bounded structure each. :mod:`validate` gives them one meaning.

A field that is ``null`` is a field that is absent. An integer is a JSON number without fraction or exponent
(``5.0`` and ``true`` are refused); of doubled keys the last one counts; fields that stand nowhere here are
ignored.

===============================  ===========================================================================
field                            what happens
===============================  ===========================================================================
``model``                        honoured: exactly the served name; only ``/generate`` may leave it out
``prompt``                       honoured: a text, a list of texts, token ids, or a list of lists of them
``messages``                     honoured: roles system, developer (= system), user, assistant, and tool where
                                 the model's template knows tools; ``content`` is a text, or text parts, which
                                 a template that takes no parts gets joined by a newline; ``tool_calls`` with
                                 ``content`` null; ``name`` where the template writes it, else ignored
``tools``                        chat: functions, rendered by the model's template, ``parameters`` a JSON
                                 schema; refused where the template has no tools or writes calls in an unknown
                                 form, or where ``strict: true`` cannot be held to
``tool_choice``                  chat: ``auto`` (the default), ``none``, which hides the tools from the
                                 model; ``required`` and a named function: the answer is calls alone
``parallel_tool_calls``          chat: honoured; with false the answer ends with its first call
``chat_template_kwargs``         chat: variables of the model's template, and ``enable_thinking``; scalars
``add_generation_prompt``        chat: honoured, default true
``continue_final_message``       chat: honoured; the last message is an assistant's, which is then continued
``max_tokens``                   honoured, ≥ 1 (completions beside ``echo``: 0);
                                 what does not fit the context is cut to it without a word;
                                 default: ``/generate`` 128, completions 16, chat all that fits
``max_completion_tokens``        chat: honoured, beats ``max_tokens``
``temperature``                  honoured, 0 to 100, default 1; below 1e-5 greedy, whatever the seed
``top_p``                        honoured, above 0 to 1 (0 is refused), default 1
``min_p``                        honoured, 0 to 1, default 0
``top_k``                        honoured; -1 and 0 are off, which is the default
``n``                            honoured, ≥ 1; prompts × n at most ``router.max_choices``
``seed``                         honoured, any signed 64-bit integer; without one each choice draws its own
``min_tokens``                   honoured, 0 to ``max_tokens``
``ignore_eos``                   honoured
``stop``                         honoured: at most 16 literal texts of 1 to 1,024 characters
``stop_token_ids``               honoured: at most 128 ids of the vocabulary
``include_stop_str_in_output``   honoured
``skip_special_tokens``          honoured, default true
``stream``, ``stream_options``   honoured; options (``include_usage``) only beside ``stream: true``
``presence_penalty``,            honoured, -2 to 2: subtracted from the logits of tokens in the answer, the
``frequency_penalty``            latter as often as they are there
``repetition_penalty``           honoured, 0.01 to 100: divides the logits of tokens in prompt and answer
``logit_bias``                   honoured: token id → -100 to 100, at most 1,024
``bad_words``                    honoured: at most 128 texts whose tokens never come in that order
``allowed_token_ids``            honoured: nothing else comes; at most 16,384
``logprobs``                     completions, ``/generate``: a number, 0 to 20, of alternatives beside each
                                 token; chat: true or false
``top_logprobs``                 chat: honoured, 0 to 20, only beside ``logprobs: true``
``prompt_logprobs``              honoured without streaming, 0 to 20
``echo``                         completions: honoured; with ``logprobs`` the prompt's are there too; with
                                 ``max_tokens: 0`` it is all there is
``best_of``                      completions, ``/generate``: honoured without streaming, at least ``n``: the
                                 ``n`` of so many answers with the largest mean log-probability
``response_format``              honoured: ``text``, ``json_object``, ``json_schema`` (always strict)
``guided_json``,                 honoured: an object or its text, a regular expression, up to 1,000 texts,
``guided_regex``,                a grammar of Lark or GBNF; ``structured_outputs`` with ``json``,
``guided_choice``,               ``regex``, ``choice``, ``grammar`` or ``json_object: true`` says it too; one
``guided_grammar``               of them at most; the answer ends when nothing may follow
``use_beam_search``              honoured without streaming: ``n`` answers, best first, of a search by
                                 ``best_of`` (default ``n``) beams, 2 to 64; each prompt counts that many
                                 choices; an answer may have 150,000 / beams tokens
``num_beams``                    the same, and says how many; 1 is no search
``length_penalty``,              beside these: -10 to 10, default 1; true, false (default) or ``"never"``; as
``early_stopping``               in transformers
``truncate_prompt_tokens``       honoured, ≥ 1: only so many of a prompt's last tokens count
``add_special_tokens``           prompts: honoured, default true; chat: only false, its template adds them
``return_token_ids``             honoured: choices have ``token_ids``, as those of ``/generate`` always have
all others in :data:`NOT_YET`    refused by name (``unsupported_parameter``) unless null or neutral
``user``, unknown fields         ignored
other servers' names             ``/generate``: see :mod:`dialects`
===============================  ===========================================================================
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from pagerelay.common.wire.sampling import MAX_LOGPROBS

INT32_MAX: Final = 2**31 - 1

Tokens = Annotated[int, Meta(ge=1, le=INT32_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
BadWord = Annotated[str, Meta(min_length=1, max_length=256)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]

MAX_MESSAGES: Final = 4096
MAX_TOOLS: Final = 128


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class JsonSchemaFormat(Struct, frozen=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True):
    type: str
    json_schema: JsonSchemaFormat | None = None


Pattern = Annotated[str, Meta(min_length=1)]
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1000)]


class StructuredOutputs(Struct, frozen=True):
    json: dict[str, Any] | str | None = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: Any = None


class Common(Struct, frozen=True, kw_only=True):
    """The fields of every endpoint."""

    model: str | None = None
    user: str | None = None
    max_tokens: Tokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    ignore_eos: bool | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=1024)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=128)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=16384)] | None = None
    logprobs: NumLogprobs | bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    best_of: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Pattern | None = None
    structured_outputs: StructuredOutputs | None = None
    use_beam_search: bool | None = None
    num_beams: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    truncate_prompt_tokens: Tokens | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None

    # Understood, and refused with any other value than the neutral one of NOT_YET.
    echo: Any = None
    top_logprobs: Any = None
    suffix: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    documents: Any = None
    modalities: Any = None
    audio: Any = None
    logits_processors: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    prompt_embeds: Any = None
    web_search_options: Any = None
    kv_transfer_params: Any = None


NOT_YET: Final[dict[str, tuple[Any, ...]]] = {
    "echo": (False,),
    "top_logprobs": (0,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "modalities": (["text"],),
    "audio": (),
    "logits_processors": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "prompt_embeds": (),
    "web_search_options": (),
    "kv_transfer_params": (),
}
"""Fields with a meaning that pagerelay does not have yet → the values (beside null) that mean the same as
absence.
"""

HONOURED_BY: Final = {
    "echo": "completions",
    "top_logprobs": "chat",
    "tools": "chat",
    "tool_choice": "chat",
    "chat_template_kwargs": "chat",
    "add_generation_prompt": "chat",
    "continue_final_message": "chat",
}
"""Fields of :data:`NOT_YET` that one kind of request does have."""

Prompt = str | list[str | TokenId | list[TokenId]]


class GenerateRequest(Common, frozen=True, kw_only=True):
    """``POST /generate``"""

    prompt: Prompt | None = None


class CompletionRequest(Common, frozen=True, kw_only=True):
    """``POST /v1/completions``"""

    prompt: Prompt | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    echo: bool | None = None


class ContentPart(Struct, frozen=True):
    type: str
    text: str | None = None


class FunctionCall(Struct, frozen=True):
    name: str
    arguments: str
    """A JSON object as a text."""


class ToolCall(Struct, frozen=True):
    id: str
    type: str = "function"
    function: FunctionCall | None = None


class ChatMessage(Struct, frozen=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    function_call: Any = None
    audio: Any = None


class FunctionTool(Struct, frozen=True):
    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema; absent: no parameters."""
    strict: bool | None = None


class Tool(Struct, frozen=True):
    type: str
    function: FunctionTool | None = None


class FunctionName(Struct, frozen=True):
    name: str


class ToolChoice(Struct, frozen=True):
    type: str
    function: FunctionName | None = None


class ChatRequest(Common, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``"""

    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    max_completion_tokens: Tokens | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    top_logprobs: NumLogprobs | None = None

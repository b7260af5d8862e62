"""Small chat templates in the documented forms of five families, and what their models write."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from pagerelay.common.model.fetch import TINY_MODEL, resolve_model

HERMES = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'Functions:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nAnswer a call as ' }}
    {{- '<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- macro head(role) %}{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{%- endmacro %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- head('system') }}{{- 'Date: ' + date_string + '\\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- head('ipython') }}{{- message.content | tojson }}{{- '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length > 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- head('assistant') }}{{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- else %}
        {{- head(message.role) }}
        {%- if loop.first and tools is not none %}
            {{- 'Answer a call as {"name": ..., "parameters": ...}.\\n\\n' }}
            {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
        {%- endif %}
        {{- (message.content | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- head('assistant') }}{%- endif %}
"""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and loop.last %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' }}
        {%- if message.content is string %}{{- message.content }}
        {%- else %}{%- for part in message.content %}{{- part.text }}{%- endfor %}{%- endif %}
        {{- '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('ids have 9 characters') }}{%- endif %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
            {{- ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) }}
        {{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- else %}{{- raise_exception('only user, assistant and tool take turns') }}
    {%- endif %}
{%- endfor %}
"""

MISTRAL_ARGS = """\
{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'user' %}
        {{- '[INST]' }}
        {%- if message.content is string %}{{- message.content }}
        {%- else %}{%- for part in message.content %}{{- part.text }}{%- endfor %}{%- endif %}
        {{- '[/INST]' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content }}
        {{- '[/TOOL_RESULTS]' }}
    {%- else %}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id }}
            {{- '[ARGS]' + (call.function.arguments | tojson) }}
        {%- endfor %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}
"""

QWEN3_CODER = """\
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nAnswer a call as <tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n' }}
    {{- '</parameter>\\n</function>\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>\\n' }}
                {{- value if value is string else value | tojson }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

TEMPLATES = {
    "hermes": HERMES,
    "llama3_json": LLAMA,
    "mistral": MISTRAL,
    "mistral_args": MISTRAL_ARGS,
    "qwen3_coder": QWEN3_CODER,
}

SPECIALS = {
    "hermes": ["<|im_start|>", "<|im_end|>"],
    "qwen3_coder": ["<|im_start|>", "<|im_end|>"],
    "mistral_args": [
        *("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]"),
        *("[CALL_ID]", "[ARGS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
        *("[TOOL_CONTENT]", "[/TOOL_RESULTS]"),
    ],
    "llama3_json": [
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
    ],
    "mistral": [
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ],
}
NAMED = {
    "hermes": {"eos_token": "<|im_end|>"},
    "qwen3_coder": {"eos_token": "<|im_end|>"},
    "mistral_args": {"bos_token": "<s>", "eos_token": "</s>"},
    "llama3_json": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>"},
}

MARKS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "llama3_json": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]"],
}
"""Tags that are one token each in the models' own vocabularies."""
FIRST_MARK = 3
"""The id of the first one in a folder of :func:`with_tools`."""


def with_tools(model: Path, folder: Path, family: str) -> Path:
    """The tiny model below ``folder`` with a family's template; its marks are the tokens from 3 on, which
    have no other use. Qwen's are not special, the others are."""
    folder /= model.name
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    definition = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = definition["model"]["vocab"]
    for number, mark in enumerate(MARKS[family], FIRST_MARK):
        token = next(one for one in definition["added_tokens"] if one["id"] == number)
        vocabulary[mark] = vocabulary.pop(token["content"])
        token |= {"content": mark, "special": family != "hermes"}
    for name, text in (
        ("tokenizer.json", json.dumps(definition)),
        ("chat_template.jinja", TEMPLATES[family]),
    ):
        (folder / name).unlink()
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@lru_cache
def vocabulary() -> dict[str, int]:
    """The tiny model's, blanks as ``Ġ`` and line breaks as ``Ċ``."""
    definition = (resolve_model(TINY_MODEL, progress=print) / "tokenizer.json").read_text(encoding="utf-8")
    return dict(json.loads(definition)["model"]["vocab"])


def beginning(text: str, bias: int) -> dict[str, int]:
    """A ``logit_bias`` for all tokens that begin with ``text``."""
    return {str(number): bias for token, number in vocabulary().items() if token.startswith(text)}


def terse() -> dict[str, int]:
    """A ``logit_bias`` for a random model under a grammar of JSON: no blanks, and whatever is begun ends."""
    blanks = {str(number): -100 for token, number in vocabulary().items() if not token.strip("ĠĊĉč")}
    return blanks | beginning('"', 8) | beginning("}", 8) | beginning("]", 8)

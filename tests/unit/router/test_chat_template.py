from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from pagerelay.common.errors import InvalidRequest, StartupError
from pagerelay.router.chat_template import ChatTemplate

HI = [{"role": "user", "content": "hi"}]
LONG = [{"role": "user", "content": "long"}]


def test_settings_and_helpers_are_those_of_transformers() -> None:
    source = (
        "{% for m in messages %}\n"
        "    {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ m.role }}: {{ m | tojson }} {{ bos_token }}{{ strftime_now('%Y') | length }}\n"
        "{% endfor %}\n"
        "{% generation %}<g>{% endgeneration %}{% if tools is none and add_generation_prompt %}!{% endif %}"
    )
    text = ChatTemplate(source, {"bos_token": "<s>"}).render([*HI, *HI])
    assert text == 'user: {"role": "user", "content": "hi"} <s>4\n<g>!'


def test_json_is_not_escaped_for_html() -> None:
    template = ChatTemplate("{{ messages[0].content | tojson }}", {})
    assert template.render([{"role": "user", "content": "<é&>"}]) == '"<é&>"'


def test_the_template_may_refuse() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template.render(HI)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for x in range(100000) %}{% for y in range(100000) %}{% endfor %}{% endfor %}",
        "{% for x in range(100000) %}{% for y in range(100000) %}{% set z = 1 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_endless_work_ends(source: str) -> None:
    began = time.thread_time()
    with pytest.raises(StartupError, match="takes too long"):
        ChatTemplate(source, {}, seconds=0.2)
    assert time.thread_time() - began < 2


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10000000000 }}",
        "{{ ([0] * 10000000000) | length }}",
        "{{ 10 ** 10000000000 }}",
        "{% for x in range(100000) %}{{ 'aaaaaaaaaaaaaaaaaaaa' }}{% endfor %}",
        "{{ range(10000000000) | list }}",
    ],
)
def test_giant_output_ends(source: str) -> None:
    with pytest.raises(StartupError):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{{ lipsum(100000) }}",
        "{% for m in messages %}",
        "{{ 1 / 0 }}",
        "{{ messages[0] + 1 }}",
    ],
)
def test_sandbox_and_faults_end_the_start(source: str) -> None:
    with pytest.raises(StartupError) as caught:
        ChatTemplate(source, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{% if messages[0].content == 'long' %}{% for x in range(100000) %}{% for y in range(100000) %}"
        "{% endfor %}{% endfor %}{% endif %}",
        "{% if messages[0].content == 'long' %}{{ ''.__class__.__mro__ }}{{ 1 / 0 }}{% endif %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{% if messages[0].content == 'long' %}{{ f() }}{% endif %}",
    ],
)
def test_faults_of_one_request_end_that_request(source: str) -> None:
    template = ChatTemplate(source, {}, seconds=0.2)
    with pytest.raises(InvalidRequest) as caught:
        template.render(LONG)
    assert "Error" not in caught.value.message
    assert template.render(HI) == ""


def test_threads_have_their_own_clock() -> None:
    template = ChatTemplate("{% for x in range(20000) %}{% endfor %}{{ messages[0].content }}", {}, seconds=5)
    got: list[str] = []
    threads = [threading.Thread(target=lambda: got.append(template.render(HI))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == ["hi"] * 8


def test_where_it_is_found(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path, {}, {}) is None
    named = {"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}
    for settings, text in (({"chat_template": "S"}, "S"), (named, "D")):
        template = ChatTemplate.load(tmp_path, json.loads(json.dumps(settings)), {})
        assert template is not None
        assert template.render(HI) == text
    assert ChatTemplate.load(tmp_path, {"chat_template": [{"name": "rag", "template": "R"}]}, {}) is None
    (tmp_path / "chat_template.jinja").write_text("F")
    template = ChatTemplate.load(tmp_path, named, {})
    assert template is not None
    assert template.render(HI) == "F"

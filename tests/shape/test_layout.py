"""The rooms: each says what it is for, no file outgrows a reader, the whole stays small."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICE_ROOMS = ("common", "kernels", "prefill_svc", "decode_svc", "router")
ROOMS = (*SERVICE_ROOMS, "bench", "cli", "client")
PRODUCT = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
MAX_FILE_LINES = 400
MAX_SERVICE_CODE_LINES = 9000
MAX_GPU_CODE_LINES = 2500
MAX_API_CODE_LINES = 2500
GPU_ONLY = (
    "kernels/triton/",
    "common/transport/cu",
    "common/transport/torch_runtime",
    "common/transport/staging",
    "common/service/gpu_memory",
)
API = tuple(
    f"router/{name}"
    for name in (
        *("schemas", "json_body", "prompts", "validate", "openapi", "tokens", "aliases", "structured"),
        *(
            "chat_template",
            "control_tokens",
            "tools",
            "tool_calls",
            "tool_xml",
            "tool_grammar",
            "logprobs",
            "pieces",
            "replies",
            "sse",
        ),
        *("dialects", "beam_fields"),
    )
)
"""Shapes of requests and answers: it says what the API is, and moves nothing."""


def code_lines(source: str) -> int:
    """Lines that hold code: neither blank, nor comment, nor (part of) a docstring."""
    documented = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:  # docstrings, and the strings that document a field
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                documented.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    silent = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in silent:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def test_code_lines_counts_what_a_reader_would() -> None:
    source = (
        '"""Doc\nstring."""\n\n# comment\nx = 1  # why\n\n\ndef f():\n    """Doc."""\n    return """a\nb"""\n'
    )
    assert code_lines(source) == 4


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_is_readable_in_one_sitting(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_FILE_LINES, f"{lines} lines, at most {MAX_FILE_LINES}: one noun per file"


def test_every_room_says_what_it_is_for() -> None:
    mute = []
    for folder in sorted({path.parent for path in PRODUCT}):
        room = folder / "__init__.py"
        if not room.is_file() or not ast.get_docstring(ast.parse(room.read_text(encoding="utf-8"))):
            mute.append(str(room.relative_to(ROOT)))
    assert mute == []


def test_images_get_every_room() -> None:
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert [room for room in ROOMS if f"!{room}" not in allowed] == []


def test_every_module_has_a_docstring() -> None:
    mute = [p for p in PRODUCT if not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))]
    assert [str(path.relative_to(ROOT)) for path in mute] == []


def test_the_services_stay_within_their_budget() -> None:
    """What the split consists of, and beside it what only a GPU needs, and what only translates the API."""
    per_room: dict[tuple[str, str], int] = {}
    for path in (path for room in SERVICE_ROOMS for path in (ROOT / room).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        kind = "gpu" if name.startswith(GPU_ONLY) else "api" if name.startswith(API) else "split"
        room = path.relative_to(ROOT).parts[0]
        per_room[room, kind] = per_room.get((room, kind), 0) + code_lines(path.read_text(encoding="utf-8"))

    def total(wanted: str) -> int:
        return sum(lines for (_, kind), lines in per_room.items() if kind == wanted)

    assert total("split") <= MAX_SERVICE_CODE_LINES, per_room
    assert total("gpu") <= MAX_GPU_CODE_LINES, per_room
    assert total("api") <= MAX_API_CODE_LINES, per_room

"""docs/api.md says of every field of every endpoint what happens to it, and says it as the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec import Struct

from pagerelay.router.dialects import NEUTRAL, SAME, AnyGenerateRequest, Nested
from pagerelay.router.openapi import ROUTES
from pagerelay.router.schemas import HONOURED_BY, NOT_YET, ChatRequest, CompletionRequest, GenerateRequest
from pagerelay.router.tokenization import DetokenizeRequest, TokenizeRequest

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
IGNORED = {"user", "details"}
GENERATING: dict[str, type[Struct]] = {
    "generate": GenerateRequest,
    "completions": CompletionRequest,
    "chat": ChatRequest,
}


def rows(title: str) -> dict[str, list[str]]:
    """First cell (in backticks) → the other cells, of the table under a heading."""
    part = re.split(r"^## ", TEXT, flags=re.M)
    (section,) = (text for text in part if text.startswith(title + "\n"))
    found: dict[str, list[str]] = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            first, *others = (cell.strip() for cell in line.strip("|").split("|"))
            assert first.strip("`") not in found, f"{first} stands there twice"
            found[first.strip("`")] = others
    return found


def happens(field: str, kind: str, fields: tuple[str, ...]) -> str:
    if field not in fields:
        return "–"
    if field in IGNORED:
        return "ignored"
    if (field in NOT_YET and HONOURED_BY.get(field) != kind) or field in NEUTRAL:
        return "refused"
    return "refused" if (field, kind) == ("add_special_tokens", "chat") else "honoured"


def test_fields_of_the_generating_endpoints() -> None:
    fields = {field for struct in GENERATING.values() for field in struct.__struct_fields__}
    table = rows("Fields of /generate, /v1/completions and /v1/chat/completions")
    assert table.keys() == fields
    for field, cells in table.items():
        wanted = [happens(field, kind, struct.__struct_fields__) for kind, struct in GENERATING.items()]
        assert cells[:3] == wanted, f"docs/api.md, {field}: the cells must be {wanted}"


def test_other_servers_names() -> None:
    ours = set(GenerateRequest.__struct_fields__)
    table = rows("Other servers' names on /generate")
    theirs = {*Nested.__struct_fields__, *AnyGenerateRequest.__struct_fields__} - ours
    assert table.keys() == theirs
    for field, cells in table.items():
        if field in SAME:
            assert cells[0] == f"`{SAME[field]}`", field
        elif field in IGNORED or field in NEUTRAL:
            assert cells[0] == happens(field, "generate", (field,)), field


@pytest.mark.parametrize(
    ("title", "struct"),
    [("Fields of /tokenize", TokenizeRequest), ("Fields of /detokenize", DetokenizeRequest)],
)
def test_fields_of_the_tokenizer(title: str, struct: type[Struct]) -> None:
    assert list(rows(title)) == list(struct.__struct_fields__)


def test_routes() -> None:
    table = rows("Routes")
    assert list(table) == [f"{route.method.upper()} {route.path}" for route in ROUTES]


def test_readme_links_to_it() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert "docs/api.md" in readme

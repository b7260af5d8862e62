from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagerelay.bench.report import (
    figures_table,
    header,
    markdown_table,
    noise_note,
    number,
    stamped,
    table,
    write_json,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (3.0, "3"),
        (1234567, "1,234,567"),
        (1234.5, "1,234"),
        (12.34, "12.3"),
        (1.234, "1.23"),
        (0.1234, "0.123"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_the_table_is_aligned() -> None:
    assert table(["", "W1", "W2"], [["a row", "1", "22"], ["b", "333", "-"]]).splitlines() == [
        "        W1  W2",
        "--------------",
        "a row    1  22",
        "b      333   -",
    ]


def test_the_same_in_markdown() -> None:
    assert markdown_table(["", "W1"], [["a row", "1"]]).splitlines() == [
        "|  | W1 |",
        "| --- | ---: |",
        "| a row | 1 |",
    ]


def test_rows_without_a_value_are_left_out() -> None:
    text = figures_table("x", {"W1": {"ok": 5, "itl_p99": None}, "W4": {"ok": 8, "itl_p99": 12.34}})
    lines = text.splitlines()
    assert len(lines) == 4
    assert lines[2].split() == ["ok", "5", "8"]
    assert lines[3].split() == ["ITL", "p99", "ms", "-", "12.3"]


def test_other_load_is_pointed_out() -> None:
    assert noise_note([]) is None
    assert noise_note([{"other_cores": None}, {"other_cores": 0.1}]) is None
    assert "up to 1.50 cores" in (noise_note([{"other_cores": 0.1}, {"other_cores": 1.5}]) or "")


def test_the_file_says_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/some/where/__main__.py", "load", "--label", "two words"])
    path = write_json(stamped(str(tmp_path / "new" / "folder"), "load"), header(figures={"a": 1.5}))
    report = json.loads(path.read_text())
    assert report["command"] == "python -m pagerelay.bench load --label 'two words'"
    assert report["machine"]["cores"] >= 1
    assert {"date", "git_commit", "figures"} <= report.keys()

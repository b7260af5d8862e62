from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagerelay.router.stops import StopMatcher


def run(pieces: list[str], stops: tuple[str, ...], include: bool = False) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops, include)
    sent = []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        sent.append(text)
        if stopped:
            return sent, True
    return [*sent, matcher.flush()], False


def cut(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, bool]:
    """The definition: earliest end wins, then the longest."""
    found = []
    for stop in stops:
        begin = text.find(stop)
        if begin >= 0:
            found.append((begin + len(stop), begin))
    if not found:
        return text, False
    end, begin = min(found)
    return text[: end if include else begin], True


@pytest.mark.parametrize("include", [False, True])
def test_stop_over_three_pieces_is_never_shown(include: bool) -> None:
    sent, stopped = run(["Hello wo", "r", "ld and more"], ("world",), include)
    assert stopped
    assert "".join(sent) == ("Hello world" if include else "Hello ")
    if not include:
        assert all("w" not in piece for piece in sent)


def test_false_start_is_released() -> None:
    matcher = StopMatcher(("abcd",))
    assert matcher.push("xab") == ("x", False)
    assert matcher.push("c") == ("", False)
    assert matcher.push("ab") == ("abc", False)
    assert matcher.push("e") == ("abe", False)
    assert matcher.push("abc") == ("", False)
    assert matcher.flush() == "abc"
    assert matcher.flush() == ""


def test_nothing_waits_when_the_stop_is_part_of_the_text() -> None:
    matcher = StopMatcher(("abcd",), include=True)
    assert matcher.push("xab") == ("xab", False)
    assert matcher.push("cde") == ("cd", True)
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ""


def test_earliest_end_wins_then_the_longest() -> None:
    assert run(["abcde"], ("abcde", "bc")) == (["a"], True)
    assert run(["xabc"], ("c", "abc")) == (["x"], True)


def test_stops_are_literal_text() -> None:
    assert run(["aaaaaaaaa$"], ("(a+)+$",)) == (["aaaaaaaaa$", ""], False)
    assert run(["see (a+)+$ here"], ("(a+)+$",)) == (["see "], True)


def test_unarmed_text_is_no_part_of_a_stop() -> None:
    matcher = StopMatcher(("end",))
    assert matcher.push("the end e", armed=False) == ("the end e", False)
    assert matcher.push("nd of it") == ("nd of it", False)
    assert matcher.push("en") == ("", False)
    assert matcher.push("d", armed=False) == ("end", False)
    assert matcher.push("end") == ("", True)


def test_no_stops() -> None:
    assert run(["a", "b"], ()) == (["a", "b", ""], False)


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    st.booleans(),
)
def test_any_cutting_gives_the_same(pieces: list[str], stops: list[str], include: bool) -> None:
    sent, stopped = run(pieces, tuple(stops), include)
    assert ("".join(sent), stopped) == cut("".join(pieces), tuple(stops), include)


def test_linear_on_the_worst_stop() -> None:
    """Quadratic matching would need 10^8 steps here."""
    stops = tuple("a" * (1023 - number) + "b" for number in range(16))
    began = time.thread_time()
    sent, stopped = run(["a"] * 100_000, stops)
    assert not stopped
    assert "".join(sent) == "a" * 100_000
    assert time.thread_time() - began < 3

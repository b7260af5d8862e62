"""Stop strings on a stream of text: nothing of a stop is ever sent, nothing else is ever withheld for good.

The stops of one request form an Aho-Corasick automaton (Aho and Corasick, 1975): each character costs
constant time on average, however long the stops are and however the text is cut into pieces. Stops are
literal text, no patterns.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache


class _Automaton:
    """State 0 is "nothing matched"; ``depth`` is how much of a stop the text's end may be the beginning
    of.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.moves: list[dict[str, int]] = [{}]
        self.fail: list[int] = [0]
        self.depth: list[int] = [0]
        self.match: list[int] = [0]
        """Length of the longest stop that ends in a state; 0 if none does."""
        for stop in stops:
            state = 0
            for char in stop:
                following = self.moves[state].get(char)
                if following is None:
                    following = len(self.moves)
                    self.moves[state][char] = following
                    self.moves.append({})
                    self.fail.append(0)
                    self.depth.append(self.depth[state] + 1)
                    self.match.append(0)
                state = following
            self.match[state] = len(stop)
        self.first = frozenset(self.moves[0])
        queue = deque(self.moves[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self.moves[state].items():
                self.fail[following] = self.step(self.fail[state], char)
                if not self.match[following]:
                    self.match[following] = self.match[self.fail[following]]
                queue.append(following)

    def step(self, state: int, char: str) -> int:
        while state and char not in self.moves[state]:
            state = self.fail[state]
        return self.moves[state].get(char, 0)


@lru_cache(maxsize=256)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    return _Automaton(stops)


class StopMatcher:
    """Cuts one choice's text at the first stop string.

    The stop that is complete first wins; of two that end at one place, the longer. ``include`` keeps the stop
    in the text; then no text has to wait.
    """

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self._automaton = _automaton(stops) if stops else None
        self._include = include
        self._state = 0
        self._held = ""
        self.stopped = False

    def push(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """Takes new text, gives (text that may be sent now, stopped?).

        With ``armed`` false (before ``min_tokens``) the text is passed on and can be no part of a stop.
        After a stop everything is swallowed.
        """
        if self.stopped:
            return "", True
        automaton = self._automaton
        if automaton is None:
            return text, False
        if not armed:
            return self.flush() + text, False
        state = self._state
        if not state and automaton.first.isdisjoint(text):
            return text, False
        for position, char in enumerate(text):
            state = automaton.step(state, char)
            if automaton.match[state]:
                self.stopped = True
                seen = self._held + text[: position + 1]
                self._held = ""
                return (seen if self._include else seen[: len(seen) - automaton.match[state]]), True
        self._state = state
        if self._include:
            return text, False
        seen = self._held + text
        cut = len(seen) - automaton.depth[state]
        self._held = seen[cut:]
        return seen[:cut], False

    def flush(self) -> str:
        """The held text, at the end of the output: it did not become a stop."""
        held, self._held, self._state = self._held, "", 0
        return held

"""Finding stop strings in text that arrives piece by piece.

One automaton (Aho-Corasick) for all stop strings of a request: its state is the longest end of the text that is the
beginning of a stop string, which is exactly what must not be sent yet. Work per character is constant.

Which stop string wins does not depend on how the text is cut: the one that is complete first; of several complete
with the same character, the longest, that is the one that began first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string stands at characters start..end (exclusive) of the whole text."""

    stop_string: str
    start: int
    end: int


class StopMatcher:
    """Feed it the text of one output, in order, until it returns a match.

    num_held: characters at the end of the text so far that may still become a stop string.
    """

    __slots__ = ("_children", "_fail", "_held", "_longest", "_num_chars", "_state")

    def __init__(self, stop_strings: Sequence[str]) -> None:
        """stop_strings: not empty, none of them empty."""
        # Per state: transitions, the state of its longest proper end, how much of it to hold back, what it completes.
        self._children: list[dict[str, int]] = [{}]
        self._longest: list[str | None] = [None]
        for stop_string in stop_strings:
            self._add(stop_string)
        self._fail = [0] * len(self._children)
        self._held = [0] * len(self._children)
        self._link()
        self._state = 0
        self._num_chars = 0

    def _add(self, stop_string: str) -> None:
        state = 0
        for char in stop_string:
            following = self._children[state].get(char)
            if following is None:
                following = len(self._children)
                self._children[state][char] = following
                self._children.append({})
                self._longest.append(None)
            state = following
        self._longest[state] = stop_string

    def _link(self) -> None:
        queue = deque((state, 1) for state in self._children[0].values())
        while queue:
            state, depth = queue.popleft()
            fail = self._fail[state]
            # Only what has a continuation can still become a stop string.
            self._held[state] = depth if self._children[state] else self._held[fail]
            if self._longest[state] is None:
                self._longest[state] = self._longest[fail]
            for char, child in self._children[state].items():
                self._fail[child] = self._step(fail, char)
                queue.append((child, depth + 1))

    def _step(self, state: int, char: str) -> int:
        while (following := self._children[state].get(char)) is None and state:
            state = self._fail[state]
        return following or 0

    @property
    def num_held(self) -> int:
        return self._held[self._state]

    def feed(self, text: str, *, armed: bool = True) -> StopMatch | None:
        """Take the next characters. Not armed: stop strings that become complete within them do not count."""
        state = self._state
        for position, char in enumerate(text, self._num_chars + 1):
            state = self._step(state, char)
            found = self._longest[state]
            if found is not None and armed:
                return StopMatch(found, position - len(found), position)
        self._state = state
        self._num_chars += len(text)
        return None

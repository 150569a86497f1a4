"""Finding stop strings in text that arrives piece by piece.

For every stop string it is known how many of its first characters the text so far ends with (Knuth, Morris and Pratt).
The largest of these numbers is exactly what must not be sent yet. Memory is at most two bytes a character of the stop
strings, time constant for each character and stop string, taken over the whole text.

Which stop string wins does not depend on how the text is cut: the one that is complete first; of several complete with
the same character, the longest, that is the one that began first.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string stands at characters start..end (exclusive) of the whole text."""

    stop_string: str
    start: int
    end: int


class _Candidate:
    """One stop string. num_matched: characters of it that the text ends with; never all of them."""

    __slots__ = ("_shorter", "num_matched", "stop_string")

    def __init__(self, stop_string: str) -> None:
        self.stop_string = stop_string
        self.num_matched = 0
        # Per number of matched characters: the next smaller number that they also end with. As far as it was needed:
        # most stop strings are never begun, and a long one takes long.
        self._shorter = array("H", (0, 0))

    def take(self, char: str) -> bool:
        """Whether the stop string is complete with this character."""
        num_matched = self._extended(self.num_matched, char)
        if num_matched == len(self._shorter):
            self._shorter.append(self._extended(self._shorter[-1], char))
        complete = num_matched == len(self.stop_string)
        self.num_matched = self._shorter[num_matched] if complete else num_matched
        return complete

    def _extended(self, num_matched: int, char: str) -> int:
        while self.stop_string[num_matched] != char:
            if not num_matched:
                return 0
            num_matched = self._shorter[num_matched]
        return num_matched + 1


class StopMatcher:
    """Feed it the text of one output, in order, until it returns a match."""

    __slots__ = ("_candidates", "_first_chars", "_num_chars", "num_held")

    def __init__(self, stop_strings: Sequence[str]) -> None:
        """stop_strings: at least one, each of 1 to 65,535 characters."""
        self._candidates = [_Candidate(stop_string) for stop_string in stop_strings]
        self._first_chars = frozenset(stop_string[0] for stop_string in stop_strings)
        self._num_chars = 0
        # Characters at the end of the text so far that may still become a stop string.
        self.num_held = 0

    def feed(self, text: str, *, armed: bool = True) -> StopMatch | None:
        """Take the next characters. Not armed: stop strings that become complete within them do not count."""
        for end, char in enumerate(text, self._num_chars + 1):
            if not self.num_held and char not in self._first_chars:
                continue
            complete = [candidate.stop_string for candidate in self._candidates if candidate.take(char)]
            if complete and armed:
                longest = max(complete, key=len)
                return StopMatch(longest, end - len(longest), end)
            self.num_held = max(candidate.num_matched for candidate in self._candidates)
        self._num_chars += len(text)
        return None

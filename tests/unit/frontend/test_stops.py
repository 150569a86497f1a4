from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.frontend.stops import StopMatch, StopMatcher

LETTERS = st.text("abAB é삼", max_size=24)
STOPS = st.lists(st.text("abAB é삼", min_size=1, max_size=5), min_size=1, max_size=5)


def first_stop(text: str, stops: list[str]) -> StopMatch | None:
    """Sees the whole text: the stop string complete first; of those complete at the same place, the longest."""
    found = [
        (start + len(stop), -len(stop), stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start)
    ]
    if not found:
        return None
    end, minus_length, stop = min(found)
    return StopMatch(stop, end + minus_length, end)


def longest_threat(text: str, stops: list[str]) -> int:
    """Characters at the end of the text that may still become a stop string."""
    return max(
        (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])),
        default=0,
    )


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted({min(position, len(text)) for position in cuts}), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@given(LETTERS, STOPS, st.lists(st.integers(0, 24), max_size=6))
def test_the_first_complete_stop_string_wins_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(stops)
    found = None
    for piece in cut(text, cuts):
        found = matcher.feed(piece)
        if found is not None:
            break
    assert found == first_stop(text, stops)


@given(LETTERS, STOPS)
def test_exactly_what_may_become_a_stop_string_is_held(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    for size, char in enumerate(text, 1):
        if matcher.feed(char) is not None:
            return
        assert matcher.num_held == longest_threat(text[:size], stops)


@pytest.mark.parametrize(
    "stops, text, expected",
    [
        (["DEFGHIJ"], "abcDEFGHIJk", ("DEFGHIJ", 3)),
        (["STOPPED", "STOP"], "xSTOPPED", ("STOP", 1)),
        (["bc", "abc"], "xabc", ("abc", 1)),
        (["abcX", "b"], "abcX", ("b", 1)),
        (["aab"], "aaab", ("aab", 1)),
    ],
)
def test_examples_f70(stops: list[str], text: str, expected: tuple[str, int]) -> None:
    found = StopMatcher(stops).feed(text)
    assert found is not None
    assert (found.stop_string, found.start) == expected


def test_a_stop_string_that_is_complete_while_not_armed_does_not_count() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.feed("ab", armed=False) is None
    assert matcher.num_held == 0
    assert matcher.feed("a", armed=False) is None
    found = matcher.feed("b")
    assert found == StopMatch("ab", 2, 4)

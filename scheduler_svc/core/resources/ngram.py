"""Drafts from the text itself: what followed the last tokens where they occurred before."""

from __future__ import annotations

from array import array


class NgramProposer:
    """Prompt look-up: where did the last n tokens occur before, and what followed? Longest n first, newest occurrence
    first."""

    def __init__(self, num_drafts: int, *, max_ngram: int = 4, min_ngram: int = 2, window: int = 4096) -> None:
        self.num_drafts = num_drafts
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram
        # Tokens searched, so that one row's proposal is bounded.
        self._window = window

    def propose(self, tokens: array[int]) -> list[int]:
        """At most num_drafts ids that may follow `tokens`; empty when nothing suggests any."""
        tail = tokens[-self._window :]
        width = tail.itemsize
        data = tail.tobytes()
        for n in range(min(self._max_ngram, len(tail) - 1), self._min_ngram - 1, -1):
            pattern = data[-n * width :]
            # Found bytes must start at a token; the last token itself is not a match.
            end = len(data) - width
            while (at := data.rfind(pattern, 0, end)) >= 0 and at % width:
                end = at + len(pattern) - 1
            if at >= 0:
                start = at // width + n
                return list(tail[start : start + self.num_drafts])
        return []

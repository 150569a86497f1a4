"""From output token ids to what a client may see: text, and the ids it came from, held back together (D32).

Tokens are gathered into groups that end where no character is half decoded. A group goes out as soon as nothing of it
can become part of a stop string, so everything ever sent decodes to exactly the text sent with it. What is held is kept
in arrays: as objects, the tokens of many requests would keep the garbage collector busy.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Protocol

from scheduler_svc.frontend.calls import Delta
from scheduler_svc.frontend.stops import StopMatch, StopMatcher


class TokenDecoder(Protocol):
    """Decodes one output, token by token."""

    def push(self, token_id: int) -> str:
        """Characters that are complete with this token; "" when it completes none (or is a special token)."""
        ...

    @property
    def pending(self) -> bool:
        """Whether the tokens so far end within a character."""
        ...


class OutputAssembler:
    """The output of one request.

    decoder None: the model has no tokenizer, deltas carry ids only. stop_ids end the output from output index
    min_tokens on: the id is counted, but neither it nor its text is delivered. Stop strings count when the token that
    completes them has index min_tokens or more. At the end, bytes of a character that never became complete have no
    text; their ids are delivered all the same.

    num_tokens: output tokens that belong to the request so far, delivered or not; nothing after the end is counted.
    stop_string: the one that appeared. stop_token_id: the stop id that was sampled.
    """

    __slots__ = (
        "_decoder",
        "_ends",
        "_group_ends",
        "_min_tokens",
        "_num_chars",
        "_num_closed",
        "_stop_ids",
        "_stops",
        "_text",
        "_token_ids",
        "num_tokens",
        "stop_string",
        "stop_token_id",
    )

    def __init__(
        self,
        decoder: TokenDecoder | None,
        stops: StopMatcher | None = None,
        *,
        stop_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        self._decoder = decoder
        self._stops = stops
        self._stop_ids = stop_ids
        self._min_tokens = min_tokens
        # Characters of the output so far, and those of them that are held.
        self._num_chars = 0
        self._text = ""
        # Of every token that is held: its id, the number of the output's characters after it, whether its group ends.
        self._token_ids = array("q")
        self._ends = array("q")
        self._group_ends = bytearray()
        # Tokens held in groups that have ended.
        self._num_closed = 0
        self.num_tokens = 0
        self.stop_string: str | None = None
        self.stop_token_id: int | None = None

    @property
    def ended(self) -> bool:
        """Whether the output ended by itself: whatever is pushed after that is ignored."""
        return self.stop_string is not None or self.stop_token_id is not None

    def clip_min_tokens(self, max_tokens: int) -> None:
        """min_tokens is never more than the max_tokens the scheduler granted."""
        self._min_tokens = min(self._min_tokens, max_tokens)

    def push(self, token_ids: Iterable[int]) -> Delta | None:
        """Take the next tokens; what may be delivered now."""
        match: StopMatch | None = None
        for token_id in token_ids:
            if self.ended:
                break
            match = self._push(token_id)
        if match is not None:
            return self._take_until(match.start)
        return self._take()

    def finish(self, stop_token_id: int | None) -> Delta | None:
        """The request ended well: what was held back and belongs to the text. stop_token_id: what the scheduler stopped
        on. Not for requests that fail: what is held back may then have been the beginning of a stop string."""
        if self.stop_string is not None:
            return None
        if self.stop_token_id is not None and stop_token_id is None:
            # It was not what ended the request, so it is output like any other.
            token_id, self.stop_token_id = self.stop_token_id, None
            self.num_tokens -= 1
            match = self._append(token_id)
            if match is not None:
                return self._take_until(match.start)
        return self._delivered(len(self._token_ids), self._num_chars)

    def _push(self, token_id: int) -> StopMatch | None:
        if token_id in self._stop_ids and self.num_tokens >= self._min_tokens:
            self.stop_token_id = token_id
            self.num_tokens += 1
            return None
        return self._append(token_id)

    def _append(self, token_id: int) -> StopMatch | None:
        armed = self.num_tokens >= self._min_tokens
        self.num_tokens += 1
        text = "" if self._decoder is None else self._decoder.push(token_id)
        self._num_chars += len(text)
        self._text += text
        self._token_ids.append(token_id)
        self._ends.append(self._num_chars)
        match = None if self._stops is None or not text else self._stops.feed(text, armed=armed)
        if match is not None:
            self.stop_string = match.stop_string
        ends_group = match is not None or self._decoder is None or not self._decoder.pending
        self._group_ends.append(ends_group)
        if ends_group:
            self._num_closed = len(self._token_ids)
        return match

    def _take(self) -> Delta | None:
        safe = self._num_chars - (0 if self._stops is None else self._stops.num_held)
        num_tokens = self._num_until(safe)
        return self._delivered(num_tokens, self._ends[num_tokens - 1]) if num_tokens else None

    def _take_until(self, cut: int) -> Delta | None:
        """A stop string begins at character `cut`: everything before it, and the ids down to the last token that has a
        character before it."""
        num_tokens = self._num_until(cut)
        start = self._ends[num_tokens - 1] if num_tokens else self._num_chars - len(self._text)
        if start < cut:
            num_tokens = next(index for index, end in enumerate(self._ends, 1) if end >= cut)
        delta = self._delivered(num_tokens, cut)
        self._delivered(len(self._token_ids), self._num_chars)
        return delta

    def _num_until(self, num_chars: int) -> int:
        """Tokens held in whole groups that lie within so many characters of the output."""
        if num_chars == self._num_chars:
            return self._num_closed
        found = 0
        for index in range(self._num_closed):
            if self._ends[index] > num_chars:
                break
            if self._group_ends[index]:
                found = index + 1
        return found

    def _delivered(self, num_tokens: int, num_chars: int) -> Delta | None:
        """The first tokens that are held, with the text that ends at this character of the output; they are held no
        more."""
        if not num_tokens:
            return None
        size = len(self._text) - (self._num_chars - num_chars)
        delta = Delta(self._text[:size], tuple(self._token_ids[:num_tokens]))
        self._text = self._text[size:]
        del self._token_ids[:num_tokens]
        del self._ends[:num_tokens]
        del self._group_ends[:num_tokens]
        self._num_closed = max(0, self._num_closed - num_tokens)
        return delta

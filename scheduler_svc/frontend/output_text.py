"""From output token ids to what a client may see: text, and the ids it came from, held back together (D32).

Tokens are gathered into groups that end where no character is half decoded. A group goes out as soon as nothing of it
can become part of a stop string, so everything ever sent decodes to exactly the text sent with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class _Group:
    # First character, counted from the start of the output, and one after the last.
    start: int
    end: int
    text: list[str] = field(default_factory=list)
    # Each token with the number of output characters complete after it.
    tokens: list[tuple[int, int]] = field(default_factory=list)


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
        "_groups",
        "_min_tokens",
        "_num_chars",
        "_open",
        "_stop_ids",
        "_stops",
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
        self._num_chars = 0
        self._groups: deque[_Group] = deque()
        self._open = _Group(0, 0)
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
        if self._open.tokens:
            self._groups.append(self._open)
            self._open = _Group(self._num_chars, self._num_chars)
        return _joined(self._drain(self._num_chars))

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
        group = self._open
        group.text.append(text)
        group.tokens.append((token_id, self._num_chars))
        group.end = self._num_chars
        match = None if self._stops is None or not text else self._stops.feed(text, armed=armed)
        if match is not None:
            self.stop_string = match.stop_string
        if match is not None or self._decoder is None or not self._decoder.pending:
            self._groups.append(group)
            self._open = _Group(self._num_chars, self._num_chars)
        return match

    def _take(self) -> Delta | None:
        num_held = 0 if self._stops is None else self._stops.num_held
        return _joined(self._drain(self._num_chars - num_held))

    def _take_until(self, cut: int) -> Delta | None:
        """A stop string begins at character `cut`: everything before it, and the ids down to the last token that has a
        character before it."""
        groups = self._drain(cut)
        if self._groups and self._groups[0].start < cut:
            last = self._groups[0]
            num_tokens = next(index for index, (_, end) in enumerate(last.tokens, 1) if end >= cut)
            text = "".join(last.text)[: cut - last.start]
            groups.append(_Group(last.start, cut, [text], last.tokens[:num_tokens]))
        self._groups.clear()
        return _joined(groups)

    def _drain(self, safe: int) -> list[_Group]:
        groups = []
        while self._groups and self._groups[0].end <= safe:
            groups.append(self._groups.popleft())
        return groups


def _joined(groups: list[_Group]) -> Delta | None:
    if not groups:
        return None
    text = "".join(part for group in groups for part in group.text)
    return Delta(text, tuple(token_id for group in groups for token_id, _ in group.tokens))

"""One running request between the scheduler's stream and the client's call.

The session pushes into it (CallSink) as fast as tokens come; the call takes from it as fast as its client reads. What
lies between is bounded: deltas coalesce, and a client that is too far behind is given up, so nobody waits for a slow
reader.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

from scheduler_svc.frontend.calls import Accepted, CancelReason, Delta, Ended, Finished, FinishReason
from scheduler_svc.frontend.containment import contained
from scheduler_svc.frontend.errors import (
    CLIENT_GONE,
    INTERNAL,
    SLOW_READER,
    Failure,
    RequestError,
    TokenizerError,
)
from scheduler_svc.frontend.limits import Limits
from scheduler_svc.frontend.output_text import OutputAssembler
from scheduler_svc.frontend.usage import Usage

log = logging.getLogger(__name__)


class Requests(Protocol):
    """What a generation asks of the session; satisfied by SessionClient."""

    def cancel(self, handle: int, reason: CancelReason) -> None: ...

    def release(self, handle: int) -> None: ...

    def text_ended(self, handle: int, num_tokens: int) -> None: ...


class Undelivered:
    """Deltas the client has not taken yet."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._deltas: deque[Delta] = deque()
        self._num_bytes = 0

    def put(self, delta: Delta) -> bool:
        """False, with everything dropped, when the client is too far behind."""
        self._num_bytes += _size(delta)
        if self._num_bytes > self._limits.max_undelivered_bytes:
            self.clear()
            return False
        if len(self._deltas) >= self._limits.max_undelivered_deltas:
            joined = Delta(
                "".join(waiting.text for waiting in self._deltas),
                tuple(token_id for waiting in self._deltas for token_id in waiting.token_ids),
            )
            self._deltas.clear()
            self._deltas.append(joined)
        self._deltas.append(delta)
        return True

    def take(self) -> Delta | None:
        if not self._deltas:
            return None
        delta = self._deltas.popleft()
        self._num_bytes -= _size(delta)
        return delta

    def clear(self) -> None:
        self._deltas.clear()
        self._num_bytes = 0


def _size(delta: Delta) -> int:
    return len(delta.text.encode()) + 4 * len(delta.token_ids)


class Generation:
    """A submitted request. Iterate with `next` inside `with`: leaving the block ends the request, wherever it is.

    Events: Accepted, any number of Delta, Finished, then None; or RequestError at any point, with the usage so far when
    the request had been accepted.
    """

    def __init__(
        self,
        request_id: str,
        num_prompt_tokens: int,
        output: OutputAssembler,
        requests: Requests,
        limits: Limits,
    ) -> None:
        self.request_id = request_id
        self._num_prompt_tokens = num_prompt_tokens
        self._output = output
        self._requests = requests
        self._undelivered = Undelivered(limits)
        self._handle = 0
        self._accepted = False
        self._accepted_told = False
        # How the call ends once all deltas are delivered, and that it has.
        self._last: Finished | RequestError | None = None
        self._last_told = False
        # The scheduler was asked to end it: the failure to tell the client then.
        self._cut: Failure | None = None
        # Deltas were dropped: no success is possible any more.
        self._dropped = False
        self._news = asyncio.Event()
        # Called once, when the request is no longer live at the scheduler or its client has left.
        self.on_end: Callable[[], None] = lambda: None
        # Called once for a request that was accepted, when its cost is known: "stop", "length" or the reason of its
        # failure; the cost; and when its first output came, in seconds of the loop's clock.
        self.on_settled: Callable[[str, Usage, float | None], None] = lambda finish, usage, first_token_at: None
        self._settled = False
        self._first_token_at: float | None = None

    @property
    def num_output_tokens(self) -> int:
        return self._output.num_tokens

    def submitted(self, handle: int) -> None:
        self._handle = handle

    # --- the client's side ---

    async def next(self) -> Accepted | Delta | Finished | None:
        """The next event, as soon as there is one. Raises RequestError when the request ends without success."""
        while True:
            if self._accepted and not self._accepted_told:
                self._accepted_told = True
                return Accepted(self.request_id, self._num_prompt_tokens)
            if (delta := self._undelivered.take()) is not None:
                return delta
            if self._last_told:
                return None
            if self._last is not None:
                self._last_told = True
                if isinstance(self._last, RequestError):
                    raise self._last
                return self._last
            self._news.clear()
            await self._news.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._last is None:
            # No client will see it. The scheduler still says what it has cost.
            self._end(RequestError(CLIENT_GONE))
            self._requests.cancel(self._handle, CancelReason.CLIENT_GONE)
        self._undelivered.clear()

    def abort(self) -> None:
        """Abort was called by some client."""
        self._requests.cancel(self._handle, CancelReason.ABORTED)

    def cut(self, failure: Failure) -> None:
        """Have it ended, and tell the client this failure with the usage the scheduler answers; a success that was on
        its way stays one."""
        if self._last is None and self._cut is None:
            self._cut = failure
            self._requests.cancel(self._handle, CancelReason.DRAINED)

    def give_up(self, failure: Failure) -> None:
        """End it with this failure now, with the usage as far as it is known here."""
        if self._last is None:
            self._requests.cancel(self._handle, CancelReason.ABORTED)
            self._requests.release(self._handle)
            self._fail(failure)

    # --- the scheduler's side (CallSink) ---

    def accepted(self, max_tokens: int) -> None:
        self._accepted = True
        if max_tokens:
            self._output.clip_min_tokens(max_tokens)
        self._news.set()

    def tokens(self, token_ids: Sequence[int]) -> None:
        if self._first_token_at is None and token_ids:
            self._first_token_at = asyncio.get_running_loop().time()
        if self._last is not None or self._dropped or self._output.stop_string is not None:
            return
        try:
            delta = contained(lambda: self._output.push(token_ids))
        except TokenizerError:
            log.exception("output could not be decoded", extra={"request_id": self.request_id})
            self.give_up(INTERNAL)
            return
        if self._output.stop_string is not None:
            self._requests.text_ended(self._handle, self._output.num_tokens)
        if not self._deliver(delta):
            self._requests.cancel(self._handle, CancelReason.SLOW_READER)

    def refused(self, failure: Failure) -> None:
        self._end(RequestError(failure))

    def ended(self, ended: Ended) -> None:
        if self._last is not None:
            self.settle(ended.usage)
            return
        if self._dropped:
            self._fail(SLOW_READER, ended.usage)
        elif ended.failure is not None and self._output.stop_string is None:
            self._fail(self._cut or ended.failure, ended.usage)
        else:
            self._finish(ended)

    def _finish(self, ended: Ended) -> None:
        try:
            rest = contained(lambda: self._output.finish(ended.stop_token_id))
        except TokenizerError:
            log.exception("output could not be decoded", extra={"request_id": self.request_id})
            self._fail(INTERNAL)
            return
        if not self._deliver(rest):
            self._fail(SLOW_READER, ended.usage)
            return
        usage = self._billed(ended.usage)
        if self._output.stop_string is not None:
            # Also when the scheduler saw another end first: what the client gets ends before the stop string.
            self._end(Finished(FinishReason.STOP, usage, stop_string=self._output.stop_string))
        else:
            self._end(Finished(ended.reason or FinishReason.STOP, usage, stop_token_id=ended.stop_token_id))

    def _deliver(self, delta: Delta | None) -> bool:
        """False: the client is too far behind."""
        if delta is None or self._dropped:
            return not self._dropped
        self._dropped = not self._undelivered.put(delta)
        self._news.set()
        return not self._dropped

    def _billed(self, usage: Usage | None) -> Usage:
        """Tokens after a stop string are not billed, even when the scheduler had produced them."""
        if usage is None:
            return Usage(num_prompt_tokens=self._num_prompt_tokens, num_completion_tokens=self._output.num_tokens)
        if self._output.stop_string is None:
            return usage
        return replace(usage, num_completion_tokens=min(usage.num_completion_tokens, self._output.num_tokens))

    def _fail(self, failure: Failure, usage: Usage | None = None) -> None:
        """usage: the scheduler's; None: as far as it is known here."""
        self._end(RequestError(failure, self._billed(usage) if self._accepted else None))

    def settle(self, usage: Usage | None = None) -> None:
        """Its client has left, and this is what it has cost; None: as far as it is known here."""
        if self._accepted:
            self._settle(CLIENT_GONE.reason, self._billed(usage))

    def _settle(self, finish: str, usage: Usage) -> None:
        if not self._settled:
            self._settled = True
            self.on_settled(finish, usage, self._first_token_at)

    def _end(self, last: Finished | RequestError) -> None:
        if self._last is None:
            self._last = last
            if isinstance(last, Finished):
                self._settle(last.reason.value, last.usage)
            elif last.usage is not None:
                self._settle(last.failure.reason, last.usage)
            self._news.set()
            self.on_end()

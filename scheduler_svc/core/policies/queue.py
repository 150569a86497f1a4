"""The waiting requests of all ranks, in two lanes (D15); a policy decides their order.

New and preempted requests stand in the *waiting* lane. Requests that a pass skipped for reasons that have nothing to do
with room stand in the *skipped* lane."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from scheduler_svc.core.request import Request, Status


class Lane(Protocol):
    """A queue of requests. `insert` puts one before those at the end that arrived later. `put_back` takes requests in
    the order in which they shall be served."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...
    def append(self, request: Request) -> None: ...
    def insert(self, request: Request) -> None: ...
    def put_back(self, requests: Iterable[Request]) -> None: ...
    def head(self) -> Request | None: ...
    def remove(self, request: Request) -> None: ...


class WaitingQueue:
    """Both lanes. A queued request is in exactly one of them; its ticket says in which. A policy says in `head`
    which one is served."""

    def __init__(self, waiting: Lane, skipped: Lane) -> None:
        self.waiting = waiting
        self.skipped = skipped
        # Sum of prompt tokens, for the admission limit.
        self.num_prompt_tokens = 0

    def head(self) -> Request | None:
        """The request to try next."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.waiting) + len(self.skipped)

    def __iter__(self) -> Iterator[Request]:
        yield from self.skipped
        yield from self.waiting

    def append(self, request: Request) -> None:
        """A new request, at the end (of its priority); a blocked one starts in the skipped lane."""
        self._entering(request, skipped=request.status is Status.BLOCKED)
        (self.skipped if request.ticket.skipped else self.waiting).append(request)

    def insert(self, request: Request) -> None:
        """A request that was submitted again, at the place that its time of arrival gives it."""
        self._entering(request, skipped=request.status is Status.BLOCKED)
        (self.skipped if request.ticket.skipped else self.waiting).insert(request)

    def prepend(self, request: Request) -> None:
        """A preempted request, at the front of the waiting lane (of its place, under priority)."""
        self._entering(request, skipped=False)
        self.waiting.put_back((request,))

    def put_aside(self, requests: list[Request]) -> None:
        """Requests that a pass skipped, in the order met: to the front of the skipped lane."""
        for request in requests:
            self._entering(request, skipped=True)
        self.skipped.put_back(requests)

    def remove(self, request: Request) -> None:
        self.num_prompt_tokens -= request.num_prompt_tokens
        (self.skipped if request.ticket.skipped else self.waiting).remove(request)
        request.ticket.skipped = False

    def _entering(self, request: Request, *, skipped: bool) -> None:
        self.num_prompt_tokens += request.num_prompt_tokens
        request.ticket.skipped = skipped

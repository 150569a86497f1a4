"""Who waits, in which order: one queue for all ranks with two lanes (D15).

New and preempted requests stand in the *waiting* lane. Requests that were put aside during a pass stand in the
*skipped* lane. First come, first served serves the skipped lane first, as the reference does; priority compares the
heads of both."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Protocol

from scheduler_svc.core.config import Policy
from scheduler_svc.core.request import BLOCKED, Request

# Lower is served first. The sequence makes entries distinct: requests are never compared.
_Entry = tuple[int, float, str, int, Request]


class Lane(Protocol):
    """A queue of requests. `put_back` takes requests in the order in which they shall be served."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...
    def append(self, request: Request) -> None: ...
    def put_back(self, requests: Iterable[Request]) -> None: ...
    def head(self) -> Request | None: ...
    def remove(self, request: Request) -> None: ...


class FcfsLane:
    """Order of entering; time of arrival plays no part."""

    def __init__(self) -> None:
        self._requests: OrderedDict[int, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def append(self, request: Request) -> None:
        self._requests[request.sequence] = request

    def put_back(self, requests: Iterable[Request]) -> None:
        for request in reversed(list(requests)):
            self._requests[request.sequence] = request
            self._requests.move_to_end(request.sequence, last=False)

    def head(self) -> Request | None:
        return next(iter(self._requests.values()), None)

    def remove(self, request: Request) -> None:
        del self._requests[request.sequence]


class PriorityLane:
    """A heap by (priority, arrival, id). Removed entries stay in the heap until they surface or outnumber the live
    ones."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def __iter__(self) -> Iterator[Request]:
        return (e[4] for e in sorted(e for e in self._heap if e[4].queue_entry is e))

    def append(self, request: Request) -> None:
        entry: _Entry = (request.priority, request.arrival, request.request_id, request.sequence, request)
        request.queue_entry = entry
        heappush(self._heap, entry)
        self._num_live += 1

    def put_back(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.append(request)

    def head(self) -> Request | None:
        heap = self._heap
        while heap:
            if heap[0][4].queue_entry is heap[0]:
                return heap[0][4]
            heappop(heap)
        return None

    def remove(self, request: Request) -> None:
        request.queue_entry = None
        self._num_live -= 1
        if len(self._heap) > 2 * self._num_live + 64:
            self._heap = [e for e in self._heap if e[4].queue_entry is e]
            heapify(self._heap)


class WaitingQueue:
    """Both lanes. A queued request is in exactly one of them; `request.skipped` says in which."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        lane = FcfsLane if policy is Policy.FCFS else PriorityLane
        self.waiting: Lane = lane()
        self.skipped: Lane = lane()
        # Sum of prompt tokens, for the admission limit.
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.skipped)

    def __iter__(self) -> Iterator[Request]:
        yield from self.skipped
        yield from self.waiting

    def append(self, request: Request) -> None:
        """A new request, at the end (of its priority); a blocked one starts in the skipped lane."""
        self._entering(request, skipped=request.status in BLOCKED)
        (self.skipped if request.skipped else self.waiting).append(request)

    def prepend(self, request: Request) -> None:
        """A preempted request, at the front of the waiting lane (of its place, under priority)."""
        self._entering(request, skipped=False)
        self.waiting.put_back((request,))

    def put_aside(self, requests: list[Request]) -> None:
        """Requests that a pass skipped, in the order met: to the front of the skipped lane."""
        for request in requests:
            self._entering(request, skipped=True)
        self.skipped.put_back(requests)

    def head(self) -> Request | None:
        """Whom to try next."""
        skipped = self.skipped.head()
        if skipped is None or self._policy is Policy.FCFS:
            return self.waiting.head() if skipped is None else skipped
        waiting = self.waiting.head()
        if waiting is None:
            return skipped
        key = (waiting.priority, waiting.arrival, waiting.request_id)
        return waiting if key < (skipped.priority, skipped.arrival, skipped.request_id) else skipped

    def remove(self, request: Request) -> None:
        self.num_prompt_tokens -= request.num_prompt_tokens
        (self.skipped if request.skipped else self.waiting).remove(request)
        request.skipped = False

    def _entering(self, request: Request, *, skipped: bool) -> None:
        self.num_prompt_tokens += request.num_prompt_tokens
        request.skipped = skipped

"""By priority, lower first; among equals by arrival."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Reversible
from heapq import heapify, heappop, heappush

from scheduler_svc.core.policies.base import SchedulingPolicy
from scheduler_svc.core.policies.queue import WaitingQueue
from scheduler_svc.core.request import Request, Run

# Lower is served first. The sequence makes entries distinct: requests are never compared.
_Entry = tuple[int, float, str, int, Request]


class PriorityLane:
    """A heap by (priority, arrival, id). Removed entries stay in the heap until they surface or outnumber the live
    ones."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def __iter__(self) -> Iterator[Request]:
        return (e[4] for e in sorted(e for e in self._heap if e[4].ticket.queue_entry is e))

    def append(self, request: Request) -> None:
        entry: _Entry = (request.priority, request.arrival, request.request_id, request.sequence, request)
        request.ticket.queue_entry = entry
        heappush(self._heap, entry)
        self._num_live += 1

    def insert(self, request: Request) -> None:
        self.append(request)

    def put_back(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.append(request)

    def head(self) -> Request | None:
        heap = self._heap
        while heap:
            if heap[0][4].ticket.queue_entry is heap[0]:
                return heap[0][4]
            heappop(heap)
        return None

    def remove(self, request: Request) -> None:
        request.ticket.queue_entry = None
        self._num_live -= 1
        if len(self._heap) > 2 * self._num_live + 64:
            self._heap = [e for e in self._heap if e[4].ticket.queue_entry is e]
            heapify(self._heap)


class PriorityQueue(WaitingQueue):
    """Compares the heads of both lanes."""

    def __init__(self) -> None:
        super().__init__(PriorityLane(), PriorityLane())

    def head(self) -> Request | None:
        """See WaitingQueue."""
        skipped, waiting = self.skipped.head(), self.waiting.head()
        if skipped is None or waiting is None:
            return waiting if skipped is None else skipped
        key = (waiting.priority, waiting.arrival, waiting.request_id)
        return waiting if key < (skipped.priority, skipped.arrival, skipped.request_id) else skipped


class PriorityPolicy(SchedulingPolicy):
    """The request with the largest (priority, arrival) is preempted first, of equals the one admitted first."""

    accepts_priority = True

    def __init__(self, max_preemptions: int | None) -> None:
        super().__init__(PriorityQueue(), max_preemptions)

    def worst(self, running: Reversible[Run]) -> Run:
        """See SchedulingPolicy."""
        return max(running, key=_priority_key)


def _priority_key(run: Run) -> tuple[int, float]:
    return run.request.priority, run.request.arrival

"""First come, first served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Reversible

from scheduler_svc.core.policies.base import SchedulingPolicy
from scheduler_svc.core.policies.queue import WaitingQueue
from scheduler_svc.core.request import Request, Run


class FcfsLane:
    """Order of entering; the time of arrival plays a part only for requests that were submitted again."""

    def __init__(self) -> None:
        self._requests: OrderedDict[int, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def append(self, request: Request) -> None:
        self._requests[request.sequence] = request

    def insert(self, request: Request) -> None:
        later: list[int] = []
        for sequence, other in reversed(self._requests.items()):
            if other.arrival <= request.arrival:
                break
            later.append(sequence)
        self._requests[request.sequence] = request
        for sequence in reversed(later):
            self._requests.move_to_end(sequence)

    def put_back(self, requests: Iterable[Request]) -> None:
        for request in reversed(list(requests)):
            self._requests[request.sequence] = request
            self._requests.move_to_end(request.sequence, last=False)

    def head(self) -> Request | None:
        return next(iter(self._requests.values()), None)

    def remove(self, request: Request) -> None:
        del self._requests[request.sequence]


class FcfsQueue(WaitingQueue):
    """Serves the skipped lane first, as vLLM 0.25.1 does."""

    def __init__(self) -> None:
        super().__init__(FcfsLane(), FcfsLane())

    def head(self) -> Request | None:
        """See WaitingQueue."""
        skipped = self.skipped.head()
        return self.waiting.head() if skipped is None else skipped


class FcfsPolicy(SchedulingPolicy):
    """The last one admitted is preempted first."""

    def __init__(self, max_preemptions: int | None) -> None:
        super().__init__(FcfsQueue(), max_preemptions)

    def worst(self, running: Reversible[Run]) -> Run:
        """See SchedulingPolicy."""
        return next(reversed(running))

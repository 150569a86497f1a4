"""Frees that wait for their fence (contract rule 5): parked block tables in the order of their fences."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParkedFree:
    """A table parked behind `fence`; reason: finished, preempted or aborted."""

    fence: int
    request_id: str
    blocks: tuple[int, ...]
    reason: str


class ParkedFrees:
    """First in, first out: fences never decrease, so looking at the head is enough."""

    __slots__ = ("_queue", "unannounced")

    def __init__(self) -> None:
        self._queue: deque[ParkedFree] = deque()
        # Parked since the last step was built.
        self.unannounced: list[ParkedFree] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[ParkedFree]:
        return iter(self._queue)

    def park(self, free: ParkedFree) -> None:
        self._queue.append(free)
        self.unannounced.append(free)

    def pop_due(self, acked_fence: int) -> list[ParkedFree]:
        """Those whose fence is acknowledged, oldest first."""
        due: list[ParkedFree] = []
        queue = self._queue
        while queue and queue[0].fence <= acked_fence:
            due.append(queue.popleft())
        return due

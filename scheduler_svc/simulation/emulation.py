"""What vLLM 0.25.1 does around its scheduler, emulated for scenarios and simulations: the core knows nothing of it."""

from __future__ import annotations

from scheduler_svc.core.events import DraftsProposed
from scheduler_svc.core.inflight import StepRecord
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.throttle import Throttle


class ScriptedThrottle(Throttle):
    """A throttle that is set from outside before each step. None: the rank's own rhythm."""

    __slots__ = ("is_on",)

    def __init__(self, interval: int) -> None:
        super().__init__(interval)
        self.is_on: bool | None = None

    def is_between(self) -> bool:
        """See Throttle."""
        return super().is_between() if self.is_on is None else self.is_on

    @classmethod
    def of(cls, rank: RankState) -> ScriptedThrottle:
        """The rank's throttle, replaced by a scripted one with the same state if it is none yet."""
        if not isinstance(rank.throttle, cls):
            scripted = cls(rank.throttle.interval)
            scripted.num_steps, scripted.capacity_bound = rank.throttle.num_steps, rank.throttle.capacity_bound
            rank.throttle = scripted
        assert isinstance(rank.throttle, cls)
        return rank.throttle


def placeholders(rank_name: str, record: StepRecord, num_drafts: int) -> DraftsProposed:
    """Drafts that only the worker knows: in asynchronous scheduling they stand as -1 in the next row of each request
    whose row samples."""
    rows = zip(record.requests, record.expected, strict=True)
    return DraftsProposed(rank_name, {request.request_id: [-1] * num_drafts for request, expected in rows if expected})

"""Ranks that drain: they admit no new request, and finish those that they have begun and only they can hold (D30)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.request import Request, Run, RunEnd, RunsOn
from scheduler_svc.core.resources.base import Failure, Resource

# Whether some rank that stays can ever hold the request.
CanStay = Callable[[Request], bool]


class Draining(Resource):
    """Which requests each draining rank has begun: those that were preempted there while it drains."""

    def __init__(self) -> None:
        self._begun: dict[RunsOn, dict[Request, None]] = {}

    def start(self, rank: RankState) -> None:
        """The rank drains from now on."""
        rank.is_draining = True
        self._begun[rank] = {}

    def has_begun(self, rank: RankState) -> bool:
        """Whether requests wait that this rank may take back."""
        return bool(self._begun.get(rank))

    def takes_back(self, rank: RankState, request: Request, can_stay: CanStay) -> bool:
        """Whether the rank may admit the request: begun there, and beyond what any rank can hold that stays."""
        return request in self._begun.get(rank, ()) and not can_stay(request)

    def candidate(self, rank: RankState, queue: Iterable[Request], can_stay: CanStay) -> Request | None:
        """The first request in the queue that the rank may admit."""
        return next((request for request in queue if self.takes_back(rank, request, can_stay)), None)

    def take(self, plan: StepPlan, run: Run, start: int, n: int) -> None:
        """See Resource. What it takes back it need not take back again."""
        if self._begun and not run.last_fence:
            self._begun.get(plan.rank, {}).pop(run.request, None)

    def on_run_end(self, run: Run, how: RunEnd) -> None:
        """See Resource."""
        if how is RunEnd.PREEMPTED and run.rank in self._begun:
            self._begun[run.rank][run.request] = None

    def on_finish(self, request: Request, now: float) -> None:
        """See Resource."""
        for begun in self._begun.values():
            begun.pop(request, None)

    def on_rank_lost(self, rank: RankState, in_flight: Sequence[Request], *, graceful: bool) -> Iterable[Failure]:
        """See Resource."""
        self._begun.pop(rank, None)
        return ()

    def check(self, rank: RankState) -> Iterator[str]:
        """See Resource."""
        if rank.is_draining is not (rank in self._begun):
            yield f"{rank.name} drains: {rank.is_draining}, known as such: {rank in self._begun}"

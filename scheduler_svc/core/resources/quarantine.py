"""Requests under which workers fail again and again run alone (D31), so that each of them is found out or cleared, and
no other request suffers with it.

Two epochs in a row that end under the rows of a request without a new token put it into quarantine. The first rank
that looks at it is reserved for it, and the first that is empty takes it; no other request is admitted beside it until
it has a token. After one more such epoch, or as many as the setting says, it fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from scheduler_svc.core import reasons
from scheduler_svc.core.events import EndReason, StepAcked
from scheduler_svc.core.inflight import StepRecord
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.rank import RankState, Reservation
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.request import FINISHED, Request, Run, RunEnd
from scheduler_svc.core.resources.base import Failure, Resource

# Epochs in a row that put a request into quarantine.
_TOLERATED = 2


class Quarantine(Resource):
    """Losses by request, and which rank is reserved for whom."""

    def __init__(self, max_fruitless_epochs: int) -> None:
        # 0: no request fails for this.
        self._most = max_fruitless_epochs
        # Epochs in a row that ended under its rows without a new token, and its length when the last one did.
        self._losses: dict[Request, tuple[int, int]] = {}
        self._reserved: dict[Request, RankState] = {}

    def num_fruitless_epochs(self, request: Request) -> int:
        """Epochs in a row that ended under it; a token since then does not reset the number until the next loss."""
        return self._losses.get(request, (0, 0))[0]

    def holds(self, request: Request) -> bool:
        """Whether the request must run alone: until it has a token."""
        num_epochs, num_tokens = self._losses.get(request, (0, 0))
        return num_epochs >= _TOLERATED and num_tokens == request.num_tokens

    def history(self, request: Request) -> tuple[int, bool]:
        """All that decides about the request: its fruitless epochs, and whether it has no token since the last one."""
        num_epochs, num_tokens = self._losses.get(request, (0, 0))
        return num_epochs, num_epochs > 0 and num_tokens == request.num_tokens

    def release(self, rank: RankState) -> None:
        """The rank is not reserved any more."""
        if rank.reservation is not None:
            del self._reserved[rank.reservation.request]
            rank.reservation = None

    def gate(self, plan: StepPlan, request: Request) -> SkipReason | None:
        """See Resource. The first rank that looks keeps itself free for the request, and the first that is empty takes
        it."""
        if not self._losses or not self.holds(request):
            return None
        keeper, rank = self._reserved.get(request), plan.rank
        if keeper is rank:
            return None
        if not rank.running:
            if keeper is not None:
                self.release(keeper)
            return None
        if keeper is None:
            self._reserve(rank, request)
        return reasons.QUARANTINED

    def take(self, plan: StepPlan, run: Run, start: int, n: int) -> None:
        """See Resource. The rank is reserved for a request in quarantine while it runs, too."""
        if self._losses and not run.last_fence and self.holds(run.request):
            self.release(plan.rank)
            self._reserve(plan.rank, run.request)

    def on_settled(self, rank: RankState, record: StepRecord, event: StepAcked) -> Iterable[Failure]:
        """See Resource. A token ends the quarantine."""
        if rank.reservation is not None and not self.holds(rank.reservation.request):
            self.release(rank)
        return ()

    def on_run_end(self, run: Run, how: RunEnd) -> None:
        """See Resource."""
        self._give_up(run.request)

    def on_finish(self, request: Request, now: float) -> None:
        """See Resource."""
        self._give_up(request)
        self._losses.pop(request, None)

    def on_rank_lost(self, rank: RankState, in_flight: Sequence[Request], *, graceful: bool) -> Iterable[Failure]:
        """See Resource. Counts the loss against the requests whose rows were in flight."""
        self.release(rank)
        if graceful:
            return ()
        for request in in_flight:
            num_epochs, num_tokens = self._losses.get(request, (0, 0))
            again = num_epochs > 0 and num_tokens == request.num_tokens
            self._losses[request] = (num_epochs + 1 if again else 1, request.num_tokens)
        return [
            Failure(
                request,
                EndReason.WORKER_FAULT,
                f"{self.num_fruitless_epochs(request)} workers in a row failed while computing this request.",
            )
            for request in in_flight
            if self._most and self.num_fruitless_epochs(request) >= self._most
        ]

    def check(self, rank: RankState) -> Iterator[str]:
        """See Resource."""
        reserved = None if rank.reservation is None else rank.reservation.request
        if [request for request, keeper in self._reserved.items() if keeper is rank] != [reserved] * (
            reserved is not None
        ):
            yield f"{rank.name} is reserved for {reserved}, which the quarantine does not know"
        for request in self._losses:
            if request.status in FINISHED:
                yield f"{request.request_id} has ended and is remembered"

    def _reserve(self, rank: RankState, request: Request) -> None:
        rank.reservation = Reservation(request)
        self._reserved[request] = rank

    def _give_up(self, request: Request) -> None:
        if (keeper := self._reserved.get(request)) is not None:
            self.release(keeper)

"""A resource for tests: some requests need one unit of a quota that every step has anew."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_svc.core.events import RequestArrived
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.request import Request, Run, RunEnd
from scheduler_svc.core.resources.base import Resource

QUOTA_SPENT = SkipReason("QUOTA_SPENT", "the step's quota is spent")


class Quota(Resource):
    """Requests whose id begins with "q" need one unit for each of their rows, which then has at most `most` tokens."""

    reasons = (QUOTA_SPENT,)

    def __init__(self, units: int, most: int = 1 << 20) -> None:
        self.units = units
        self.most = most
        self.left = self.total = units
        self.taken: dict[Run, None] = {}
        self.arrived: list[str] = []
        self.ends: list[tuple[str, RunEnd]] = []
        self.finished: list[str] = []

    def on_arrive(self, request: Request, event: RequestArrived, now: float) -> None:
        self.arrived.append(request.request_id)

    def open(self, plan: StepPlan) -> None:
        self.left = self.total = self.units
        self.taken = {}

    def clip(self, plan: StepPlan, request: Request, start: int, n: int) -> int | SkipReason:
        if not request.request_id.startswith("q"):
            return n
        return min(n, self.most) if self.left else QUOTA_SPENT

    def take(self, plan: StepPlan, run: Run, start: int, n: int) -> None:
        if run.request.request_id.startswith("q"):
            self.left -= 1
            self.taken[run] = None
            # All its rows need the quota, so none is a plain decode.
            run.mark(self.bit)

    def withdraw(self, plan: StepPlan, run: Run) -> None:
        if run in self.taken:
            del self.taken[run]
            self.left += 1

    def on_run_end(self, run: Run, how: RunEnd) -> None:
        self.ends.append((run.request.request_id, how))

    def on_finish(self, request: Request, now: float) -> None:
        self.finished.append(request.request_id)

    def claims(self, run: Run) -> bool:
        return run.request.request_id.startswith("q")

    def snapshot(self, rank: RankState) -> object:
        return self.left, dict(self.taken)

    def check(self, rank: RankState) -> Iterator[str]:
        if self.left < 0 or self.left + len(self.taken) != self.total:
            yield f"the quota has {self.left} of {self.total}, and {len(self.taken)} are taken"

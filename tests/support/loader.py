"""A resource for tests: KV of some requests is loaded from elsewhere, outside the steps. A load ends well, fails, or
never ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from scheduler_svc.core.kv.manager import Hold
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.request import FINISHED, Request, Run, RunEnd, RunsOn, block, unblock
from scheduler_svc.core.resources.base import Extension, Failure, Resource

LOADING = SkipReason("LOADING", "its KV is being loaded", puts_aside=True)
UNKNOWN = SkipReason("UNKNOWN", "whether its KV can be loaded is not known yet", puts_aside=True)


@dataclass(slots=True)
class Load:
    """One load. num_valid: tokens that it brought, known when it is over."""

    num_tokens: int
    is_over: bool = False
    num_valid: int = 0
    # Whether the run ended before the load: a hold then has its blocks.
    is_orphan: bool = False


class Loader(Resource):
    """Loads up to `most` tokens of each request whose id begins with "l", once a run; after a failure no more."""

    reasons = (LOADING, UNKNOWN)

    def __init__(self, most: int, *, of_all: bool = False) -> None:
        self.most = most
        self.of_all = of_all
        self.loads: dict[Run, Load] = {}
        self.failed: dict[Request, None] = {}
        # Requests of which it does not know yet, and blocks that admissions must leave free.
        self.unknown: set[str] = set()
        self.free_blocks = 0

    # --- what the passes ask ---

    def gate(self, plan: StepPlan, request: Request) -> SkipReason | None:
        run = request.run
        load = None if run is None else self.loads.get(run)
        if run is None or load is None or run.ended:
            return None
        if not load.is_over:
            return LOADING
        del self.loads[run]
        unblock(request)
        # At least one token is left to compute.
        run.settled = min(run.settled + load.num_valid, request.num_tokens - 1)
        run.in_flight = 0
        plan.rank.kv.cache_blocks(run, run.settled)
        return None

    def extend(self, plan: StepPlan, request: Request, start: int) -> Extension | SkipReason | None:
        if request.request_id in self.unknown:
            return UNKNOWN
        if request in self.failed or not (self.of_all or request.request_id.startswith("l")):
            return None
        if request.num_tokens - 1 <= start:
            # The one token that must be computed in any case.
            return None
        num_tokens = min(self.most, request.num_tokens) - start
        reserved = self._reserved(plan.rank)
        return Extension(self, num_tokens, True, reserved, LOADING) if num_tokens > 0 else None

    def _reserved(self, rank: RankState) -> int:
        """Blocks that requests already begun need for their prompts: without them no load could ever be used."""
        begun = (*rank.prefills, *rank.set_aside)
        return sum(max(0, rank.kv.blocks_short(run, run.request.num_tokens)) for run in begun)

    def begin(self, plan: StepPlan, run: Run, extension: Extension) -> None:
        self.loads[run] = Load(extension.tokens)
        block(run.request, LOADING)
        plan.must_send = True

    def margin(self, plan: StepPlan, request: Request) -> int:
        return self.free_blocks

    # --- ends ---

    def keeps(self, run: Run, how: RunEnd) -> bool:
        load = self.loads.get(run)
        return load is not None and not load.is_over and how is not RunEnd.RANK_LOST

    def on_run_end(self, run: Run, how: RunEnd) -> None:
        load = self.loads.get(run)
        if load is None:
            return
        if load.is_over or how is RunEnd.RANK_LOST:
            del self.loads[run]
        else:
            load.is_orphan = True

    def on_finish(self, request: Request, now: float) -> None:
        self.failed.pop(request, None)

    def on_rank_lost(self, rank: RankState, in_flight: Sequence[Request], *, graceful: bool) -> Sequence[Failure]:
        for run in [run for run in self.loads if run.rank is rank]:
            del self.loads[run]
        return ()

    # --- what the worker says ---

    def end(self, rank: RankState, run: Run, num_valid: int) -> None:
        """The load of this run is over; `num_valid` of its tokens are there."""
        load = self.loads[run]
        load.is_over, load.num_valid = True, num_valid
        if num_valid < load.num_tokens and run.request.status not in FINISHED:
            self.failed[run.request] = None
        if load.is_orphan:
            del self.loads[run]
            rank.let_go(self.hold_of(rank, run))

    def hold_of(self, rank: RankState, run: Run) -> Hold:
        """The hold with the blocks of a run that has ended."""
        return next(hold for hold in rank.kv.holds.values() if hold.run is run)

    # --- accounts ---

    def snapshot(self, rank: RankState) -> object:
        """Free of names, so that a search over states can use it."""
        return (
            tuple(self._state(run) for run in rank.set_aside),
            tuple(self._state(hold.run) for hold in rank.kv.holds.values()),
            tuple(sorted(request.sequence for request in self.failed)),
        )

    def _state(self, run: Run) -> object:
        load = self.loads.get(run)
        return None if load is None else (load.num_tokens, load.is_over, load.num_valid, load.is_orphan)

    def check(self, rank: RankState) -> Iterator[str]:
        for run, load in self.loads.items():
            if run.rank is not rank:
                continue
            if load.is_orphan is not run.ended or (load.is_orphan and load.is_over):
                yield f"the load of {run} is {load}"
            if not run.ended and (run not in rank.set_aside or run.in_flight != load.num_tokens):
                yield f"{run} loads {load.num_tokens}"
        owned = {hold.run for hold in rank.kv.holds.values() if hold.owner is self}
        if owned != {run for run, load in self.loads.items() if run.rank is rank and load.is_orphan}:
            yield f"holds of {owned} are not those of loads that go on"
        for run in rank.set_aside:
            if run not in self.loads and not run.settled:
                yield f"{run} is set aside for nothing"

    def copied(
        self,
        request_of: Callable[[Request], Request],
        run_of: Callable[[Run], Run],
        rank_of: Callable[[RunsOn], RunsOn],
    ) -> Loader:
        """The same state about copies of requests and runs."""
        new = Loader(self.most, of_all=self.of_all)
        new.loads = {
            run_of(run): Load(load.num_tokens, load.is_over, load.num_valid, load.is_orphan)
            for run, load in self.loads.items()
        }
        new.failed = {request_of(request): None for request in self.failed}
        return new

"""What the scheduler tells about itself: status of ranks, the audit of KV blocks, and why a request stands where it
stands."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core import reasons
from scheduler_svc.core.events import PauseState
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.request import Request, Run, Status
from scheduler_svc.core.state import CoreState


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank, now."""

    rank: str
    epoch: int
    num_running: int
    num_blocks: int
    num_free_blocks: int
    num_parked_blocks: int
    sent_step_seq: int
    acked_step_seq: int
    is_draining: bool


@dataclass(frozen=True, slots=True)
class RankAuditFacts:
    """Blocks of one rank, counted from the tables: free + held + parked = usable when consistent."""

    rank: str
    usable: int
    free: int
    held: int
    parked: int
    violations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a request is and why it does not run, if it does not."""

    request_id: str
    status: str
    rank: str | None
    # None: the rank's newest step holds a row of it.
    reason: SkipReason | None
    # Names, in a sentence, what it waits for.
    detail: str


def rank_view(rank: RankState) -> RankView:
    return RankView(
        rank=rank.name,
        epoch=rank.epoch,
        num_running=len(rank.running),
        num_blocks=rank.kv.pool.num_blocks,
        num_free_blocks=rank.kv.pool.num_free,
        num_parked_blocks=rank.kv.pool.num_parked,
        sent_step_seq=rank.window.newest_step,
        acked_step_seq=rank.window.acked_step,
        is_draining=rank.is_draining,
    )


def explain(state: CoreState, request: Request) -> Explanation:
    """The stored reason where the last pass examined the request, else one derived from where that pass ended."""
    if request.status is Status.RUNNING:
        rank, run = state.living(request), request.run
        assert rank is not None and run is not None
        reason, detail = _why_not_scheduled(state, rank, run)
        return Explanation(request.request_id, request.status.value, rank.name, reason, detail)
    reason, detail = _why_not_admitted(state, request)
    return Explanation(request.request_id, request.status.value, None, reason, detail)


def _why_not_scheduled(state: CoreState, rank: RankState, run: Run) -> tuple[SkipReason | None, str]:
    in_newest = run.last_fence == rank.window.newest_fence and run.last_fence > 0
    if in_newest and run.last_fence > rank.window.acked_fence:
        step_seq = next(r.step_seq for r in rank.window.records if r.fence_seq == run.last_fence)
        return None, f"in step {step_seq} of {rank.name}"
    if state.pause is PauseState.PAUSED_ALL:
        return reasons.PAUSED, reasons.PAUSED.text
    account = run.request.account
    had_row = run.last_fence == rank.last_pass_fence and run.last_fence > 0
    if rank.stopped is not None and not had_row and account.skipped_in_pass != rank.last_pass:
        return rank.stopped, rank.stopped.text
    if in_newest:
        return None, f"in the last step of {rank.name}, which is answered"
    reason = account.skip_reason or reasons.NOT_EXAMINED
    return reason, reason.text


def _why_not_admitted(state: CoreState, request: Request) -> tuple[SkipReason, str]:
    if not state.ranks:
        return reasons.NO_RANK, reasons.NO_RANK.text
    if state.pause is not PauseState.UNPAUSED:
        return reasons.PAUSED, reasons.PAUSED.text
    admitting = [
        rank
        for rank in state.ranks.values()
        if not rank.is_draining or state.draining.takes_back(rank, request, state.can_stay)
    ]
    if not admitting:
        return reasons.RANK_DRAINING, reasons.RANK_DRAINING.text
    if request.account.skip_reason is not None and request.account.skipped_in_pass >= state.last_admission_pass:
        return request.account.skip_reason, request.account.skip_reason.text
    stopped = state.admission_stopped
    # The request that stopped the pass may have ended since.
    if stopped is not None and state.requests.get(stopped[1].request_id) is stopped[1]:
        reason, head = stopped
        return reasons.BEHIND, f"behind {head.request_id}, which waits: {reason.text}"
    if all(rank.window.is_full for rank in admitting):
        return reasons.WINDOW_FULL, reasons.WINDOW_FULL.text
    return reasons.NOT_EXAMINED, reasons.NOT_EXAMINED.text

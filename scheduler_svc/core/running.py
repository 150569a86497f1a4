"""First chapter of a step: who of the running requests goes on, and who must go so that another can."""

from __future__ import annotations

from scheduler_svc.core import lifecycle, reasons, rows
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.request import Run
from scheduler_svc.core.state import CoreState


def run(state: CoreState, rank: RankState, plan: StepPlan, *, defer_prefills: bool) -> None:
    """Give tokens to running requests in their order, over a snapshot: what a preemption removes is passed by, nothing
    is visited twice. A plain decode, one token with room and nothing to cache, is decided in this loop; all else is
    `_consider`."""
    add_run, add_count = plan.runs.append, plan.num_tokens.append
    rank.stopped = None
    left = plan.tokens_left
    for run in state.policy.running_order(rank):
        if left <= 0:
            rank.stopped = reasons.NO_BUDGET
            break
        end = run.settled + run.in_flight + 1
        if not run.special and end <= run.plain_until and (end < run.cache_at or run.request.num_tokens < run.cache_at):
            add_run(run)
            add_count(1)
            left -= 1
            continue
        plan.tokens_left = left
        stops = _consider(state, rank, plan, run, defer_prefills)
        left = plan.tokens_left
        if stops:
            rank.stopped = reasons.BEHIND_PREEMPTION
            break
    plan.tokens_left = left


def _consider(state: CoreState, rank: RankState, plan: StepPlan, run: Run, defer_prefills: bool) -> bool:
    """Give a row to a run that may be anything, or note why it gets none. True: it had to preempt itself, and the pass
    ends."""
    if run.ended:
        # Preempted earlier in this pass.
        return False
    request = run.request
    if (reason := _must_wait(run, defer_prefills)) is not None:
        state.skip(request, reason)
        return False
    start = run.settled + run.in_flight
    n = rows.size_row(state, plan, request, start, request.num_tokens + request.awaited, admitting=False)
    if isinstance(n, SkipReason):
        state.skip(request, n)
        return False
    slots = min(start + n + rank.kv.lookahead, plan.longest)
    if slots > run.capacity and not _make_room(state, rank, plan, run, slots):
        return run.ended
    plan.take(run, start, n)
    return False


def _must_wait(run: Run, defer_prefills: bool) -> SkipReason | None:
    """Whether the run has nothing to do before some result is in, or is left out on purpose."""
    request = run.request
    if request.awaited:
        if request.needs_result_first:
            return reasons.AWAITING_RESULT
        # Every row that samples yields at least one token; drafts may yield none.
        if request.num_tokens + request.awaited - request.awaited_optional >= request.limit:
            return reasons.LAST_TOKEN_IN_FLIGHT
    if defer_prefills and run.is_prefill_chunk:
        return reasons.PREFILL_DEFERRED
    return None


def _make_room(state: CoreState, rank: RankState, plan: StepPlan, run: Run, slots: int) -> bool:
    """Blocks for `slots` tokens, preempting if need be. False: the run gets nothing in this step, because it waits for
    blocks that are on their way back, or because it was itself the victim and has ended."""
    need = rank.kv.blocks_short(run, slots)
    waits = state.config.rules.waits_for_fence
    while need > plan.num_free_blocks:
        if waits and need <= plan.num_free_blocks + plan.num_returning_blocks:
            plan.wait_for_fence(run, need)
            state.skip(run.request, reasons.WAITING_FOR_FENCE)
            return False
        victim = state.policy.victim(plan, run)
        plan.withdraw(victim)
        lifecycle.preempt(state, rank, victim, beneficiary=run.request.request_id, cause="blocks")
        state.queue.prepend(victim.request)
        plan.preempted.append(victim)
        if victim is run:
            return False
    plan.grow(run, need)
    return True

"""First chapter of a step: who of the running requests goes on, and who must go so that another can."""

from __future__ import annotations

from scheduler_svc.core import lifecycle, reasons, rows
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.request import Run, give_drafts
from scheduler_svc.core.state import CoreState

# Sentinel of `_consider`: stop the pass.
_END_OF_PASS = -1


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
        n = _consider(state, rank, plan, run, defer_prefills)
        left = plan.tokens_left
        if n == _END_OF_PASS:
            rank.stopped = reasons.BEHIND_PREEMPTION
            break
        if n:
            add_run(run)
            add_count(n)
            left -= n
    plan.tokens_left = left


def _consider(state: CoreState, rank: RankState, plan: StepPlan, run: Run, defer_prefills: bool) -> int:
    """Tokens for a run that may be anything; 0, with the reason noted, when it gets none in this step."""
    if run.ended:
        # Preempted earlier in this pass.
        return 0
    request = run.request
    if (reason := _must_wait(run, defer_prefills)) is not None:
        state.skip(request, reason)
        return 0
    start = run.settled + run.in_flight
    n = rows.size_row(state, plan, request, start, request.num_tokens + request.awaited, admitting=False)
    if isinstance(n, SkipReason):
        state.skip(request, n)
        return 0
    end = start + n
    slots = min(end + state.config.num_lookahead_slots, state.max_model_len)
    if slots > run.capacity and not _make_room(state, rank, plan, run, slots):
        return _END_OF_PASS if run.ended else 0
    known_end = min(end, request.num_tokens)
    if known_end >= run.cache_at:
        plan.cache(run, known_end)
    if request.drafts:
        _take_drafts(plan, run, end)
    plan.prefill_scheduled |= run.is_prefill_chunk
    return n


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


def _take_drafts(plan: StepPlan, run: Run, end: int) -> None:
    """The drafts that the row has room for go along; the rest is lost, since they would be stale next time."""
    request = run.request
    count = end - request.num_tokens - request.awaited
    if count > 0:
        plan.drafts[run] = list(request.drafts[:count])
    give_drafts(request, [])


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

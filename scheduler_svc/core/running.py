"""First chapter of a step: who of the running requests goes on, and who must go so that another can."""

from __future__ import annotations

from scheduler_svc.core import lifecycle, reasons, rows
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.request import Request, Status
from scheduler_svc.core.state import CoreState

# Sentinel of `_consider`: stop the pass.
_END_OF_PASS = -1


def run(state: CoreState, rank: RankState, plan: StepPlan, *, defer_prefills: bool) -> None:
    """Give tokens to running requests in their order, over a snapshot: what a preemption removes is passed by, nothing
    is visited twice. A plain decode, one token with room and nothing to cache, is decided in this loop; all else is
    `_consider`."""
    lookahead = state.config.num_lookahead_slots
    add_request, add_count = plan.requests.append, plan.num_tokens.append
    rank.stopped = None
    left = plan.tokens_left
    for request in state.policy.running_order(rank):
        if left <= 0:
            rank.stopped = reasons.NO_BUDGET
            break
        awaited = request.awaited
        end = request.settled + request.in_flight + 1
        if (
            end == request.num_tokens + awaited
            and end + lookahead <= request.capacity
            and (end < request.cache_at or request.num_tokens < request.cache_at)
            and end < request.limit
            and not request.is_prefill_chunk
            and not request.drafts
            and not (awaited and request.needs_result_first)
            and request.status is Status.RUNNING
        ):
            n = 1
        else:
            plan.tokens_left = left
            n = _consider(state, rank, plan, request, defer_prefills)
            left = plan.tokens_left
            if n == _END_OF_PASS:
                rank.stopped = reasons.BEHIND_PREEMPTION
                break
            if n == 0:
                continue
        add_request(request)
        add_count(n)
        left -= n
    plan.tokens_left = left


def _consider(state: CoreState, rank: RankState, plan: StepPlan, request: Request, defer_prefills: bool) -> int:
    """Tokens for a request that may be anything; 0, with the reason noted, when it gets none in this step."""
    if request.status is not Status.RUNNING:
        return 0
    if (reason := _must_wait(state, request, defer_prefills)) is not None:
        state.skip(request, reason)
        return 0
    start = request.settled + request.in_flight
    n = rows.size_row(state, plan, request, start, request.num_tokens + request.awaited, admitting=False)
    if isinstance(n, SkipReason):
        state.skip(request, n)
        return 0
    end = start + n
    slots = min(end + state.config.num_lookahead_slots, state.max_model_len)
    if slots > request.capacity and not _make_room(state, rank, plan, request, slots):
        return 0 if request.status is Status.RUNNING else _END_OF_PASS
    known_end = min(end, request.num_tokens)
    if known_end >= request.cache_at:
        plan.cache(request, known_end)
    if request.drafts:
        _take_drafts(plan, request, end)
    plan.prefill_scheduled |= request.is_prefill_chunk
    return n


def _must_wait(state: CoreState, request: Request, defer_prefills: bool) -> SkipReason | None:
    """Whether the request has nothing to do before some result is in, or is left out on purpose."""
    if request.awaited:
        if request.needs_result_first:
            return reasons.AWAITING_RESULT
        # Every row that samples yields at least one token; drafts may yield none.
        if request.num_tokens + request.awaited - request.awaited_drafts >= request.limit:
            return reasons.LAST_TOKEN_IN_FLIGHT
    if defer_prefills and request.is_prefill_chunk:
        return reasons.PREFILL_DEFERRED
    return None


def _take_drafts(plan: StepPlan, request: Request, end: int) -> None:
    """The drafts that the row has room for go along; the rest is lost, since they would be stale next time."""
    count = end - request.num_tokens - request.awaited
    if count > 0:
        plan.drafts[request] = list(request.drafts[:count])
    request.drafts = ()


def _make_room(state: CoreState, rank: RankState, plan: StepPlan, request: Request, slots: int) -> bool:
    """Blocks for `slots` tokens of `request`, preempting if need be. False: it gets nothing in this step, because it
    waits for blocks that are on their way back (it is still running) or was itself the victim (it is not)."""
    need = rank.kv.blocks_short(request, slots)
    config = state.config
    while need > plan.num_free_blocks:
        if config.rules.waits_for_fence and need <= plan.num_free_blocks + plan.num_returning_blocks:
            plan.wait_for_fence(request, need)
            state.skip(request, reasons.WAITING_FOR_FENCE)
            return False
        victim = state.policy.victim(plan, request)
        plan.withdraw(victim)
        lifecycle.preempt(state, rank, victim, beneficiary=request.request_id, cause="blocks")
        state.queue.prepend(victim)
        plan.preempted.append(victim)
        if victim is request:
            return False
    plan.grow(request, need)
    return True

"""Second chapter of a step: who of the waiting requests starts."""

from __future__ import annotations

from scheduler_svc.core import lifecycle, reasons, rows
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.request import QUEUED, Request, Run, RunEnd, Status, transition
from scheduler_svc.core.resources.base import Extension
from scheduler_svc.core.state import CoreState

# Steps of one rank that may leave a request to another rank with a longer cached prefix (D15).
_MAX_PASSES = 2


def run(state: CoreState, rank: RankState, plan: StepPlan, *, defer_prefills: bool) -> None:
    """Admit from the head of the queue until a request does not fit, which holds up all behind it (head-of-line
    blocking). Requests that cannot start for other reasons are put aside, into the skipped queue, and the pass goes
    on."""
    queue = state.queue
    aside: list[Request] = []
    stopped: tuple[SkipReason, Request] | None = None
    loaded = [run.request for run in reversed(rank.set_aside)] if state.config.rules.serve_loaded_first else []
    while stopped is None and (request := _candidate(state, rank, loaded)) is not None:
        verdict = (
            _step_is_full(state, rank, plan)
            or _refusal_here(state, rank, plan, request)
            or _try_admit(state, rank, plan, request, defer_prefills)
        )
        if verdict is None:
            continue
        state.skip(request, verdict)
        if verdict.puts_aside:
            queue.remove(request)
            aside.append(request)
        else:
            stopped = (verdict, request)
    queue.put_aside(aside)
    if rank.is_draining:
        # It looked at its own only, and says nothing about the others.
        return
    state.admission_stopped = stopped
    if not defer_prefills:
        rank.throttle.capacity_bound = len(queue.waiting) > 0


def _candidate(state: CoreState, rank: RankState, loaded: list[Request]) -> Request | None:
    """The request to try next: of `loaded`, set aside here and not yet tried in this pass, the last; the one for which
    the rank is reserved; the head of the queue; on a rank that drains, the first of those that it has begun and only it
    can finish."""
    if loaded:
        return loaded.pop()
    if rank.reservation is not None and rank.reservation.request.status in QUEUED:
        return rank.reservation.request
    if not rank.is_draining:
        return state.queue.head()
    return state.draining.candidate(rank, state.queue, state.can_stay)


def _step_is_full(state: CoreState, rank: RankState, plan: StepPlan) -> SkipReason | None:
    """Why the step admits no request at all, whichever it is."""
    if plan.tokens_left <= 0:
        return reasons.NO_BUDGET
    if len(rank.running) >= state.config.max_num_seqs:
        return reasons.SEQUENCE_LIMIT
    if rank.running and rank.reservation is not None:
        return reasons.RANK_QUARANTINED
    return None


def _refusal_here(state: CoreState, rank: RankState, plan: StepPlan, request: Request) -> SkipReason | None:
    """Why this rank puts the request aside, which has nothing to do with how much room there is."""
    if request.run is not None and request.run.is_set_aside and request.run not in rank.set_aside:
        return reasons.HELD_ELSEWHERE
    if state.config.rules.resume_settled and request.account.num_preemptions and request.has_rows_in_flight:
        return reasons.RESULT_IN_FLIGHT
    if not request.features <= rank.features:
        return reasons.FEATURE_MISSING_HERE
    # The reference lets a request run that its only rank can never hold.
    must_fit = state.config.rules.refuse_infeasible or len(state.ranks) > 1
    if must_fit and state.blocks_needed(request) > rank.kv.num_usable:
        return reasons.NEVER_FITS_HERE
    for gate in state.resources.gates:
        if (reason := gate(plan, request)) is not None:
            return reason
    stays_here = rank.reservation is not None or (request.run is not None and request.run.is_set_aside)
    if not stays_here and _better_elsewhere(state, rank, request):
        return reasons.PASSED_OVER
    return state.policy.gate(plan, request)


def _better_elsewhere(state: CoreState, rank: RankState, request: Request) -> bool:
    """Whether another rank that could take it now holds a longer cached prefix; at most _MAX_PASSES times a request."""
    if len(state.ranks) == 1 or request.ticket.num_passes >= _MAX_PASSES or not state.config.enable_prefix_caching:
        return False
    others = [
        other
        for other in state.ranks.values()
        if other is not rank
        and not other.window.is_full
        and not other.is_draining
        and other.reservation is None
        and len(other.running) < state.config.max_num_seqs
        and state.can_hold(other, request)
    ]
    if not others:
        return False
    here = len(rank.kv.find_hits(request))
    if not any(len(other.kv.find_hits(request)) > here for other in others):
        return False
    request.ticket.num_passes += 1
    return True


def _try_admit(
    state: CoreState, rank: RankState, plan: StepPlan, request: Request, defer_prefills: bool
) -> SkipReason | None:
    """Start the request, or set a run of it aside, or say why not."""
    run = request.run
    if run is not None and run.is_set_aside and not run.settled:
        # What it waited for did not come. The prefix cache may have changed since, so it is looked up again.
        lifecycle.abandon(state, rank, run, RunEnd.ABANDONED)
    if run is not None and run.is_set_aside:
        # What it waited for is there: its own blocks count as hits.
        hits, start, extension = run.blocks, run.settled, None
    else:
        hits = rank.kv.look_up(request)
        start = len(hits) * rank.kv.block_size
        answer = _extension(state, plan, request, start)
        if isinstance(answer, SkipReason):
            return answer
        extension = answer
        if extension is not None:
            start += extension.tokens
            if extension.later:
                return _set_aside(state, rank, plan, request, hits, start, extension)
    if defer_prefills and start < request.num_tokens - 1:
        return reasons.PREFILL_DEFERRED
    n = rows.size_row(state, plan, request, start, request.num_tokens, admitting=True)
    if isinstance(n, SkipReason):
        return n
    slots = min(start + n + rank.kv.lookahead, plan.longest)
    if (reason := _has_no_room(state, rank, plan, request, hits, slots)) is not None:
        return reason
    run = _admit(state, rank, request, hits, start, slots)
    if extension is not None:
        extension.owner.begin(plan, run, extension)
    plan.admit(run, start, n)
    return None


def _extension(state: CoreState, plan: StepPlan, request: Request, start: int) -> Extension | SkipReason | None:
    """The first answer of a resource."""
    for extend in state.resources.extends:
        if (answer := extend(plan, request, start)) is not None:
            return answer
    return None


def _has_no_room(
    state: CoreState, rank: RankState, plan: StepPlan, request: Request, hits: list[int], slots: int
) -> SkipReason | None:
    """Why a row of the request cannot be added to the step, although it has tokens left."""
    if not plan.has_bytes_for(request, slots):
        return reasons.STEP_TOO_LARGE
    return None if _fits(state, rank, plan, request, hits, slots) else reasons.NO_BLOCKS


def _fits(
    state: CoreState,
    rank: RankState,
    plan: StepPlan,
    request: Request,
    hits: list[int],
    num_slots: int,
    reserved: int = 0,
) -> bool:
    whole = min(request.num_tokens, plan.longest) if state.config.scheduler_reserve_full_isl else None
    return rank.kv.fits_admission(
        hits,
        whole=whole,
        num_slots=num_slots,
        others_run=bool(rank.running),
        margin=sum(margin(plan, request) for margin in state.resources.margins),
        reserved=reserved,
    )


def _set_aside(
    state: CoreState,
    rank: RankState,
    plan: StepPlan,
    request: Request,
    hits: list[int],
    end: int,
    extension: Extension,
) -> SkipReason:
    """Give blocks to a request whose tokens up to `end` come later. It takes no tokens and no row of the step."""
    if not _fits(state, rank, plan, request, hits, end, extension.reserved):
        return reasons.NO_BLOCKS
    run = rank.set_run_aside(request, state.now)
    rank.kv.admit(run, hits, end)
    run.settled = len(hits) * rank.kv.block_size
    run.in_flight = extension.tokens
    if request.account.first_admitted_at is None:
        request.account.num_cached_tokens = run.settled
    extension.owner.begin(plan, run, extension)
    return extension.reason


def _admit(state: CoreState, rank: RankState, request: Request, hits: list[int], start: int, slots: int) -> Run:
    """The request runs from position `start` on, with blocks for `slots` tokens."""
    state.queue.remove(request)
    state.unholdable_since.pop(request.request_id, None)
    transition(request, Status.RUNNING)
    is_set_aside = request.run is not None and request.run.is_set_aside
    run = rank.admit(request, state.now)
    if is_set_aside:
        rank.kv.grow(run, max(0, rank.kv.blocks_short(run, slots)))
    else:
        rank.kv.admit(run, hits, slots)
    run.settled = start
    account = request.account
    if account.first_admitted_at is None:
        account.first_admitted_at = state.now
        if not is_set_aside:
            account.num_cached_tokens = len(hits) * rank.kv.block_size
    if account.preempted_at is not None:
        account.preempted_s += state.now - account.preempted_at
        account.preempted_at = None
    request.ticket.num_passes = 0
    lifecycle.usage_changed(state, request)
    return run

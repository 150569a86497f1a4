"""The two ways in which a request leaves a rank: preempted, to come back, or ended for good."""

from __future__ import annotations

from scheduler_svc.core import reasons
from scheduler_svc.core.events import AbortCause, EndReason, RequestEnded, RequestPreempted, UsageChanged
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.request import Request, Run, RunEnd, Status, transition, unblock
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.stats import Usage


def preempt(state: CoreState, rank: RankState, run: Run, *, beneficiary: str, cause: str) -> None:
    """End a run for recompute. The tokens of its request stay; samples awaited still count when they come.

    cause: "blocks", "reset", "row_error", "rank_lost" or "rank_draining". The caller puts the request back into the
    queue."""
    victim, account = run.request, run.request.account
    num_blocks = sum(1 for block in run.blocks if rank.kv.pool.refs[block] == 1)
    state.effects.append(
        RequestPreempted(
            rank=rank.name,
            victim=victim.request_id,
            beneficiary=beneficiary,
            cause=cause,
            num_blocks_gained=num_blocks,
            # In-flight tokens of a lost worker are never acknowledged.
            num_tokens_to_recompute=min(run.computed, victim.num_tokens) if cause == "rank_lost" else run.computed,
            num_preemptions_before=account.num_preemptions,
        )
    )
    account.high_water = max(account.high_water, run.computed)
    _end_run(state, rank, run, RunEnd.RANK_LOST if cause == "rank_lost" else RunEnd.PREEMPTED, "preempted")
    transition(victim, Status.PREEMPTED)
    account.num_preemptions += 1
    # The loss of a rank is noticed late: its requests stood still before.
    account.preempted_at = max(rank.quiet_since, run.run_since) if cause == "rank_lost" else state.now
    account.preemption_cause = cause
    account.skip_reason, account.skipped_in_pass = reasons.PREEMPTED, state.num_passes
    rank.preempted.append((victim.request_id, run.row))
    if cause in ("rank_lost", "rank_draining"):
        state.totals.num_requeued_after_worker_loss += 1
    else:
        account.num_shortage_preemptions += cause == "blocks"
        state.totals.num_preemptions += 1
    usage_changed(state, victim)


def recompute(state: CoreState, rank: RankState, run: Run, *, cause: str) -> None:
    """Preempt a run whose results on the way are to be dropped, tokens included, and put its request back into the
    queue."""
    request = run.request
    preempt(state, rank, run, beneficiary="", cause=cause)
    # Of its steps in flight, and of the answer that is being settled. No results of an earlier run are on the way: a
    # request comes back only when they are in. The rules may let it come back sooner, but only where two steps at most
    # are in flight, so that the older of them is settled by then.
    run.drops_results = True
    request.awaited = request.awaited_optional = 0
    state.queue.prepend(request)


def abandon(state: CoreState, rank: RankState, run: Run, how: RunEnd) -> None:
    """End a run that is set aside. Its request stays where it stands in the queue, unblocked; no preemption is
    counted."""
    _end_run(state, rank, run, how, "preempted")
    if run.request.status is Status.BLOCKED:
        unblock(run.request)


def _end_run(state: CoreState, rank: RankState, run: Run, how: RunEnd, freed_as: str) -> None:
    """The only place where a run ends: out of running (or of those set aside), its blocks kept for a resource or free
    behind the fence. freed_as: as what the free is announced, if it must wait."""
    rank.remove(run)
    keeper = state.resources.keeper(run, how)
    if keeper is not None:
        rank.keep_blocks_of(run, keeper)
    else:
        rank.free_blocks_of(run, freed_as)
    run.ended = True
    run.settled = run.in_flight = 0
    state.resources.on_run_end(run, how)


def finish(
    state: CoreState,
    request: Request,
    status: Status,
    reason: EndReason,
    *,
    stop_token_id: int | None = None,
    cause: AbortCause | None = None,
    num_output_tokens: int | None = None,
    message: str = "",
) -> None:
    """End a live request: out of running or queue, blocks free behind the fence, the worker and the client told.

    num_output_tokens: how many belong to it, when not all (a stop string).
    """
    rank, run = state.living(request), request.run
    was_running = request.status is Status.RUNNING
    if not was_running:
        state.queue.remove(request)
        state.unholdable_since.pop(request.request_id, None)
    if rank is not None and run is not None and not run.ended:
        _end_run(state, rank, run, RunEnd.FINISHED, "aborted" if status is Status.FINISHED_ABORTED else "finished")
    request.ticket.blocked_by = None
    transition(request, status)
    del state.requests[request.request_id]
    state.resources.on_finish(request, state.now)
    state.policy.on_finish(request)
    if rank is not None and run is not None and run.row >= 0:
        # Announce the end to the worker that has the request, or had it last.
        rank.finished.append((request.request_id, run.row if was_running else -1))
    # A run knows its request: without this the two would keep each other alive.
    request.run = None
    _count(state, status)
    state.effects.append(
        RequestEnded(
            handle=request.handle,
            request_id=request.request_id,
            reason=reason,
            usage=usage_of(state, request, num_output_tokens),
            stop_token_id=stop_token_id,
            cause=cause,
            message=message,
        )
    )


def usage_changed(state: CoreState, request: Request) -> None:
    """Say what the request has cost so far. Called wherever something of it changes but its output tokens."""
    state.effects.append(UsageChanged(request.handle, usage_of(state, request)))


def usage_of(state: CoreState, request: Request, num_output_tokens: int | None = None) -> Usage:
    """What it cost so far."""
    preempted_s = request.account.preempted_s
    if request.account.preempted_at is not None:
        preempted_s += state.now - request.account.preempted_at
    admitted_at = state.now if request.account.first_admitted_at is None else request.account.first_admitted_at
    return Usage(
        num_prompt_tokens=request.num_prompt_tokens,
        num_completion_tokens=request.num_output_tokens if num_output_tokens is None else num_output_tokens,
        num_cached_tokens=request.account.num_cached_tokens,
        num_preemptions=request.account.num_preemptions,
        num_recomputed_tokens=request.account.num_recomputed_tokens,
        queued_s=admitted_at - request.account.arrived_at,
        preempted_s=preempted_s,
    )


def _count(state: CoreState, status: Status) -> None:
    totals = state.totals
    state.recent_ends.append(state.now)
    if status is Status.FINISHED_ABORTED:
        totals.num_aborted += 1
    elif status is Status.FINISHED_ERROR:
        totals.num_failed += 1
    else:
        totals.num_finished += 1

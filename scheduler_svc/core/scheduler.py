"""The scheduler: events in, effects and numbered steps out. Everything that decides who runs is here and in its two
chapters, `running.py` and `admission.py`.

A step is made like this. The first pass goes through the running requests in their order and gives each its next token
or chunk; when blocks run out, it preempts from the back. The second pass admits from the head of the queue, unless the
first one has preempted. Then the plan is committed. Results (tokens, stops, fences) are taken in by `settlement.py`.

Single-threaded, deterministic: the same configuration and the same events give the same outputs, byte for byte.
"""

from __future__ import annotations

from heapq import heappop
from typing import assert_never

from scheduler_svc.core import (
    admission,
    invariants,
    lifecycle,
    reasons,
    resubmission,
    running,
    settlement,
    submission,
    views,
)
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import (
    AbortCause,
    DrainStarted,
    Effect,
    EndReason,
    Event,
    OperatorEvent,
    PauseRequested,
    PauseState,
    PrefixCacheReset,
    PrefixCacheResetRequested,
    RankDraining,
    RankEvent,
    RankJoined,
    RankLost,
    RequestAborted,
    RequestAccepted,
    RequestArrived,
    RequestEvent,
    RequestRefused,
    StepAcked,
    TextEnded,
    Tick,
)
from scheduler_svc.core.kv.prefix_index import HashChain
from scheduler_svc.core.output import SchedulerOutput
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.request import QUEUED, Request, RunEnd, Status
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.stats import Totals
from scheduler_svc.core.step_bytes import columns_bytes
from scheduler_svc.core.views import Explanation, RankAuditFacts, RankView


class Scheduler:
    """All ranks, all requests. `handle` takes what happened, `schedule` makes a rank's next step."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.state = CoreState(config)

    @property
    def accepts_priority(self) -> bool:
        """Whether requests may have a priority other than 0."""
        return self.state.policy.accepts_priority

    @property
    def config(self) -> SchedulerConfig:
        return self.state.config

    def handle(self, event: Event) -> list[Effect]:
        """Take in one event. Returns what it caused, together with what earlier calls of `schedule` caused.

        Raises WorkerProtocolError, with nothing changed, for a StepAcked that does not fit its step.
        """
        match event:
            case RankJoined() | RankLost() | RankDraining() | StepAcked():
                self._handle_rank_event(event)
            case RequestArrived() | RequestAborted() | TextEnded():
                self._handle_request_event(event)
            case PauseRequested() | PrefixCacheResetRequested() | DrainStarted():
                self._handle_operator_event(event)
            case Tick():
                self._tick(event)
            case _:
                # Every other event must be a ResourceEvent, as the type of `on_event` demands.
                self.state.resources.on_event(event, self.state.requests)
        if self.state.config.prefill_schedule_interval > 1:
            self._note_idle_moment()
        return self.take_effects()

    def _handle_rank_event(self, event: RankEvent) -> None:
        match event:
            case StepAcked():
                settlement.acknowledge(self.state, event)
            case RankJoined():
                self._join(event)
            case RankLost():
                self._lose(event)
            case RankDraining():
                self._drain_rank(event)
            case _:
                assert_never(event)

    def _handle_request_event(self, event: RequestEvent) -> None:
        match event:
            case RequestArrived():
                self._arrive(event)
            case RequestAborted():
                self._abort(event)
            case TextEnded():
                self._end_text(event)
            case _:
                assert_never(event)

    def _handle_operator_event(self, event: OperatorEvent) -> None:
        match event:
            case PauseRequested():
                self.state.pause = event.state
            case PrefixCacheResetRequested():
                self._reset_prefix_cache(event)
            case DrainStarted():
                self.state.is_draining = True
            case _:
                assert_never(event)

    def take_effects(self) -> list[Effect]:
        """Effects not yet handed out (preemptions by `schedule`)."""
        effects, self.state.effects = self.state.effects, []
        return effects

    # --- a step ---------------------------------------------------------------------------------------------------

    def schedule(self, rank_name: str) -> SchedulerOutput | None:
        """The next step of a rank, or None: its window is full, or there is nothing to compute or to announce. Call it
        again after every event until it returns None."""
        state = self.state
        rank = state.ranks.get(rank_name)
        if rank is None or rank.window.is_full:
            return None
        state.num_passes += 1
        rank.last_pass = state.num_passes
        if state.pause is PauseState.UNPAUSED and not rank.is_draining:
            state.last_admission_pass = state.num_passes
        plan = StepPlan(
            rank,
            0 if state.pause is PauseState.PAUSED_ALL else state.config.step_budget,
            longest=state.max_model_len,
            claims=state.resources.claims,
            column_bytes=columns_bytes(rank.num_rows, state.config.max_num_batched_tokens),
        )
        defer = rank.throttle.defers_prefills(rank.num_decodes)
        skips, was_idle = state.totals.skips, not len(rank.window)
        num_deferred = skips.get(reasons.PREFILL_DEFERRED, 0)
        running.run(state, rank, plan, defer_prefills=defer)
        if self._may_admit(rank, plan):
            admission.run(state, rank, plan, defer_prefills=defer)
        output = plan.build(state.totals)
        rank.last_pass_fence = rank.window.newest_fence if plan.runs else 0
        if output is not None:
            state.policy.charge(plan)
        for request in plan.caught_up:
            lifecycle.usage_changed(state, request)
        if was_idle:
            rank.quiet_since = state.now
        if output is not None and output.total_num_tokens:
            rank.throttle.num_steps += 1
            state.totals.num_deferring_steps += skips.get(reasons.PREFILL_DEFERRED, 0) > num_deferred
        return output

    def _may_admit(self, rank: RankState, plan: StepPlan) -> bool:
        """A step that preempts admits nobody, and neither does one in which someone waits for returning blocks."""
        if plan.preempted or plan.awaits_fence:
            head = self.state.queue.head()
            if head is not None:
                reason = reasons.STEP_PREEMPTS if plan.preempted else reasons.FENCE_AWAITED
                self.state.admission_stopped = (reason, head)
                if all(run.request is not head for run in plan.preempted):
                    self.state.skip(head, reason)
            return False
        return self.state.pause is PauseState.UNPAUSED and (not rank.is_draining or self.state.draining.has_begun(rank))

    # --- requests -------------------------------------------------------------------------------------------------

    def _arrive(self, event: RequestArrived) -> None:
        state = self.state
        was_accepted_before = event.output_tokens is not None
        verdict = (resubmission if was_accepted_before else submission).judge(state, event)
        if isinstance(verdict, RequestRefused):
            state.totals.num_refused += 1
            state.effects.append(verdict)
            return
        sequence = state.next_sequence
        state.next_sequence += 1
        chain = HashChain(
            state.config.block_size,
            event.cache_salt,
            enabled=state.config.enable_prefix_caching,
            identity=state.resources.identity(event),
        )
        request = Request(
            event,
            verdict,
            sequence=sequence,
            now=state.now,
            chain=chain,
            needs_result_first=state.config.rules.results_first,
        )
        state.resources.on_arrive(request, event, state.now)
        state.requests[request.request_id] = request
        if was_accepted_before:
            state.queue.insert(request)
        else:
            state.queue.append(request)
        state.watch_deadline(request)
        state.totals.num_accepted += 1
        state.totals.num_prompt_tokens += request.num_prompt_tokens
        state.effects.append(
            RequestAccepted(request.handle, request.request_id, request.num_prompt_tokens, verdict.max_tokens)
        )
        if was_accepted_before:
            resubmission.restore(state, request, event)
            self._note_whether_holdable(request)
        self._end_overdue()

    def _abort(self, event: RequestAborted) -> None:
        request = self.state.requests.get(event.request_id)
        if request is None:
            return
        lifecycle.finish(self.state, request, Status.FINISHED_ABORTED, EndReason.ABORTED, cause=event.cause)

    def _end_text(self, event: TextEnded) -> None:
        request = self.state.requests.get(event.request_id)
        if request is not None:
            count = min(max(event.num_tokens, 0), request.num_output_tokens)
            lifecycle.finish(self.state, request, Status.FINISHED_STOPPED, EndReason.STOP, num_output_tokens=count)

    def _tick(self, event: Tick) -> None:
        state = self.state
        if event.now < state.now:
            raise AssertionError(f"time runs backwards: {event.now} after {state.now}")
        state.now = event.now
        state.policy.tick(event.now)
        self._end_overdue()
        grace = state.config.no_worker_grace_s
        for request_id in [i for i, since in state.unholdable_since.items() if state.now - since >= grace]:
            lifecycle.finish(
                state,
                state.requests[request_id],
                Status.FINISHED_ERROR,
                EndReason.NO_WORKER,
                message="No worker that is up can hold this request.",
            )

    def _end_overdue(self) -> None:
        state = self.state
        while (first := state.first_deadline()) is not None and first <= state.now:
            request = state.requests[heappop(state.deadlines)[2]]
            lifecycle.finish(state, request, Status.FINISHED_ABORTED, EndReason.ABORTED, cause=AbortCause.DEADLINE)

    # --- ranks ----------------------------------------------------------------------------------------------------

    def _join(self, event: RankJoined) -> None:
        state = self.state
        if event.rank in state.ranks:
            raise AssertionError(f"rank {event.rank} joined twice: its old epoch must end first")
        if not state.ranks and (not state.requests or state.vocab_size is None):
            state.max_model_len = min(state.config.max_model_len, event.max_model_len)
            resubmission.fit_to_model(state)
        state.vocab_size = event.vocab_size
        state.ranks[event.rank] = RankState(
            event.rank,
            event.epoch,
            event.num_blocks,
            event.vocab_size,
            state.config,
            deferring=state.deferring_frees,
            lookahead=state.resources.lookahead,
            max_step_bytes=event.max_step_bytes,
            features=event.features,
        )
        state.ranks[event.rank].kv.stats = state.totals.prefix
        state.no_rank_since = None
        self._ranks_changed()

    def _lose(self, event: RankLost) -> None:
        state = self.state
        rank = state.ranks.get(event.rank)
        if rank is None:
            return
        settlement.end_epoch(state, rank, graceful=event.graceful)
        if not state.ranks:
            state.no_rank_since = state.now
        self._ranks_changed()

    def _drain_rank(self, event: RankDraining) -> None:
        """Admit nobody new there, and move whoever another rank can hold to the head of the queue; the others finish
        there, preemptions or not."""
        state = self.state
        rank = state.ranks.get(event.rank)
        if rank is None or rank.is_draining:
            return
        state.draining.start(rank)
        state.quarantine.release(rank)
        for run in list(rank.set_aside):
            lifecycle.abandon(state, rank, run, RunEnd.ABANDONED)
        for run in reversed(list(rank.running)):
            if state.can_stay(run.request):
                lifecycle.preempt(state, rank, run, beneficiary="", cause="rank_draining")
                state.queue.prepend(run.request)

    def _ranks_changed(self) -> None:
        """Note what no living rank can hold; time will tell whether one comes that can (D30)."""
        state = self.state
        if not state.ranks:
            state.unholdable_since.clear()
            return
        state.largest_pool = max(rank.kv.num_usable for rank in state.ranks.values())
        for request in state.queue:
            self._note_whether_holdable(request)

    def _note_whether_holdable(self, request: Request) -> None:
        state = self.state
        if not state.ranks or request.status not in QUEUED:
            return
        if not state.config.rules.refuse_infeasible or any(
            state.can_hold(rank, request) for rank in state.ranks.values()
        ):
            state.unholdable_since.pop(request.request_id, None)
        else:
            state.unholdable_since.setdefault(request.request_id, state.now)

    def _note_idle_moment(self) -> None:
        """When nothing runs and nothing is in flight on any rank, the throttle counts steps anew (D19)."""
        ranks = self.state.ranks.values()
        if not any(rank.running or rank.window.newest_fence > rank.window.acked_fence for rank in ranks):
            for rank in ranks:
                rank.throttle.num_steps = 0

    # --- operators ------------------------------------------------------------------------------------------------

    def _reset_prefix_cache(self, event: PrefixCacheResetRequested) -> None:
        """Reset every rank or none. Blocks behind a fence do not stand in the way (unless the rules say otherwise), so
        a reset that preempts succeeds. Blocks that a resource still keeps do."""
        state = self.state
        ranks = list(state.ranks.values())
        if event.preempt_running:
            for rank in ranks:
                for run in reversed(list(rank.running)):
                    # Results on the way belong to what is being forgotten.
                    lifecycle.recompute(state, rank, run, cause="reset")
                for run in list(rank.set_aside):
                    lifecycle.abandon(state, rank, run, RunEnd.ABANDONED)
        over_parked = state.config.rules.reset_over_parked
        busy = [rank.name for rank in ranks if rank.kv.is_held or (rank.kv.parked and not over_parked)]
        if busy:
            message = f"blocks are in use on {', '.join(busy)}"
            state.effects.append(PrefixCacheReset(False, message))
            return
        for rank in ranks:
            rank.kv.reset_prefix_cache()
        state.effects.append(PrefixCacheReset(True, ""))

    # --- questions ------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self.state.queue.waiting)

    @property
    def num_skipped(self) -> int:
        return len(self.state.queue.skipped)

    @property
    def num_running(self) -> int:
        return sum(len(rank.running) for rank in self.state.ranks.values())

    @property
    def num_live_requests(self) -> int:
        return len(self.state.requests)

    @property
    def totals(self) -> Totals:
        return self.state.totals

    @property
    def rank_names(self) -> tuple[str, ...]:
        """Living ranks, in order of joining."""
        return tuple(self.state.ranks)

    def rank_view(self, rank_name: str) -> RankView | None:
        rank = self.state.ranks.get(rank_name)
        return None if rank is None else views.rank_view(rank)

    def explain(self, request_id: str) -> Explanation | None:
        """Where a live request is and why; None when no such request is live."""
        request = self.state.requests.get(request_id)
        return None if request is None else views.explain(self.state, request)

    def audit(self) -> tuple[RankAuditFacts, ...]:
        """Count every block of every rank from the tables, and check all invariants."""
        return tuple(invariants.audit(self.state, rank) for rank in self.state.ranks.values())

    def next_deadline(self) -> float | None:
        """When a Tick has something to do, if nothing else happens before."""
        first = self.state.first_deadline()
        times = [] if first is None else [first]
        grace = self.state.config.no_worker_grace_s
        if (of_policy := self.state.policy.next_deadline()) is not None:
            times.append(of_policy)
        times += [since + grace for since in self.state.unholdable_since.values()]
        return min(times, default=None)

    def queued(self) -> list[Request]:
        """Queued requests, skipped lane first (for tests and status)."""
        return [r for r in self.state.queue if r.status in QUEUED]

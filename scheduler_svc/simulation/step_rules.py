"""What must hold of one planned step, judged from outside: the state before it, the plan, and what it caused. One
function a rule; each yields the ways in which it is broken. Numbers are those of the invariants in
`docs/simulation.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from scheduler_svc.core import reasons
from scheduler_svc.core.config import Policy, SchedulerConfig
from scheduler_svc.core.events import Effect, PauseState, RequestPreempted
from scheduler_svc.core.output import SchedulerOutput
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.request import Request, Run
from scheduler_svc.core.scheduler import Scheduler

_RUNNING_REASONS = frozenset(
    {
        reasons.LAST_TOKEN_IN_FLIGHT,
        reasons.AWAITING_RESULT,
        reasons.LENGTH_REACHED,
        reasons.PREFILL_DEFERRED,
        reasons.WAITING_FOR_FENCE,
        reasons.NO_BUDGET,
        reasons.BEHIND_PREEMPTION,
        reasons.PAUSED,
    }
)
# Those that no waiting request can have. It may have any other one, of the core or of a resource.
_ONLY_RUNNING = _RUNNING_REASONS - {reasons.PREFILL_DEFERRED, reasons.NO_BUDGET, reasons.PAUSED}


@dataclass(frozen=True, slots=True)
class Before:
    """A rank before it planned a step."""

    running: tuple[Request, ...]
    # By request: how often the scheduler preempted it, and whether its last row was a partial prefill.
    num_preemptions: dict[Request, int]
    is_chunk: dict[Request, bool]
    capacity_bound: bool
    num_nonempty_steps: int
    # In the waiting lane, never skipped and never preempted.
    fresh: tuple[Request, ...]

    @classmethod
    def of(cls, scheduler: Scheduler, rank: RankState) -> Before:
        return cls(
            running=tuple(run.request for run in rank.running),
            num_preemptions={run.request: run.request.account.num_shortage_preemptions for run in rank.running},
            is_chunk={run.request: run.is_prefill_chunk for run in rank.running},
            capacity_bound=rank.throttle.capacity_bound,
            num_nonempty_steps=rank.throttle.num_steps,
            fresh=tuple(r for r in scheduler.state.queue.waiting if not r.account.num_preemptions),
        )


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One call of `Scheduler.schedule` that was not turned away by a full window."""

    scheduler: Scheduler
    rank: RankState
    before: Before
    output: SchedulerOutput | None
    effects: tuple[Effect, ...]

    @property
    def config(self) -> SchedulerConfig:
        return self.scheduler.config

    @property
    def rows(self) -> list[tuple[Request, int]]:
        """Requests of the step, with their tokens."""
        if self.output is None:
            return []
        record = self.rank.window.records[-1]
        return list(zip(record.requests, record.num_tokens, strict=True))

    @property
    def admitted(self) -> list[Request]:
        return [r for r, _ in self.rows if r not in self.before.num_preemptions]

    @property
    def preemptions(self) -> list[RequestPreempted]:
        return [e for e in self.effects if isinstance(e, RequestPreempted) and e.cause == "blocks"]

    @property
    def defers(self) -> bool:
        """Whether the throttle leaves prefills out of this step."""
        interval = self.config.prefill_schedule_interval
        throttled = interval > 1 and self.before.num_nonempty_steps % interval != 0
        return throttled and not self.before.capacity_bound and not all(self.before.is_chunk.values())

    @property
    def looked_at_queue(self) -> bool:
        """Whether nothing kept the step from admitting: a victim, somebody who waits for a fence, a pause, a drain."""
        rank, state = self.rank, self.scheduler.state
        in_step = {r for r, _ in self.rows}
        left_out = [run.request for run in rank.running if run.request not in in_step]
        waits = any(request.account.skip_reason is reasons.WAITING_FOR_FENCE for request in left_out)
        return not (self.preemptions or waits or rank.is_draining or state.pause is not PauseState.UNPAUSED)


def violations(step: PlannedStep) -> list[str]:
    return [problem for rule in _RULES for problem in rule(step)]


def rows_are_within_budget_and_sequence(step: PlannedStep) -> Iterator[str]:
    """Tokens of a step within its budget, at least one a row, none beyond the sequence, drafts included (9, I4)."""
    if sum(n for _, n in step.rows) > step.config.step_budget:
        yield f"{sum(n for _, n in step.rows)} tokens exceed the step"
    for request, n in step.rows:
        if n < 1 or request.computed > request.row_limit:
            yield f"{request.request_id} gets {n} tokens to {request.computed} of {request.row_limit}"


def preempted_do_not_run(step: PlannedStep) -> Iterator[str]:
    """Who is preempted in a step has no row in it; the step admits nobody (10, 11)."""
    victims = {e.victim for e in step.preemptions}
    for request, _ in step.rows:
        if request.request_id in victims:
            yield f"{request.request_id} is preempted and runs in the same step"
    if victims and step.admitted:
        yield f"a step that preempts {victims} admits {step.admitted}"


def victims_are_the_right_ones(step: PlannedStep) -> Iterator[str]:
    """FCFS: the last admitted. Priority: the largest (priority, arrival), of equals the first admitted. With a bound on
    preemptions: among those below it and not in need themselves, if the ordinary victim is at it (12, 13, D11)."""
    running = list(step.before.running)
    most = step.config.max_preemptions
    counts = step.before.num_preemptions
    by_id = {r.request_id: r for r in running}
    for event in step.preemptions:
        order = [*reversed(running)]
        if step.config.policy is Policy.PRIORITY:
            order = sorted(running, key=lambda r: (-r.priority, -r.arrival))
        expected = order[0]
        if most is not None and counts[expected] >= most:
            spare = [r for r in order if counts[r] < most and r.request_id != event.beneficiary]
            expected = spare[0] if spare else expected
        if event.victim != expected.request_id:
            yield f"{event.victim} is preempted for {event.beneficiary}, not {expected.request_id}"
        running.remove(by_id[event.victim])


def victims_wait_at_the_head(step: PlannedStep) -> Iterator[str]:
    """FCFS: the waiting lane then starts with the victims, the first one preempted last (12)."""
    queued = [r.request_id for r in step.scheduler.state.queue.waiting]
    victims = [e.victim for e in reversed(step.preemptions)]
    if step.config.policy is Policy.PRIORITY:
        if not set(victims) <= set(queued):
            yield f"victims {victims} are not all in the waiting lane {queued}"
    elif queued[: len(victims)] != victims:
        yield f"the waiting lane is {queued}, not {victims} first"


def nobody_is_overtaken(step: PlannedStep) -> Iterator[str]:
    """FCFS, one rank: a new request is not admitted before one that came earlier and was never put aside (14)."""
    if step.config.policy is not Policy.FCFS or len(step.scheduler.state.ranks) > 1:
        return
    admitted = set(step.admitted)
    left = [r for r in step.before.fresh if r not in admitted and not r.ticket.skipped]
    for request in step.admitted:
        if request in step.before.fresh and any(r.arrival < request.arrival for r in left):
            yield f"{request.request_id} overtakes one of {left}"


def a_draining_rank_only_finishes_its_own(step: PlannedStep) -> Iterator[str]:
    """It admits who was preempted, and no other rank can hold (D30)."""
    others = [r.kv.num_usable for r in step.scheduler.state.ranks.values() if not r.is_draining]
    for request in step.admitted if step.rank.is_draining else ():
        if not request.account.num_preemptions or step.scheduler.state.blocks_needed(request) <= max(others, default=0):
            yield f"{request.request_id} is admitted by a rank that drains"


def throttled_steps_hold_no_prefill(step: PlannedStep) -> Iterator[str]:
    """A deferring step runs no partial prefill and admits only who needs one token, padding aside (24)."""
    if not step.defers:
        return
    for request, n in step.rows:
        if step.before.is_chunk.get(request, False):
            yield f"deferring step runs the prefill of {request.request_id}"
        elif request not in step.before.is_chunk and n > 1 + step.config.num_speculative_tokens:
            yield f"deferring step admits {request.request_id} with {n} tokens"


def capacity_flag_is_kept(step: PlannedStep) -> Iterator[str]:
    """capacity_bound says whether somebody waits after a step that looked at the queue without deferring; else it stays
    as it was (25)."""
    looked = step.looked_at_queue and not step.defers
    expected = len(step.scheduler.state.queue.waiting) > 0 if looked else step.before.capacity_bound
    if step.rank.throttle.capacity_bound is not expected:
        yield f"capacity_bound is {step.rank.throttle.capacity_bound}"


def every_running_request_has_a_row_or_a_reason(step: PlannedStep) -> Iterator[str]:
    """R4, for those that run on the rank; the reason must fit the state."""
    in_step = {r for r, _ in step.rows}
    for run in step.rank.running:
        request = run.request
        explanation = step.scheduler.explain(request.request_id)
        reason = None if explanation is None else explanation.reason
        if request in in_step:
            if reason is not None:
                yield f"{request.request_id} runs and says {reason}"
        elif not _runs(step.rank, run) and (reason not in _RUNNING_REASONS or not _is_true(step, request, reason)):
            yield f"{request.request_id} got nothing and says {reason}"


def _runs(rank: RankState, run: Run) -> bool:
    return 0 < run.last_fence == rank.window.newest_fence


def _is_true(step: PlannedStep, request: Request, reason: SkipReason | None) -> bool:
    """Whether a stored reason fits what is the case."""
    if reason in (reasons.LAST_TOKEN_IN_FLIGHT, reasons.AWAITING_RESULT):
        return request.awaited > 0
    if reason is reasons.PREFILL_DEFERRED:
        return step.defers
    if reason is reasons.WAITING_FOR_FENCE:
        return step.rank.kv.pool.num_parked > 0
    if reason is reasons.NO_BUDGET:
        return sum(n for _, n in step.rows) == step.config.step_budget
    if reason is reasons.BEHIND_PREEMPTION:
        return bool(step.preemptions)
    return True


def the_pass_over_the_queue_ends_for_its_reason(step: PlannedStep) -> Iterator[str]:
    """What ended the pass over the queue is the case."""
    stopped = step.scheduler.state.admission_stopped
    if stopped is None or not step.looked_at_queue:
        return
    reason, request = stopped
    if reason is reasons.SEQUENCE_LIMIT and len(step.rank.running) < step.config.max_num_seqs:
        yield f"{request.request_id} meets no limit of sequences"
    elif reason is reasons.NO_BUDGET and sum(n for _, n in step.rows) < step.config.step_budget:
        yield f"{request.request_id} is left out of a step with tokens to give"
    elif reason is reasons.PREFILL_DEFERRED and not step.defers:
        yield f"{request.request_id} is deferred in a step that defers nobody"


_RULES: tuple[Callable[[PlannedStep], Iterator[str]], ...] = (
    rows_are_within_budget_and_sequence,
    preempted_do_not_run,
    victims_are_the_right_ones,
    victims_wait_at_the_head,
    nobody_is_overtaken,
    a_draining_rank_only_finishes_its_own,
    throttled_steps_hold_no_prefill,
    capacity_flag_is_kept,
    the_pass_over_the_queue_ends_for_its_reason,
    every_running_request_has_a_row_or_a_reason,
)


def queued_without_reason(scheduler: Scheduler) -> list[str]:
    """R4 for those that wait, after every rank was asked for a step: ids whose reason is missing or cannot be
    theirs."""
    state = scheduler.state
    wrong = []
    for request in state.queue:
        explanation = scheduler.explain(request.request_id)
        reason = None if explanation is None else explanation.reason
        if reason is None or reason is reasons.NOT_EXAMINED or reason in _ONLY_RUNNING:
            wrong.append(f"{request.request_id} waits and says {reason}")
        elif explanation is not None and reason is reasons.BEHIND:
            before = explanation.detail.split()[1].rstrip(",")
            if before not in state.requests:
                wrong.append(f"{request.request_id} stands behind {before}, which is gone")
    return wrong

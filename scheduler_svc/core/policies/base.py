"""What a policy decides: who waits in which order, who runs in which order, and who is preempted."""

from __future__ import annotations

from collections.abc import Reversible, Sequence

from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.policies.queue import WaitingQueue
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.request import Request, Run


class SchedulingPolicy:
    """One object per scheduler; it owns the queue. Of the questions only `worst` has no answer here; a policy overrides
    the others where it differs."""

    # Whether requests may have a priority other than 0.
    accepts_priority = False

    def __init__(self, queue: WaitingQueue, max_preemptions: int | None) -> None:
        self.queue = queue
        # Victims that were preempted this often for want of blocks are spared while another exists; None: never.
        self.max_preemptions = max_preemptions

    def running_order(self, rank: RankState) -> Sequence[Run]:
        """The running requests in the order in which a step serves them, as a list of its own: the pass over it may
        preempt. Here: the order of admission."""
        return list(rank.running)

    def worst(self, running: Reversible[Run]) -> Run:
        """Of these requests, in order of admission and at least one, the first to be preempted."""
        raise NotImplementedError

    def victim(self, plan: StepPlan, needy: Run) -> Run:
        """The request to preempt so that `needy` gets blocks; may be `needy` itself. A victim that was preempted
        max_preemptions times already is spared while another one exists, `needy` not counting as such (D11)."""
        most, running = self.max_preemptions, plan.rank.running
        victim = self.worst(running)
        if most is None or victim.request.account.num_shortage_preemptions < most:
            return victim
        others = [r for r in running if r.request.account.num_shortage_preemptions < most and r is not needy]
        return self.worst(others) if others else victim

    def gate(self, plan: StepPlan, request: Request) -> SkipReason | None:
        """Why the policy puts a waiting request aside in this step, whatever room there is; None: it may start."""
        return None

    def charge(self, plan: StepPlan) -> None:
        """The step is final: its rows and tokens may be charged to the tenants of its requests. Called once a step, and
        only for steps that are sent."""

    def on_finish(self, request: Request) -> None:
        """The request has ended, whether or not it ever ran."""

    def tick(self, now: float) -> None:
        """Time passes: seconds of Tick's clock."""

    def next_deadline(self) -> float | None:
        """When `tick` has something to do; None: never."""
        return None

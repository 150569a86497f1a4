"""Who is preempted: the order among running requests, worst last."""

from __future__ import annotations

from scheduler_svc.core.config import Policy
from scheduler_svc.core.request import Request


def choose_victim(running: list[Request], needy: Request, policy: Policy, max_preemptions: int | None) -> Request:
    """The request to preempt so that `needy` gets blocks; may be `needy` itself.

    FCFS: the last one admitted. Priority: the largest (priority, arrival); of equals the one admitted first. A victim
    that was preempted `max_preemptions` times already is spared while another one exists, `needy` not counting as such
    (D11)."""
    victim = _worst(running, policy)
    if max_preemptions is None or victim.num_shortage_preemptions < max_preemptions:
        return victim
    others = [r for r in running if r.num_shortage_preemptions < max_preemptions and r is not needy]
    return _worst(others, policy) if others else victim


def _worst(running: list[Request], policy: Policy) -> Request:
    if policy is Policy.FCFS:
        return running[-1]
    return max(running, key=_priority_key)


def _priority_key(request: Request) -> tuple[int, float]:
    return request.priority, request.arrival

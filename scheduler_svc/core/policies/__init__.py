"""Policies, each in a file of its own and with one line here."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.core.config import Policy, SchedulerConfig
from scheduler_svc.core.policies.base import SchedulingPolicy
from scheduler_svc.core.policies.fcfs import FcfsPolicy
from scheduler_svc.core.policies.priority import PriorityPolicy

_POLICIES: dict[Policy, Callable[[int | None], SchedulingPolicy]] = {
    Policy.FCFS: FcfsPolicy,
    Policy.PRIORITY: PriorityPolicy,
}


def make_policy(config: SchedulerConfig) -> SchedulingPolicy:
    """The policy of this configuration, with an empty queue."""
    return _POLICIES[config.policy](config.max_preemptions)

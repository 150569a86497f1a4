"""Resources, each in a file of its own and with one line here. Their order is that of the questions."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_svc.core import reasons
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.resources.base import Resource
from scheduler_svc.core.resources.container import Resources
from scheduler_svc.core.resources.draining import Draining
from scheduler_svc.core.resources.grammar import Grammar
from scheduler_svc.core.resources.quarantine import Quarantine
from scheduler_svc.core.resources.speculation import Speculation
from scheduler_svc.core.resources.tenants import Isolation, Tenants

__all__ = ["ALL_REASONS", "KINDS", "Resources", "make_resources"]

KINDS: tuple[type[Resource], ...] = (Grammar, Speculation, Quarantine, Draining, Isolation, Tenants)

# Of the core and of every resource, on or off.
ALL_REASONS: tuple[SkipReason, ...] = reasons.ALL + tuple(reason for kind in KINDS for reason in kind.reasons)


def make_resources(config: SchedulerConfig) -> Resources:
    """Those that this configuration switches on."""
    return Resources(list(_switched_on(config)))


def _switched_on(config: SchedulerConfig) -> Iterator[Resource]:
    yield Grammar()
    if Speculation.is_on(config):
        yield Speculation(config)
    yield Quarantine(config.max_fruitless_epochs)
    yield Draining()
    yield Isolation()
    if config.tenants:
        yield Tenants(config.tenants)

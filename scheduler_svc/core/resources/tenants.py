"""Tenants: what one shares with another, and how much of the deployment each may have.

A prompt's KV belongs to its tenant: requests of two tenants never share blocks. Limits hold for each tenant by itself,
over all front ends and ranks: requests running, requests waiting, and tokens a minute. A tenant that is not named among
the limits has those of "*", where there are any; so has the tenant without a name, of callers that show no token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from scheduler_svc.core.config import EVERYONE, TenantLimits
from scheduler_svc.core.events import RefusalReason, RequestArrived, RequestRefused
from scheduler_svc.core.kv.prefix_index import NO_IDENTITY, Identity
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.request import Limits, Request, Run, RunEnd
from scheduler_svc.core.resources.base import Resource

TENANT_LIMIT = SkipReason("TENANT_LIMIT", "its tenant has as many requests running as it may have", puts_aside=True)


class Bucket:
    """Tokens that a tenant may still ask for: full at first, filled evenly, a minute's worth at most. Times in seconds
    of Tick's clock."""

    def __init__(self, tokens_per_minute: int, now: float) -> None:
        self.size = tokens_per_minute
        self._level = float(tokens_per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """Tokens left; negative after requests that came from an earlier scheduler."""
        return min(self.size, self._level + (now - self._at) * self.size / 60)

    def take(self, num_tokens: int, now: float) -> None:
        """Charge them, or give them back (negative)."""
        self._level, self._at = min(self.size, self.level(now) - num_tokens), now

    def seconds_until(self, num_tokens: int, now: float) -> float:
        """When so many will be there, if nothing is taken before."""
        return max(0.0, (num_tokens - self.level(now)) * 60 / self.size)


class _Tenant:
    """One tenant's limits, and what counts against them."""

    def __init__(self, limits: TenantLimits, now: float) -> None:
        self.limits = limits
        self.live: dict[Request, None] = {}
        self.running: dict[Run, None] = {}
        self.bucket = None if limits.tokens_per_minute is None else Bucket(limits.tokens_per_minute, now)

    @property
    def num_waiting(self) -> int:
        return len(self.live) - len(self.running)


class Isolation(Resource):
    """Requests of two tenants share no blocks."""

    def identity(self, event: RequestArrived) -> Identity:
        """See Resource."""
        return Identity(fields=((b"tenant", event.tenant.encode()),)) if event.tenant else NO_IDENTITY


class Tenants(Resource):
    """Every tenant that has limits and a live request, or has had one lately enough for its tokens to count."""

    reasons = (TENANT_LIMIT,)

    def __init__(self, limits: Iterable[TenantLimits]) -> None:
        self._limits = {one.tenant: one for one in limits}
        self._tenants: dict[str, _Tenant] = {}

    # --- arrival ---

    def refusal(self, event: RequestArrived, limits: Limits, now: float) -> RequestRefused | None:
        """See Resource."""
        if (tenant := self._find(event.tenant, now)) is None:
            return None
        most = tenant.limits.max_queued
        if most is not None and tenant.num_waiting >= most:
            message = f"{_name(event)} has {tenant.num_waiting} requests waiting, the most that are allowed."
            return _refused(event, "max_queued", most, message, 1.0)
        bucket, wanted = tenant.bucket, limits.limit
        if bucket is None or wanted <= bucket.level(now):
            return None
        if wanted > bucket.size:
            message = (
                f"The request may take {wanted} tokens, prompt and max_tokens together; {_name(event)} may take "
                f"{bucket.size} a minute. Ask for fewer (max_tokens)."
            )
            return _refused(event, "tokens_per_minute", bucket.size, message, None)
        wait_s = bucket.seconds_until(wanted, now)
        message = (
            f"The request may take {wanted} tokens, prompt and max_tokens together; {_name(event)} may take "
            f"{int(max(0.0, bucket.level(now)))} now, and so many in {wait_s:.1f} s."
        )
        return _refused(event, "tokens_per_minute", bucket.size, message, wait_s)

    def on_arrive(self, request: Request, event: RequestArrived, now: float) -> None:
        """See Resource. Charged is what the request may take at most; what it has not taken comes back at its end."""
        if (tenant := self._find(event.tenant, now)) is None:
            return
        tenant.live[request] = None
        if tenant.bucket is not None:
            tenant.bucket.take(request.limit, now)

    # --- a step ---

    def gate(self, plan: StepPlan, request: Request) -> SkipReason | None:
        """See Resource."""
        tenant = self._tenants.get(request.tenant)
        if tenant is None or tenant.limits.max_running is None:
            return None
        return TENANT_LIMIT if len(tenant.running) >= tenant.limits.max_running else None

    def take(self, plan: StepPlan, run: Run, start: int, n: int) -> None:
        """See Resource. The run counts from its first row to its end; a row that is withdrawn changes nothing, since
        the run goes on without it or ends."""
        if (tenant := self._tenants.get(run.request.tenant)) is not None:
            tenant.running[run] = None

    # --- ends ---

    def on_run_end(self, run: Run, how: RunEnd) -> None:
        """See Resource."""
        if (tenant := self._tenants.get(run.request.tenant)) is not None:
            tenant.running.pop(run, None)

    def on_finish(self, request: Request, now: float) -> None:
        """See Resource."""
        tenant = self._tenants.get(request.tenant)
        if tenant is None or request not in tenant.live:
            return
        del tenant.live[request]
        if tenant.bucket is not None:
            tenant.bucket.take(request.num_tokens - request.limit, now)

    # --- accounts ---

    def check(self, rank: RankState) -> Iterator[str]:
        """See Resource."""
        for name, tenant in self._tenants.items():
            here = [run for run in rank.running if run.request.tenant == name]
            counted = [run for run in tenant.running if run.rank is rank]
            if set(here) != set(counted):
                yield f"tenant {name!r} has {len(here)} requests running on {rank.name}, {len(counted)} are counted"
            most = tenant.limits.max_running
            if most is not None and len(tenant.running) > most:
                yield f"tenant {name!r} has {len(tenant.running)} requests running, more than {most}"

    def _find(self, name: str, now: float) -> _Tenant | None:
        """None: it has no limits."""
        tenant = self._tenants.get(name)
        if tenant is None:
            limits = self._limits.get(name) or self._limits.get(EVERYONE)
            if limits is None:
                return None
            self._forget_idle(now)
            tenant = self._tenants[name] = _Tenant(limits, now)
        return tenant

    def _forget_idle(self, now: float) -> None:
        """Those of which nothing is live and whose bucket is full are as good as new ones."""
        for name, tenant in list(self._tenants.items()):
            bucket = tenant.bucket
            if not tenant.live and (bucket is None or bucket.level(now) >= bucket.size):
                del self._tenants[name]


def _name(event: RequestArrived) -> str:
    return f"Tenant {event.tenant!r}" if event.tenant else "The tenant without a name"


def _refused(event: RequestArrived, name: str, limit: int, message: str, wait_s: float | None) -> RequestRefused:
    facts = {"tenant": event.tenant, "limit": name, "value": str(limit)}
    return RequestRefused(event.handle, event.request_id, RefusalReason.TENANT_LIMIT, message, facts, wait_s)

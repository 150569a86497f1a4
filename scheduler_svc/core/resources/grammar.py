"""Grammars that are compiled before their request may start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from scheduler_svc.core.events import GrammarReady, RequestArrived, ResourceEvent
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.request import FINISHED, Request, block, unblock
from scheduler_svc.core.resources.base import Resource

GRAMMAR_NOT_READY = SkipReason("GRAMMAR_NOT_READY", "its grammar is being compiled", puts_aside=True)


class Grammar(Resource):
    """Requests whose grammar is not there yet."""

    reasons = (GRAMMAR_NOT_READY,)

    def __init__(self) -> None:
        self._pending: dict[str, Request] = {}

    def on_arrive(self, request: Request, event: RequestArrived, now: float) -> None:
        """See Resource."""
        if event.awaits_grammar:
            self._pending[request.request_id] = request
            block(request, GRAMMAR_NOT_READY)

    def on_event(self, event: ResourceEvent, live: Mapping[str, Request]) -> None:
        """See Resource. The request is unblocked when a pass comes to it."""
        if isinstance(event, GrammarReady):
            self._pending.pop(event.request_id, None)

    def gate(self, plan: StepPlan, request: Request) -> SkipReason | None:
        """See Resource."""
        if request.ticket.blocked_by is GRAMMAR_NOT_READY:
            if request.request_id in self._pending:
                return GRAMMAR_NOT_READY
            unblock(request)
        return None

    def on_finish(self, request: Request, now: float) -> None:
        """See Resource."""
        if self._pending.get(request.request_id) is request:
            del self._pending[request.request_id]

    def is_pending(self, request: Request) -> bool:
        """Whether the grammar of the request is still being compiled."""
        return request.request_id in self._pending

    def snapshot(self, rank: RankState) -> object:
        """See Resource."""
        return tuple(self._pending)

    def check(self, rank: RankState) -> Iterator[str]:
        """See Resource."""
        for request in self._pending.values():
            if request.status in FINISHED:
                yield f"{request.request_id} has ended and awaits its grammar"

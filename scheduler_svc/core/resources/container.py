"""All resources of a scheduler, and for each question those that answer it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from scheduler_svc.core.events import RequestArrived, RequestRefused, ResourceEvent, StepAcked
from scheduler_svc.core.inflight import StepRecord
from scheduler_svc.core.kv.prefix_index import NO_IDENTITY, Identity
from scheduler_svc.core.plan import Claims, StepPlan
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.request import FIRST_RESOURCE_BIT, Limits, Request, Run, RunEnd
from scheduler_svc.core.resources.base import Extension, Failure, Resource

_R = TypeVar("_R", bound=Resource)
_Extend = Callable[[StepPlan, Request, int], Extension | SkipReason | None]
_OnSettled = Callable[[RankState, StepRecord, StepAcked], Iterable[Failure]]


class Resources:
    """A feature that is off is not in it, and a question that no resource answers is an empty tuple."""

    def __init__(self, resources: Sequence[Resource]) -> None:
        self._all = tuple(resources)
        for number, resource in enumerate(self._all):
            resource.bit = FIRST_RESOURCE_BIT << number
        self.extends: tuple[_Extend, ...] = self._answers("extend")
        self.margins: tuple[Callable[[StepPlan, Request], int], ...] = self._answers("margin")
        self._keepers = tuple(r for r in self._all if type(r).keeps is not Resource.keeps)
        self.lookahead = max((resource.lookahead for resource in self._all), default=0)
        self.gates: tuple[Callable[[StepPlan, Request], SkipReason | None], ...] = self._answers("gate")
        self.wants: tuple[Callable[[StepPlan, Request, int, int], int | SkipReason], ...] = self._answers("want")
        self.clips: tuple[Callable[[StepPlan, Request, int, int], int | SkipReason], ...] = self._answers("clip")
        self.claims = Claims(
            opens=self._answers("open"),
            takes=self._answers("take"),
            withdraws=self._answers("withdraw")[::-1],
            builds=self._answers("build"),
        )
        self._identities: tuple[Callable[[RequestArrived], Identity], ...] = self._answers("identity")
        self._refusals: tuple[Callable[[RequestArrived, Limits, float], RequestRefused | None], ...] = self._answers(
            "refusal"
        )
        self._arrivals: tuple[Callable[[Request, RequestArrived, float], None], ...] = self._answers("on_arrive")
        self._events: tuple[Callable[[ResourceEvent, Mapping[str, Request]], None], ...] = self._answers("on_event")
        self._run_ends: tuple[Callable[[Run, RunEnd], None], ...] = self._answers("on_run_end")
        self._finishes: tuple[Callable[[Request, float], None], ...] = self._answers("on_finish")
        self._settlements: tuple[Callable[[RankState, StepRecord, StepAcked], Iterable[Failure]], ...] = self._answers(
            "on_settled"
        )

    def __iter__(self) -> Iterator[Resource]:
        return iter(self._all)

    def find(self, kind: type[_R]) -> _R | None:
        """The resource of this class, if it is on."""
        return next((resource for resource in self._all if isinstance(resource, kind)), None)

    def get(self, kind: type[_R]) -> _R:
        """The resource of this class, which must be on."""
        found = self.find(kind)
        assert found is not None, f"{kind.__name__} is off"
        return found

    def identity(self, event: RequestArrived) -> Identity:
        """What all resources say that the KV of a prompt depends on."""
        return sum((answer(event) for answer in self._identities), NO_IDENTITY)

    def refusal(self, event: RequestArrived, limits: Limits, now: float) -> RequestRefused | None:
        """The first answer of a resource."""
        return next((refused for answer in self._refusals if (refused := answer(event, limits, now))), None)

    def on_arrive(self, request: Request, event: RequestArrived, now: float) -> None:
        """See Resource."""
        for answer in self._arrivals:
            answer(request, event, now)

    def on_event(self, event: ResourceEvent, live: Mapping[str, Request]) -> None:
        """See Resource."""
        for answer in self._events:
            answer(event, live)

    def keeper(self, run: Run, how: RunEnd) -> Resource | None:
        """The first resource that keeps the blocks of a run that ends."""
        return next((resource for resource in self._keepers if resource.keeps(run, how)), None)

    def on_run_end(self, run: Run, how: RunEnd) -> None:
        """See Resource."""
        for answer in self._run_ends:
            answer(run, how)

    def on_finish(self, request: Request, now: float) -> None:
        """See Resource."""
        for answer in self._finishes:
            answer(request, now)

    def on_settled(self, rank: RankState, record: StepRecord, event: StepAcked) -> list[Failure]:
        """See Resource."""
        return [failure for answer in self._settlements for failure in answer(rank, record, event)]

    def on_rank_lost(self, rank: RankState, in_flight: Sequence[Request], *, graceful: bool) -> list[Failure]:
        """See Resource."""
        return [
            failure for resource in self._all for failure in resource.on_rank_lost(rank, in_flight, graceful=graceful)
        ]

    def _answers(self, question: str) -> tuple[Any, ...]:
        """The bound methods of the resources that override this question, in their order."""
        default = getattr(Resource, question)
        return tuple(getattr(r, question) for r in self._all if getattr(type(r), question) is not default)

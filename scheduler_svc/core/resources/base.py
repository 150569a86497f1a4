"""What competes for a place in a step, beside tokens, sequences and blocks: one class for each feature.

A resource is one object per scheduler, with its state per rank where it has any. It answers the questions below; those
that it does not override are not asked. The order of resources is that of the registry; `withdraw` goes in reverse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from scheduler_svc.core.events import EndReason, RequestArrived, RequestRefused, ResourceEvent, StepAcked
from scheduler_svc.core.inflight import StepRecord
from scheduler_svc.core.kv.prefix_index import NO_IDENTITY, Identity
from scheduler_svc.core.output import StepColumns
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.request import Limits, Request, Run, RunEnd


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that ends in error for what a resource has learnt. message: for its client."""

    request: Request
    reason: EndReason
    message: str


@dataclass(frozen=True, slots=True)
class Extension:
    """Tokens whose KV comes from elsewhere. later: the request waits for them, set aside; else they are there when its
    row is computed, and at least one token is left to compute. reserved: blocks that must stay free when this extension
    is set aside, beside the margin that holds for every admission. reason: why the request waits, which puts it
    aside."""

    owner: Resource
    tokens: int
    later: bool
    reserved: int
    reason: SkipReason


class Resource:
    """A feature that does nothing. Only one plan is open at a time, so what concerns the step under construction may be
    kept in the resource; `open` resets it."""

    # Its bit in Run.special, given by the container.
    bit = 0
    # Slots that must be free behind every row.
    lookahead = 0
    # Reasons of its own for leaving a request out.
    reasons: tuple[SkipReason, ...] = ()

    # --- may it start? --------------------------------------------------------------------------------------------

    def identity(self, event: RequestArrived) -> Identity:
        """What the KV of the request's prompt depends on beside its token ids: requests share blocks only if it is
        equal."""
        return NO_IDENTITY

    def refusal(self, event: RequestArrived, limits: Limits, now: float) -> RequestRefused | None:
        """Why a new request is not accepted, although it could run within these limits; None: it is. Not asked for
        requests that were accepted before. Times in seconds of Tick's clock. Changes nothing."""
        return None

    def on_arrive(self, request: Request, event: RequestArrived, now: float) -> None:
        """A request was accepted. May block it, or set needs_result_first."""

    def on_event(self, event: ResourceEvent, live: Mapping[str, Request]) -> None:
        """Something happened that concerns a resource; events of others are ignored. live: live requests by id."""

    def gate(self, plan: StepPlan, request: Request) -> SkipReason | None:
        """Why a waiting request may not be considered in this step, whatever room there is; None: it may. May complete
        what the request waited for. The reason must put aside."""

    def extend(self, plan: StepPlan, request: Request, start: int) -> Extension | SkipReason | None:
        """Tokens whose KV comes from elsewhere, from position `start` on; a reason (which puts aside) if that is not
        known yet; None if there are none. Changes nothing."""
        return None

    def begin(self, plan: StepPlan, run: Run, extension: Extension) -> None:
        """Blocks for an extension of this resource are allocated: start to fill them. If its tokens come later, the run
        is set aside, and the resource blocks its request until they are there."""

    def margin(self, plan: StepPlan, request: Request) -> int:
        """Blocks that the admission of the request must leave free."""
        return 0

    # --- how long is the row? -------------------------------------------------------------------------------------

    def want(self, plan: StepPlan, request: Request, start: int, known: int) -> int | SkipReason:
        """Tokens that a row from position `start` should have beyond the known ones (drafts, for example). A reason:
        the row must have all of them or none, and the step has no room for all. Changes nothing."""
        return 0

    def clip(self, plan: StepPlan, request: Request, start: int, n: int) -> int | SkipReason:
        """How many of `n` tokens from position `start` on the row may have, at least 1; or why it gets none. Claims
        nothing: a later resource may shorten the row, and an admission may fail."""
        return n

    # --- what does it take? ---------------------------------------------------------------------------------------

    def open(self, plan: StepPlan) -> None:
        """A step begins: budgets are full."""

    def take(self, plan: StepPlan, run: Run, start: int, n: int) -> None:
        """The row is final: claim what it needs. Asked for runs that are special, which admitted ones are."""

    def withdraw(self, plan: StepPlan, run: Run) -> None:
        """Exact inverse of `take`; no effect for a run that took nothing, and the second time."""

    def build(self, plan: StepPlan, columns: StepColumns) -> None:
        """All rows are final: write the columns of this resource."""

    # --- what happens to runs and requests ------------------------------------------------------------------------

    def keeps(self, run: Run, how: RunEnd) -> bool:
        """The run ends: True if its blocks must not be freed yet. The rank keeps them in a Hold with this resource as
        its owner, until the resource releases it."""
        return False

    def on_run_end(self, run: Run, how: RunEnd) -> None:
        """A run has ended."""

    def on_finish(self, request: Request, now: float) -> None:
        """A request has ended, whether or not it ever ran."""

    # --- what workers say -----------------------------------------------------------------------------------------

    def on_settled(self, rank: RankState, record: StepRecord, event: StepAcked) -> Iterable[Failure]:
        """All rows of a result are settled, and requests that it ends have ended."""
        return ()

    def on_rank_lost(self, rank: RankState, in_flight: Sequence[Request], *, graceful: bool) -> Iterable[Failure]:
        """The rank's epoch is over and its runs have ended. in_flight: requests whose rows were in flight, in the order
        of the rows; graceful: the worker left in an orderly way."""
        return ()

    # --- accounts -------------------------------------------------------------------------------------------------

    def claims(self, run: Run) -> bool:
        """Whether the resource's bit of this run must be set: the truth, for the invariants."""
        return False

    def snapshot(self, rank: RankState) -> object:
        """What `take` changes, as a value that can be compared: after `withdraw` it is what it was before."""
        return None

    def check(self, rank: RankState) -> Iterator[str]:
        """Own invariants that are broken."""
        return iter(())

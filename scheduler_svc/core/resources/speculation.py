"""Draft tokens (speculative decoding): guesses that a worker verifies in one row of 1 + k tokens.

Drafts come from the scheduler's own proposer after each result, or from outside as DraftsProposed. A row takes those
for which it has room; the rest is lost, since it would be stale next time. KV of rejected drafts is overwritten later:
settlement counts only what was accepted."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import DraftsProposed, RequestArrived, ResourceEvent, StepAcked
from scheduler_svc.core.inflight import StepRecord
from scheduler_svc.core.output import StepColumns
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.request import FINISHED, Request, Run, RunEnd
from scheduler_svc.core.resources.base import Failure, Resource
from scheduler_svc.core.resources.ngram import NgramProposer

DRAFTS_EXCEED_STEP = SkipReason("DRAFTS_EXCEED_STEP", "its padded drafts do not fit in the step")


class Speculation(Resource):
    """Drafts by request: they may come for one that was preempted meanwhile."""

    reasons = (DRAFTS_EXCEED_STEP,)

    def __init__(self, config: SchedulerConfig) -> None:
        self.lookahead = config.num_lookahead_slots
        self.drafts: dict[Request, list[int]] = {}
        self._width = config.num_speculative_tokens
        self._pads = self._width > 0 and not config.rules.proposes_drafts
        self._proposer = NgramProposer(self._width) if config.proposes_drafts else None
        # Of the open step: the drafts in its rows; what waited for the rows that took some; and whether a running
        # partial prefill got tokens.
        self._rows: dict[Run, list[int]] = {}
        self._waiting: dict[Run, list[int]] = {}
        self._has_chunk = False

    @classmethod
    def is_on(cls, config: SchedulerConfig) -> bool:
        """Whether this configuration has drafts."""
        return config.num_speculative_tokens > 0 or not config.rules.proposes_drafts

    def on_arrive(self, request: Request, event: RequestArrived, now: float) -> None:
        """See Resource. Drafts of the proposer continue the last known token."""
        if self._proposer is not None:
            request.needs_result_first = True

    def on_event(self, event: ResourceEvent, live: Mapping[str, Request]) -> None:
        """See Resource. Drafts for a request in the middle of its prompt are ignored."""
        if isinstance(event, DraftsProposed):
            for request_id, drafts in event.drafts.items():
                request = live.get(request_id)
                if request is not None and (request.run is None or not request.run.is_prefill_chunk):
                    self._give(request, list(drafts))

    def want(self, plan: StepPlan, request: Request, start: int, known: int) -> int | SkipReason:
        """See Resource. An admission of one token beside decodes that carry drafts is padded, if the rules say so, so
        that all rows of the step have the same width."""
        if request.run is not None and not request.run.ended:
            return len(self.drafts.get(request, ()))
        decodes_only = len(plan.runs) > len(plan.admitted) and not self._has_chunk
        if not (self._pads and known - start == 1 and decodes_only):
            return 0
        if 1 + self._width > plan.tokens_left or start + 1 + self._width > plan.longest:
            return DRAFTS_EXCEED_STEP
        return self._width

    def open(self, plan: StepPlan) -> None:
        """See Resource."""
        self._rows, self._waiting, self._has_chunk = {}, {}, False

    def take(self, plan: StepPlan, run: Run, start: int, n: int) -> None:
        """See Resource."""
        request = run.request
        if not run.last_fence:
            # Its first row.
            # Padding: placeholders for what the row has beyond the known tokens.
            if (num_padding := start + n - request.num_tokens) > 0:
                self._put(plan, run, [-1] * num_padding)
            if request in self.drafts:
                run.mark(self.bit)
            return
        self._has_chunk |= run.is_prefill_chunk
        if request in self.drafts:
            self._waiting[run] = self.drafts.pop(request)
            run.clear(self.bit)
            if (count := start + n - request.num_tokens - request.awaited) > 0:
                self._put(plan, run, self._waiting[run][:count])

    def withdraw(self, plan: StepPlan, run: Run) -> None:
        """See Resource."""
        if self._rows.pop(run, None) is not None:
            del plan.may_yield[run]
        if (drafts := self._waiting.pop(run, None)) is not None:
            self._give(run.request, drafts)

    def build(self, plan: StepPlan, columns: StepColumns) -> None:
        """See Resource."""
        if self._rows:
            rows = [self._rows.get(run, ()) for run in plan.runs]
            columns.num_drafts = array("i", [len(drafts) for drafts in rows])
            columns.draft_token_ids = array("i", [token for drafts in rows for token in drafts])

    def on_run_end(self, run: Run, how: RunEnd) -> None:
        """See Resource."""
        self.drafts.pop(run.request, None)

    def on_finish(self, request: Request, now: float) -> None:
        """See Resource."""
        self.drafts.pop(request, None)

    def on_settled(self, rank: RankState, record: StepRecord, event: StepAcked) -> Iterable[Failure]:
        """See Resource. The proposer continues every run that yielded tokens and goes on."""
        if self._proposer is None:
            return ()
        counts = record.expected if event.counts is None else event.counts
        for run, count in zip(record.runs, counts, strict=True):
            if count and not run.ended:
                self._give(run.request, self._proposer.propose(run.request.tokens))
        return ()

    def claims(self, run: Run) -> bool:
        """See Resource."""
        return run.request in self.drafts

    def snapshot(self, rank: RankState) -> object:
        """See Resource."""
        return (
            {request: tuple(drafts) for request, drafts in self.drafts.items()},
            {run: tuple(drafts) for run, drafts in self._rows.items()},
        )

    def check(self, rank: RankState) -> Iterator[str]:
        """See Resource. Only drafts from outside come for requests that wait."""
        for request in self.drafts:
            if request.status in FINISHED:
                yield f"{request.request_id} has ended and has drafts"
            elif self._proposer is not None and (request.run is None or request.run.ended):
                yield f"{request.request_id} waits with drafts"

    def _give(self, request: Request, drafts: list[int]) -> None:
        """Drafts for the next row of the request, in place of those it has."""
        run = request.run
        if drafts:
            self.drafts[request] = drafts
            if run is not None and not run.ended:
                run.mark(self.bit)
        else:
            self.drafts.pop(request, None)
            if run is not None and not run.ended:
                run.clear(self.bit)

    def _put(self, plan: StepPlan, run: Run, drafts: list[int]) -> None:
        self._rows[run] = drafts
        plan.may_yield[run] = len(drafts)

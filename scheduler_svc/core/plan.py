"""The plan of one step while it is made: rows, budgets, blocks, and what may still be taken back.

Nothing a plan holds is visible to the request's counters before `build`; blocks and cached block hashes are, and
`withdraw` gives those back. Rows are kept as parallel lists: an object per row would cost more than deciding it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.core.inflight import StepRecord
from scheduler_svc.core.output import RESOURCE_COLUMNS, DeferredFree, NewRow, SchedulerOutput, StepColumns
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.request import CHUNK, Request, Run
from scheduler_svc.core.stats import Totals
from scheduler_svc.core.step_bytes import row_bytes

# Longer than any sequence.
_UNBOUNDED = 1 << 31


@dataclass(frozen=True, slots=True)
class Claims:
    """The questions to resources that a plan asks itself; see Resource. withdraws: in reverse order."""

    opens: tuple[Callable[[StepPlan], None], ...] = ()
    takes: tuple[Callable[[StepPlan, Run, int, int], None], ...] = ()
    withdraws: tuple[Callable[[StepPlan, Run], None], ...] = ()
    builds: tuple[Callable[[StepPlan, StepColumns], None], ...] = ()


class StepPlan:
    """One step of `rank` under construction, with `tokens_left` tokens to give."""

    __slots__ = (
        "_cached_before",
        "_claims",
        "_fence_needs",
        "admitted",
        "bytes_left",
        "caught_up",
        "grown",
        "longest",
        "may_yield",
        "must_send",
        "num_tokens",
        "preempted",
        "rank",
        "reserved_free",
        "reserved_parked",
        "runs",
        "tokens_left",
    )

    def __init__(
        self,
        rank: RankState,
        tokens_left: int,
        *,
        longest: int = _UNBOUNDED,
        claims: Claims | None = None,
        column_bytes: int = 0,
    ) -> None:
        self.rank = rank
        self.tokens_left = tokens_left
        # Of the message, for the entries of admitted requests; None: any number.
        self.bytes_left = None if rank.max_step_bytes is None else rank.max_step_bytes - column_bytes
        # Of any sequence, in tokens.
        self.longest = longest
        # Rows in scheduling order: running ones, then admitted ones.
        self.runs: list[Run] = []
        self.num_tokens: list[int] = []
        # Whether the step goes out although it has no row and no news.
        self.must_send = False
        # Running requests that got new blocks, with those.
        self.grown: dict[Run, list[int]] = {}
        # Tokens that a row may yield beyond one, for the rows that may.
        self.may_yield: dict[Run, int] = {}
        self.admitted: list[Run] = []
        self.preempted: list[Run] = []
        # Requests that have computed again, with this step, all that they had lost.
        self.caught_up: list[Request] = []
        self._cached_before: dict[Run, int] = {}
        # Blocks that requests waiting for a fence count on: free ones, and parked ones that will return.
        self._fence_needs: dict[Run, tuple[int, int]] = {}
        self.reserved_free = 0
        self.reserved_parked = 0
        self._claims = Claims() if claims is None else claims
        for open_step in self._claims.opens:
            open_step(self)

    # --- what is left ---------------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Free blocks minus those reserved in this step for requests that wait for a fence."""
        return self.rank.kv.pool.num_free - self.reserved_free

    @property
    def num_returning_blocks(self) -> int:
        """Parked blocks that no table holds, minus those reserved in this step for requests that wait for a fence."""
        return self.rank.kv.pool.num_parked - self.reserved_parked

    @property
    def awaits_fence(self) -> bool:
        return bool(self._fence_needs)

    def has_bytes_for(self, request: Request, num_slots: int) -> bool:
        """Whether the message has room for the entry of a request with blocks for so many tokens. The first one always
        fits, unless more requests are to be dropped than one message can name."""
        if self.bytes_left is None:
            return True
        if len(self.rank.preempted) + len(self.rank.finished) > self.rank.num_rows:
            return False
        return not self.admitted or self._entry_bytes(request, num_slots) <= self.bytes_left

    def admit(self, run: Run, start: int, n: int) -> None:
        """The first row of a run, whose request enters the worker's batch in full."""
        if self.bytes_left is not None:
            self.bytes_left -= self._entry_bytes(run.request, run.capacity)
        self.admitted.append(run)
        self.take(run, start, n)

    def _entry_bytes(self, request: Request, num_slots: int) -> int:
        num_blocks = self.rank.kv.blocks_for(num_slots)
        return row_bytes(request.num_tokens, num_blocks, request.request_id, request.sampling)

    # --- changes --------------------------------------------------------------------------------------------------

    def take(self, run: Run, start: int, n: int) -> None:
        """A row of n tokens from position `start` on: its full blocks are cached, and resources claim what it needs.
        The pass over running requests adds rows of plain decodes itself, without a call for each (record 7)."""
        known_end = min(start + n, run.request.num_tokens)
        if known_end >= run.cache_at:
            self.cache(run, known_end)
        self.runs.append(run)
        self.num_tokens.append(n)
        self.tokens_left -= n
        if run.special:
            for take in self._claims.takes:
                take(self, run, start, n)

    def grow(self, run: Run, count: int) -> None:
        self.grown[run] = self.rank.kv.grow(run, count)

    def wait_for_fence(self, run: Run, need: int) -> None:
        """`run` gets nothing in this step; keep what it counts on from every request behind it."""
        free = min(need, self.num_free_blocks)
        self._fence_needs[run] = (free, need - free)
        self.reserved_free += free
        self.reserved_parked += need - free

    def cache(self, run: Run, num_tokens: int) -> None:
        """Enter full blocks in the prefix index although this step computes them: contract rule 11 makes that safe."""
        self._cached_before.setdefault(run, run.num_cached)
        self.rank.kv.cache_blocks(run, num_tokens)

    def withdraw(self, victim: Run) -> None:
        """Take back all this step gave `victim`: its claim on returning blocks, what resources gave it, the hashes of
        blocks that will now not be computed, the entry of its new blocks (the blocks themselves go with its table), and
        its row. Before its run is ended."""
        free, parked = self._fence_needs.pop(victim, (0, 0))
        self.reserved_free -= free
        self.reserved_parked -= parked
        for withdraw in self._claims.withdraws:
            withdraw(self, victim)
        if victim in self._cached_before:
            self.rank.kv.uncache_blocks(victim, self._cached_before.pop(victim))
        self.grown.pop(victim, None)
        if victim in self.runs:
            index = self.runs.index(victim)
            self.tokens_left += self.num_tokens[index]
            del self.runs[index], self.num_tokens[index]

    # --- the result -----------------------------------------------------------------------------------------------

    def build(self, totals: Totals) -> SchedulerOutput | None:
        """Commit: number the step, count its tokens as in flight, and put it into the window. None, with nothing
        changed, when there is nothing to tell the worker."""
        rank, window = self.rank, self.rank.window
        if not (self.runs or rank.has_news or self.must_send):
            return None
        step_seq = window.newest_step + 1
        fence_seq = window.newest_fence + 1 if self.runs else window.newest_fence
        # Before the counters move: num_computed is the state before this step.
        # Resumed requests come after new ones, as in the reference.
        new_requests = tuple(_new_row(run) for run in sorted(self.admitted, key=_was_preempted))
        expected, num_sampling = self._commit(fence_seq, totals)
        preempted, finished = rank.take_dropped()
        columns = StepColumns()
        for build in self._claims.builds:
            build(self, columns)
        output = SchedulerOutput(
            rank=rank.name,
            epoch=rank.epoch,
            step_seq=step_seq,
            fence_seq=fence_seq,
            processed_step_seq=window.acked_step,
            new_requests=new_requests,
            rows=array("i", [run.row for run in self.runs]),
            num_tokens=array("i", self.num_tokens),
            appended_rows=array("i", [run.row for run, blocks in self.grown.items() for _ in blocks]),
            appended_blocks=array("i", [b for blocks in self.grown.values() for b in blocks]),
            preempted_request_ids=tuple(request_id for request_id, _ in preempted),
            finished_request_ids=tuple(request_id for request_id, _ in finished),
            deferred_frees=tuple(
                DeferredFree(f.fence, f.request_id, f.blocks, f.reason) for f in rank.kv.parked.unannounced
            ),
            total_num_tokens=sum(self.num_tokens),
            **{name: getattr(columns, name) for name in RESOURCE_COLUMNS},
        )
        window.push(
            StepRecord(
                step_seq=step_seq,
                fence_seq=fence_seq if self.runs else 0,
                runs=self.runs,
                num_tokens=self.num_tokens,
                expected=expected,
                num_sampling=num_sampling,
                yields_more=bool(self.may_yield),
                released_rows=[row for _, row in (*preempted, *finished) if row >= 0],
            )
        )
        rank.kv.parked.unannounced = []
        return output

    def _commit(self, fence_seq: int, totals: Totals) -> tuple[list[int], int]:
        """Count every row as in flight. Returns the most tokens each may yield, and how many rows sample."""
        expected: list[int] = []
        num_sampling = 0
        for run, n in zip(self.runs, self.num_tokens, strict=True):
            request = run.request
            run.last_fence = fence_seq
            run.in_flight += n
            end = run.settled + run.in_flight
            if end >= request.num_tokens + request.awaited:
                if run.special & CHUNK:
                    self._count_recomputed(request, end - n, end, totals)
                    self.rank.set_chunk(run, False)
                    if end < request.account.high_water:
                        # What else it had lost were tokens that had not come; those are sampled again.
                        self.caught_up.append(request)
                tokens = 1 if not self.may_yield else 1 + self.may_yield.get(run, 0)
                request.awaited += tokens
                if tokens > 1:
                    request.awaited_optional += tokens - 1
                num_sampling += 1
                expected.append(tokens)
            else:
                self._count_recomputed(request, end - n, end, totals)
                self.rank.set_chunk(run, True)
                expected.append(0)
        totals.num_computed_tokens += sum(self.num_tokens)
        return expected, num_sampling

    def _count_recomputed(self, request: Request, start: int, end: int, totals: Totals) -> None:
        again = min(end, request.account.high_water) - start
        if again > 0:
            request.account.num_recomputed_tokens += again
            totals.num_recomputed_tokens += again
            by_cause = totals.recomputed_by_cause
            by_cause[request.account.preemption_cause] = by_cause.get(request.account.preemption_cause, 0) + again
            if end >= request.account.high_water:
                self.caught_up.append(request)


def _was_preempted(run: Run) -> bool:
    return run.request.account.num_preemptions > 0


def _new_row(run: Run) -> NewRow:
    request = run.request
    return NewRow(
        request_id=request.request_id,
        row=run.row,
        token_ids=request.tokens[:],
        block_table=array("i", run.blocks),
        num_computed_tokens=run.settled,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
    )

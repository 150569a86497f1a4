"""What a worker holds, as numbers: enough to judge every step before anything of it is executed.

The ledger knows for each row its request, how many tokens it has and how many of them are in KV, and the size of its
block table. Token values and KV live in the runner. Two things make it possible to judge step N+1 while N still runs:
a row samples exactly one token when it has computed all it knows, and with drafts the ledger counts them as accepted
until `settle` takes back what was rejected. Its numbers are therefore upper bounds, and never above the scheduler's
own.

One rule about rows covers prefill, decode and drafts: with `base` = tokens without drafts and `unseen` = tokens known
but not in KV, 1 <= base <= unseen, and drafts only where base = unseen. A decoding row has unseen = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from worker_svc.errors import MalformedStep, StepRefused
from worker_svc.runner.base import Geometry, RunnerCapabilities
from worker_svc.step import AddedRequest, Int32Column, Step, StepOutput

_Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """The rows of one step that had drafts, for `Ledger.settle`. `runs` tells occupants of a row apart."""

    # Positions within the step.
    at: npt.NDArray[np.intp]
    rows: Int32Column
    num_drafts: Int32Column
    runs: _Counts


class Ledger:
    """State of one epoch's batch. `apply` every step once, in order; after a refusal the ledger is void, as the epoch
    is."""

    def __init__(self, geometry: Geometry, num_blocks: int, capabilities: RunnerCapabilities) -> None:
        self._geometry: Final = geometry
        self._num_blocks: Final = num_blocks
        self._capabilities: Final = capabilities
        self._max_table_len: Final = -(-geometry.max_model_len // geometry.block_size)
        self._row_of: Final[dict[str, int]] = {}
        self._id_at: Final[list[str | None]] = [None] * geometry.num_rows
        self._tables: Final[list[set[int]]] = [set() for _ in range(geometry.num_rows)]
        self._known: Final[_Counts] = np.zeros(geometry.num_rows, np.int64)
        self._computed: Final[_Counts] = np.zeros(geometry.num_rows, np.int64)
        # Tokens for which the block table has slots; 0: nobody in this row.
        self._capacity: Final[_Counts] = np.zeros(geometry.num_rows, np.int64)
        self._is_held: Final = np.zeros(geometry.num_rows, np.bool_)
        self._is_greedy: Final = np.zeros(geometry.num_rows, np.bool_)
        self._run: Final[_Counts] = np.zeros(geometry.num_rows, np.int64)
        self._num_runs = 0

    @property
    def num_rows_held(self) -> int:
        return len(self._row_of)

    def bounds(self, row: int) -> tuple[int, int]:
        """Most tokens that the request in this row can have, and most of them that can be in KV."""
        return int(self._known[row]), int(self._computed[row])

    def apply(self, step: Step) -> DraftedRows | None:
        """Judge a step and take it as done; the rows with drafts, if any, for `settle`.

        Raises MalformedStep (values that fit no state) or StepRefused (values that do not fit this one).
        """
        for request_id in step.dropped_ids:
            self._drop(request_id)
        self._add_all(step.added)
        self._append_blocks(step.appended_rows, step.appended_blocks)
        if not len(step.rows):
            return None
        return self._compute(step)

    def settle(self, drafted: DraftedRows, output: StepOutput) -> None:
        """Take back rejected drafts of rows that still belong to the request that had them.

        An output whose counts do not fit the step changes nothing: it ends the epoch on the scheduler's side.
        """
        counts = output.sampled_counts
        if counts is None:
            accepted = np.zeros(len(drafted.at), np.int64)
        elif int(drafted.at.max()) < len(counts):
            accepted = counts[drafted.at].astype(np.int64) - 1
        else:
            return
        rejected = np.clip(drafted.num_drafts - accepted, 0, drafted.num_drafts)
        rejected[self._run[drafted.rows] != drafted.runs] = 0
        # A row may stand in a step once only, so that fancy indexing counts each.
        self._known[drafted.rows] -= rejected
        self._computed[drafted.rows] -= rejected

    def _drop(self, request_id: str) -> None:
        row = self._row_of.pop(request_id, None)
        if row is None:
            return
        self._id_at[row] = None
        self._tables[row] = set()
        self._known[row] = self._computed[row] = self._capacity[row] = self._run[row] = 0
        self._is_held[row] = False

    def _add_all(self, added: tuple[AddedRequest, ...]) -> None:
        ids = {request.request_id for request in added}
        if len(ids) != len(added):
            raise MalformedStep("new_requests: an id appears twice")
        # All replaced ones leave before anybody enters, so that two requests may swap rows.
        for request in added:
            self._drop(request.request_id)
        for request in added:
            self._add(request)

    def _add(self, request: AddedRequest) -> None:
        row, name, geometry = request.row, request.request_id, self._geometry
        if row >= geometry.num_rows:
            raise StepRefused("UNKNOWN_ROW", f"{name}: row {row} of {geometry.num_rows}")
        if self._id_at[row] is not None:
            raise StepRefused("ROW_TAKEN", f"{name}: row {row} belongs to {self._id_at[row]}")
        self._check_tokens(request)
        table = self._check_table(request)
        self._num_runs += 1
        self._row_of[name] = row
        self._id_at[row] = name
        self._tables[row] = table
        self._known[row] = len(request.token_ids)
        self._computed[row] = request.num_computed_tokens
        self._capacity[row] = len(table) * geometry.block_size
        self._run[row] = self._num_runs
        self._is_held[row] = True
        self._is_greedy[row] = request.sampling.temperature == 0

    def _check_tokens(self, request: AddedRequest) -> None:
        name = request.request_id
        if len(request.token_ids) > self._geometry.max_model_len:
            raise StepRefused(
                "TOO_LONG", f"{name}: {len(request.token_ids)} tokens, max_model_len {self._geometry.max_model_len}"
            )
        if int(request.token_ids.max()) >= self._capabilities.vocab_size:
            raise MalformedStep(
                f"{name}: token id {int(request.token_ids.max())}, vocabulary {self._capabilities.vocab_size}"
            )
        if request.num_computed_tokens % self._geometry.block_size:
            raise MalformedStep(
                f"{name}: {request.num_computed_tokens} computed tokens, blocks of {self._geometry.block_size}"
            )

    def _check_table(self, request: AddedRequest) -> set[int]:
        name, blocks = request.request_id, request.block_table
        if len(blocks) > self._max_table_len:
            raise StepRefused("TABLE_TOO_LONG", f"{name}: {len(blocks)} blocks, at most {self._max_table_len}")
        if len(blocks) and int(blocks.max()) >= self._num_blocks:
            raise StepRefused("UNKNOWN_BLOCK", f"{name}: block {int(blocks.max())} of {self._num_blocks}")
        if len(blocks) * self._geometry.block_size < request.num_computed_tokens:
            raise StepRefused(
                "TABLE_TOO_SMALL", f"{name}: {request.num_computed_tokens} computed tokens in {len(blocks)} blocks"
            )
        table = set(blocks.tolist())
        if len(table) != len(blocks):
            raise StepRefused("REPEATED_BLOCK", f"{name}: a block appears twice in its table")
        return table

    def _append_blocks(self, rows: Int32Column, blocks: Int32Column) -> None:
        for row, block in zip(rows.tolist(), blocks.tolist(), strict=True):
            if row >= self._geometry.num_rows or self._id_at[row] is None:
                raise StepRefused("UNKNOWN_ROW", f"appended_rows: nobody is in row {row}")
            table = self._tables[row]
            if block >= self._num_blocks:
                raise StepRefused("UNKNOWN_BLOCK", f"row {row}: block {block} of {self._num_blocks}")
            if block in table:
                raise StepRefused("REPEATED_BLOCK", f"row {row}: block {block} is in its table already")
            if len(table) == self._max_table_len:
                raise StepRefused("TABLE_TOO_LONG", f"row {row}: more than {self._max_table_len} blocks")
            table.add(block)
            self._capacity[row] += self._geometry.block_size

    def _compute(self, step: Step) -> DraftedRows | None:
        rows, num_tokens = step.rows, step.num_tokens.astype(np.int64)
        self._check_rows(rows, num_tokens)
        num_drafts = step.num_drafts if len(step.num_drafts) else np.zeros(len(rows), np.int32)
        base = num_tokens - num_drafts
        known, computed = self._known[rows], self._computed[rows]
        unseen = known - computed
        self._refuse_any(base < 1, step, "MALFORMED_DRAFTS", "drafts only, no token of its own")
        self._refuse_any(base > unseen, step, "BEYOND_KNOWN", "more tokens than are known and not yet computed")
        self._refuse_any((num_drafts > 0) & (base < unseen), step, "DRAFTS_IN_PREFILL", "drafts before the end")
        drafted = self._check_drafts(step, num_drafts) if len(step.draft_token_ids) else None
        after = computed + num_tokens
        self._refuse_any(after > self._capacity[rows], step, "TABLE_TOO_SMALL", "its block table has no slots for them")
        self._refuse_any(after > self._geometry.max_model_len, step, "TOO_LONG", "beyond max_model_len")
        self._computed[rows] = after
        self._known[rows] = np.where(base == unseen, after + 1, known)
        return drafted

    def _check_rows(self, rows: Int32Column, num_tokens: _Counts) -> None:
        if len(rows) > self._geometry.num_rows or int(rows.max()) >= self._geometry.num_rows:
            raise StepRefused("UNKNOWN_ROW", f"rows: {int(rows.max())} of {self._geometry.num_rows}")
        held = self._is_held[rows]
        if not held.all():
            raise StepRefused("UNKNOWN_ROW", f"rows: nobody is in row {int(rows[~held][0])}")
        if int(np.bincount(rows).max()) > 1:
            raise MalformedStep("rows: a row appears twice")
        total = int(num_tokens.sum())
        if total > self._geometry.max_num_batched_tokens:
            raise StepRefused("OVER_LIMIT", f"{total} tokens, at most {self._geometry.max_num_batched_tokens}")

    def _check_drafts(self, step: Step, num_drafts: Int32Column) -> DraftedRows:
        rows = step.rows
        if int(step.draft_token_ids.max()) >= self._capabilities.vocab_size:
            raise MalformedStep(
                f"draft_token_ids: {int(step.draft_token_ids.max())}, vocabulary {self._capabilities.vocab_size}"
            )
        too_many = num_drafts > self._capabilities.max_num_drafts
        self._refuse_any(
            too_many, step, "OVER_LIMIT", f"more than {self._capabilities.max_num_drafts} drafts are not verified here"
        )
        if not self._capabilities.verifies_sampled_drafts:
            sampled = (num_drafts > 0) & ~self._is_greedy[rows]
            self._refuse_any(sampled, step, "DRAFTS_NOT_VERIFIED", "drafts of sampled rows are not verified here")
        at = np.flatnonzero(num_drafts)
        return DraftedRows(at=at, rows=rows[at], num_drafts=num_drafts[at], runs=self._run[rows[at]].copy())

    def _refuse_any(self, bad: npt.NDArray[np.bool_] | Any, step: Step, reason: str, what: str) -> None:
        if not bad.any():
            return
        at = int(np.flatnonzero(bad)[0])
        row = int(step.rows[at])
        raise StepRefused(
            reason,
            f"row {row} ({self._id_at[row]}): {int(step.num_tokens[at])} tokens with {int(self._computed[row])} of "
            f"{int(self._known[row])} computed and slots for {int(self._capacity[row])}: {what}",
        )

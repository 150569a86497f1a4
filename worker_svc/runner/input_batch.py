"""The worker's persistent batch: what each row holds between steps, as host columns indexed by row.

The scheduler chooses rows and sends changes only. Sampled tokens are not kept here: they stay on the device
(`last_tokens` of the runner); the batch knows how many tokens were computed, which needs no token values.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from worker_svc.runner.base import Geometry
from worker_svc.sampling import SamplingTable
from worker_svc.step import AddedRequest, Int32Column, Step


class InputBatch:
    """Rows and their columns. The service has checked that steps are consistent; nothing here guesses."""

    def __init__(self, geometry: Geometry) -> None:
        rows = geometry.num_rows
        max_blocks = -(-geometry.max_model_len // geometry.block_size)
        self.block_size = geometry.block_size
        self.block_table: npt.NDArray[np.int32] = np.zeros((rows, max_blocks), np.int32)
        self.num_blocks = np.zeros(rows, np.int32)
        # Tokens whose KV is in the blocks. Exact after every step: rejected drafts are taken off.
        self.num_computed = np.zeros(rows, np.int32)
        # Tokens the request arrived with; positions from here on hold sampled tokens.
        self.num_given = np.zeros(rows, np.int32)
        self.num_prompt = np.zeros(rows, np.int32)
        self.sampling = SamplingTable(rows)
        self.token_ids: list[Int32Column | None] = [None] * rows
        self._row_of: dict[str, int] = {}

    @property
    def num_rows_held(self) -> int:
        """Requests in the batch."""
        return len(self._row_of)

    def apply(self, step: Step) -> None:
        """Drop, add, append, in this order."""
        for request_id in step.dropped_ids:
            self._drop(request_id)
        for added in step.added:
            self._drop(added.request_id)
        for added in step.added:
            self._add(added)
        if len(step.appended_rows):
            self._append(step.appended_rows, step.appended_blocks)

    def _drop(self, request_id: str) -> None:
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self.token_ids[row] = None

    def _add(self, added: AddedRequest) -> None:
        row = added.row
        self._row_of[added.request_id] = row
        self.token_ids[row] = added.token_ids
        self.num_given[row] = len(added.token_ids)
        self.num_prompt[row] = added.num_prompt_tokens
        self.num_computed[row] = added.num_computed_tokens
        self.num_blocks[row] = len(added.block_table)
        self.block_table[row, : len(added.block_table)] = added.block_table
        self.block_table[row, len(added.block_table) :] = 0
        self.sampling.put(row, added.sampling)

    def _append(self, rows: Int32Column, blocks: Int32Column) -> None:
        # A row may be named several times: its k-th block here goes k places behind its last.
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        first = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
        counts = np.diff(np.r_[first, len(ordered)])
        place = np.arange(len(ordered)) - np.repeat(first, counts)
        self.block_table[ordered, self.num_blocks[ordered] + place] = blocks[order]
        self.num_blocks[ordered[first]] += counts.astype(np.int32)

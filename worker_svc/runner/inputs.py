"""One step's host arrays, built from the persistent batch: what goes to the device and what is sampled.

Rows are laid out as the attention backend likes them. Results go back in the step's own order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker_svc.attention.base import RaggedBatch
from worker_svc.runner.input_batch import InputBatch
from worker_svc.sampler import SamplingRows
from worker_svc.step import Int32Column, Step

Int64Array = npt.NDArray[np.int64]
# See AttentionBackend.row_order.
RowOrder = Callable[[Int64Array, Int64Array], npt.NDArray[np.intp]]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """T tokens in layout order; S rows of logits, those of one row of the step together, in the step's order."""

    token_ids: Int64Array
    positions: Int64Array
    slots: Int64Array
    ragged: RaggedBatch
    # Tokens that are the row's last sampled token, and that row: filled in on the device.
    fed_tokens: Int64Array
    fed_rows: Int64Array
    logit_tokens: Int64Array
    # Rows (of the batch) that sample, in the step's order, how many logits each has (drafts + 1) and its drafts.
    sampling_rows: Int64Array
    num_logits: Int64Array
    draft_token_ids: Int64Array
    sampling: SamplingRows
    # Parallel to the step's rows: whether it samples.
    samples: npt.NDArray[np.bool_]


def build_inputs(batch: InputBatch, step: Step, row_order: RowOrder) -> StepInputs:
    """The arrays of a step with at least one row; `batch` has the step's changes applied, but computed counts from
    before. row_order: the attention backend's."""
    rows = step.rows.astype(np.int64)
    num_tokens = step.num_tokens.astype(np.int64)
    num_drafts = step.num_drafts.astype(np.int64) if len(step.num_drafts) else np.zeros(len(rows), np.int64)
    computed = batch.num_computed[rows].astype(np.int64)
    order = row_order(computed, num_tokens)

    query_start = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(num_tokens[order], out=query_start[1:])
    start = np.empty(len(rows), np.int64)  # of each row of the step, in layout order
    start[order] = query_start[:-1]
    layout_rows = np.repeat(rows[order], num_tokens[order])
    positions = np.arange(query_start[-1]) + np.repeat(computed[order] - query_start[:-1], num_tokens[order])
    blocks = batch.block_table[layout_rows, positions // batch.block_size]
    token_ids = _given_tokens(batch, rows, num_tokens, computed, start)
    _place_drafts(token_ids, step.draft_token_ids, start + num_tokens - num_drafts, num_drafts)
    real = num_tokens - num_drafts
    # The token after everything given is the last sampled one; later ones are drafts.
    fed = np.flatnonzero(computed + real > batch.num_given[rows])
    samples = computed + real >= batch.num_given[rows]

    seq_lens = (computed + num_tokens)[order].astype(np.int32)
    used_blocks = -(-int(seq_lens.max()) // batch.block_size)
    picked = np.flatnonzero(samples)
    num_logits = num_drafts[picked] + 1
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        slots=blocks.astype(np.int64) * batch.block_size + positions % batch.block_size,
        ragged=RaggedBatch(query_start.astype(np.int32), seq_lens, batch.block_table[rows[order], :used_blocks]),
        fed_tokens=start[fed] + real[fed] - 1,
        fed_rows=rows[fed],
        logit_tokens=_ranges(start[picked] + real[picked] - 1, num_logits),
        sampling_rows=rows[picked],
        num_logits=num_logits,
        draft_token_ids=step.draft_token_ids.astype(np.int64),
        sampling=_sampling(batch, rows[picked], num_logits, (computed + real)[picked]),
        samples=samples,
    )


def _ranges(starts: Int64Array, counts: Int64Array) -> Int64Array:
    """starts[i], starts[i] + 1, ... counts[i] of them, for every i."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    ranges: Int64Array = np.arange(total) + np.repeat(starts - (ends - counts), counts)
    return ranges


def _given_tokens(
    batch: InputBatch, rows: Int64Array, num_tokens: Int64Array, computed: Int64Array, start: Int64Array
) -> Int64Array:
    """Token ids where the request brought them, 0 elsewhere."""
    token_ids = np.zeros(int(num_tokens.sum()), np.int64)
    for i in np.flatnonzero(computed < batch.num_given[rows]).tolist():
        given = batch.token_ids[int(rows[i])]
        assert given is not None
        piece = given[computed[i] : computed[i] + num_tokens[i]]
        token_ids[start[i] : start[i] + len(piece)] = piece
    return token_ids


def _place_drafts(token_ids: Int64Array, drafts: Int32Column, first: Int64Array, counts: Int64Array) -> None:
    if len(drafts):
        token_ids[_ranges(first, counts)] = drafts


def _sampling(batch: InputBatch, rows: Int64Array, num_logits: Int64Array, num_known: Int64Array) -> SamplingRows:
    """One entry per row of logits. num_known: tokens before the first of them is sampled."""
    each = np.repeat(rows, num_logits)
    output_index = _ranges(num_known - batch.num_prompt[rows], num_logits)
    early = np.flatnonzero(output_index < batch.sampling["min_tokens"][each])
    masked = [(int(i), batch.sampling.masked_token_ids[int(each[i])]) for i in early]
    return SamplingRows(batch.sampling.take(each), output_index, [(row, ids) for row, ids in masked if ids])


def accept_drafts(
    sampled: Int64Array, num_logits: Int64Array, drafts: Int64Array
) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """How many of each row's sampled tokens hold, [rows], and which of all sampled tokens they are.

    Position i of a row was sampled given the drafts before it: it holds while all drafts before it were sampled too.
    The first that differs replaces its draft; if none does, the last one is a token gained.
    """
    ends = np.cumsum(num_logits)
    row = np.repeat(np.arange(len(num_logits)), num_logits)
    offset = np.arange(len(sampled)) - np.repeat(ends - num_logits, num_logits)
    has_draft = offset < num_logits[row] - 1
    right = np.zeros(len(sampled), bool)
    right[has_draft] = sampled[has_draft] == drafts
    # Wrong ones so far within the row, the position itself left out.
    wrong = np.cumsum(~right & has_draft)
    before_row = np.r_[0, wrong[ends[:-1] - 1]][row] if len(ends) else wrong
    wrong_before = wrong - (~right & has_draft) - before_row
    holds = wrong_before == 0
    return np.bincount(row[holds], minlength=len(num_logits)).astype(np.int64), holds

"""What one step tells a worker, as the core states it; `workers/codec.py` turns it into the message."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request that enters the worker's batch, new or resumed, in full."""

    request_id: str
    row: int
    token_ids: array[int]
    block_table: array[int]
    num_computed_tokens: int
    num_prompt_tokens: int
    sampling: bytes


@dataclass(frozen=True, slots=True)
class DeferredFree:
    """Blocks freed by their request that wait for `fence_seq` to be acknowledged. reason: finished, preempted,
    aborted."""

    fence_seq: int
    request_id: str
    block_ids: tuple[int, ...]
    reason: str


_NO_COLUMN: array[int] = array("i")


@dataclass(slots=True)
class StepColumns:
    """Columns of a step that resources write, each its own. SchedulerOutput has fields of the same names."""

    num_drafts: array[int] | None = None
    draft_token_ids: array[int] = field(default_factory=lambda: _NO_COLUMN)


RESOURCE_COLUMNS = tuple(column.name for column in fields(StepColumns))


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One numbered step. rows and num_tokens are parallel columns in scheduling order (running first, then admitted);
    so are appended_rows and appended_blocks. num_drafts (parallel to rows) is None when no row has drafts."""

    rank: str
    epoch: int
    step_seq: int
    fence_seq: int
    processed_step_seq: int
    new_requests: tuple[NewRow, ...]
    rows: array[int]
    num_tokens: array[int]
    appended_rows: array[int]
    appended_blocks: array[int]
    preempted_request_ids: tuple[str, ...]
    finished_request_ids: tuple[str, ...]
    deferred_frees: tuple[DeferredFree, ...]
    num_drafts: array[int] | None
    draft_token_ids: array[int]
    # Sum of num_tokens.
    total_num_tokens: int

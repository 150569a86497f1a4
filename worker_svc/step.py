"""One step as the worker's own types: what `codec` decodes, `service` orders and a runner executes. No protobuf, no
torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from worker_svc.sampling import Sampling

Int32Column = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AddedRequest:
    """A request that enters the batch at `row`, in full; token_ids are prompt and outputs so far. The next sampled
    token has output index len(token_ids) - num_prompt_tokens."""

    request_id: str
    row: int
    token_ids: Int32Column
    block_table: Int32Column
    num_computed_tokens: int
    num_prompt_tokens: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Step:
    """One numbered step, checked by the codec for well-formed columns. Applied in this order: dropped_ids, added,
    appended, then compute rows. num_tokens includes drafts; num_drafts is parallel to rows, or empty when no row has
    drafts."""

    epoch: int
    step_seq: int
    fence_seq: int
    processed_step_seq: int
    dropped_ids: tuple[str, ...]
    added: tuple[AddedRequest, ...]
    appended_rows: Int32Column
    appended_blocks: Int32Column
    rows: Int32Column
    num_tokens: Int32Column
    num_drafts: Int32Column = field(default_factory=lambda: np.empty(0, np.int32))
    draft_token_ids: Int32Column = field(default_factory=lambda: np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A row whose output is not usable, although the step was executed (proto RowError)."""

    row: int
    # For people.
    message: str


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step sampled: ids in row order; counts per row of the step (0 for a partial prefill), or None when every
    sampling row has exactly one. A row samples unless known tokens remain to be computed after this step."""

    sampled_token_ids: Int32Column
    sampled_counts: Int32Column | None
    num_rows_held: int
    # Rows that failed alone; they have 0 in sampled_counts, which is given then.
    row_errors: tuple[RowFailure, ...] = ()


class FailureKind(Enum):
    """What a failed step means for the worker (proto StepErrorKind)."""

    # State is void, a new epoch is awaited.
    EXECUTION = "execution"
    # The process exits after this answer.
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """The acknowledgement of one step: an output, or a failure with a message for people. Exactly one of the two is
    set."""

    epoch: int
    step_seq: int
    output: StepOutput | None = None
    failure: FailureKind | None = None
    message: str = ""
    # From receipt to launch, and from launch to the tokens.
    staged_us: int = 0
    executed_us: int = 0

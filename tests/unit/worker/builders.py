"""Steps in the worker's own types, briefly written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from worker_svc.runner.base import Geometry, RunnerCapabilities
from worker_svc.runner.scripted import ScriptedRunner
from worker_svc.sampling import Sampling
from worker_svc.step import AddedRequest, Int32Column, Step

BLOCK_SIZE = 4


def ints(values: Sequence[int]) -> Int32Column:
    return np.array(list(values), np.int32)


def geometry(**changes: int) -> Geometry:
    fields = {
        "block_size": BLOCK_SIZE,
        "num_rows": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "max_inflight_steps": 2,
    }
    return Geometry(**{**fields, **changes})


def capabilities(**changes: object) -> RunnerCapabilities:
    known = ScriptedRunner(max_model_len=64).capabilities
    fields = {name: getattr(known, name) for name in RunnerCapabilities.__dataclass_fields__}
    return RunnerCapabilities(**{**fields, **changes})


def added(
    request_id: str,
    row: int,
    tokens: Sequence[int],
    table: Sequence[int],
    *,
    num_computed: int = 0,
    num_prompt: int | None = None,
    sampling: Sampling | None = None,
) -> AddedRequest:
    return AddedRequest(
        request_id=request_id,
        row=row,
        token_ids=ints(tokens),
        block_table=ints(table),
        num_computed_tokens=num_computed,
        num_prompt_tokens=len(tokens) if num_prompt is None else num_prompt,
        sampling=sampling or Sampling(),
    )


class Steps:
    """Numbers steps; every earlier one counts as processed unless `processed` says otherwise."""

    def __init__(self, epoch: int = 1) -> None:
        self._epoch = epoch
        self.step_seq = 0
        self._fence_seq = 0

    def next(
        self,
        rows: Mapping[int, int] | None = None,
        *,
        new: Sequence[AddedRequest] = (),
        appended: Sequence[tuple[int, int]] = (),
        dropped: Sequence[str] = (),
        drafts: Mapping[int, Sequence[int]] | None = None,
        processed: int | None = None,
    ) -> Step:
        rows = rows or {}
        self.step_seq += 1
        self._fence_seq += 1 if rows else 0
        step = Step(
            epoch=self._epoch,
            step_seq=self.step_seq,
            fence_seq=self._fence_seq,
            processed_step_seq=self.step_seq - 1 if processed is None else processed,
            dropped_ids=tuple(dropped),
            added=tuple(new),
            appended_rows=ints([row for row, _ in appended]),
            appended_blocks=ints([block for _, block in appended]),
            rows=ints(list(rows)),
            num_tokens=ints(list(rows.values())),
            num_drafts=ints([len(drafts.get(row, ())) for row in rows] if drafts else []),
            draft_token_ids=ints([token for row in rows for token in drafts.get(row, ())] if drafts else []),
        )
        return step

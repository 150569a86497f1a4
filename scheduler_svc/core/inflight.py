"""Steps sent to a rank and not yet acknowledged: a window of numbered records.

Calling contract: `is_full` before `push`; acknowledgements come oldest first; `clear` when the epoch ends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from scheduler_svc.core.request import Request, Run


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What was dispatched. The lists are parallel, one entry a row. `runs` says which stay of which request the row
    belongs to; it may have ended since. `expected` is the most tokens the row can yield: 0 for a partial prefill, 1, or
    1 + drafts."""

    step_seq: int
    # 0: a step without tokens.
    fence_seq: int
    runs: list[Run]
    num_tokens: list[int]
    expected: list[int]
    # Number of rows that sample, and whether any may yield more than one token.
    num_sampling: int
    yields_more: bool
    # Rows whose requests this step drops: free for others once it is acknowledged.
    released_rows: list[int]

    @property
    def requests(self) -> list[Request]:
        """Whose rows they are."""
        return [run.request for run in self.runs]


class InflightWindow:
    """Steps in flight of one rank in one epoch, and its counters."""

    __slots__ = ("_records", "acked_fence", "acked_step", "depth", "newest_fence", "newest_step")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._records: deque[StepRecord] = deque()
        self.newest_step = self.acked_step = 0
        self.newest_fence = self.acked_fence = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def is_full(self) -> bool:
        return len(self._records) >= self.depth

    @property
    def records(self) -> tuple[StepRecord, ...]:
        return tuple(self._records)

    @property
    def oldest(self) -> StepRecord | None:
        return self._records[0] if self._records else None

    def push(self, record: StepRecord) -> None:
        self._records.append(record)
        self.newest_step = record.step_seq
        self.newest_fence = max(self.newest_fence, record.fence_seq)

    def acknowledge(self) -> StepRecord:
        record = self._records.popleft()
        self.acked_step = record.step_seq
        self.acked_fence = max(self.acked_fence, record.fence_seq)
        return record

    def clear(self) -> list[StepRecord]:
        """The epoch is over: nothing is in flight any more, and nothing will be acknowledged."""
        records = list(self._records)
        self._records.clear()
        self.acked_step, self.acked_fence = self.newest_step, self.newest_fence
        return records

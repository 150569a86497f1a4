"""A scheduler of a page for tests of runners: builds Steps, keeps blocks, feeds nothing back but counts.

It is deliberately simpler than the real one: first come first served, as many prefill tokens as the budget allows,
decodes first. What it offers beyond that is what the tests need: prefix hits (within one step too), preemption, drafts,
two or more steps in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from worker_svc.runner.base import Geometry, Launched, Runner
from worker_svc.sampling import Sampling
from worker_svc.step import AddedRequest, Step, StepOutput

GREEDY = Sampling()


@dataclass(slots=True)
class LoopRequest:
    """One request. `outputs` grows as results come in."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    outputs: list[int] = field(default_factory=list)
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    # Tokens computed or on their way, and sampled tokens still to come.
    scheduled: int = 0
    awaited: int = 0
    num_given: int = 0
    num_hit: int = 0
    num_accepted_drafts: int = 0

    @property
    def is_done(self) -> bool:
        """All its tokens are here."""
        return len(self.outputs) >= self.max_tokens


@dataclass(frozen=True, slots=True)
class _InFlight:
    launched: Launched
    rows: list[tuple[LoopRequest, int, list[int]]]


class StepLoop:
    """Drives one runner. `depth` steps are launched before the first is collected."""

    def __init__(
        self,
        runner: Runner,
        *,
        block_size: int = 16,
        num_rows: int = 64,
        budget: int = 2048,
        max_model_len: int = 1024,
        depth: int = 1,
        prefix_cache: bool = False,
        propose: Callable[[LoopRequest], Sequence[int]] | None = None,
    ) -> None:
        self.block_size = block_size
        self.budget = budget
        self.depth = depth
        self.runner = runner
        self._propose = propose
        self._use_prefixes = prefix_cache
        num_blocks = runner.open(Geometry(block_size, num_rows, budget, max_model_len, depth))
        self.free = deque(range(1, num_blocks))
        self._free_rows = deque(range(num_rows))
        self._prefixes: dict[tuple[int, ...], int] = {}
        self.waiting: deque[LoopRequest] = deque()
        self.running: list[LoopRequest] = []
        self._dropped: list[str] = []
        self._step_seq = 0
        self._serial = 0
        self.steps: list[Step] = []

    def add(self, prompt: Sequence[int], max_tokens: int, sampling: Sampling = GREEDY) -> LoopRequest:
        """Queue a request."""
        self._serial += 1
        request = LoopRequest(f"r{self._serial}", list(prompt), max_tokens, sampling)
        self.waiting.append(request)
        return request

    def preempt(self, request: LoopRequest) -> None:
        """Take it out of the batch, to be recomputed from its tokens so far. Nothing of it may be in flight."""
        assert request.awaited == 0
        self.running.remove(request)
        self._leave(request)
        self.waiting.appendleft(request)

    def _leave(self, request: LoopRequest) -> None:
        self._dropped.append(request.request_id)
        self._free_rows.append(request.row)
        if not self._use_prefixes:  # shared blocks are simply kept
            self.free.extend(request.blocks)
        request.blocks = []

    def run(self, after_step: Callable[[StepLoop], None] | None = None) -> None:
        """Until every request has its tokens. `after_step` is called when a step's results are in."""
        in_flight: deque[_InFlight] = deque()
        while self.waiting or self.running or in_flight:
            step, rows = self._build()
            if rows:
                in_flight.append(_InFlight(self.runner.launch(step), rows))
            if in_flight and (len(in_flight) >= self.depth or not rows):
                done = in_flight.popleft()
                self._settle(done)
                if after_step is not None:
                    after_step(self)
        self.runner.launch(self._step([], [], []))  # tells the runner who left last

    def _build(self) -> tuple[Step, list[tuple[LoopRequest, int, list[int]]]]:
        budget = self.budget
        rows: list[tuple[LoopRequest, int, list[int]]] = []
        appended: list[tuple[int, int]] = []
        added: list[AddedRequest] = []
        for request in self.running:
            if budget and len(request.outputs) + request.awaited < request.max_tokens:
                budget -= self._schedule(request, budget, rows, appended)
        while self.waiting and budget and self._free_rows:
            request = self.waiting.popleft()
            added.append(self._admit(request))
            self.running.append(request)
            budget -= self._schedule(request, budget, rows, appended)
        return self._step(added, appended, rows), rows

    def _admit(self, request: LoopRequest) -> AddedRequest:
        tokens = request.prompt + request.outputs
        request.row = self._free_rows.popleft()
        request.num_given = len(tokens)
        request.blocks = self._hits(tokens) if self._use_prefixes else []
        request.num_hit = request.scheduled = len(request.blocks) * self.block_size
        while len(request.blocks) * self.block_size < len(tokens):
            request.blocks.append(self.free.popleft())
        if self._use_prefixes:
            for end in range(self.block_size, len(tokens) + 1, self.block_size):
                self._prefixes.setdefault(tuple(tokens[:end]), request.blocks[end // self.block_size - 1])
        return AddedRequest(
            request.request_id,
            request.row,
            np.array(tokens, np.int32),
            np.array(request.blocks, np.int32),
            request.scheduled,
            len(request.prompt),
            request.sampling,
        )

    def _hits(self, tokens: list[int]) -> list[int]:
        blocks: list[int] = []
        for end in range(self.block_size, len(tokens), self.block_size):
            block = self._prefixes.get(tuple(tokens[:end]))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _schedule(
        self,
        request: LoopRequest,
        budget: int,
        rows: list[tuple[LoopRequest, int, list[int]]],
        appended: list[tuple[int, int]],
    ) -> int:
        drafts: list[int] = []
        left = request.num_given - request.scheduled
        if left <= 0 and self._propose is not None and request.awaited == 0:
            room = min(budget - 1, request.max_tokens - len(request.outputs) - 1)
            drafts = list(self._propose(request))[: max(room, 0)]
        num = min(max(left, 1), budget) + len(drafts)
        request.scheduled += num
        while len(request.blocks) * self.block_size < request.scheduled:
            block = self.free.popleft()
            request.blocks.append(block)
            appended.append((request.row, block))
        if request.scheduled - len(drafts) >= request.num_given:
            request.awaited += 1
        rows.append((request, num, drafts))
        return num

    def _step(
        self,
        added: Sequence[AddedRequest],
        appended: Sequence[tuple[int, int]],
        rows: Sequence[tuple[LoopRequest, int, list[int]]],
    ) -> Step:
        self._step_seq += 1
        drafts = [d for _, _, ids in rows for d in ids]
        step = Step(
            epoch=1,
            step_seq=self._step_seq,
            fence_seq=self._step_seq,
            processed_step_seq=0,
            dropped_ids=tuple(self._dropped),
            added=tuple(added),
            appended_rows=np.array([r for r, _ in appended], np.int32),
            appended_blocks=np.array([b for _, b in appended], np.int32),
            rows=np.array([r.row for r, _, _ in rows], np.int32),
            num_tokens=np.array([n for _, n, _ in rows], np.int32),
            num_drafts=np.array([len(d) for _, _, d in rows] if drafts else [], np.int32),
            draft_token_ids=np.array(drafts, np.int32),
        )
        self._dropped = []
        self.steps.append(step)
        return step

    def _settle(self, done: _InFlight) -> None:
        output: StepOutput = done.launched.collect()
        ids = output.sampled_token_ids.tolist()
        counts = None if output.sampled_counts is None else output.sampled_counts.tolist()
        if counts is None:
            assert len(ids) == len(done.rows)
            counts = [1] * len(done.rows)
        assert sum(counts) == len(ids)
        for (request, _, drafts), count in zip(done.rows, counts, strict=True):
            sampled, ids = ids[:count], ids[count:]
            if count:
                request.awaited -= 1
                request.outputs += sampled
                request.scheduled -= len(drafts) + 1 - count
                request.num_accepted_drafts += count - 1
            if request.is_done and request in self.running:
                self.running.remove(request)
                self._leave(request)

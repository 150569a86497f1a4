"""One rank, a trace and a cost model on virtual time: when would every token have come?

The scheduler's turns take no time, a step takes what the cost model says, and the worker runs steps one after the
other; with two in flight it starts the next without waiting for anybody."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import assert_never

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import (
    Effect,
    PrefixCacheReset,
    RankJoined,
    RequestAccepted,
    RequestArrived,
    RequestEnded,
    RequestPreempted,
    RequestRefused,
    StepAcked,
    Tick,
    TokensProduced,
    UsageChanged,
)
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.stats import Totals
from scheduler_svc.simulation.cost_model import CostModel
from scheduler_svc.simulation.workload import END_TOKEN, VOCAB_SIZE, TracedRequest, output_token

_RANK = "rank"


@dataclass(slots=True)
class RequestLog:
    """What one client saw. Times in seconds from the start of the trace."""

    arrival_s: float
    first_token_s: float | None = None
    last_token_s: float = 0.0
    ended_s: float | None = None
    num_tokens: int = 0
    num_preemptions: int = 0
    # Between one token and the next.
    gaps_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A step on its way. answer_s: when its result reaches the scheduler."""

    step_seq: int
    answer_s: float
    sampled: list[int]


class VirtualRun:
    """Run a trace to its end on a pool of `num_blocks` usable blocks. Raises RuntimeError when a request is refused or
    nothing moves any more."""

    def __init__(self, config: SchedulerConfig, num_blocks: int, trace: list[TracedRequest], cost: CostModel) -> None:
        self.scheduler = Scheduler(config)
        self.logs = [RequestLog(request.arrival_s) for request in trace]
        self.num_steps = 0
        self.num_rows = 0
        # The most blocks that living tables and parked frees held at once.
        self.most_held = 0
        # When the last request ended.
        self.end_s = 0.0
        self._now_s = 0.0
        self._trace = trace
        self._cost = cost
        self._sent: deque[_Sent] = deque()
        self._worker_free_s = 0.0
        self._numbers = {request.request_id: number for number, request in enumerate(trace)}
        self.scheduler.handle(RankJoined(_RANK, 1, num_blocks + 1, config.max_model_len, VOCAB_SIZE))
        self._rank = self.scheduler.state.ranks[_RANK]

    @property
    def totals(self) -> Totals:
        """The core's own counts."""
        return self.scheduler.totals

    def run(self) -> None:
        """Everything until the last request has ended and the last step is answered."""
        waiting = deque(enumerate(self._trace))
        while waiting or self._sent or self.scheduler.num_live_requests:
            arrival_s = waiting[0][1].arrival_s if waiting else None
            answer_s = self._sent[0].answer_s if self._sent else None
            if arrival_s is not None and (answer_s is None or arrival_s <= answer_s):
                self._turn(arrival_s)
                number, request = waiting.popleft()
                self._arrive(number, request)
            elif answer_s is not None:
                self._turn(answer_s)
                sent = self._sent.popleft()
                self._note(self.scheduler.handle(StepAcked(_RANK, 1, sent.step_seq, sent.sampled)))
            else:
                raise RuntimeError(f"{self.scheduler.num_live_requests} requests wait and nothing is in flight")
            self._schedule()

    def _turn(self, now_s: float) -> None:
        self._now_s = now_s
        self.scheduler.handle(Tick(now_s))

    def _arrive(self, number: int, request: TracedRequest) -> None:
        self._note(
            self.scheduler.handle(
                RequestArrived(
                    request.request_id,
                    number,
                    request.prompt,
                    max_tokens=request.max_tokens,
                    eos_token_ids=(END_TOKEN,),
                )
            )
        )

    def _schedule(self) -> None:
        while (output := self.scheduler.schedule(_RANK)) is not None:
            self._note(self.scheduler.take_effects())
            duration_s, sampled = self._execute()
            start_s = max(self._now_s + self._cost.link_s, self._worker_free_s)
            if output.total_num_tokens:
                self.num_steps += 1
                self.num_rows += len(output.rows)
                self._worker_free_s = start_s + duration_s
            else:
                # Ids only: nothing runs.
                self._worker_free_s = start_s
            self._sent.append(_Sent(output.step_seq, self._worker_free_s + self._cost.link_s, sampled))
        self._note(self.scheduler.take_effects())
        self.most_held = max(self.most_held, self._rank.kv.num_usable - self._rank.kv.pool.num_free)

    def _execute(self) -> tuple[float, list[int]]:
        """Duration and answer of the step just sent."""
        record = self._rank.window.records[-1]
        num_prefill = num_decode = num_context = 0
        sampled: list[int] = []
        for run, n, expected in zip(record.runs, record.num_tokens, record.expected, strict=True):
            request = run.request
            num_context += run.computed
            if n > 1 or not expected:
                num_prefill += n
            else:
                num_decode += 1
            if expected:
                number = self._numbers[request.request_id]
                index = request.num_output_tokens + request.awaited - 1
                is_last = index >= self._trace[number].num_output
                sampled.append(END_TOKEN if is_last else output_token(number, index))
        return self._cost.step_s(num_prefill, num_decode, num_context), sampled

    def _note(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case TokensProduced():
                    for number in effect.handles:
                        self._note_token(self.logs[number])
                case RequestPreempted():
                    self.logs[self._numbers[effect.victim]].num_preemptions += 1
                case RequestEnded():
                    self.logs[effect.handle].ended_s = self.end_s = self._now_s
                case RequestRefused():
                    raise RuntimeError(f"{effect.request_id} was refused: {effect.message}")
                case RequestAccepted() | UsageChanged() | PrefixCacheReset():
                    pass
                case _:
                    assert_never(effect)

    def _note_token(self, log: RequestLog) -> None:
        if log.first_token_s is None:
            log.first_token_s = self._now_s
        else:
            log.gaps_s.append(self._now_s - log.last_token_s)
        log.last_token_s = self._now_s
        log.num_tokens += 1

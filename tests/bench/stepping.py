"""A core driven step by step with a clock beside it: what benchmarks of the scheduler share."""

from __future__ import annotations

import gc
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import Effect, RankJoined, RequestArrived, RequestEnded, RequestPreempted, StepAcked
from scheduler_svc.core.output import SchedulerOutput
from scheduler_svc.core.scheduler import Scheduler

RANK = "bench"
VOCAB_SIZE = 32000
BLOCK_SIZE = 16


def read_columns(output: SchedulerOutput) -> tuple[bytes, ...]:
    """What a codec does with a step: turn the columns into bytes."""
    columns = (output.rows, output.num_tokens, output.appended_rows, output.appended_blocks)
    return tuple(column.tobytes() for column in columns)


def tame_garbage_collector() -> None:
    """As the scheduler process does at its start."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@dataclass(slots=True)
class Times:
    """Microseconds of the steps measured: schedule with the columns' bytes, acknowledgement with reading its column,
    and, if requests come and go, taking in arrivals."""

    schedule: list[float] = field(default_factory=list)
    ack: list[float] = field(default_factory=list)
    arrive: list[float] = field(default_factory=list)

    @property
    def total(self) -> list[float]:
        return [s + a + r for s, a, r in zip(self.schedule, self.ack, self.arrive, strict=True)]

    def median(self) -> float:
        return statistics.median(self.total)

    def mean(self) -> float:
        return statistics.fmean(self.total)

    def quantile(self, percent: int) -> float:
        return statistics.quantiles(self.total, n=100)[percent - 1]


class Stepper:
    """One rank, two steps in flight, answers made of distinct tokens. `replace` is asked for new requests whenever
    some ended. `clock_ns` may be the thread's CPU time, where a machine that others use would spoil the means."""

    def __init__(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        *,
        replace: Callable[[int], list[RequestArrived]] | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.scheduler = Scheduler(config)
        self.times = Times()
        self.num_steps = 0
        self.num_preempted = 0
        self.num_ended = 0
        self._replace = replace
        self._clock_ns = clock_ns
        self._replies: deque[bytes] = deque()
        self._acked = 0
        self.scheduler.handle(RankJoined(RANK, 1, num_blocks, config.max_model_len, VOCAB_SIZE))

    def arrive(self, requests: list[RequestArrived]) -> None:
        for request in requests:
            self._count(self.scheduler.handle(request))

    def step(self) -> int:
        """One step sent, if there is one, and the oldest answered once two are in flight or nothing could be sent.
        Returns the number of rows sent."""
        clock = self._clock_ns
        begin = clock()
        output = self.scheduler.schedule(RANK)
        columns = () if output is None else read_columns(output)
        scheduled = clock()
        if output is not None:
            assert columns
            self.num_steps += 1
            self._replies.append(self._reply())
        self._count(self.scheduler.take_effects())
        if len(self._replies) == 2 or output is None:
            reply = self._replies.popleft()
            self._acked += 1
            before = clock()
            effects = self.scheduler.handle(StepAcked(RANK, 1, self._acked, memoryview(reply).cast("i").tolist()))
            after = clock()
            num_ended = self._count(effects)
            requests = self._replace(num_ended) if self._replace is not None and num_ended else []
            arriving = clock()
            self.arrive(requests)
            arrived = clock()
            self.times.schedule.append((scheduled - begin) / 1000)
            self.times.ack.append((after - before) / 1000)
            self.times.arrive.append((arrived - arriving) / 1000)
        return 0 if output is None else len(output.rows)

    def run(self, num_steps: int) -> Times:
        """`num_steps` steps, measured apart from those before."""
        self.times = Times()
        for _ in range(num_steps):
            self.step()
        return self.times

    def _reply(self) -> bytes:
        record = self.scheduler.state.ranks[RANK].window.records[-1]
        first = self.num_steps * 13
        return array("i", [100 + (first + i) % 30000 for i in range(record.num_sampling)]).tobytes()

    def _count(self, effects: list[Effect]) -> int:
        num_ended = 0
        for effect in effects:
            num_ended += isinstance(effect, RequestEnded)
            self.num_preempted += isinstance(effect, RequestPreempted)
        self.num_ended += num_ended
        return num_ended


class Prompts:
    """Requests with prompts that share no block."""

    def __init__(self) -> None:
        self._num = 0

    def request(self, num_tokens: int, max_tokens: int) -> RequestArrived:
        i = self._num
        self._num += 1
        # The first token pair is the request's own: no two prompts share a block hash.
        prompt = array("i", [i % 30000, i // 30000, *[(i * 7919 + j * 31) % VOCAB_SIZE for j in range(num_tokens - 2)]])
        return RequestArrived(f"r{i}", i, prompt, max_tokens=max_tokens, eos_token_ids=(2,))

    @property
    def num_made(self) -> int:
        return self._num


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)

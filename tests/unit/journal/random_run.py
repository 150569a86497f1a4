"""Seeded random runs of the core, told to a recorder exactly as the loop of the scheduler process tells it."""

from __future__ import annotations

import random
from array import array
from collections import deque

from scheduler_svc.core.config import Policy, SchedulerConfig
from scheduler_svc.core.events import (
    AbortCause,
    DrainStarted,
    Event,
    GrammarReady,
    PauseRequested,
    PauseState,
    PrefixCacheResetRequested,
    RankDraining,
    RankJoined,
    RankLost,
    RequestAborted,
    RequestArrived,
    StepAcked,
    TextEnded,
    Tick,
    WorkerProtocolError,
)
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.facts import Recorder

VOCAB_SIZE = 50


def random_config(seed: int) -> SchedulerConfig:
    """Small and tight, of any policy and depth."""
    rng = random.Random(seed)
    num_drafts = rng.choice([0, 0, 3])
    return SchedulerConfig(
        block_size=rng.choice([2, 4]),
        max_num_seqs=rng.choice([3, 6]),
        max_num_batched_tokens=rng.choice([8, 16, 64]),
        max_model_len=64,
        policy=rng.choice([Policy.FCFS, Policy.PRIORITY]),
        max_inflight_steps=rng.randint(1, 3),
        num_speculative_tokens=num_drafts,
        prefill_schedule_interval=rng.choice([1, 3]),
        watermark=rng.choice([0.0, 0.1]),
        no_worker_grace_s=5.0,
    )


class RandomRun:
    """A run of `num_turns` turns; the same seed and configuration give the same run."""

    def __init__(self, seed: int, config: SchedulerConfig, recorder: Recorder) -> None:
        self.scheduler = Scheduler(config)
        self.num_steps = 0
        self._rng = random.Random(seed)
        self._recorder = recorder
        self._now = 100.0
        self._epoch = 0
        self._num_requests = 0
        self._depth = config.max_inflight_steps
        # Steps without an answer by rank: (step_seq, most tokens of each row), of its present epoch.
        self._unanswered: dict[str, deque[tuple[int, tuple[int, ...]]]] = {}
        self._epochs: dict[str, int] = {}

    def run(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self._now += self._rng.choice([0.0, 0.001, 0.25])
            self._tell(Tick(self._now))
            for _ in range(self._rng.randint(0, 4)):
                self._something_happens()
            for rank in list(self._unanswered):
                self._schedule(rank)
            self.scheduler.take_effects()
        self._tell(DrainStarted())

    def _tell(self, event: Event) -> None:
        self._recorder.event(event)
        self.scheduler.handle(event)

    def _schedule(self, rank: str) -> None:
        while True:
            output = self.scheduler.schedule(rank)
            self._recorder.scheduled(rank, output)
            if output is None:
                return
            self.num_steps += 1
            record = self.scheduler.state.ranks[rank].window.records[-1]
            self._unanswered[rank].append((output.step_seq, tuple(record.expected)))

    def _something_happens(self) -> None:
        roll = self._rng.random()
        waiting = [rank for rank, steps in self._unanswered.items() if steps]
        if len(self._unanswered) < 2 and roll < 0.3:
            self._join()
        elif waiting and roll < 0.6:
            self._answer(self._rng.choice(waiting))
        elif roll < 0.85:
            self._arrive()
        elif roll < 0.95:
            self._touch_a_request()
        else:
            self._operate()

    def _join(self) -> None:
        self._epoch += 1
        rank = f"worker-{self._epoch % 3}"
        if rank not in self._unanswered:
            self._unanswered[rank] = deque()
            self._epochs[rank] = self._epoch
            self._tell(RankJoined(rank, self._epoch, self._rng.randint(12, 30), 64, VOCAB_SIZE))

    def _answer(self, rank: str) -> None:
        step_seq, most = self._unanswered[rank].popleft()
        counts = [self._rng.randint(1, count) if count else 0 for count in most]
        sampled = [self._rng.randrange(VOCAB_SIZE) for _ in range(sum(counts))]
        if self._rng.random() < 0.01:
            sampled.append(self._rng.choice([-1, 1 << 40]))
        drafted = any(count > 1 for count in most)
        try:
            self._tell(StepAcked(rank, self._epochs[rank], step_seq, sampled, counts if drafted else None))
        except WorkerProtocolError as error:
            self._lose(rank, f"wrong answer: {error}")

    def _lose(self, rank: str, reason: str) -> None:
        del self._unanswered[rank]
        self._tell(RankLost(rank, reason, graceful=self._rng.random() < 0.5))

    def _arrive(self) -> None:
        rng = self._rng
        self._num_requests += 1
        start = rng.choice([1, 1, 1, 7])
        self._tell(
            RequestArrived(
                request_id=f"r{rng.randint(0, 400)}-ünï",
                handle=self._num_requests,
                prompt=array("i", range(start, start + rng.randint(0, 30))),
                max_tokens=rng.choice([0, 3, 9, 20]),
                min_tokens=rng.choice([0, 0, 2]),
                eos_token_ids=(2,),
                stop_token_ids=rng.choice([(), (3, 4)]),
                priority=0 if self.scheduler.config.policy is Policy.FCFS else rng.randint(-2, 2),
                cache_salt=rng.choice(["", "salt"]),
                sampling=rng.randbytes(rng.randint(0, 5)),
                deadline=rng.choice([None, None, self._now + 2.0]),
                arrival=rng.choice([None, self._now]),
                skip_prefix_cache=rng.random() < 0.1,
                awaits_grammar=rng.random() < 0.05,
            )
        )

    def _touch_a_request(self) -> None:
        live = list(self.scheduler.state.requests)
        request_id = self._rng.choice(live) if live else "nobody"
        kind = self._rng.randrange(3)
        if kind == 0:
            self._tell(RequestAborted(request_id, self._rng.choice([AbortCause.CLIENT_GONE, AbortCause.DRAINED])))
        elif kind == 1:
            self._tell(TextEnded(request_id, self._rng.randint(0, 5)))
        else:
            self._tell(GrammarReady(request_id))

    def _operate(self) -> None:
        kind = self._rng.randrange(5)
        if kind == 0:
            self._tell(PauseRequested(self._rng.choice(list(PauseState))))
        elif kind == 1:
            self._tell(PauseRequested(PauseState.UNPAUSED))
        elif kind == 2:
            self._tell(PrefixCacheResetRequested(preempt_running=self._rng.random() < 0.5))
        elif self._unanswered:
            rank = self._rng.choice(list(self._unanswered))
            if kind == 3:
                self._tell(RankDraining(rank))
            else:
                self._lose(rank, "gone")

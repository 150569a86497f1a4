"""The loop alone, around a core that only writes down what it is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from scheduler_svc.core.events import (
    AbortCause,
    Effect,
    Event,
    RankJoined,
    RankLost,
    RequestAborted,
    StepAcked,
    Tick,
    WorkerProtocolError,
)
from scheduler_svc.core.output import SchedulerOutput
from scheduler_svc.facts import NullMetrics, NullRecorder
from scheduler_svc.loop import LoopLimits, SchedulerLoop


class NotingCore:
    """Refuses the results it is told to; never schedules anything."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.asked: list[str] = []
        self.refuses: set[int] = set()
        self.deadline: float | None = None
        self.num_live_requests = 0

    def handle(self, event: Event) -> list[Effect]:
        if isinstance(event, StepAcked) and event.step_seq in self.refuses:
            raise WorkerProtocolError("does not fit")
        self.events.append(event)
        return []

    def schedule(self, rank: str) -> SchedulerOutput | None:
        self.asked.append(rank)
        return None

    def take_effects(self) -> list[Effect]:
        return []

    def next_deadline(self) -> float | None:
        return self.deadline

    def without_ticks(self) -> list[Event]:
        return [event for event in self.events if not isinstance(event, Tick)]


class FakeClient:
    def __init__(self, epoch: int = 1) -> None:
        self.epoch = epoch
        self.is_connected = True
        self.failures: list[tuple[int, str]] = []

    def fail(self, epoch: int, reason: str) -> None:
        self.failures.append((epoch, reason))


def make(core: NotingCore, **limits: Any) -> tuple[SchedulerLoop, list[str]]:
    happened: list[str] = []
    loop = SchedulerLoop(
        core,
        deliver=lambda effects: happened.append("effects"),
        turn_ended=lambda: happened.append("turn"),
        idle=lambda: happened.append("idle"),
        metrics=NullMetrics(),
        recorder=NullRecorder(),
        limits=LoopLimits(**limits),
    )
    return loop, happened


def join(loop: SchedulerLoop, client: FakeClient, rank: str = "a") -> None:
    stands_in: Any = client
    loop.rank_joined(stands_in, RankJoined(rank, client.epoch, 100, 1000, 260))


async def test_every_turn_begins_with_the_time_and_ends_with_a_flush() -> None:
    core = NotingCore()
    loop, happened = make(core)
    loop.post(RequestAborted("x", AbortCause.ABORTED))
    assert loop.turn(5.0) == 1
    assert core.events == [Tick(5.0), RequestAborted("x", AbortCause.ABORTED)]
    assert happened == ["turn"]


async def test_a_turn_takes_a_bounded_number_of_items() -> None:
    core = NotingCore()
    loop, _ = make(core, max_batch=10)
    for index in range(25):
        loop.post(RequestAborted(str(index), AbortCause.ABORTED))
    assert [loop.turn(float(turn)) for turn in range(4)] == [10, 10, 5, 0]


async def test_new_work_waits_while_the_inbox_is_full_and_results_do_not() -> None:
    core = NotingCore()
    loop, _ = make(core, max_inbox=3, max_batch=1)
    for _ in range(3):
        await loop.put(RequestAborted("x", AbortCause.ABORTED))
    waiting = asyncio.create_task(loop.put(RequestAborted("y", AbortCause.ABORTED)))
    await asyncio.sleep(0)
    assert not waiting.done()
    loop.post(RequestAborted("result", AbortCause.ABORTED))
    loop.turn(1.0)
    await asyncio.sleep(0)
    assert not waiting.done()
    loop.turn(2.0)
    await waiting
    assert loop.num_queued_items == 3


async def test_what_an_item_means_is_decided_when_its_turn_comes() -> None:
    core = NotingCore()
    loop, _ = make(core)
    loop.post(RequestAborted("first", AbortCause.ABORTED))
    loop.post(lambda: [RequestAborted(f"after {len(core.without_ticks())}", AbortCause.ABORTED)])
    loop.turn(1.0)
    assert core.without_ticks()[-1] == RequestAborted("after 1", AbortCause.ABORTED)


async def test_results_and_losses_of_another_epoch_do_not_reach_the_core() -> None:
    core = NotingCore()
    loop, _ = make(core)
    join(loop, FakeClient(epoch=2))
    loop.step_acked(StepAcked("a", 1, 7, []))
    loop.rank_lost("a", 1, "old", False)
    loop.step_acked(StepAcked("b", 1, 1, []))
    loop.step_acked(StepAcked("a", 2, 1, []))
    loop.turn(1.0)
    assert core.without_ticks()[1:] == [StepAcked("a", 2, 1, [])]
    loop.rank_lost("a", 2, "gone", True)
    loop.step_acked(StepAcked("a", 2, 2, []))
    loop.turn(2.0)
    assert core.without_ticks()[-1] == RankLost("a", "gone", True)
    assert core.asked == ["a"]


async def test_rule_9_a_refused_result_ends_the_epoch_at_once_and_the_client_hears_it() -> None:
    core = NotingCore()
    core.refuses = {3}
    loop, _ = make(core)
    client = FakeClient()
    join(loop, client)
    for step_seq in (1, 2, 3, 4):
        loop.step_acked(StepAcked("a", 1, step_seq, []))
    loop.turn(1.0)
    *_, second, lost = core.without_ticks()
    assert second == StepAcked("a", 1, 2, [])
    assert isinstance(lost, RankLost) and not lost.graceful
    assert client.failures == [(1, "wrong answer: does not fit")]
    # Nothing is scheduled there until it has joined again.
    assert core.asked == []


async def test_a_rank_without_stream_gets_no_steps() -> None:
    core = NotingCore()
    loop, _ = make(core)
    client = FakeClient()
    join(loop, client)
    client.is_connected = False
    loop.turn(1.0)
    assert core.asked == []
    client.is_connected = True
    loop.turn(2.0)
    assert core.asked == ["a"]


async def test_the_core_hears_the_time_when_a_deadline_comes() -> None:
    core = NotingCore()
    loop, _ = make(core)
    now = asyncio.get_running_loop().time()
    core.deadline = now + 0.05
    running = asyncio.create_task(loop.run())
    async with asyncio.timeout(10):
        while not core.events:
            await asyncio.sleep(0.005)
    first = core.events[0]
    assert isinstance(first, Tick) and first.now >= core.deadline
    running.cancel()


async def test_idle_is_told_once_after_every_busy_time() -> None:
    core = NotingCore()
    loop, happened = make(core, idle_after_s=0.02)
    running = asyncio.create_task(loop.run())
    await asyncio.sleep(0.1)
    assert "idle" not in happened
    for round_ in (1, 2):
        loop.post(RequestAborted("x", AbortCause.ABORTED))
        async with asyncio.timeout(10):
            while happened.count("idle") < round_:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        assert happened.count("idle") == round_
    running.cancel()


async def test_a_failure_of_the_core_is_not_swallowed() -> None:
    core = NotingCore()
    loop, _ = make(core)

    def broken() -> list[Event]:
        raise ZeroDivisionError

    loop.post(broken)
    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(10):
            await loop.run()

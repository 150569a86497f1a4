"""The executor's promises, with a runner whose steps can be held up one by one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from tests.unit.worker.builders import Steps, capabilities, geometry, ints
from worker_svc.epoch import Epoch
from worker_svc.errors import InternalFault, MalformedOpen, NotReady
from worker_svc.executor import Executor
from worker_svc.limits import MAX_STAGED_COMMANDS
from worker_svc.runner.base import DeviceFailed, Geometry, RunnerCapabilities, StepFailed
from worker_svc.step import FailureKind, Step, StepAnswer, StepOutput

_PATIENCE_S = 30.0


class _Runner:
    """Writes down what happens. `gates` holds up the collection of a step, `failures` says what it raises."""

    def __init__(self, *, launches_ahead: bool) -> None:
        self._capabilities = capabilities(launches_ahead=launches_ahead)
        self.events: list[str] = []
        self.gates: dict[int, threading.Event] = {}
        self.launch_failures: dict[int, Exception] = {}
        self.collect_failures: dict[int, Exception] = {}
        self.open_failure: Exception | None = None

    @property
    def capabilities(self) -> RunnerCapabilities:
        return self._capabilities

    def tokenizer_files(self) -> Iterator[tuple[str, bytes]]:
        yield "t.json", b"{}"

    def open(self, opened: Geometry) -> int:
        self.events.append("open")
        if self.open_failure is not None:
            raise self.open_failure
        return 10

    def launch(self, step: Step) -> _Launched:
        self.events.append(f"launch {step.step_seq}")
        if step.step_seq in self.launch_failures:
            raise self.launch_failures[step.step_seq]
        return _Launched(self, step.step_seq)

    def close(self) -> None:
        self.events.append("close")


class _Launched:
    def __init__(self, runner: _Runner, step_seq: int) -> None:
        self._runner = runner
        self._step_seq = step_seq

    def collect(self) -> StepOutput:
        if (gate := self._runner.gates.get(self._step_seq)) is not None:
            assert gate.wait(_PATIENCE_S)
        if self._step_seq in self._runner.collect_failures:
            raise self._runner.collect_failures[self._step_seq]
        self._runner.events.append(f"collect {self._step_seq}")
        return StepOutput(ints([self._step_seq]), None, 0)


@dataclass
class _Setup:
    runner: _Runner
    executor: Executor
    answers: list[StepAnswer] = field(default_factory=list)

    async def epoch(self, number: int = 1) -> Epoch:
        epoch = Epoch(1, number, geometry(max_inflight_steps=8))
        epoch.start(await self.executor.open(epoch), self.runner.capabilities)
        return epoch

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(_PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.001)


@asynccontextmanager
async def _setup(*, launches_ahead: bool, clock_ns: Callable[[], int] = time.monotonic_ns) -> AsyncIterator[_Setup]:
    runner = _Runner(launches_ahead=launches_ahead)
    answers: list[StepAnswer] = []
    executor = Executor(lambda: runner, lambda _, answer: answers.append(answer), clock_ns=clock_ns)
    setup = _Setup(runner, executor, answers)
    await setup.executor.start()
    try:
        yield setup
    finally:
        for gate in runner.gates.values():
            gate.set()
        assert await asyncio.to_thread(setup.executor.stop, _PATIENCE_S)
        assert runner.events[-1] == "close"


async def test_a_step_is_launched_before_the_one_before_is_collected() -> None:
    async with _setup(launches_ahead=True) as setup:
        epoch, steps = await setup.epoch(), Steps()
        setup.runner.gates[1] = threading.Event()
        for _ in range(2):
            setup.executor.submit(epoch, steps.next())
        await setup.until(lambda: "launch 2" in setup.runner.events)
        assert "collect 1" not in setup.runner.events and not setup.answers
        setup.runner.gates[1].set()
        await setup.until(lambda: len(setup.answers) == 2)
        assert [answer.step_seq for answer in setup.answers] == [1, 2]


@pytest.mark.parametrize("fails", [False, True])
async def test_f117_a_step_that_waits_for_the_one_before_it_is_not_executed_meanwhile(fails: bool) -> None:
    now_ms = 0
    async with _setup(launches_ahead=True, clock_ns=lambda: now_ms * 1_000_000) as setup:
        epoch, steps = await setup.epoch(), Steps()
        setup.runner.gates |= {1: threading.Event(), 2: threading.Event()}
        if fails:
            setup.runner.collect_failures[2] = StepFailed("no")
        for _ in range(2):
            setup.executor.submit(epoch, steps.next())
        await setup.until(lambda: "launch 2" in setup.runner.events)
        for step_seq, ended_ms in ((1, 10), (2, 13)):
            now_ms = ended_ms
            setup.runner.gates[step_seq].set()
            await setup.until(lambda: len(setup.answers) == step_seq)  # noqa: B023
        assert [(answer.staged_us, answer.executed_us) for answer in setup.answers] == [(0, 10_000), (10_000, 3_000)]


async def test_a_runner_that_works_in_launch_answers_each_step_before_the_next() -> None:
    async with _setup(launches_ahead=False) as setup:
        epoch, steps = await setup.epoch(), Steps()
        for _ in range(2):
            setup.executor.submit(epoch, steps.next())
        await setup.until(lambda: len(setup.answers) == 2)
        assert setup.runner.events == ["open", "launch 1", "collect 1", "launch 2", "collect 2"]


@pytest.mark.parametrize("launches_ahead", [False, True])
@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize(
    "error, kind",
    [
        (StepFailed("no"), FailureKind.EXECUTION),
        (DeviceFailed("ECC"), FailureKind.DEVICE),
        (ZeroDivisionError("what"), FailureKind.EXECUTION),
    ],
)
async def test_after_a_failure_nothing_of_the_epoch_is_answered_any_more(
    launches_ahead: bool, where: str, error: Exception, kind: FailureKind
) -> None:
    async with _setup(launches_ahead=launches_ahead) as setup:
        epoch, steps = await setup.epoch(), Steps()
        failures = setup.runner.launch_failures if where == "launch" else setup.runner.collect_failures
        failures[2] = error
        setup.runner.gates[1] = threading.Event()
        for _ in range(4):
            setup.executor.submit(epoch, steps.next())
        setup.runner.gates[1].set()
        later = await setup.epoch(2)
        assert [answer.step_seq for answer in setup.answers] == [1, 2]
        assert setup.answers[0].output is not None
        assert (setup.answers[1].failure, setup.answers[1].output) == (kind, None)
        assert epoch.is_over
        setup.executor.submit(later, Steps(2).next())
        await setup.until(lambda: len(setup.answers) == 3)
        assert setup.answers[2].epoch == 2


async def test_an_epoch_opens_only_when_steps_of_the_last_are_off_the_device() -> None:
    async with _setup(launches_ahead=True) as setup:
        epoch = await setup.epoch()
        setup.runner.gates[1] = threading.Event()
        setup.executor.submit(epoch, Steps().next())
        await setup.until(lambda: "launch 1" in setup.runner.events)
        epoch.end("a newer one")
        opening = asyncio.create_task(setup.epoch(2))
        done, _ = await asyncio.wait([opening], timeout=0.1)
        assert not done
        setup.runner.gates[1].set()
        await asyncio.wait_for(opening, _PATIENCE_S)
        assert setup.runner.events.index("collect 1") < len(setup.runner.events) - 1
        assert setup.runner.events[-1] == "open" and not setup.answers


async def test_steps_of_an_epoch_that_ended_meanwhile_are_not_executed() -> None:
    async with _setup(launches_ahead=False) as setup:
        epoch, steps = await setup.epoch(), Steps()
        setup.runner.gates[1] = threading.Event()
        for _ in range(2):
            setup.executor.submit(epoch, steps.next())
        await setup.until(lambda: "launch 1" in setup.runner.events)
        epoch.end("refused")
        setup.runner.gates[1].set()
        await setup.epoch(2)
        assert "launch 2" not in setup.runner.events and not setup.answers


@pytest.mark.parametrize(
    "raised, told",
    [(ValueError("too many"), MalformedOpen), (OSError("?"), InternalFault), (DeviceFailed("x"), DeviceFailed)],
)
async def test_what_an_open_raises_is_told(raised: Exception, told: type[Exception]) -> None:
    async with _setup(launches_ahead=False) as setup:
        setup.runner.open_failure = raised
        with pytest.raises(told):
            await setup.epoch()


async def test_a_stuck_runner_fills_a_bounded_queue() -> None:
    async with _setup(launches_ahead=False) as setup:
        epoch, steps = await setup.epoch(), Steps()
        setup.runner.gates[1] = threading.Event()
        setup.executor.submit(epoch, steps.next())
        await setup.until(lambda: "launch 1" in setup.runner.events)
        for _ in range(MAX_STAGED_COMMANDS):
            setup.executor.submit(epoch, steps.next())
        with pytest.raises(NotReady):
            setup.executor.submit(epoch, steps.next())
        assert setup.executor.stop(0) is False
        setup.runner.gates[1].set()


async def test_loading_that_fails_is_told_and_the_thread_still_ends() -> None:
    def load() -> _Runner:
        raise OSError("no such file")

    executor = Executor(load, lambda *_: None)
    with pytest.raises(OSError, match="no such file"):
        await executor.start()
    assert await asyncio.to_thread(executor.stop, _PATIENCE_S)

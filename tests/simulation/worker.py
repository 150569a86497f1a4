"""A worker process in the simulation: the real service, epoch, ledger and scripted runner, without a thread."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from scheduler_svc.rpc.status import reason_of
from stepfence.v1 import worker_service_pb2 as pb
from tests.simulation.hosts import Process
from tests.simulation.network import Network, ServerContext, streaming, unary
from worker_svc.epoch import Epoch
from worker_svc.errors import NotReady
from worker_svc.executor import Executor, Loaded
from worker_svc.limits import MAX_STAGED_COMMANDS
from worker_svc.runner.base import Geometry, Runner, StepFailed
from worker_svc.runner.script import Script
from worker_svc.runner.scripted import ScriptedRunner
from worker_svc.service import WorkerService
from worker_svc.step import Step, StepAnswer, StepOutput

# What a step that fails on purpose says.
ON_PURPOSE: Final = "fails on purpose"
# Reasons with which a worker may end a stream of a scheduler that makes no mistake. All others accuse the scheduler.
_INNOCENT: Final = frozenset(
    {
        "SUPERSEDED",
        "EPOCH_OVER",
        "EPOCH_TOO_SMALL",
        "DRAINING",
        "MODEL_LOADING",
        "OPEN_EXPECTED",
        "BUSY",
        "NEWER_SCHEDULER",
    }
)


@dataclass
class Temper:
    """How a worker works, and misbehaves; changed by the world while it runs. Shares are per step."""

    step_s: float
    fail_share: float = 0.0
    wrong_share: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerSetting:
    """What a worker process is started with."""

    address: str
    num_blocks: int
    max_model_len: int
    load_s: float
    keep_state_s: float


class _InlineExecutor(Executor):
    """Commands one after another on the event loop, each of which takes its time before and after it is executed."""

    def __init__(
        self,
        load: Callable[[], Runner],
        on_answer: Callable[[Epoch, StepAnswer], None],
        process: Process,
        take_time: Callable[[], float],
        load_s: float,
    ) -> None:
        super().__init__(load, on_answer, clock_ns=lambda: 0)
        self._process = process
        self._take_time = take_time
        self._load_s = load_s
        self._staged: deque[Callable[[], None]] = deque()
        self._wake = asyncio.Event()
        self._collected: Any = None
        self.is_idle = True

    async def start(self) -> Loaded:
        self._loop = asyncio.get_running_loop()
        await asyncio.sleep(self._load_s)
        loaded = self._load_now()
        self._process.spawn(self._pump(), "executor")
        return loaded

    def stop(self, timeout_s: float) -> bool:
        return True

    def _enqueue(self, command: Callable[[], None]) -> None:
        if len(self._staged) >= MAX_STAGED_COMMANDS:
            raise NotReady("BUSY", "too many commands are staged")
        self._staged.append(command)
        self._wake.set()

    def _post(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.call_soon(call)

    def _collect(self, item: Any) -> None:
        self._collected = item

    async def _pump(self) -> None:
        while True:
            while not self._staged:
                self.is_idle = True
                self._wake.clear()
                await self._wake.wait()
            self.is_idle = False
            await asyncio.sleep(self._take_time())
            self._staged.popleft()()
            if self._collected is not None:
                item, self._collected = self._collected, None
                await asyncio.sleep(self._take_time())
                super()._collect(item)


class _Runner(ScriptedRunner):
    """The scripted runner; tells the world what it executes, and fails or answers wrongly as often as the temper
    says."""

    def __init__(self, worker: WorkerProcess) -> None:
        setting = worker.setting
        super().__init__(Script(verify="full"), num_blocks=setting.num_blocks, max_model_len=setting.max_model_len)
        self._worker = worker

    def open(self, geometry: Geometry) -> int:
        self._worker.executed.clear()
        return super().open(geometry)

    def launch(self, step: Step) -> Any:
        worker, temper, rng = self._worker, self._worker.temper, self._worker.rng
        worker.note_execution(step)
        if rng.random() < temper.fail_share:
            raise StepFailed(ON_PURPOSE)
        try:
            launched = super().launch(step)
        except StepFailed as error:
            worker.accuse(f"the scripted worker found a fault: {error}")
            raise
        if rng.random() < temper.wrong_share:
            return _Falsified(launched, rng.choice(("missing", "surplus", "range")))
        return launched


@dataclass(frozen=True, slots=True)
class _Falsified:
    """A result that cannot be right."""

    true: Any
    how: str

    def collect(self) -> StepOutput:
        output: StepOutput = self.true.collect()
        ids = output.sampled_token_ids
        if self.how == "surplus" or not len(ids):
            ids = np.append(ids, np.int32(65)).astype(np.int32)
        elif self.how == "missing":
            ids = ids[:-1]
        else:
            ids = np.array([260, *ids[1:]], np.int32)
        return replace(output, sampled_token_ids=ids)


class WorkerProcess:
    """One life of a worker. `accuse` is told what a faultless scheduler could not have caused."""

    def __init__(
        self,
        network: Network,
        setting: WorkerSetting,
        temper: Temper,
        rng: random.Random,
        accuse: Callable[[str], None],
        on_repetition: Callable[[], None],
    ) -> None:
        self.setting = setting
        self.on_repetition = on_repetition
        self.temper = temper
        self.rng = rng
        self.process = Process(network.loop, setting.address)
        self.service: WorkerService | None = None
        self.num_steps = 0
        # step_seq by epoch.
        self._newest_seen: dict[int, int] = {}
        # step_seq of the epoch that the runner was opened for.
        self.executed: list[int] = []
        self._network = network
        self._accuse = accuse
        self._incarnation = rng.getrandbits(64)
        self.process.spawn(self._main(), "main")

    def accuse(self, what: str) -> None:
        self._accuse(f"{self.setting.address}: {what}")

    def note_execution(self, step: Step) -> None:
        """A step is about to be executed: the next one, and for the first time."""
        expected = self.executed[-1] + 1 if self.executed else 1
        if step.step_seq != expected:
            self.accuse(f"step {step.step_seq} of epoch {step.epoch} is executed after {self.executed[-3:]}")
        self.executed.append(step.step_seq)
        self.num_steps += 1

    @property
    def is_idle(self) -> bool:
        """Nothing is left to be executed, and nothing keeps it from saying so."""
        executor: Any = None if self.service is None else self.service._executor
        return not self.process.is_frozen and executor is not None and executor.is_idle and not executor._staged

    @property
    def num_rows_held(self) -> int:
        epoch = None if self.service is None else self.service._epoch
        return 0 if epoch is None else epoch.num_rows_held

    async def _main(self) -> None:
        service = WorkerService(
            lambda: _Runner(self),
            keep_state_s=self.setting.keep_state_s,
            incarnation=self._incarnation,
            make_executor=lambda load, on_answer: _InlineExecutor(
                load, on_answer, self.process, self._take_time, self.setting.load_s
            ),
        )
        self.service = service
        handlers = {
            "GetCapabilities": unary(service.GetCapabilities, pb.GetCapabilitiesRequest),
            "GetTokenizer": unary(service.GetTokenizer, pb.GetTokenizerRequest),
            "RunSteps": streaming(self._run_steps, pb.RunStepsRequest),
        }
        self._network.listen(self.setting.address, self.process, handlers)
        await service.start()

    async def _run_steps(self, requests: Any, context: ServerContext) -> None:
        assert self.service is not None
        witness: Any = _Witness(context, self)
        await self.service.RunSteps(self._watched(requests), witness)

    async def _watched(self, requests: Any) -> AsyncIterator[pb.RunStepsRequest]:
        requests.message_class = pb.RunStepsRequest
        async for request in requests:
            if request.HasField("step") and request.step.step_seq <= self._newest_seen.get(request.step.epoch, 0):
                self.on_repetition()
            self._newest_seen[request.step.epoch] = request.step.step_seq
            yield request

    def _take_time(self) -> float:
        return self.temper.step_s * self.rng.expovariate(2.0)


class _Witness:
    """The context of RunSteps; notices refusals that accuse the scheduler."""

    def __init__(self, context: ServerContext, worker: WorkerProcess) -> None:
        self._context = context
        self._worker = worker

    async def write(self, message: pb.RunStepsResponse) -> None:
        await self._context.write(message)

    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> None:
        reason = reason_of(trailing_metadata[0][1])
        if reason not in _INNOCENT:
            self._worker.accuse(f"the worker refused a step: {reason}: {details}")
        await self._context.abort(code, details, trailing_metadata)

"""Every servicer and every stream client, in process and on virtual time, against a peer that says anything.

Each of these runs so many frames, and then proves that the same process still does its work. What is logged as an error
on the way, and what fails unnoticed, is a failure.
"""

from __future__ import annotations

import asyncio
import logging
import random
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc.aio
from google.protobuf.message import Message

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.frontend import codec as front_end_codec
from scheduler_svc.frontend.calls import Delta, GenerateCall, IdsPrompt, Sampling
from scheduler_svc.frontend.errors import RequestError
from scheduler_svc.frontend.limits import Limits
from scheduler_svc.frontend.session_client import TOKENIZER_UNUSABLE
from scheduler_svc.service import ServiceOptions
from scheduler_svc.workers.session import Timeouts
from stepfence.v1 import session_service_pb2, worker_service_pb2
from tests.fuzz import corpus
from tests.fuzz.mutation import Mutator
from tests.simulation.frontend import FrontEndProcess
from tests.simulation.hosts import Process, SimulationLoop
from tests.simulation.network import Call, Handler, Keepalive, Network, ServerContext
from tests.simulation.scheduler import Names, SchedulerProcess
from tests.simulation.worker import Temper, WorkerProcess, WorkerSetting
from worker_svc.runner.scripted import complete
from worker_svc.sampling import Sampling as WorkerSampling

_WORKER: Final = "worker-0:50061"
_SCHEDULER: Final = "scheduler:50052"
_FRONT_END: Final = "frontend-0:50051"
_KEEPALIVE: Final = Keepalive(6.0, 20.0)
_PATIENCE_S: Final = 120.0


class Deployment:
    """The processes a fuzzed one needs around it; each may be wild instead."""

    def __init__(self, network: Network, rng: random.Random) -> None:
        self.network = network
        self.rng = rng
        self.problems: list[str] = []

    def start_worker(self) -> WorkerProcess:
        # What it accuses the scheduler of is true here: the scheduler is wild, or what it passes on is.
        setting = WorkerSetting(_WORKER, num_blocks=65, max_model_len=512, load_s=0.01, keep_state_s=10.0)
        return WorkerProcess(self.network, setting, Temper(step_s=0.002), self.rng, lambda _: None, lambda: None)

    def start_scheduler(self) -> SchedulerProcess:
        return SchedulerProcess(
            self.network,
            _SCHEDULER,
            SchedulerConfig(
                block_size=4, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=256, max_queued_requests=64
            ),
            ServiceOptions(workers=(_WORKER,), timeouts=Timeouts(step_watchdog_s=2.0, first_steps_watchdog_s=2.0)),
            names=Names(),
            rng=random.Random(self.rng.getrandbits(32)),
            accuse=self.problems.append,
            check_every=50,
            trusts_workers=False,
        )

    def start_front_end(self) -> FrontEndProcess:
        return FrontEndProcess(self.network, _FRONT_END, _SCHEDULER, rng=random.Random(3), now=self.network.loop.time)

    def mutator(self, messages: list[Message]) -> Mutator:
        return Mutator(random.Random(self.rng.getrandbits(64)), messages)

    async def is_served(self, front_end: FrontEndProcess) -> None:
        """A request gets its tokens, from everybody involved, within some time."""
        prompt = [self.rng.randrange(256) for _ in range(9)]
        got: list[int] = []

        async def ask() -> None:
            call = GenerateCall(IdsPrompt(array("I", prompt)), sampling=Sampling(temperature=0.0, max_tokens=5))
            while True:
                try:
                    with await front_end.front_end.start(call, lambda: None) as generation:
                        while (event := await generation.next()) is not None:
                            if isinstance(event, Delta):
                                got.extend(event.token_ids)
                    return
                except RequestError:
                    got.clear()
                    await asyncio.sleep(0.1)

        async with asyncio.timeout(_PATIENCE_S):
            await front_end.process.spawn(ask())
        assert got == complete(prompt, 5, WorkerSampling())

    async def is_idle(self, scheduler: SchedulerProcess) -> None:
        """Nothing is left in the scheduler within some time."""
        assert scheduler.service is not None
        core = scheduler.service.core
        async with asyncio.timeout(_PATIENCE_S):
            while core.num_live_requests or any(facts.free != facts.usable for facts in core.audit()):
                await asyncio.sleep(0.1)
        scheduler.observer.check()


# --- wild clients of a servicer -------------------------------------------------------------------------------------


async def steps_at_a_worker(deployment: Deployment, num_frames: int) -> None:
    """RunSteps: sessions that begin well and go on anyhow, or begin anyhow."""
    worker = deployment.start_worker()
    rng, network = deployment.rng, deployment.network
    wild = Process(network.loop, "wild")
    mutator = deployment.mutator(corpus.run_steps_requests())
    sent = epoch = 0
    while sent < num_frames:
        epoch += 1
        call = network.call(wild, "wild", _WORKER, "RunSteps", _KEEPALIVE)
        frames: list[bytes] = []
        if rng.random() < 0.9:
            opening = worker_service_pb2.RunStepsRequest(open=corpus.opening(epoch=epoch))
            frames.append(opening.SerializeToString())
            steps = [corpus.first_step(epoch), *corpus.later_steps(epoch)]
            frames += [
                worker_service_pb2.RunStepsRequest(step=step).SerializeToString()
                for step in steps[: rng.randrange(len(steps))]
            ]
        frames += [mutator.next() for _ in range(rng.randrange(1, 6))]
        sent += len(frames)
        await _say(call, frames, rng)
    assert worker.process.is_alive
    scheduler, front_end = deployment.start_scheduler(), deployment.start_front_end()
    await deployment.is_served(front_end)
    await deployment.is_idle(scheduler)


async def _say(call: Call, frames: list[bytes], rng: random.Random) -> None:
    """Say all of it, listen for a while, and leave in one way or the other."""
    try:
        for frame in frames:
            await call.send(frame)
            if rng.random() < 0.2:
                await asyncio.sleep(rng.expovariate(200.0))
        async with asyncio.timeout(rng.choice((0.001, 0.02, 0.1))):
            while await call.receive() is not None:
                pass
    except (grpc.aio.AioRpcError, TimeoutError):
        pass
    call.cancel()


async def frames_at_a_scheduler(deployment: Deployment, num_frames: int) -> None:
    """Attach: front ends that say anything that is a message (other bytes never reach the servicer)."""
    deployment.start_worker()
    scheduler = deployment.start_scheduler()
    rng, network = deployment.rng, deployment.network
    front_end = deployment.start_front_end()
    await deployment.is_served(front_end)
    wild = Process(network.loop, "wild")
    mutator = deployment.mutator(corpus.attach_requests())
    sent = 0
    while sent < num_frames:
        call = network.call(wild, "wild", _SCHEDULER, "Attach", _KEEPALIVE)
        frames = [corpus.hello().SerializeToString()] if rng.random() < 0.95 else []
        frames += [mutator.message().SerializeToString() for _ in range(rng.randrange(1, 12))]
        sent += len(frames)
        await _say(call, frames, rng)
    await deployment.is_served(front_end)
    await deployment.is_idle(scheduler)


async def calls_at_a_front_end(deployment: Deployment, num_frames: int) -> None:
    """Generate: clients that ask for anything, and leave."""
    deployment.start_worker()
    scheduler, front_end = deployment.start_scheduler(), deployment.start_front_end()
    await deployment.is_served(front_end)
    rng = deployment.rng
    mutator = deployment.mutator(corpus.generate_requests())

    async def ask(message: Any, patience_s: float) -> None:
        try:
            async with asyncio.timeout(patience_s):
                with await front_end.front_end.start(
                    front_end_codec.decode_call(message, Limits()), lambda: None
                ) as generation:
                    while (event := await generation.next()) is not None:
                        front_end_codec.encode_event(event).SerializeToString()
        except RequestError as error:
            front_end_codec.encode_error(error).SerializeToString()
        except TimeoutError:
            pass

    left = num_frames

    async def client() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await front_end.process.spawn(ask(mutator.message(), rng.choice((0.0, 0.01, 0.3))))

    await asyncio.gather(*(client() for _ in range(8)))
    await deployment.is_served(front_end)
    await deployment.is_idle(scheduler)
    assert front_end.front_end.num_live == 0


# --- wild servers of a stream client --------------------------------------------------------------------------------


class _Wild:
    """A server that answers with the next frame of a mutator, whatever it is asked."""

    def __init__(self, deployment: Deployment, address: str) -> None:
        self.num_said = 0
        self._rng = deployment.rng
        self._network = deployment.network
        self._address = address
        self.process = Process(deployment.network.loop, "wild server")

    def listen(self, handlers: dict[str, Handler]) -> None:
        self._network.listen(self._address, self.process, handlers)

    def unary(self, mutator: Mutator, valid_share: float, valid: bytes) -> Handler:
        async def handle(requests: Any, context: ServerContext) -> None:
            self.num_said += 1
            context.write_bytes(valid if self._rng.random() < valid_share else mutator.next())

        return handle

    def stream(self, mutator: Mutator, first: Callable[[bytes], bytes]) -> Handler:
        """One right answer to the first frame, mostly, and then anything."""

        async def handle(requests: Any, context: ServerContext) -> None:
            requests.message_class = _Raw
            opening = await anext(requests)
            context.write_bytes(first(opening.data) if self._rng.random() < 0.9 else mutator.next())
            for _ in range(self._rng.randrange(1, 20)):
                await asyncio.sleep(self._rng.expovariate(500.0))
                self.num_said += 1
                context.write_bytes(mutator.next())

        return handle

    def vanish(self) -> None:
        self._network.sever(self.process, is_told=True)
        self.process.kill()


class _Raw:
    """A message class that keeps bytes as they are."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    @classmethod
    def FromString(cls, data: bytes) -> _Raw:
        return cls(data)


async def results_at_a_scheduler(deployment: Deployment, num_frames: int) -> None:
    """A worker that answers anything; then a good one in its place."""
    scheduler, front_end = deployment.start_scheduler(), deployment.start_front_end()
    wild = _Wild(deployment, _WORKER)
    (capabilities,) = corpus.capabilities()
    results = deployment.mutator(corpus.run_steps_responses())
    opened = worker_service_pb2.Opened(worker_incarnation=3, num_blocks=64)
    answer = worker_service_pb2.RunStepsResponse(opened=opened).SerializeToString()
    wild.listen(
        {
            "GetCapabilities": wild.unary(
                deployment.mutator(corpus.capabilities()), 0.8, capabilities.SerializeToString()
            ),
            "GetTokenizer": wild.unary(deployment.mutator(corpus.tokenizer_pieces()), 0.5, b""),
            "RunSteps": wild.stream(results, lambda _: answer),
        }
    )
    asking = [front_end.process.spawn(_ask_for_ever(front_end, deployment.rng)) for _ in range(4)]
    while wild.num_said < num_frames:
        await asyncio.sleep(0.1)
    for task in asking:
        task.cancel()
    wild.vanish()
    deployment.start_worker()
    await deployment.is_served(front_end)
    await deployment.is_idle(scheduler)


async def _ask_for_ever(front_end: FrontEndProcess, rng: random.Random) -> None:
    while True:
        call = GenerateCall(
            IdsPrompt(array("I", [rng.randrange(256) for _ in range(6)])), sampling=Sampling(max_tokens=6)
        )
        try:
            async with asyncio.timeout(1.0):
                with await front_end.front_end.start(call, lambda: None) as generation:
                    while await generation.next() is not None:
                        pass
        except (RequestError, TimeoutError):
            await asyncio.sleep(0.2)


async def frames_at_a_front_end(deployment: Deployment, num_frames: int) -> None:
    """A scheduler that says anything; then a good one in its place."""
    front_end = deployment.start_front_end()
    wild = _Wild(deployment, _SCHEDULER)
    attached = session_service_pb2.AttachResponse(
        attached=session_service_pb2.Attached(scheduler_incarnation=1, protocol_revision=2)
    ).SerializeToString()
    model = session_service_pb2.SessionServiceGetModelResponse(model=corpus.MODEL)
    chunk = session_service_pb2.SessionServiceGetTokenizerResponse()
    wild.listen(
        {
            "Attach": wild.stream(deployment.mutator(corpus.attach_responses()), lambda _: attached),
            "GetModel": wild.unary(deployment.mutator([model]), 0.7, model.SerializeToString()),
            "GetTokenizer": wild.unary(deployment.mutator([chunk]), 0.5, chunk.SerializeToString()),
        }
    )
    asking = [front_end.process.spawn(_ask_for_ever(front_end, deployment.rng)) for _ in range(4)]
    while wild.num_said < num_frames:
        await asyncio.sleep(0.1)
    for task in asking:
        task.cancel()
    wild.vanish()
    deployment.start_worker()
    scheduler = deployment.start_scheduler()
    await deployment.is_served(front_end)
    await deployment.is_idle(scheduler)


Scenario = Callable[[Deployment, int], Awaitable[None]]
SCENARIOS: Final[dict[str, Scenario]] = {
    "steps at a worker": steps_at_a_worker,
    "frames at a scheduler": frames_at_a_scheduler,
    "calls at a front end": calls_at_a_front_end,
    "results at a scheduler": results_at_a_scheduler,
    "frames at a front end": frames_at_a_front_end,
}


class _Errors(logging.Handler):
    def __init__(self, problems: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._problems = problems

    def emit(self, record: logging.LogRecord) -> None:
        error = None if record.exc_info is None else record.exc_info[1]
        if (record.name, record.msg) not in _EXPECTED_ERRORS:
            self._problems.append(f"{record.name}: {record.getMessage()}: {error!r}")


# Errors that tell about the peer, as they should.
_EXPECTED_ERRORS: Final = frozenset(
    {
        ("worker_svc.executor", "step failed"),
        ("scheduler_svc.frontend.session_client", TOKENIZER_UNUSABLE),
    }
)


@asynccontextmanager
async def _deployment(seed: int) -> AsyncIterator[Deployment]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulationLoop)
    rng = random.Random(seed)
    deployment = Deployment(Network(loop, random.Random(rng.getrandbits(64))), rng)
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    root.handlers = [_Errors(deployment.problems)]
    root.setLevel(logging.ERROR)
    try:
        yield deployment
    finally:
        root.handlers = handlers
        root.setLevel(level)
    problems = deployment.problems + loop.failures
    assert not problems, problems[:5]


def run_scenario(name: str, seed: int, num_frames: int) -> None:
    """One scenario with at least so many frames."""

    async def run() -> None:
        async with _deployment(seed) as deployment:
            await SCENARIOS[name](deployment, num_frames)

    with asyncio.Runner(loop_factory=SimulationLoop) as runner:
        runner.run(run())

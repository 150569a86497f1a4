"""A scheduler process in the simulation: SchedulerService and SessionServicer over the simulated network."""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncIterator, Callable
from typing import Final

import grpc.aio

from scheduler_svc.core import invariants
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import Event, RankJoined, RankLost
from scheduler_svc.core.output import SchedulerOutput
from scheduler_svc.service import SchedulerService, ServiceOptions
from scheduler_svc.session import SessionServicer
from scheduler_svc.workers.grpc_transport import _judged
from scheduler_svc.workers.transport import StepStream, WorkerLink
from stepfence.v1 import session_service_pb2, worker_service_pb2
from tests.simulation.hosts import Process
from tests.simulation.network import Call, Keepalive, Network, streaming, unary

# As CHANNEL_OPTIONS of grpc_transport and the worker's server_options have it.
_TO_WORKER: Final = Keepalive(client_s=6.0, server_s=30.0)
# How reasons begin for which a worker must have done wrong.
_ACCUSATIONS: Final = ("wrong answer", "step failed")


class WorkerNetwork:
    """WorkerTransport over the simulated network."""

    def __init__(self, network: Network, process: Process, source: str) -> None:
        self._network = network
        self._process = process
        self._source = source

    def connect(self, address: str) -> WorkerLink:
        return _Link(self._network, self._process, self._source, address)


class _Link:
    def __init__(self, network: Network, process: Process, source: str, address: str) -> None:
        self._network = network
        self._process = process
        self._source = source
        self._address = address
        self._calls: list[Call] = []

    def _call(self, method: str) -> Call:
        call = self._network.call(self._process, self._source, self._address, method, _TO_WORKER)
        self._calls.append(call)
        return call

    async def get_capabilities(self) -> bytes:
        call = self._call("GetCapabilities")
        try:
            await call.send(worker_service_pb2.GetCapabilitiesRequest().SerializeToString())
            answer = await call.receive()
        except grpc.aio.AioRpcError as error:
            raise _judged(error) from None
        assert answer is not None
        return answer

    async def get_tokenizer(self) -> AsyncIterator[bytes]:
        call = self._call("GetTokenizer")
        try:
            await call.send(worker_service_pb2.GetTokenizerRequest().SerializeToString())
            while (piece := await call.receive()) is not None:
                yield piece
        except grpc.aio.AioRpcError as error:
            raise _judged(error) from None

    def run_steps(self) -> StepStream:
        return _Stream(self._call("RunSteps"))

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()


class _Stream:
    def __init__(self, call: Call) -> None:
        self._call = call

    async def send(self, frame: bytes) -> None:
        try:
            await self._call.send(frame)
        except grpc.aio.AioRpcError as error:
            raise _judged(error) from None

    async def receive(self) -> bytes | None:
        try:
            return await self._call.receive()
        except grpc.aio.AioRpcError as error:
            raise _judged(error) from None

    def cancel(self) -> None:
        self._call.cancel()


class Names:
    """AddressResolver: what the world says the name stands for."""

    def __init__(self) -> None:
        self.addresses: tuple[str, ...] = ()

    async def resolve(self, host: str, port: int) -> tuple[str, ...]:
        return self.addresses


class Observer:
    """Recorder of a scheduler's life: counts steps, checks invariants, remembers when ranks came and went."""

    def __init__(
        self,
        now: Callable[[], float],
        accuse: Callable[[str], None],
        check_every: int,
        *,
        trusts_workers: bool,
    ) -> None:
        self.scheduler: SchedulerService | None = None
        self.num_steps = 0
        self.digest = hashlib.blake2b(digest_size=16)
        # (when, whether it joined, rank, why it was lost)
        self.changes: list[tuple[float, bool, str, str]] = []
        self._now = now
        self._accuse = accuse
        self._check_every = check_every
        # Whether no worker fails or answers wrongly unless something else is wrong.
        self._trusts_workers = trusts_workers
        self._num_calls = 0

    def event(self, event: Event) -> None:
        """See Recorder."""
        self.digest.update(f"{self._now()!r} {event!r}\n".encode())
        if isinstance(event, RankJoined):
            self.changes.append((self._now(), True, event.rank, ""))
        elif isinstance(event, RankLost):
            self.changes.append((self._now(), False, event.rank, event.reason))
            if self._trusts_workers and event.reason.startswith(_ACCUSATIONS):
                self._accuse(f"{event.rank} is accused: {event.reason}")

    def scheduled(self, rank: str, output: SchedulerOutput | None) -> None:
        """See Recorder."""
        if output is not None:
            self.num_steps += 1
            self.digest.update(f"{self._now()!r} {output!r}\n".encode())
        self._num_calls += 1
        if self._num_calls % self._check_every == 0:
            self.check()

    def check(self) -> None:
        """All invariants of the core; and that nobody's requests outlive their front end's stream."""
        assert self.scheduler is not None
        sessions = self.scheduler.hub._sessions
        for request in self.scheduler.core.state.requests.values():
            if request.handle >> 32 not in sessions:
                self._accuse(f"{request.request_id} lives, its front end's stream does not")
        try:
            invariants.check(self.scheduler.core.state)
        except invariants.InvariantViolation as error:
            self._accuse(f"invariant broken: {error}")


class SchedulerProcess:
    """One life of a scheduler."""

    def __init__(
        self,
        network: Network,
        address: str,
        config: SchedulerConfig,
        options: ServiceOptions,
        *,
        names: Names,
        rng: random.Random,
        accuse: Callable[[str], None],
        check_every: int,
        trusts_workers: bool,
    ) -> None:
        self.address = address
        self.process = Process(network.loop, address)
        self.observer = Observer(network.loop.time, accuse, check_every, trusts_workers=trusts_workers)
        self.service: SchedulerService | None = None
        self.has_ended = False
        self._network = network
        self._config = config
        self._options = options
        self._names = names
        self._rng = rng
        self.process.spawn(self._main(), "main")

    async def _main(self) -> None:
        service = SchedulerService(
            self._config,
            self._options,
            transport=WorkerNetwork(self._network, self.process, self.address),
            resolver=self._names,
            rng=self._rng,
            wall_time=self._network.loop.time,
            recorder=self.observer,
        )
        self.service = self.observer.scheduler = service
        servicer = SessionServicer(service.hub)
        handlers = {
            "Attach": streaming(servicer.Attach, session_service_pb2.AttachRequest),
            "GetModel": unary(servicer.GetModel, session_service_pb2.SessionServiceGetModelRequest),
            "GetTokenizer": unary(servicer.GetTokenizer, session_service_pb2.SessionServiceGetTokenizerRequest),
        }
        self._network.listen(self.address, self.process, handlers)
        await service.run()
        self.has_ended = True

"""Worker links without a network, for the scheduler's logic on virtual time: bytes in, bytes out, faults by hand.

The worker behind the link is the contract double's executor; only its transport is replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from scheduler_svc.errors import LinkLost, LinkRefused, LinkRejected
from scheduler_svc.workers.transport import StepStream, WorkerLink
from stepfence.v1 import worker_service_pb2
from tests.support.worker_double import BreachError, Capabilities, WorkerDouble

Queue = asyncio.Queue[worker_service_pb2.RunStepsResponse | None]


class SimulatedWorker:
    """One worker process on the simulated network. Every step takes `step_s`."""

    def __init__(self, capabilities: Capabilities | None = None, *, incarnation: int, step_s: float = 0.01) -> None:
        self.double = WorkerDouble(capabilities, incarnation=incarnation)
        self.step_s = step_s
        self.is_listening = True
        # Out of reach, but not refusing: new connections just do not come about.
        self.hangs = False
        # While cleared, steps are not executed.
        self.running = asyncio.Event()
        self.running.set()
        self.streams: list[SimulatedStream] = []

    def restart(self) -> None:
        """A new process at the same address."""
        self.cut()
        self.double.incarnation += 1
        self.double.session = None

    def cut(self) -> None:
        """All its streams are lost."""
        for stream in self.streams:
            stream.cut()


class SimulatedNetwork:
    """WorkerTransport: workers by address."""

    def __init__(self) -> None:
        self.workers: dict[str, SimulatedWorker] = {}
        self.num_connections = 0

    def connect(self, address: str) -> WorkerLink:
        self.num_connections += 1
        return _Link(self, address)


class _Link:
    def __init__(self, network: SimulatedNetwork, address: str) -> None:
        self._network = network
        self._address = address

    def _worker(self) -> SimulatedWorker:
        worker = self._network.workers.get(self._address)
        if worker is None or not worker.is_listening:
            raise LinkRefused("Connection refused")
        return worker

    async def get_capabilities(self) -> bytes:
        await asyncio.sleep(3600 if self._worker().hangs else 0.001)
        answer = await self._worker().double.GetCapabilities(worker_service_pb2.GetCapabilitiesRequest(), None)
        return answer.SerializeToString()

    async def get_tokenizer(self) -> AsyncIterator[bytes]:
        async for piece in self._worker().double.GetTokenizer(worker_service_pb2.GetTokenizerRequest(), None):
            yield piece.SerializeToString()

    def run_steps(self) -> StepStream:
        stream = SimulatedStream(self._worker())
        return stream

    async def close(self) -> None:
        pass


class SimulatedStream:
    """StepStream over two queues."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self._worker = worker
        self._up: asyncio.Queue[bytes] = asyncio.Queue()
        self._down: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self._is_lost = False
        worker.streams.append(self)
        self._task = asyncio.create_task(self._work())

    async def send(self, frame: bytes) -> None:
        if self._is_lost:
            raise LinkLost("cut")
        self._up.put_nowait(frame)

    async def receive(self) -> bytes | None:
        frame = await self._down.get()
        if isinstance(frame, Exception):
            raise frame
        return frame

    def cancel(self) -> None:
        self._is_lost = True
        self._task.cancel()
        if self in self._worker.streams:
            self._worker.streams.remove(self)

    def cut(self) -> None:
        """Lost in transport."""
        self._is_lost = True
        self._task.cancel()
        self._down.put_nowait(LinkLost("cut"))

    def end(self) -> None:
        """Ended by the worker, in order."""
        self._task.cancel()
        self._down.put_nowait(None)

    def say(self, frame: worker_service_pb2.RunStepsResponse) -> None:
        """A frame out of turn."""
        self._down.put_nowait(frame.SerializeToString())

    async def _work(self) -> None:
        double = self._worker.double
        opened: Queue = asyncio.Queue()
        while True:
            frame = worker_service_pb2.RunStepsRequest.FromString(await self._up.get())
            try:
                if frame.WhichOneof("frame") == "open":
                    double._open(frame.open, opened)
                    answers = [opened.get_nowait()]
                else:
                    await asyncio.sleep(self._worker.step_s)
                    await self._worker.running.wait()
                    answers = [*double._take(0, frame.step)]
            except BreachError as error:
                double.breaches.append(str(error))
                self._down.put_nowait(LinkRejected("FAILED_PRECONDITION", str(error)))
                return
            for answer in answers:
                if answer is not None:
                    self._down.put_nowait(answer.SerializeToString())

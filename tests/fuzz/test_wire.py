"""Malformed input over the wire, at every port of real processes: each answers or refuses, stays, keeps its memory, and
serves afterwards. 20,000 frames a port in the long form."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from scheduler_svc.cli.health import check
from stepfence.v1 import generation_service_pb2 as pb
from stepfence.v1 import worker_service_pb2
from tests.e2e.client import connect, generate, sampling
from tests.fuzz import corpus
from tests.fuzz.mutation import Mutator
from tests.support.processes import Deployment, Process
from worker_svc.runner.scripted import complete
from worker_svc.sampling import Sampling

FORMS = [
    pytest.param(600, id="short"),
    pytest.param(20_000, id="long", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
]
# What a process may grow by in the second half of the frames. The scheduler lets 50,000 objects wait for a collection
# while it is busy, which is up to 20 MiB; over 50,000 frames with idle moments it grew by 3 MiB.
_MAX_GROWTH_MIB: Final = 32.0
# Nothing else may end a call: no other status says "it broke in there".
_KNOWN_ENDS: Final = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.UNAVAILABLE,
        # gRPC itself, for bytes that are no message, or for a stream that was given up.
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
# Messages at level error that tell about the peer, as they should; all but the first are gRPC's own.
_EXPECTED_ERRORS: Final = (
    "step failed",
    "Exception deserializing message!",
    "Unexpected [DecodeError] raised",
    # Its client left while the call was being ended.
    "Failed sending error status",
    "ExecuteBatchError",
)


def _same(data: bytes) -> bytes:
    return data


class Port:
    """One port under fire."""

    def __init__(self, channel: Any, service: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.ends: Counter[str] = Counter()
        self.num_frames = 0
        self._channel = channel
        self._service = service

    def mutator(self, messages: Sequence[Message]) -> Mutator:
        return Mutator(random.Random(self.rng.getrandbits(64)), messages)

    async def stream(self, method: str, frames: Sequence[bytes]) -> None:
        """One stream with these frames; left in one way or the other."""
        self.num_frames += len(frames)
        call = self._channel.stream_stream(f"/{self._service}/{method}", _same, _same)(timeout=60)
        try:
            for frame in frames:
                await call.write(frame)
            if self.rng.random() < 0.5:
                await call.done_writing()
            async with asyncio.timeout(self.rng.choice((0.0, 0.01, 0.05))):
                while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                    pass
        except (grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError, asyncio.CancelledError):
            pass
        call.cancel()
        await self._note(call)

    async def ask(self, method: str, frame: bytes, *, is_stream: bool = False, patience_s: float = 60.0) -> None:
        """One call with one request."""
        self.num_frames += 1
        make = self._channel.unary_stream if is_stream else self._channel.unary_unary
        call = make(f"/{self._service}/{method}", _same, _same)(frame, timeout=patience_s)
        try:
            if is_stream:
                async for _ in call:
                    pass
            else:
                await call
        except grpc.aio.AioRpcError:
            pass
        await self._note(call)

    async def _note(self, call: Any) -> None:
        code = await call.code()
        details = await call.details() or ""
        assert code in _KNOWN_ENDS, (code, details)
        # INTERNAL and UNKNOWN are gRPC's here, or its absence of a better word; never ours.
        ours = [value for key, value in await call.trailing_metadata() or () if key == "grpc-status-details-bin"]
        assert code not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN) or not ours, (code, details)
        self.ends[code.name] += 1


def rss_mib(process: Process) -> float:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


def unexpected_errors(process: Process) -> list[str]:
    found = []
    for line in process.output().splitlines():
        facts = json.loads(line) if line.startswith("{") else {"level": "none"}
        if facts["level"] in ("error", "critical") and not facts["message"].startswith(_EXPECTED_ERRORS):
            found.append(line[:500])
    return found


async def still_served(deployment: Deployment) -> None:
    """Everybody is there and does their work; nothing is left."""
    async with connect(deployment.frontend_address) as stub:
        request = pb.GenerateRequest(text="still there", sampling=sampling(max_tokens=12))
        stream = await generate(stub, request)
    assert stream.token_ids == complete(list(b"still there"), 12, Sampling())
    await asyncio.to_thread(deployment.wait_idle)
    for process in deployment.processes:
        assert process.is_running
        assert unexpected_errors(process) == []
        assert (await asyncio.to_thread(check, process.address, None, 20.0)).serving


class Fire:
    """Rounds of calls at a port, until so many frames were sent; watches the memory of the process behind it."""

    def __init__(self, port: Port, process: Process, num_frames: int) -> None:
        self._port = port
        self._process = process
        self._num_frames = num_frames
        self._before: float | None = None

    def goes_on(self) -> bool:
        if self._before is None and self._port.num_frames >= self._num_frames // 2:
            self._before = rss_mib(self._process)
        return self._port.num_frames < self._num_frames

    def cease(self) -> None:
        assert self._before is not None
        growth = rss_mib(self._process) - self._before
        print(f"fuzz: {self._port.num_frames} frames, ends {dict(self._port.ends)}, growth {growth:.1f} MiB")
        assert growth < _MAX_GROWTH_MIB
        # That something was taken and something refused.
        assert self._port.ends["INVALID_ARGUMENT"] and sum(self._port.ends.values()) > 20


@pytest.mark.parametrize("num_frames", FORMS)
async def test_a_workers_port(tmp_path: Path, num_frames: int) -> None:
    with Deployment(tmp_path) as deployment:
        worker = deployment.start_worker(num_blocks="257", max_model_len="512")
        await asyncio.to_thread(deployment.wait_ready)
        async with grpc.aio.insecure_channel(worker.address) as channel:
            port = Port(channel, "stepfence.v1.WorkerService", seed=num_frames)
            steps, anything = port.mutator(corpus.run_steps_requests()), port.mutator(corpus.capabilities())
            fire = Fire(port, worker, num_frames)
            epoch = 0
            while fire.goes_on():
                epoch += 1
                opening = worker_service_pb2.RunStepsRequest(open=corpus.opening(epoch=epoch))
                known = [corpus.first_step(epoch), *corpus.later_steps(epoch)]
                good = [worker_service_pb2.RunStepsRequest(step=step).SerializeToString() for step in known]
                frames = [opening.SerializeToString(), *good[: port.rng.randrange(5)]]
                await port.stream("RunSteps", frames + [steps.next() for _ in range(port.rng.randrange(1, 8))])
                await port.stream("RunSteps", [steps.next() for _ in range(port.rng.randrange(1, 4))])
                await port.ask("GetCapabilities", anything.next())
                if epoch % 20 == 0:
                    await port.ask("GetTokenizer", anything.next(), is_stream=True)
            fire.cease()
        deployment.start_scheduler()
        deployment.start_frontend()
        await asyncio.to_thread(deployment.wait_ready)
        await still_served(deployment)


@pytest.mark.parametrize("num_frames", FORMS)
async def test_a_schedulers_port(tmp_path: Path, num_frames: int) -> None:
    with Deployment(tmp_path) as deployment:
        deployment.start_worker(num_blocks="257", max_model_len="512")
        scheduler = deployment.start_scheduler(max_queued_requests="64")
        deployment.start_frontend()
        await asyncio.to_thread(deployment.wait_ready)
        async with grpc.aio.insecure_channel(scheduler.address) as channel:
            port = Port(channel, "stepfence.v1.SessionService", seed=num_frames)
            admin = Port(channel, "stepfence.v1.AdminService", seed=num_frames + 1)
            frames = port.mutator(corpus.attach_requests())
            asked = {method: admin.mutator(messages) for method, messages in corpus.admin_requests().items()}
            fire = Fire(port, scheduler, num_frames)
            turn = 0
            while fire.goes_on():
                turn += 1
                said = [frames.next() for _ in range(port.rng.randrange(1, 12))]
                await port.stream("Attach", [corpus.hello().SerializeToString(), *said])
                await port.stream("Attach", [frames.next(), frames.next()])
                await port.ask("GetModel", frames.next())
                method = port.rng.choice(list(asked))
                await admin.ask(method, asked[method].next())
                if turn % 20 == 0:
                    await port.ask("GetTokenizer", frames.next(), is_stream=True)
            fire.cease()
            assert admin.ends["OK"] > 0
        await still_served(deployment)


@pytest.mark.parametrize("num_frames", FORMS)
async def test_a_front_ends_port(tmp_path: Path, num_frames: int) -> None:
    with Deployment(tmp_path) as deployment:
        deployment.start_worker(num_blocks="257", max_model_len="512")
        deployment.start_scheduler(max_queued_requests="64")
        front_end = deployment.start_frontend()
        await asyncio.to_thread(deployment.wait_ready)
        async with grpc.aio.insecure_channel(front_end.address) as channel:
            port = Port(channel, "stepfence.v1.GenerationService", seed=num_frames)
            calls, unary = port.mutator(corpus.generate_requests()), port.mutator(corpus.complete_requests())
            aborts = port.mutator(corpus.abort_requests())
            fire = Fire(port, front_end, num_frames)
            while fire.goes_on():
                await asyncio.gather(
                    *(
                        port.ask("Generate", calls.next(), is_stream=True, patience_s=port.rng.choice((0.01, 0.1)))
                        for _ in range(8)
                    ),
                    *(port.ask("Complete", unary.next(), patience_s=port.rng.choice((0.01, 0.1))) for _ in range(4)),
                    *(port.ask("Abort", aborts.next()) for _ in range(3)),
                    port.ask("GetModel", aborts.next()),
                )
            fire.cease()
        await still_served(deployment)

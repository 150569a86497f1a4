"""The scheduler as a process: alive and ready, draining, signals, exit codes, the port, reflection."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from stepfence.v1 import admin_service_pb2 as admin
from tests.support.scheduler_process import running_scheduler, until
from tests.support.session_client import SessionClient
from tests.support.worker_double import WorkerDouble, complete

PROMPT = [5, 6, 7, 8, 9]
REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
async def double() -> AsyncIterator[WorkerDouble]:
    double = WorkerDouble()
    double.delay_s = 0.002
    await double.start()
    yield double
    await double.stop()


# --- health
# ------------------------------------------------------------------------------------------------------------


async def test_f62_alive_without_workers_ready_with_one_and_not_when_it_stands_still(double: WorkerDouble) -> None:
    await double.stop()
    async with running_scheduler(double.address, step_watchdog_s=0.3, first_steps_watchdog_s=0.3) as scheduler:
        assert (await scheduler.health(""), await scheduler.health()) == (1, 2)
        assert await scheduler.health("stepfence.v1.AdminService") == 2
        status = await scheduler.status()
        assert not status.ready and double.address in status.not_ready_cause
        await double.start(double.port)
        await scheduler.ready()
        assert (await scheduler.status()).not_ready_cause == ""
        async with SessionClient(scheduler.address) as client:
            stream = client.submit(PROMPT, 50)
            await stream.until(2)
            # It answers nothing any more, not even the question what it can do.
            double.answering.clear()
            double.capabilities_code = grpc.StatusCode.UNAVAILABLE
            await scheduler.not_ready()
            assert await scheduler.health("") == 1
            async with asyncio.timeout(20):
                while "not now" not in (await scheduler.status()).not_ready_cause:
                    await asyncio.sleep(0.01)
            double.answering.set()
            double.capabilities_code = None
            await scheduler.ready()
            await stream.over()
            assert stream.tokens == complete(PROMPT, 50)


async def test_a_scheduler_without_workers_configured_says_so() -> None:
    async with running_scheduler() as scheduler:
        assert "--worker" in (await scheduler.status()).not_ready_cause


async def test_reflection_names_every_service(double: WorkerDouble) -> None:
    async with running_scheduler(double.address) as scheduler, grpc.aio.insecure_channel(scheduler.address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]))
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {"stepfence.v1.SessionService", "stepfence.v1.AdminService", "grpc.health.v1.Health"} <= names


async def test_f59_a_silent_call_survives_the_pings_of_its_client(double: WorkerDouble) -> None:
    options = (
        ("grpc.keepalive_time_ms", 100),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_time_between_pings_ms", 100),
    )
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        scheduler.service.hub.silence_s = 60.0
        async with grpc.aio.insecure_channel(scheduler.address, options=options) as channel:
            attach: Any = channel.stream_stream("/stepfence.v1.SessionService/Attach")  # type: ignore[call-arg]
            call = attach()
            # As raw bytes: hello {protocol_revision: 2}.
            await call.write(b"\x0a\x02\x10\x02")
            assert await call.read()
            assert await call.read()  # the model
            await asyncio.sleep(3)
            assert not call.done()
            call.cancel()


# --- drain
# -------------------------------------------------------------------------------------------------------------


async def test_f83_drain_refuses_new_work_finishes_accepted_work_and_ends_with_0(double: WorkerDouble) -> None:
    async with running_scheduler(double.address, max_num_seqs=2) as scheduler:
        await scheduler.ready()
        async with SessionClient(scheduler.address) as client:
            # Two run, three are queued.
            streams = [client.submit([index], 60) for index in range(5)]
            for stream in streams:
                await stream.answered()
            await scheduler.admin.Drain(admin.DrainRequest())
            await scheduler.not_ready()
            assert (await scheduler.status()).draining
            await until(lambda: client.is_told_to_drain)
            refused = await client.submit(PROMPT, 5).over()
            assert refused.refused is not None
            assert (refused.refused.code, refused.refused.reason) == (code_pb2.UNAVAILABLE, "DRAINING")
            for stream in streams:
                await stream.over()
                assert stream.tokens == complete(stream.prompt, 60)
            async with asyncio.timeout(20):
                await client.ended.wait()
            assert client.status is grpc.StatusCode.UNAVAILABLE
        assert scheduler.exit_code is not None
        async with asyncio.timeout(20):
            assert await scheduler.exit_code == 0


async def test_f83_at_the_drain_deadline_front_ends_keep_what_is_left_and_it_exits_with_3(
    double: WorkerDouble,
) -> None:
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        async with SessionClient(scheduler.address) as client:
            streams = [client.submit([index], 2000) for index in range(1, 3)]
            for stream in streams:
                await stream.until(3)
            await scheduler.admin.Drain(admin.DrainRequest(deadline=Duration(seconds=60)))
            await scheduler.admin.Drain(admin.DrainRequest(deadline=Duration(nanos=200_000_000)))
            # Later ones only shorten it.
            await scheduler.admin.Drain(admin.DrainRequest(deadline=Duration(seconds=60)))
            async with asyncio.timeout(20):
                await client.ended.wait()
            # The stream ends, its requests do not: the next scheduler gets them.
            assert client.status is grpc.StatusCode.UNAVAILABLE
            assert not any(stream.is_over for stream in streams)
        assert scheduler.exit_code is not None
        async with asyncio.timeout(20):
            assert await scheduler.exit_code == 3


async def test_drain_of_an_idle_scheduler_ends_at_once(double: WorkerDouble) -> None:
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        await scheduler.admin.Drain(admin.DrainRequest())
        assert scheduler.exit_code is not None
        async with asyncio.timeout(20):
            assert await scheduler.exit_code == 0


# --- the process
# -------------------------------------------------------------------------------------------------------


class Child:
    """A scheduler process of its own; its log lines are read as they come."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        # Of gRPC's library.
        self.other_lines: list[bytes] = []

    async def line(self, message: str) -> dict[str, Any]:
        """The next log line whose message starts like this."""
        assert self.process.stderr is not None
        async with asyncio.timeout(30):
            while True:
                raw = await self.process.stderr.readline()
                assert raw, f"no line {message!r} in {self.lines}"
                if not raw.startswith(b"{"):
                    self.other_lines.append(raw)
                    continue
                self.lines.append(json.loads(raw))
                if self.lines[-1]["message"].startswith(message):
                    return self.lines[-1]

    async def code(self) -> int:
        """Its exit code."""
        async with asyncio.timeout(30):
            _, rest = await self.process.communicate()
        for raw in rest.splitlines():
            if raw.startswith(b"{"):
                self.lines.append(json.loads(raw))
            else:
                self.other_lines.append(raw)
        assert self.process.returncode is not None
        return self.process.returncode


RUN = """
import sys
from scheduler_svc.config import SchedulerSettings
from scheduler_svc.server import run
sys.exit(run(SchedulerSettings(**eval(sys.argv[1]))))
"""


@asynccontextmanager
async def child(plant: str = "", **settings: Any) -> AsyncIterator[Child]:
    settings = {"listen": "127.0.0.1:0", "log_format": "json", "metrics_listen": None, "block_size": 4, **settings}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        plant + RUN,
        repr(settings),
        cwd=REPOSITORY,
        env={"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'protos'}", "PATH": ""},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Child(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_the_process_exits_0(double: WorkerDouble, number: signal.Signals) -> None:
    async with child(worker=(double.address,)) as scheduler:
        address = (await scheduler.line("listening"))["address"]
        await scheduler.line("ready")
        async with SessionClient(address) as client:
            stream = client.submit(PROMPT, 100)
            await stream.until(1)
            scheduler.process.send_signal(number)
            await stream.over()
            assert stream.tokens == complete(PROMPT, 100)
        assert await scheduler.code() == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_a_second_signal_ends_at_once(double: WorkerDouble, number: signal.Signals, code: int) -> None:
    async with child(worker=(double.address,)) as scheduler:
        address = (await scheduler.line("listening"))["address"]
        await scheduler.line("ready")
        async with SessionClient(address) as client:
            stream = client.submit(PROMPT, 2000)
            await stream.until(1)
            scheduler.process.send_signal(number)
            await scheduler.line("draining")
            scheduler.process.send_signal(number)
            assert await scheduler.code() == code
            async with asyncio.timeout(20):
                await client.ended.wait()
            assert client.status is grpc.StatusCode.UNAVAILABLE


async def test_the_start_and_a_stop_as_asked_are_no_reason_to_worry(double: WorkerDouble) -> None:
    async with child(worker=(double.address,)) as scheduler:
        listening = await scheduler.line("listening on ")
        assert listening["message"] == f"listening on {listening['address']}"
        await scheduler.line("rank up")
        await scheduler.line("ready")
        scheduler.process.send_signal(signal.SIGTERM)
        assert await scheduler.code() == 0
        assert {line["level"] for line in scheduler.lines} == {"info"}
        assert {"not ready", "drained", "rank lost"} <= {line["message"] for line in scheduler.lines}


async def test_readiness_that_is_lost_is_a_warning(double: WorkerDouble) -> None:
    async with child(worker=(double.address,)) as scheduler:
        assert (await scheduler.line("not ready"))["level"] == "info"
        await scheduler.line("ready")
        await double.stop()
        assert (await scheduler.line("not ready"))["level"] == "warning"


async def test_a_taken_port_is_an_error_that_names_the_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for settings, advice in (
            ({"listen": address}, "--listen"),
            ({"metrics_listen": address}, "--metrics-listen, or none"),
        ):
            async with child(**settings) as scheduler:
                line = await scheduler.line("cannot listen")
                assert line["message"] == f"cannot listen on {address}: choose another address with {advice}"
                assert line["cause"] == "Address already in use"
                assert await scheduler.code() == 1
                assert scheduler.lines == [line] and not scheduler.other_lines


@pytest.mark.parametrize(
    "settings", [{"listen": "0.0.0.0:0"}, {"metrics_listen": "0.0.0.0:0"}], ids=["gRPC", "metrics"]
)
async def test_d5_a_port_beyond_loopback_is_pointed_out(settings: dict[str, str]) -> None:
    async with child(**settings) as scheduler:
        assert (await scheduler.line("reachable from other machines"))["address"].startswith("0.0.0.0:")


async def test_a_recording_is_written_from_start_to_end(double: WorkerDouble, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    async with child(worker=(double.address,), record=str(path)) as scheduler:
        address = (await scheduler.line("listening"))["address"]
        await scheduler.line("ready")
        async with SessionClient(address) as client:
            await client.submit(PROMPT, 5, request_id="recorded").over()
        scheduler.process.send_signal(signal.SIGTERM)
        assert await scheduler.code() == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[-1] == {"end": "closed"}
    assert any(line.get("request_id") == "recorded" for line in lines)
    assert any(line.get("schedule") == double.address and line["step"] for line in lines)
    async with child(record=str(tmp_path / "no" / "folder")) as scheduler:
        assert "--record" in (await scheduler.line("cannot write"))["message"]
        assert await scheduler.code() == 1


async def test_f63_a_fatal_error_exits_1(double: WorkerDouble) -> None:
    """A bug in the core must not end as if nothing had happened."""
    plant = """
from scheduler_svc.core.scheduler import Scheduler
def broken(self, event): raise ZeroDivisionError("planted")
Scheduler.handle = broken
"""
    async with child(plant, worker=(double.address,)) as scheduler:
        assert "planted" in (await scheduler.line("fatal error"))["exception"]
        assert await scheduler.code() == 1


async def test_d4_a_scheduler_killed_under_load_is_followed_by_another_without_restarting_anyone(
    double: WorkerDouble,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    for _ in range(2):
        async with child(listen=address, worker=(double.address,)) as scheduler:
            await scheduler.line("ready")
            async with SessionClient(address) as client:
                done = await client.submit(PROMPT, 20).over()
                assert done.tokens == complete(PROMPT, 20)
                stream = client.submit(PROMPT, 2000)
                await stream.until(5)
                scheduler.process.kill()
                async with asyncio.timeout(20):
                    await client.ended.wait()
                assert client.status is grpc.StatusCode.UNAVAILABLE
    assert len({opening.scheduler_incarnation for opening in double.opens}) == 2
    assert double.breaches == []

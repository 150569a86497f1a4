"""The front end as a process: health, reflection, keepalive, drain, signals, exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from scheduler_svc.config import FrontendSettings
from scheduler_svc.frontend.server import SERVICE, FrontEndProcess
from scheduler_svc.rpc.channels import is_loopback
from stepfence.v1 import generation_service_pb2 as pb
from stepfence.v1 import generation_service_pb2_grpc
from tests.contract.frontend.harness import (
    EOF,
    NOT_SERVING,
    SERVING,
    complete,
    front_end,
    read_stream,
    refusal,
    served,
    text_request,
    until,
)
from tests.support.deaf_caller import DeafCaller
from tests.support.session_double import SessionDouble

ROOT = Path(__file__).parents[3]
START = (
    "import sys; from scheduler_svc.config import FrontendSettings; from scheduler_svc.frontend.server import run; "
    "sys.exit(run(FrontendSettings(listen=sys.argv[1], scheduler=sys.argv[2], drain_deadline_s=float(sys.argv[3]), "
    "log_format='json')))"
)


# --- health, reflection, keepalive ----------------------------------------------------------------------------------


async def test_f62_readiness_follows_the_scheduler_and_liveness_does_not(caplog: pytest.LogCaptureFixture) -> None:
    double = SessionDouble()
    double.has_worker = False
    caplog.set_level(logging.INFO)
    async with double, front_end(double, ready=False) as under_test:
        await double.attached()
        assert await under_test.health() == NOT_SERVING
        assert await under_test.health("") == SERVING
        double.worker_joins()
        await under_test.until_health(SERVING)
        await double.stop()
        await under_test.until_health(NOT_SERVING)
        assert await under_test.health("") == SERVING
        await double.start()
        await under_test.until_health(SERVING)
        told = [record for record in caplog.records if record.message == "not ready"]
        causes = [str(getattr(record, "cause", "")) for record in told]
        # At the start it is no news.
        assert told[0].levelno == logging.INFO
        assert [record.levelno for record in told if "no connection" in str(getattr(record, "cause", ""))][-1] == (
            logging.WARNING
        )
        assert any("no worker" in cause for cause in causes)
        assert any("no connection to the scheduler" in cause for cause in causes)


async def test_f62_a_scheduler_whose_workers_are_gone_makes_the_front_end_not_ready(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    double = SessionDouble()
    async with double, front_end(double) as under_test:
        double.say_readiness(False, "no worker is up (a:1 lost: refused)")
        await under_test.until_health(NOT_SERVING)
        assert await under_test.health("") == SERVING
        assert under_test.process.front_end.not_ready_cause == (
            "the scheduler is not ready: no worker is up (a:1 lost: refused)"
        )
        # Whether a request waits or is refused stays the scheduler's decision.
        call = under_test.stub.Generate(text_request("hi"))
        request = await double.next_request()
        request.accept()
        double.say_readiness(True)
        await under_test.until_health(SERVING)
        request.end_length()
        assert [response.WhichOneof("event") async for response in call] == ["accepted", "finished"]
        # What one scheduler said is not held against the next.
        double.say_readiness(False, "draining")
        await under_test.until_health(NOT_SERVING)
        await double.stop()
        await double.start()
        await under_test.until_health(SERVING)
        causes = [str(getattr(record, "cause", "")) for record in caplog.records if record.message == "not ready"]
        assert any("a:1 lost" in cause for cause in causes)


async def test_reflection_lists_the_service() -> None:
    async with served() as under_test:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(under_test.channel)
        call = stub.ServerReflectionInfo(timeout=30)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        response = await call.read()
        names = {service.name for service in response.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names
        await call.done_writing()


async def test_f59_a_silent_call_survives_a_client_that_pings() -> None:
    options = (
        ("grpc.keepalive_time_ms", 20),
        ("grpc.keepalive_timeout_ms", 5000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    )
    async with served() as under_test, grpc.aio.insecure_channel(under_test.address, options=options) as channel:
        stub: Any = generation_service_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Complete(complete(text_request()), timeout=60)
        request = await under_test.double.next_request()
        request.accept()
        # Clients ping once a second at most; a server with default options ends the connection at the fourth ping.
        await asyncio.sleep(6)
        request.send_tokens(b"late")
        request.end_length()
        assert (await call).text == "late"


# --- start ----------------------------------------------------------------------------------------------------------


async def test_a_taken_port_ends_with_an_error_that_names_the_flag(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        process = FrontEndProcess(FrontendSettings(listen=listen, scheduler="127.0.0.1:1"))
        assert await process.serve() == 1
    (told,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert told.getMessage() == f"cannot listen on {listen}: choose another address with --listen"
    assert getattr(told, "cause", "") == "Address already in use"


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("listen", "cause"),
    [("192.0.2.1:5000", "Cannot assign requested address"), ("no-such-host.invalid:5000", "")],
)
async def test_an_address_of_another_machine_is_told_in_the_log_and_nowhere_else(listen: str, cause: str) -> None:
    async with child(listen, "127.0.0.1:1") as front:
        assert await front.exit_code() == 1
        (line,) = front.lines
        assert line["message"] == f"cannot listen on {listen}: choose another address with --listen"
        assert line["cause"] and cause in line["cause"]


@pytest.mark.parametrize(
    "host, loopback",
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("localhost", True), ("[::1]", True),
        ("0.0.0.0", False), ("[::]", False), ("192.168.1.5", False), ("example.org", False),
    ],
)  # fmt: skip
def test_what_only_this_machine_can_reach(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


async def test_d5_a_port_beyond_loopback_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    async with SessionDouble() as double:
        process = FrontEndProcess(FrontendSettings(listen="0.0.0.0:0", scheduler=double.address))
        serving = asyncio.create_task(process.serve())
        await process.listening.wait()
        assert any("reachable from other machines" in record.message for record in caplog.records)
        process.stop()
        assert await serving == 0


# --- drain ----------------------------------------------------------------------------------------------------------


async def test_f83_drain_refuses_new_work_and_finishes_what_was_accepted() -> None:
    async with served() as under_test:
        running = under_test.stub.Generate(text_request(), timeout=30)
        first = await under_test.double.next_request()
        first.accept()
        queued = under_test.stub.Complete(complete(text_request()), timeout=30)
        second = await under_test.double.next_request()
        second.accept()
        under_test.process.stop()
        await under_test.until_health(NOT_SERVING)
        assert await under_test.health("") == SERVING
        told = await refusal(under_test.stub.Generate(text_request(), timeout=30))
        assert (told.code, told.reason) == ("UNAVAILABLE", "DRAINING")
        first.send_tokens(b"done")
        first.end_length()
        second.send_tokens(b"too")
        second.end_length()
        assert (await read_stream(running)).text == "done"
        assert (await queued).text == "too"
        assert await asyncio.wait_for(asyncio.shield(under_test.serving), 30) == 0


@pytest.mark.parametrize("deadline_s", [0.0, 600.0])
async def test_f126_a_client_that_does_not_read_what_has_ended_does_not_hold_a_drain(deadline_s: float) -> None:
    async with served(drain_deadline_s=deadline_s) as under_test:
        method = f"/{SERVICE}/Generate"
        with await asyncio.to_thread(DeafCaller, under_test.address, method, text_request().SerializeToString()):
            first = await under_test.double.next_request()
            other = under_test.stub.Generate(text_request(), timeout=60)
            second = await under_test.double.next_request()
            for request in (first, second):
                request.accept()
                request.send_tokens(b"x")
                request.end_length()
            assert (await read_stream(other)).text == "x"
            assert (under_test.process.front_end.num_live, under_test.process.front_end.num_streams) == (0, 1)
            under_test.process.stop()
            assert await asyncio.wait_for(asyncio.shield(under_test.serving), 30) == 0


@pytest.mark.parametrize("answers", [True, False])
async def test_f83_what_is_left_at_the_deadline_ends_unavailable_with_its_usage(answers: bool) -> None:
    async with served(drain_deadline_s=0.2) as under_test:
        under_test.double.answers_cancels = answers
        calls = [
            under_test.stub.Generate(text_request("four"), timeout=30),
            under_test.stub.Complete(complete(text_request("four")), timeout=30),
        ]
        for _ in calls:
            request = await under_test.double.next_request()
            request.accept()
            request.send_tokens(b"abc")
        ends = asyncio.gather(*(refusal(call) for call in calls))
        under_test.process.stop()
        for told in await ends:
            assert (told.code, told.reason) == ("UNAVAILABLE", "DRAINING")
            assert told.usage is not None
            assert (told.usage.num_prompt_tokens, told.usage.num_completion_tokens) == (4, 3)
            # The scheduler knows more, when it answers in time.
            assert told.usage.num_preemptions == (2 if answers else 0)
        assert await asyncio.wait_for(asyncio.shield(under_test.serving), 30) == 3
        assert all(request.cancel_reason is not None for request in under_test.double.requests)


async def test_a_second_signal_ends_at_once() -> None:
    async with served() as under_test:
        call = under_test.stub.Generate(text_request(), timeout=30)
        (await under_test.double.next_request()).accept()
        await call.read()
        under_test.process.stop()
        under_test.process.stop(130)
        assert await asyncio.wait_for(asyncio.shield(under_test.serving), 30) == 130
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            while await call.read() is not EOF:
                pass


# --- real processes -------------------------------------------------------------------------------------------------


class Child:
    """A front end in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []

    async def line(self, message: str) -> dict[str, Any]:
        """The next line of its log whose message is this, or begins with it where it ends with a space."""
        assert self.process.stderr is not None
        async with asyncio.timeout(60):
            while data := await self.process.stderr.readline():
                self.lines.append(json.loads(data))
                told = self.lines[-1]["message"]
                if told == message or (message.endswith(" ") and told.startswith(message)):
                    return self.lines[-1]
        raise AssertionError(f"ended without {message!r}: {self.lines}")

    async def exit_code(self) -> int:
        _, rest = await asyncio.wait_for(self.process.communicate(), 60)
        self.lines += map(json.loads, rest.splitlines())
        assert self.process.returncode is not None
        return self.process.returncode


@contextlib.asynccontextmanager
async def child(listen: str, scheduler: str, drain_deadline_s: float = 30) -> AsyncIterator[Child]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos'}"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", START, listen, scheduler, str(drain_deadline_s),
        env=environment, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield Child(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_idle_process_ends_with_0_on_a_signal(number: int) -> None:
    async with SessionDouble() as double, child("127.0.0.1:0", double.address) as front:
        listening = await front.line("listening on ")
        assert listening["address"].startswith("127.0.0.1:")
        assert not listening["address"].endswith(":0")
        assert listening["message"] == f"listening on {listening['address']}"
        await front.line("ready")
        front.process.send_signal(number)
        assert await front.exit_code() == 0
        # Neither the start nor a stop as asked is a reason to worry.
        assert {line["level"] for line in front.lines} == {"info"}
        assert front.lines[-1]["message"] == "scheduler lost"


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_two_signals_end_a_busy_process_with_128_plus_the_number(number: int) -> None:
    async with SessionDouble() as double, child("127.0.0.1:0", double.address) as front:
        address = (await front.line("listening on "))["address"]
        await front.line("ready")
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = generation_service_pb2_grpc.GenerationServiceStub(channel)
            call = stub.Generate(text_request())
            (await double.next_request()).accept()
            await call.read()
            front.process.send_signal(number)
            await front.line("draining")
            front.process.send_signal(number)
            assert await front.exit_code() == 128 + number


@pytest.mark.e2e
async def test_a_drain_deadline_with_work_left_ends_with_3() -> None:
    async with SessionDouble() as double, child("127.0.0.1:0", double.address, 0.1) as front:
        address = (await front.line("listening on "))["address"]
        await front.line("ready")
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = generation_service_pb2_grpc.GenerationServiceStub(channel)
            call = stub.Generate(text_request())
            (await double.next_request()).accept()
            assert (await call.read()).WhichOneof("event") == "accepted"
            front.process.send_signal(signal.SIGTERM)
            told = await refusal(call)
            assert told.reason == "DRAINING"
            assert await front.exit_code() == 3


@pytest.mark.e2e
async def test_a_front_end_that_dies_takes_its_stream_with_it() -> None:
    async with SessionDouble() as double, child("127.0.0.1:0", double.address) as front:
        await front.line("ready")
        front.process.kill()
        await front.exit_code()
        await until(lambda: not double._attached.is_set())


@pytest.mark.e2e
async def test_a_process_without_a_scheduler_is_alive_and_says_what_is_missing() -> None:
    async with child("127.0.0.1:0", "127.0.0.1:1") as front:
        address = (await front.line("listening on "))["address"]
        cause = (await front.line("not ready"))["cause"]
        assert "scheduler" in cause
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = generation_service_pb2_grpc.GenerationServiceStub(channel)
            told = await refusal(stub.GetModel(pb.GetModelRequest(), timeout=30))
            assert (told.code, told.reason) == ("UNAVAILABLE", "SCHEDULER_UNAVAILABLE")
        front.process.send_signal(signal.SIGTERM)
        assert await front.exit_code() == 0

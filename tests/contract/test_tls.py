"""TLS: between the parts, where both sides show certificates of the deployment's authority, and towards clients."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import openai
import pytest
import trustme

from scheduler_svc.cli.health import check
from scheduler_svc.config import FrontendSettings, SchedulerSettings
from scheduler_svc.frontend.server import FrontEndProcess
from scheduler_svc.rpc.channels import blocking_channel, channel
from scheduler_svc.rpc.tls import FOR_CALLERS, FOR_CLIENTS, FOR_PARTS, Tls, TlsError
from scheduler_svc.server import SchedulerProcess
from stepfence.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    generation_service_pb2_grpc,
    session_service_pb2,
    session_service_pb2_grpc,
    worker_service_pb2,
    worker_service_pb2_grpc,
)
from stepfence.v1 import generation_service_pb2 as pb
from stepfence.v1.sampling_pb2 import SamplingParams
from tests.contract.frontend.harness import until
from worker_svc import tls as worker_tls
from worker_svc.config import WorkerSettings
from worker_svc.server import WorkerServer, make_service

NAME = "stepfence.internal"
_LONG_AGO = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)


def write(directory: Path, certificate: trustme.LeafCert | None, authority: trustme.CA | None) -> Path:
    """A directory as a part wants it; files are replaced whole."""
    directory.mkdir(exist_ok=True)
    contents = {}
    if certificate is not None:
        contents["tls.crt"] = b"".join(blob.bytes() for blob in certificate.cert_chain_pems)
        contents["tls.key"] = certificate.private_key_pem.bytes()
    if authority is not None:
        contents["ca.crt"] = authority.cert_pem.bytes()
    for name, content in contents.items():
        fresh = directory / f".{name}"
        fresh.write_bytes(content)
        os.replace(fresh, directory / name)
    return directory


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def inside(authority: trustme.CA, tmp_path: Path) -> Tls:
    directory = write(tmp_path / "inside", authority.issue_cert(NAME), authority)
    return Tls(directory, server_name=NAME, needs=FOR_PARTS)


class Parts:
    """A worker, a scheduler and a front end, all with TLS."""

    def __init__(self, worker: str, scheduler: str, front_end: FrontEndProcess) -> None:
        self.worker = worker
        self.scheduler = scheduler
        self.front_end = front_end
        self.clients = f"127.0.0.1:{front_end.port}"


@contextlib.asynccontextmanager
async def parts(inside: Tls, client_tls: Tls | None = None) -> AsyncIterator[Parts]:
    async with contextlib.AsyncExitStack() as stack:
        worker = WorkerServer(make_service(WorkerSettings(runner="scripted", num_blocks=65)))
        worker_address = await worker.listen("127.0.0.1:0", worker_tls.Tls(inside.directory))
        stack.push_async_callback(worker.stop)
        await worker.load()
        scheduler = SchedulerProcess(
            SchedulerSettings(listen="127.0.0.1:0", worker=(worker_address,), metrics_listen=None), tls=inside
        )
        serving = asyncio.create_task(scheduler.serve(owns_process=False))

        async def end(task: asyncio.Task[int]) -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        stack.push_async_callback(end, serving)
        await asyncio.wait_for(scheduler.started.wait(), 30)
        address = f"127.0.0.1:{scheduler.port}"
        front_end = FrontEndProcess(
            FrontendSettings(listen="127.0.0.1:0", openai_listen="127.0.0.1:0", scheduler=address),
            tls=inside,
            client_tls=client_tls,
        )
        running = asyncio.create_task(front_end.serve())
        stack.push_async_callback(end, running)
        await asyncio.wait_for(front_end.listening.wait(), 30)
        await until(lambda: front_end.front_end.not_ready_cause is None)
        yield Parts(worker_address, address, front_end)


def asked(text: str) -> Any:
    sampling = SamplingParams(max_tokens=5, temperature=0)
    return pb.CompleteRequest(request=pb.GenerateRequest(text=text, sampling=sampling))


async def _says(call: Any) -> str:
    """The code that it ends with."""
    try:
        await asyncio.wait_for(call, 20)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def _open_scheduler(address: str, tls: Tls | None) -> str:
    async with channel(address, tls=tls) as made:
        stub: Any = admin_service_pb2_grpc.AdminServiceStub(made)
        return await _says(stub.GetStatus(admin_service_pb2.GetStatusRequest(), timeout=10))


async def _open_session(address: str, tls: Tls | None) -> str:
    async with channel(address, tls=tls) as made:
        stub: Any = session_service_pb2_grpc.SessionServiceStub(made)
        return await _says(stub.GetModel(session_service_pb2.SessionServiceGetModelRequest(), timeout=10))


async def _open_worker(address: str, tls: Tls | None) -> str:
    async with channel(address, tls=tls) as made:
        stub: Any = worker_service_pb2_grpc.WorkerServiceStub(made)
        return await _says(stub.GetCapabilities(worker_service_pb2.GetCapabilitiesRequest(), timeout=10))


def strangers(authority: trustme.CA, tmp_path: Path) -> dict[str, Tls | None]:
    other = trustme.CA()
    expired = authority.issue_cert(NAME, not_after=_LONG_AGO)
    return {
        "plain text": None,
        "no certificate": Tls(write(tmp_path / "none", None, authority), server_name=NAME, needs=FOR_CALLERS),
        "of another authority": Tls(write(tmp_path / "other", other.issue_cert(NAME), authority), server_name=NAME),
        "expired": Tls(write(tmp_path / "expired", expired, authority), server_name=NAME),
    }


# --- between the parts ------------------------------------------------------------------------------------------------


async def test_a_deployment_works_over_tls(inside: Tls) -> None:
    async with parts(inside) as running, grpc.aio.insecure_channel(running.clients) as made:
        stub: Any = generation_service_pb2_grpc.GenerationServiceStub(made)
        answer = await stub.Complete(asked("hello"), timeout=30)
        assert len(answer.token_ids) == 5
        for ask in (_open_scheduler, _open_session):
            assert await ask(running.scheduler, inside) == "OK"
        assert await _open_worker(running.worker, inside) == "OK"
        for address in (running.scheduler, running.worker):
            health = await asyncio.to_thread(check, address, "", 10.0, inside)
            assert health.serving, health.text


async def test_strangers_get_into_neither_scheduler_nor_worker(
    inside: Tls, authority: trustme.CA, tmp_path: Path
) -> None:
    async with parts(inside) as running, grpc.aio.insecure_channel(running.clients) as made:
        stub: Any = generation_service_pb2_grpc.GenerationServiceStub(made)
        for name, stranger in strangers(authority, tmp_path).items():
            assert await _open_scheduler(running.scheduler, stranger) == "UNAVAILABLE", name
            assert await _open_session(running.scheduler, stranger) == "UNAVAILABLE", name
            assert await _open_worker(running.worker, stranger) == "UNAVAILABLE", name
        # The deployment goes on.
        assert len((await stub.Complete(asked("hello"), timeout=30)).token_ids) == 5


async def test_a_server_that_is_not_of_the_deployment_is_not_called(authority: trustme.CA, tmp_path: Path) -> None:
    """A stranger's worker or scheduler: of another authority, or with another name."""
    mine = Tls(write(tmp_path / "mine", authority.issue_cert(NAME), authority), server_name=NAME)
    other = trustme.CA()
    for number, certificate in enumerate((other.issue_cert(NAME), authority.issue_cert("elsewhere.internal"))):
        # It takes everyone that shows a certificate of ours.
        directory = write(tmp_path / f"stranger{number}", certificate, authority)
        worker = WorkerServer(make_service(WorkerSettings(runner="scripted", num_blocks=9)))
        address = await worker.listen("127.0.0.1:0", worker_tls.Tls(directory))
        await worker.load()
        assert await _open_worker(address, mine) == "UNAVAILABLE"
        await worker.stop()


async def test_certificates_are_replaced_while_everything_runs(
    inside: Tls, authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_svc.rpc.reread.LOOK_S", 0.0)
    outside = Tls(write(tmp_path / "outside", authority.issue_cert("localhost"), None), needs=FOR_CLIENTS)
    async with parts(inside, outside) as running:
        fresh = trustme.CA()
        write(inside.directory, fresh.issue_cert(NAME), fresh)
        write(outside.directory, fresh.issue_cert("localhost", "127.0.0.1"), None)
        new = Tls(write(tmp_path / "new", fresh.issue_cert(NAME), fresh), server_name=NAME)
        old = Tls(write(tmp_path / "old", authority.issue_cert(NAME), authority), server_name=NAME)
        for address, ask in ((running.scheduler, _open_scheduler), (running.worker, _open_worker)):
            async with asyncio.timeout(30):
                while await ask(address, new) != "OK":
                    await asyncio.sleep(0.05)
            assert await ask(address, old) == "UNAVAILABLE"
        caller = Tls(write(tmp_path / "caller", None, fresh), needs=FOR_CALLERS)
        async with channel(running.clients, tls=caller) as made:
            stub: Any = generation_service_pb2_grpc.GenerationServiceStub(made)
            assert len((await stub.Complete(asked("hello"), timeout=30, wait_for_ready=True)).token_ids) == 5
        context = ssl.create_default_context(cadata=fresh.cert_pem.bytes().decode())
        async with asyncio.timeout(30):
            while not await _shakes_hands(running.front_end.openai_address, context):
                await asyncio.sleep(0.1)


async def test_an_authority_of_clients_that_was_replaced_opens_neither_port(
    inside: Tls, authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_svc.rpc.reread.LOOK_S", 0.0)
    public = authority.issue_cert("localhost", "127.0.0.1")
    old, new = trustme.CA(), trustme.CA()
    outside = Tls(write(tmp_path / "outside", public, old), needs=FOR_CLIENTS)
    async with parts(inside, outside) as running:
        write(outside.directory, None, new)
        for made_by, is_let_in in ((old, False), (new, True)):
            certificate = made_by.issue_cert("client.example")
            context = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
            certificate.configure_cert(context)
            async with openai.AsyncOpenAI(
                base_url=f"https://{running.front_end.openai_address}/v1",
                api_key="-",
                max_retries=0,
                http_client=openai.DefaultAsyncHttpxClient(verify=context),
            ) as client:
                with contextlib.nullcontext() if is_let_in else pytest.raises(openai.APIConnectionError):
                    await client.models.list()
            caller = Tls(write(tmp_path / f"caller {is_let_in}", certificate, authority), needs=FOR_CALLERS)
            async with channel(running.clients, tls=caller) as made:
                stub: Any = generation_service_pb2_grpc.GenerationServiceStub(made)
                answer = await _says(stub.Complete(asked("hello"), timeout=10))
            assert answer == ("OK" if is_let_in else "UNAVAILABLE")


async def _shakes_hands(address: str, context: ssl.SSLContext | None) -> bool:
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    except (ssl.SSLError, ConnectionError):
        return False
    writer.close()
    return True


# --- towards clients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asks", [False, True], ids=["server only", "both sides"])
async def test_clients_call_both_ports_over_tls(inside: Tls, authority: trustme.CA, tmp_path: Path, asks: bool) -> None:
    public = authority.issue_cert("localhost", "127.0.0.1")
    outside = Tls(write(tmp_path / "outside", public, authority if asks else None), needs=FOR_CLIENTS)
    async with parts(inside, outside) as running:
        mine = authority.issue_cert("client.example") if asks else None
        caller = Tls(write(tmp_path / "caller", mine, authority), needs=FOR_CALLERS)
        async with channel(running.clients, tls=caller) as made:
            stub: Any = generation_service_pb2_grpc.GenerationServiceStub(made)
            text = (await stub.Complete(asked("hello"), timeout=30)).text
        context = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
        if mine is not None:
            mine.configure_cert(context)
        async with openai.AsyncOpenAI(
            base_url=f"https://{running.front_end.openai_address}/v1",
            api_key="-",
            http_client=openai.DefaultAsyncHttpxClient(verify=context),
        ) as client:
            answer = await client.completions.create(model="scripted", prompt="hello", max_tokens=5, temperature=0)
            assert answer.choices[0].text == text
        for stranger in strangers(authority, tmp_path).values():
            if stranger is None or asks:
                async with channel(running.clients, tls=stranger) as made:
                    stub = generation_service_pb2_grpc.GenerationServiceStub(made)
                    assert await _says(stub.Complete(asked("hello"), timeout=10)) == "UNAVAILABLE"
        # HTTP in plain text gets no answer.
        host, _, port = running.front_end.openai_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b"HTTP" not in await asyncio.wait_for(reader.read(), 30)
        writer.close()


def test_a_blocking_channel_uses_tls_too(authority: trustme.CA, tmp_path: Path) -> None:
    caller = Tls(write(tmp_path / "caller", None, authority), needs=FOR_CALLERS)
    with blocking_channel("127.0.0.1:9", tls=caller) as made, pytest.raises(grpc.RpcError):
        stub: Any = admin_service_pb2_grpc.AdminServiceStub(made)
        stub.GetStatus(admin_service_pb2.GetStatusRequest(), timeout=0.2)


# --- files ------------------------------------------------------------------------------------------------------------


def test_files_that_cannot_be_used_are_named(authority: trustme.CA, tmp_path: Path) -> None:
    one, two = authority.issue_cert(NAME), authority.issue_cert(NAME)
    wrong: list[tuple[dict[str, bytes | None], str]] = [
        ({"tls.crt": None}, "tls.crt"),
        ({"tls.key": None}, "tls.key"),
        ({"ca.crt": None}, "ca.crt"),
        ({"tls.crt": b"no certificate"}, "cannot be used together"),
        ({"tls.key": two.private_key_pem.bytes()}, "key values mismatch"),
        ({"ca.crt": b"no certificate"}, "no certificates in PEM"),
        ({"ca.crt": b""}, "no certificates in PEM"),
    ]
    for number, (changes, words) in enumerate(wrong):
        directory = write(tmp_path / str(number), one, authority)
        for name, content in changes.items():
            if content is None:
                (directory / name).unlink()
            else:
                (directory / name).write_bytes(content)
        for make in (lambda d: Tls(d, needs=FOR_PARTS), worker_tls.Tls):
            error = TlsError if make is not worker_tls.Tls else worker_tls.TlsError
            with pytest.raises(error, match=words) as wrong_files:
                make(directory)
            assert str(directory) in str(wrong_files.value)


def test_files_that_become_unusable_change_nothing(
    inside: Tls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("scheduler_svc.rpc.reread.LOOK_S", 0.0)
    (inside.directory / "tls.crt").write_bytes(b"half a certif")
    for _ in range(5):
        assert inside.look_again() == 1
        inside.channel_credentials()
    assert sum("cannot be read again" in one.message for one in caplog.records) == 1

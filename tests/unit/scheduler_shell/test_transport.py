"""What counts as a lost transport and what as the worker's own word; names and the model in service."""

from __future__ import annotations

import asyncio
import socket

import grpc
import grpc.aio
import pytest

from scheduler_svc import errors
from scheduler_svc.core.events import AbortCause, EndReason, RefusalReason, RequestEnded, RequestRefused
from scheduler_svc.core.stats import Usage
from scheduler_svc.errors import Failure, LinkLost, LinkRefused, LinkRejected, RankUnfit
from scheduler_svc.rpc.status import reason_of, to_status
from scheduler_svc.workers.codec import ModelFacts, TokenizerPiece
from scheduler_svc.workers.grpc_transport import GrpcTransport, _judged
from scheduler_svc.workers.resolver import SystemResolver
from scheduler_svc.workers.served_model import ServedModel


def _error(code: grpc.StatusCode, details: str, reason: str = "") -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata()
    if reason:
        status = to_status(Failure(errors.Code.UNAVAILABLE, reason, details))
        trailing.add("grpc-status-details-bin", status.SerializeToString())
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details, "")


@pytest.mark.parametrize(
    ("code", "details", "reason", "kind"),
    [
        ("UNAVAILABLE", "Socket closed", "", LinkLost),
        ("UNAVAILABLE", "failed to connect: Connection refused", "", LinkRefused),
        ("CANCELLED", "", "", LinkLost),
        ("INTERNAL", "Received RST_STREAM with error code 2", "", LinkLost),
        # The client's own words when the stream breaks while it writes; once taken for the worker's, it cost an epoch.
        ("INTERNAL", "Internal error from Core", "", LinkLost),
        ("INTERNAL", "kernel launch failed", "", LinkRejected),
        ("FAILED_PRECONDITION", "step 5 after step 3", "", LinkRejected),
        ("INVALID_ARGUMENT", "rows and num_tokens differ", "", LinkRejected),
        # Said by the worker, as the details show, and not by the transport.
        ("UNAVAILABLE", "the worker is leaving", "DRAINING", LinkRejected),
    ],
)
def test_a_failure_is_the_transports_or_the_workers(code: str, details: str, reason: str, kind: type) -> None:
    judged = _judged(_error(grpc.StatusCode[code], details, reason))
    assert type(judged) is kind
    assert details in str(judged)
    if isinstance(judged, LinkRejected):
        assert (judged.code, judged.reason) == (code, reason)


async def test_a_port_nobody_listens_on_is_refused() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    link = GrpcTransport().connect(address)
    with pytest.raises(LinkRefused):
        async with asyncio.timeout(20):
            await link.get_capabilities()
    await link.close()


def test_reasons_survive_the_way_through_a_status() -> None:
    failure = Failure(errors.Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", "full", {"limit": "3"}, retry_after_s=1.5)
    status = to_status(failure)
    assert reason_of(status.SerializeToString()) == "QUEUE_FULL"
    assert len(status.details) == 2
    assert reason_of(b"\xff") == "" and reason_of(b"") == ""


@pytest.mark.parametrize("reason", RefusalReason)
def test_every_refusal_has_a_code(reason: RefusalReason) -> None:
    failure = errors.refusal(RequestRefused(1, "r", reason, "because"))
    assert failure.reason == reason.value and failure.message == "because"


@pytest.mark.parametrize("reason", EndReason)
def test_every_end_is_success_or_has_a_code(reason: EndReason) -> None:
    for cause in AbortCause if reason is EndReason.ABORTED else (None,):
        failure = errors.failure(RequestEnded(1, "r", reason, Usage(), cause=cause))
        assert (failure is None) == (reason in (EndReason.STOP, EndReason.LENGTH))
        assert failure is None or (failure.reason and failure.message)


async def test_names_resolve_to_addresses_in_a_fixed_order() -> None:
    resolver = SystemResolver()
    assert await resolver.resolve("127.0.0.1", 7) == ("127.0.0.1:7",)
    assert await resolver.resolve("::1", 7) == ("[::1]:7",)
    found = await resolver.resolve("localhost", 7)
    assert found == tuple(sorted(found)) and found


async def test_a_name_that_does_not_exist_has_no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: int) -> None:
        def getaddrinfo(*_: object, **__: object) -> None:
            raise socket.gaierror(number, "planted")

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    fail(socket.EAI_NONAME)
    assert await SystemResolver().resolve("worker", 1) == ()
    fail(socket.EAI_AGAIN)
    with pytest.raises(OSError, match="planted"):
        await SystemResolver().resolve("worker", 1)


# --- the model in service
# -------------------------------------------------------------------------------------------------


def facts(name: str = "m", digest: str = "d") -> ModelFacts:
    return ModelFacts(name, 260, 1000, digest, b"")


async def test_the_first_model_stays_as_long_as_it_is_in_use() -> None:
    in_use = True
    changes: list[str] = []
    model = ServedModel(lambda: in_use, lambda new: changes.append(new.name))
    model.check(facts("anything"))
    model.adopt(facts("first"))
    model.adopt(facts("first"))
    with pytest.raises(RankUnfit, match="its model is 'second'"):
        model.adopt(facts("second"))
    with pytest.raises(RankUnfit, match="tokenizer digest"):
        model.check(facts("first", "other"))
    in_use = False
    model.adopt(facts("second"))
    assert changes == ["first", "second"]


async def test_a_tokenizer_belongs_to_its_model() -> None:
    model = ServedModel(lambda: False, lambda _: None)
    pieces = (TokenizerPiece("tokenizer.json", b"{}"),)
    assert not model.wants_tokenizer(facts())
    model.adopt(facts())
    assert await model.tokenizer(0.001) is None
    waiting = asyncio.create_task(model.tokenizer(20))
    await asyncio.sleep(0)
    model.keep_tokenizer(facts(digest="of another"), ())
    assert model.wants_tokenizer(facts())
    model.keep_tokenizer(facts(), pieces)
    assert await waiting == pieces
    assert not model.wants_tokenizer(facts())
    model.adopt(facts(digest="new"))
    assert await model.tokenizer(0.001) is None
    assert not ServedModel(lambda: False, lambda _: None).wants_tokenizer(facts(digest=""))

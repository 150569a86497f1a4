"""How many calls a front end takes, from one client address and in all, and what the others are answered."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from stepfence.v1 import generation_service_pb2 as pb
from stepfence.v1 import generation_service_pb2_grpc
from tests.contract.frontend.harness import EOF, FrontEndUnderTest, complete, refusal, served, text_request, until
from tests.support.session_double import SessionDouble
from tests.support.tcp_proxy import TcpProxy

_BURST = 2_500
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


@contextlib.asynccontextmanager
async def _client(under_test: FrontEndUnderTest, address: str = "127.0.0.1") -> AsyncIterator[Any]:
    """A stub whose calls come from this address of the loopback network."""
    async with (
        TcpProxy(under_test.address, source=address) as proxy,
        grpc.aio.insecure_channel(proxy.address, options=_OPTIONS) as channel,
    ):
        yield generation_service_pb2_grpc.GenerationServiceStub(channel)


async def _outcome(call: Any) -> str:
    """ "OK", or code and reason; a refusal that can be tried again names the time."""
    try:
        await call
    except grpc.aio.AioRpcError:
        answer = await refusal(call)
        assert answer.retry_after_s or answer.code != "RESOURCE_EXHAUSTED"
        return f"{answer.code} {answer.reason}"
    return "OK"


async def test_f122_a_burst_of_calls_is_answered_and_not_cancelled() -> None:
    double = SessionDouble()
    double.play = lambda _: [b"x"]
    async with served(double, max_calls=_BURST, max_calls_per_peer=None) as under_test:
        # All are on their way before the server's loop has its first turn.
        calls = [under_test.stub.Complete(complete(text_request("a"))) for _ in range(_BURST)]
        assert collections.Counter(await asyncio.gather(*map(_outcome, calls))) == {"OK": _BURST}
        await under_test.until_nothing_is_left()


async def test_f122_what_is_too_much_of_a_burst_gets_queue_full() -> None:
    room = 300
    double = SessionDouble()
    async with served(double, max_calls=room, max_calls_per_peer=None) as under_test:
        calls = [under_test.stub.Complete(complete(text_request("a"))) for _ in range(_BURST)]
        outcomes = [asyncio.create_task(_outcome(call)) for call in calls]
        held = [await double.next_request() for _ in range(room)]
        await until(lambda: sum(outcome.done() for outcome in outcomes) == _BURST - room)
        for request in held:
            request.accept()
            request.end_length()
        assert collections.Counter(await asyncio.gather(*outcomes)) == {
            "OK": room,
            "RESOURCE_EXHAUSTED QUEUE_FULL": _BURST - room,
        }
        await under_test.until_nothing_is_left()


async def test_f123_one_client_leaves_room_for_another() -> None:
    double = SessionDouble()
    async with served(double, max_calls_per_peer=3) as under_test:
        async with _client(under_test, "127.0.0.2") as greedy, _client(under_test, "127.0.0.1") as other:
            held = [greedy.Generate(text_request("long")) for _ in range(3)]
            for _ in held:
                (await double.next_request()).accept()
            for call in held:
                assert (await call.read()).WhichOneof("event") == "accepted"
            refused = greedy.Complete(complete(text_request("one more")))
            answer = await refusal(refused)
            assert (answer.code, answer.reason) == ("RESOURCE_EXHAUSTED", "TOO_MANY_CALLS")
            assert answer.retry_after_s == 1.0
            assert answer.metadata == {"setting": "max_calls_per_peer", "limit": "3"}
            assert "--max-calls-per-peer" in answer.message and "--gateway" in answer.message
            double.play = lambda _: [b"x"]
            await other.Complete(complete(text_request("short")))
            # What ended makes room.
            held[0].cancel()
            await until(lambda: under_test.process.front_end.num_streams == 2)
            await greedy.Complete(complete(text_request("again")))
            for call in held[1:]:
                call.cancel()
        await until(lambda: under_test.process.front_end.num_streams == 0)


async def test_f123_a_gateway_is_not_one_client() -> None:
    double = SessionDouble()
    settings = {"max_calls_per_peer": 1, "gateway": ("127.0.0.0/31",)}
    async with served(double, **settings) as under_test, _client(under_test, "127.0.0.1") as stub:
        held = [stub.Generate(text_request("long")) for _ in range(5)]
        for _ in held:
            (await double.next_request()).accept()
        for call in held:
            assert (await call.read()) is not EOF
            call.cancel()


async def test_f123_a_client_at_its_bound_may_still_abort_and_ask_for_the_model() -> None:
    double = SessionDouble()
    async with served(double, max_calls_per_peer=1) as under_test, _client(under_test) as stub:
        call = stub.Generate(text_request("long"))
        (await double.next_request()).accept()
        accepted = (await call.read()).accepted
        assert (await stub.GetModel(pb.GetModelRequest())).model.name == "bytes"
        await stub.Abort(pb.AbortRequest(request_id=accepted.request_id))
        assert (await refusal(call)).reason == "ABORTED"

"""The simulation's own ground: what it does to processes and messages is what it says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from stepfence.v1 import worker_service_pb2 as pb
from tests.simulation.hosts import Process, SimulationLoop
from tests.simulation.network import Call, Keepalive, Network, ServerContext, streaming

_KEEPALIVE = Keepalive(client_s=6.0, server_s=20.0)


def simulated(test: Callable[[Network], Awaitable[None]]) -> Callable[[], None]:
    """Run a test on a clock and a network of its own."""

    def run() -> None:
        async def body() -> None:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, SimulationLoop)
            await test(Network(loop, random.Random(1)))
            assert loop.failures == []

        with asyncio.Runner(loop_factory=SimulationLoop) as runner:
            runner.run(body())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def echo(requests: Any, context: ServerContext) -> None:
    async for request in requests:
        await context.write(request)


def serve(network: Network, handler: Any = echo) -> Process:
    server = Process(network.loop, "server")
    network.listen("server", server, {"Echo": streaming(handler, pb.RunStepsRequest)})
    return server


def dial(network: Network) -> Call:
    return network.call(Process(network.loop, "client"), "client", "server", "Echo", _KEEPALIVE)


def message(number: int) -> bytes:
    return pb.RunStepsRequest(open=pb.Open(epoch=number)).SerializeToString()


async def lost(call: Call) -> tuple[float, str]:
    """When the call fails, and why."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        while True:
            await call.receive()
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    return asyncio.get_running_loop().time(), error.value.details() or ""


@simulated
async def test_messages_arrive_in_order_however_late(network: Network) -> None:
    serve(network)
    call = dial(network)
    for number in range(200):
        await call.send(message(number))
    assert [await call.receive() for _ in range(200)] == [message(number) for number in range(200)]


@simulated
async def test_a_frozen_process_does_nothing_and_then_everything_in_order(network: Network) -> None:
    happened: list[tuple[float, str]] = []

    async def live() -> None:
        for number in range(4):
            await asyncio.sleep(1.0)
            happened.append((network.loop.time(), f"woke {number}"))

    async def is_patient() -> None:
        # Both come due while the process is frozen. asyncio then lets the time-out win, as after a real SIGCONT.
        try:
            async with asyncio.timeout(2.5):
                await asyncio.sleep(1.7)
            happened.append((network.loop.time(), "in time"))
        except TimeoutError:
            happened.append((network.loop.time(), "too late"))

    process = Process(network.loop, "sleeper")
    process.spawn(live())
    process.spawn(is_patient())
    await asyncio.sleep(1.5)
    network.freeze(process)
    await asyncio.sleep(5.0)
    assert happened == [(1.0, "woke 0")]
    process.thaw()
    await asyncio.sleep(0.1)
    assert [what for _, what in happened] == ["woke 0", "too late", "woke 1"]
    assert all(when == 6.5 for when, _ in happened[1:])
    await asyncio.sleep(2.0)
    assert happened[-1] == (8.5, "woke 3")


@simulated
async def test_a_killed_process_is_silent_and_its_peers_are_reset(network: Network) -> None:
    server = serve(network)
    call = dial(network)
    await call.send(message(1))
    assert await call.receive() == message(1)
    network.sever(server, is_told=True)
    server.kill()
    at, why = await lost(call)
    assert at < 0.1 and "Stream removed" in why
    assert "Connection refused" in (await lost(dial(network)))[1]
    await asyncio.sleep(0.1)
    assert server.num_tasks == 0


@simulated
async def test_who_talks_to_a_vanished_or_frozen_process_gives_up_by_keepalive(network: Network) -> None:
    for is_gone in (False, True):
        server = serve(network)
        call = dial(network)
        await call.send(message(1))
        await call.receive()
        before = network.loop.time()
        if is_gone:
            network.sever(server, is_told=False)
            server.kill()
        else:
            network.freeze(server)
        await call.send(message(2))
        at, why = await lost(call)
        assert at - before == pytest.approx(6.0) and "keepalive" in why
        server.thaw()


@simulated
async def test_a_blocked_path_holds_things_up_and_a_cut_loses_them(network: Network) -> None:
    serve(network)
    call = dial(network)
    await call.send(message(1))
    await call.receive()
    network.block("server", "client")
    await call.send(message(2))
    await asyncio.sleep(3.0)
    network.unblock("server", "client")
    before = network.loop.time()
    assert await call.receive() == message(2)
    assert network.loop.time() - before < 0.1
    network.cut("client", "server")
    assert "Stream removed" in (await lost(call))[1]
    with pytest.raises(grpc.aio.AioRpcError):
        await call.send(message(3))


@simulated
async def test_a_handler_is_cancelled_when_its_client_leaves(network: Network) -> None:
    ended: list[str] = []

    async def wait(requests: Any, context: ServerContext) -> None:
        try:
            async for _ in requests:
                pass
        finally:
            ended.append("cancelled")

    serve(network, wait)
    call = dial(network)
    await call.send(message(1))
    await asyncio.sleep(0.1)
    call.cancel()
    await asyncio.sleep(0.1)
    assert ended == ["cancelled"]
    assert network.calls_between("client", "server") == []

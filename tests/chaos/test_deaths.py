"""The death of everything that is not a worker, under load: scheduler, front end, clients."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from scheduler_svc.cli.ports import free_address
from tests.chaos.load import Order, Outcome, check, orders, run_all, run_order
from tests.e2e.client import connect
from tests.support.processes import Deployment, wait_until
from tests.support.tcp_proxy import TcpProxy

_SCRIPT = json.dumps({"delay_ms": 10.0, "verify": "full"})


@asynccontextmanager
async def deployed(folder: Path, *, scheduler_grace_s: float = 30.0, **scheduler: str) -> AsyncIterator[Deployment]:
    with Deployment(folder, num_workers=2) as deployment:
        for index in range(2):
            start_worker(deployment, index)
        deployment.start_scheduler(**scheduler)
        deployment.start_frontend(scheduler_grace_s=str(scheduler_grace_s))
        await asyncio.to_thread(deployment.wait_ready)
        yield deployment


def start_worker(deployment: Deployment, index: int) -> None:
    # Room for every stream of a test at its greatest length: what is measured is a pause, and no wait for room.
    deployment.start_worker(index, num_blocks="6001", script=_SCRIPT)


def kill_worker(deployment: Deployment, index: int) -> None:
    """And start it again."""
    next(process for process in deployment.processes if process.name == f"worker-{index}").kill()
    start_worker(deployment, index)


def endless(index: int) -> Order:
    """A request that runs until somebody ends it."""
    return Order(index, 0.0, tuple(range(1, 20 + index % 50)), 4000, seed=None, leaves_after=None)


async def first_token(deployment: Deployment) -> float:
    """Ask again and again, as a client would, until a token comes; the time, in seconds since the epoch."""
    order = Order(0, 0.0, (1, 2, 3), 1, seed=None, leaves_after=None)
    async with connect(deployment.frontend_address) as stub:
        while True:
            outcome = await run_order(stub, order)
            if outcome.finished is not None:
                assert outcome.token_ids == order.cold_run()
                return time.time()
            assert outcome.failure is not None and outcome.failure.status is grpc.StatusCode.UNAVAILABLE
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "num_deaths", [pytest.param(3, id="short"), pytest.param(20, id="long", marks=[pytest.mark.long])]
)
@pytest.mark.timeout(900)
async def test_d57_a_scheduler_killed_under_load_is_a_pause_and_no_stream_ends(tmp_path: Path, num_deaths: int) -> None:
    """With 64 streams, and with a worker killed now and then as well."""
    pauses: list[float] = []
    async with deployed(tmp_path) as deployment:
        wanted = [
            Order(index, 0.0, tuple(range(1, 20 + index)), 60 * num_deaths, seed=index or None, leaves_after=None)
            for index in range(64)
        ]
        outcomes = [Outcome(order) for order in wanted]
        async with connect(deployment.frontend_address) as stub:
            running = [asyncio.create_task(run_order(stub, outcome.order, outcome)) for outcome in outcomes]
            for death in range(num_deaths):
                while min(len(outcome.token_ids) for outcome in outcomes) <= 40 * death:
                    await asyncio.sleep(0.01)
                (scheduler,) = [process for process in deployment.processes if process.name == "scheduler"]
                killed_at = time.monotonic()
                before = [len(outcome.token_ids) for outcome in outcomes]
                await asyncio.to_thread(scheduler.kill)
                if death % 4 == 3:
                    await asyncio.to_thread(kill_worker, deployment, death % 2)
                deployment.start_scheduler()
                while any(len(o.token_ids) <= n for o, n in zip(outcomes, before, strict=True) if o.finished is None):
                    await asyncio.sleep(0.01)
                pauses.append(time.monotonic() - killed_at)
            await asyncio.gather(*running)
        check(outcomes)
        await asyncio.to_thread(deployment.wait_idle)
    print(
        f"chaos: scheduler killed {num_deaths} times under 64 streams, until every stream had a token again s "
        f"{[round(pause, 2) for pause in sorted(pauses)]}"
    )


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_d57_the_pause_with_many_resident_tokens(tmp_path: Path) -> None:
    """64 requests with prompts of 2,000 tokens of their own, all of which the next scheduler has computed again."""
    with Deployment(tmp_path) as deployment:
        deployment.start_worker(0, num_blocks="10000", script=_SCRIPT)
        deployment.start_scheduler()
        deployment.start_frontend()
        await asyncio.to_thread(deployment.wait_ready)
        outcomes = [
            Outcome(Order(index, 0.0, tuple((index + 7 * i) % 256 for i in range(2000)), 300, None, None))
            for index in range(64)
        ]
        async with connect(deployment.frontend_address) as stub:
            running = [asyncio.create_task(run_order(stub, outcome.order, outcome)) for outcome in outcomes]
            while any(len(outcome.token_ids) < 20 for outcome in outcomes):
                await asyncio.sleep(0.01)
            before = [len(outcome.token_ids) for outcome in outcomes]
            (scheduler,) = [process for process in deployment.processes if process.name == "scheduler"]
            killed_at = time.monotonic()
            await asyncio.to_thread(scheduler.kill)
            deployment.start_scheduler()
            first = None
            while any(len(o.token_ids) <= n for o, n in zip(outcomes, before, strict=True)):
                if first is None and any(len(o.token_ids) > n for o, n in zip(outcomes, before, strict=True)):
                    first = time.monotonic() - killed_at
                await asyncio.sleep(0.01)
            last = time.monotonic() - killed_at
            await asyncio.gather(*running)
        check(outcomes)
        print(
            f"chaos: 64 streams of 2,000 tokens, scheduler killed: first token after s {first or 0.0:.2f}, "
            f"all after s {last:.2f}"
        )


@pytest.mark.timeout(300)
async def test_d57_a_cut_or_half_open_attach_stream_is_a_pause(tmp_path: Path) -> None:
    """The same scheduler all the time; only the connection of its front end suffers."""
    with Deployment(tmp_path) as deployment:
        start_worker(deployment, 0)
        deployment.start_scheduler()
        async with TcpProxy(deployment.scheduler_address) as proxy:
            deployment.start_frontend(scheduler=proxy.address)
            await asyncio.to_thread(deployment.wait_ready)
            outcomes = [
                Outcome(Order(index, 0.0, tuple(range(1, 20 + index)), 400, seed=index, leaves_after=None))
                for index in range(16)
            ]
            async with connect(deployment.frontend_address) as stub:
                running = [asyncio.create_task(run_order(stub, outcome.order, outcome)) for outcome in outcomes]
                for number in range(3):
                    while min(len(outcome.token_ids) for outcome in outcomes) <= 40 * number:
                        await asyncio.sleep(0.01)
                    proxy.cut()
                while min(len(outcome.token_ids) for outcome in outcomes) <= 150:
                    await asyncio.sleep(0.01)
                # The front end loses its connection, and the scheduler is not told: its newer stream supersedes.
                proxy.half_open("near")
                while min(len(outcome.token_ids) for outcome in outcomes) <= 250:
                    await asyncio.sleep(0.01)
                proxy.heal()
                await asyncio.gather(*running)
            check(outcomes)
            await asyncio.to_thread(deployment.wait_idle)


@pytest.mark.timeout(300)
async def test_d57_a_scheduler_that_stays_away_ends_the_streams_with_what_they_cost(tmp_path: Path) -> None:
    async with deployed(tmp_path, scheduler_grace_s=2.0) as deployment:
        outcomes = [Outcome(endless(index)) for index in range(24)]
        async with connect(deployment.frontend_address) as stub:
            running = [asyncio.create_task(run_order(stub, outcome.order, outcome)) for outcome in outcomes]
            while any(len(outcome.token_ids) < 5 for outcome in outcomes):
                await asyncio.sleep(0.01)
            (scheduler,) = [process for process in deployment.processes if process.name == "scheduler"]
            await asyncio.to_thread(scheduler.kill)
            await asyncio.gather(*running)
        for outcome in outcomes:
            failure = outcome.failure
            assert failure is not None and failure.status is grpc.StatusCode.UNAVAILABLE, outcome
            assert failure.reason == "SCHEDULER_UNAVAILABLE" and failure.message
            assert failure.usage is not None and failure.usage.num_completion_tokens == len(outcome.token_ids)
            assert outcome.token_ids == outcome.order.cold_run()[: len(outcome.token_ids)]
        deployment.start_scheduler()
        await first_token(deployment)
        await asyncio.to_thread(deployment.wait_idle)


@pytest.mark.timeout(300)
async def test_d57_a_frozen_scheduler_is_superseded_by_itself_and_no_stream_ends(tmp_path: Path) -> None:
    """It stands still longer than its connections live, and goes on as if nothing had happened."""
    async with deployed(tmp_path) as deployment:
        outcomes = [
            Outcome(Order(index, 0.0, tuple(range(1, 20 + index)), 300, seed=None, leaves_after=None))
            for index in range(16)
        ]
        async with connect(deployment.frontend_address) as stub:
            running = [asyncio.create_task(run_order(stub, outcome.order, outcome)) for outcome in outcomes]
            while any(len(outcome.token_ids) < 5 for outcome in outcomes):
                await asyncio.sleep(0.01)
            (scheduler,) = [process for process in deployment.processes if process.name == "scheduler"]
            scheduler.signal(signal.SIGSTOP)
            await asyncio.sleep(22.0)
            scheduler.signal(signal.SIGCONT)
            await asyncio.gather(*running)
        check(outcomes)
        await asyncio.to_thread(deployment.wait_idle)


async def test_a_front_end_that_dies_takes_its_requests_along_and_nobody_elses(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment:
        doomed = next(process for process in deployment.processes if process.name == "frontend")
        # A second front end at another address.
        other_address = free_address("127.0.0.1:0", {deployment.frontend_address})
        deployment.start_frontend(listen=other_address)
        await asyncio.to_thread(deployment.wait_ready)
        staying = orders(12, 0.0, random.Random(5), num_tokens=(200, 300))
        stayers = [Order(o.index, 0.0, o.prompt, o.max_tokens, o.seed, None) for o in staying]
        async with connect(deployment.frontend_address) as stub, connect(other_address) as other_stub:
            outcomes = [Outcome(endless(index)) for index in range(24)]
            running = [asyncio.create_task(run_order(stub, outcome.order, outcome)) for outcome in outcomes]
            beside = asyncio.create_task(run_all(other_stub, stayers))
            while any(len(outcome.token_ids) < 3 for outcome in outcomes):
                await asyncio.sleep(0.01)
            killed_at = time.monotonic()
            await asyncio.to_thread(doomed.kill)
            await asyncio.to_thread(
                wait_until, lambda: deployment.audit().num_live_requests <= len(stayers), "its requests are aborted"
            )
            print(f"chaos: requests of a killed front end gone after s {time.monotonic() - killed_at:.2f}")
            await asyncio.gather(*running)
            for outcome in outcomes:
                assert outcome.failure is not None and outcome.failure.status is grpc.StatusCode.UNAVAILABLE
            for survived in await beside:
                assert survived.token_ids == survived.order.cold_run() and survived.finished is not None
        await asyncio.to_thread(deployment.wait_idle)
        # And again, with a new one in its place.
        deployment.start_frontend()
        await first_token(deployment)
        await asyncio.to_thread(deployment.wait_idle)

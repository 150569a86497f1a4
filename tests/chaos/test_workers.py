"""Workers are killed, frozen and cut off while streams run: clients see pauses and nothing else.

The short form is part of every test run; `make chaos` runs the same for a minute with 200 streams and prints what
docs/operations.md records.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.chaos.load import again_and_again, check, orders, run_all, summary
from tests.e2e.client import connect
from tests.support.processes import Deployment, Process
from tests.support.tcp_proxy import TcpProxy

# (streams, seconds of trouble)
FORMS = [
    pytest.param(50, 6.0, id="short"),
    pytest.param(200, 60.0, id="long", marks=[pytest.mark.long, pytest.mark.timeout(900)]),
]

_WATCHDOG_S: Final = 1.5
# Every step takes so long, so that streams last for seconds and share steps.
_SCRIPT: Final = json.dumps({"delay_ms": 10.0, "jitter_ms": 5.0, "verify": "full"})
# Small enough that what one worker alone must take over makes it preempt.
_NUM_BLOCKS: Final = "321"

Blow = Callable[[random.Random], Awaitable[None]]


def start_worker(deployment: Deployment, index: int) -> Process:
    return deployment.start_worker(index, num_blocks=_NUM_BLOCKS, script=_SCRIPT)


def worker_of(deployment: Deployment, index: int) -> Process:
    return next(process for process in deployment.processes if process.name == f"worker-{index}")


async def busiest(deployment: Deployment) -> Process:
    """The worker with the most requests now."""
    ranks = (await asyncio.to_thread(deployment.status)).ranks
    address = max(ranks, key=lambda rank: rank.num_running).rank
    return worker_of(deployment, deployment.worker_addresses.index(address))


@asynccontextmanager
async def deployed(folder: Path, proxies: list[TcpProxy] | None = None) -> AsyncIterator[Deployment]:
    """Two workers, scheduler and front end. A list of proxies gets one before each worker."""
    with Deployment(folder, num_workers=2) as deployment:
        addresses = list(deployment.worker_addresses)
        for index in range(2):
            start_worker(deployment, index)
        if proxies is not None:
            proxies += [await TcpProxy(address).__aenter__() for address in addresses]
            addresses = [proxy.address for proxy in proxies]
        try:
            deployment.start_scheduler(
                addresses,
                step_watchdog_s=str(_WATCHDOG_S),
                first_steps_watchdog_s=str(_WATCHDOG_S),
                # Blows at random are no request's fault.
                max_fruitless_epochs="0",
            )
            deployment.start_frontend()
            await asyncio.to_thread(deployment.wait_ready)
            yield deployment
        finally:
            for proxy in proxies or ():
                await proxy.__aexit__()


async def chaos(
    deployment: Deployment, blow: Blow, num_streams: int, seconds: float, counts: Callable[[], dict[str, int]]
) -> None:
    """Streams arrive during the trouble; afterwards each must have its cold run, and nothing may be left."""
    rng = random.Random(num_streams)
    async with connect(deployment.frontend_address) as stub:
        running = asyncio.create_task(run_all(stub, orders(num_streams, seconds * 0.9, rng)))
        await again_and_again(lambda: blow(rng), running, seconds, at_least=4)
        outcomes = await running
    status = await asyncio.to_thread(deployment.status)
    facts = {
        **counts(),
        "epochs": sum(rank.epoch for rank in status.ranks),
        "requeued": status.num_requeued_after_worker_loss,
        "preemptions": status.num_preemptions,
    }
    print(summary(outcomes, **facts))
    check(outcomes)
    await asyncio.to_thread(deployment.wait_idle)


@pytest.mark.parametrize("num_streams, seconds", FORMS)
async def test_workers_killed_again_and_again(tmp_path: Path, num_streams: int, seconds: float) -> None:
    kills = 0

    async with deployed(tmp_path) as deployment:

        async def kill(rng: random.Random) -> None:
            nonlocal kills
            await asyncio.sleep(rng.uniform(1.0, 2.0))
            index = rng.randrange(2)
            await asyncio.to_thread(worker_of(deployment, index).kill)
            start_worker(deployment, index)
            kills += 1

        await chaos(deployment, kill, num_streams, seconds, lambda: {"kills": kills})
        assert kills >= 3
        status = await asyncio.to_thread(deployment.status)
        assert status.num_requeued_after_worker_loss > 0


@pytest.mark.parametrize("num_streams, seconds", FORMS)
async def test_workers_frozen_for_longer_and_shorter_than_the_watchdog(
    tmp_path: Path, num_streams: int, seconds: float
) -> None:
    short = long = 0

    async with deployed(tmp_path) as deployment:

        async def freeze(rng: random.Random) -> None:
            nonlocal short, long
            is_long = (short + long) % 2 == 1
            worker = await busiest(deployment) if is_long else worker_of(deployment, rng.randrange(2))
            worker.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(rng.uniform(1.2, 2.0) * _WATCHDOG_S if is_long else rng.uniform(0.1, 0.5))
            finally:
                worker.signal(signal.SIGCONT)
            short, long = short + (not is_long), long + is_long
            await asyncio.sleep(rng.uniform(0.2, 1.0))

        await chaos(
            deployment,
            freeze,
            num_streams,
            seconds,
            lambda: {"short freezes": short, "freezes over the watchdog": long},
        )
        assert short and long
        assert all(worker_of(deployment, index).is_running for index in range(2))
        # The long ones ended epochs of a worker that lives on.
        assert sum(rank.epoch for rank in (await asyncio.to_thread(deployment.status)).ranks) > 2


@pytest.mark.parametrize("num_streams, seconds", FORMS)
async def test_a_network_that_cuts_delays_and_goes_half_open(tmp_path: Path, num_streams: int, seconds: float) -> None:
    dealt = {"cuts": 0, "delays of 200 ms": 0, "half-open": 0, "half-open over the watchdog": 0}
    proxies: list[TcpProxy] = []

    async with deployed(tmp_path, proxies) as deployment:

        async def trouble(rng: random.Random) -> None:
            proxy = rng.choice(proxies)
            kind = list(dealt)[sum(dealt.values()) % len(dealt)]
            dealt[kind] += 1
            if kind == "cuts":
                for _ in range(rng.randrange(1, 4)):
                    proxy.cut()
                    await asyncio.sleep(rng.uniform(0.0, 0.3))
            elif kind == "delays of 200 ms":
                proxy.delay_s = 0.2
                await asyncio.sleep(rng.uniform(0.5, 1.5))
                proxy.delay_s = 0.0
            else:
                proxy.half_open(rng.choice(("near", "far", "both")))
                is_long = kind == "half-open over the watchdog"
                await asyncio.sleep(rng.uniform(1.2, 1.8) * _WATCHDOG_S if is_long else rng.uniform(0.2, 1.0))
                proxy.heal()
            await asyncio.sleep(rng.uniform(0.2, 0.8))

        await chaos(deployment, trouble, num_streams, seconds, lambda: dealt)
        assert all(dealt.values()), dealt

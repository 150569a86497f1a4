"""Clients that open requests and drop them at any moment, thousands of them, against a queue that holds 256."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from statistics import median
from typing import Any, Final

import grpc
import pytest

from scheduler_svc.cli.health import check
from stepfence.v1 import generation_service_pb2 as pb
from tests.chaos.load import DEADLINE_S, Order, Outcome, orders, run_order
from tests.chaos.load import check as check_outcomes
from tests.e2e.client import connect, refusal
from tests.support.processes import Deployment, Process

_QUEUE_LIMIT: Final = 256
# Storming clients at a time: enough to fill the queue and be refused.
_CONCURRENCY: Final = 600
# What a process may grow by, once the first part of the storm has shown it everything. RSS of an allocator is not
# exact; 5,000 requests that leaked as little as their prompts and tables would be several times this.
_MAX_GROWTH_MIB: Final = 16.0


def rss_mib(process: Process) -> float:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


class Storm:
    """Opens requests that would run for minutes and drops each after a random while."""

    def __init__(self, stub: Any, seed: int) -> None:
        self.num_refused = 0
        self.num_accepted = 0
        self._stub = stub
        self._rng = random.Random(seed)

    async def blow(self, num_requests: int) -> None:
        """So many requests, opened and dropped."""
        left = num_requests

        async def client() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await self._one()

        await asyncio.gather(*(client() for _ in range(_CONCURRENCY)))

    async def fill(self) -> None:
        """Open requests, and hold them, until one is refused for a full queue; then drop them all at once."""
        calls: list[Any] = []
        try:
            while True:
                order = Order(0, 0.0, (len(calls) % 256,), 3000, seed=None, leaves_after=None)
                calls.append(self._stub.Generate(order.request(), timeout=DEADLINE_S))
                try:
                    assert (await calls[-1].read()).WhichOneof("event") == "accepted"
                    self.num_accepted += 1
                except grpc.RpcError as error:
                    self._note_refusal(error)
                    return
                assert len(calls) < 10 * _QUEUE_LIMIT, "the queue is never full"
        finally:
            for call in calls:
                call.cancel()

    async def _one(self) -> None:
        rng = self._rng
        prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 300))]
        order = Order(0, 0.0, tuple(prompt), 3000, seed=None, leaves_after=None)
        call = self._stub.Generate(order.request(), timeout=DEADLINE_S)
        try:
            async with asyncio.timeout(rng.choice((0.0, 0.3, 2.0, 4.0)) * rng.random()):
                async for response in call:
                    if response.WhichOneof("event") == "accepted":
                        self.num_accepted += 1
        except TimeoutError:
            pass
        except grpc.RpcError as error:
            self._note_refusal(error)
        finally:
            call.cancel()

    def _note_refusal(self, error: grpc.RpcError) -> None:
        refused = refusal(error)
        assert (refused.status, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"), refused
        self.num_refused += 1


async def untouched(stub: Any, order: Order) -> Outcome:
    """A client that stays, and comes back when the queue is full."""
    while True:
        outcome = await run_order(stub, order)
        if outcome.failure is None or outcome.failure.reason != "QUEUE_FULL":
            return outcome
        await asyncio.sleep(0.05)


async def stay(stub: Any, wanted: list[Order]) -> float:
    """Clients that stay, all at once; each must get its cold run. The median time they take, in seconds."""
    outcomes = await asyncio.gather(*(untouched(stub, order) for order in wanted))
    check_outcomes(outcomes)
    return median(outcome.seconds for outcome in outcomes)


@pytest.mark.parametrize(
    "num_requests",
    [pytest.param(1_500, id="short"), pytest.param(5_000, id="long", marks=[pytest.mark.long])],
)
@pytest.mark.timeout(600)
async def test_an_abort_storm_leaves_nothing_and_stops_nobody(tmp_path: Path, num_requests: int) -> None:
    with Deployment(tmp_path) as deployment:
        deployment.start_worker(num_blocks="1025", script=json.dumps({"delay_ms": 2.0}))
        deployment.start_scheduler(max_num_seqs="64", max_queued_requests=str(_QUEUE_LIMIT))
        # All clients have one address.
        deployment.start_frontend(max_calls_per_peer="none")
        await asyncio.to_thread(deployment.wait_ready)
        wanted = [
            Order(o.index, 0.0, o.prompt, o.max_tokens, o.seed, None)
            for o in orders(16, 0.0, random.Random(1), num_tokens=(40, 80))
        ]
        async with connect(deployment.frontend_address) as stub:
            storm = Storm(stub, seed=2)
            calm_s = await stay(stub, wanted)
            await storm.fill()
            await storm.blow(num_requests // 3)
            before = {process.name: rss_mib(process) for process in deployment.processes}
            blowing = asyncio.create_task(storm.blow(num_requests - num_requests // 3))
            stormy_s = await stay(stub, wanted)
            await blowing
            await storm.fill()
            growth = {process.name: rss_mib(process) - before[process.name] for process in deployment.processes}
            for address in (deployment.frontend_address, deployment.scheduler_address):
                assert (await asyncio.to_thread(check, address, None, 20.0)).serving
            await asyncio.to_thread(deployment.wait_idle)
            after_s = await stay(stub, wanted)
            model = await stub.GetModel(pb.GetModelRequest(), timeout=20)
            assert model.model.name == "scripted"
        await asyncio.to_thread(deployment.wait_idle)
        print(
            f"chaos: storm of {num_requests} requests, {storm.num_accepted} accepted, {storm.num_refused} refused; "
            f"16 untouched ones took {calm_s:.2f} s before, {stormy_s:.2f} s during, {after_s:.2f} s after it; "
            f"growth MiB { {name: round(mib, 1) for name, mib in growth.items()} }"
        )
        assert storm.num_refused > 0 and storm.num_accepted > 0
        assert max(growth.values()) < _MAX_GROWTH_MIB

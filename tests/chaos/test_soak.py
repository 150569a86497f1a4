"""Everything at once, for minutes: traffic of every kind through two front ends, while workers, the scheduler and one
of the front ends are killed again and again.

The other front end and one of the workers live through it: memory, descriptors and threads of these must not grow. Who
stays at that front end must get the text of a cold run, or be refused; no stream of it may end for a death."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from scheduler_svc.cli.ports import free_address
from stepfence.v1 import generation_service_pb2 as pb
from tests.chaos.load import Order, Outcome, check, run_order
from tests.e2e.client import Refusal, connect, refusal
from tests.support.processes import Deployment, Process, wait_until

_SCRIPT: Final = json.dumps({"delay_ms": 5.0})
# Of a process that lives through it, from the end of the first third to the end.
_MAX_GROWTH_MIB: Final = 24.0
_MAX_MORE_DESCRIPTORS: Final = 24
# Clients of each kind that are always there.
_NUM_STAYING: Final = 12
_NUM_ROUGH: Final = 12


@dataclass(frozen=True, slots=True)
class Size:
    """Of one process."""

    rss_mib: float
    num_descriptors: int
    num_threads: int

    @classmethod
    def of(cls, process: Process) -> Size:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
        return cls(
            int(status["VmRSS"].split()[0]) / 1024,
            len(os.listdir(f"/proc/{process.pid}/fd")),
            int(status["Threads"]),
        )


class Traffic:
    """Clients of one front end that come again as soon as they are done, until `ends_at` (of time.monotonic)."""

    def __init__(self, stub: Any, seed: int, ends_at: float) -> None:
        self.counts: Counter[str] = Counter()
        self.outcomes: list[Outcome] = []
        self._stub = stub
        self._rng = random.Random(seed)
        self._ends_at = ends_at

    async def stay(self) -> None:
        """One who waits for the whole text, and comes back when it is refused for want of room."""
        while time.monotonic() < self._ends_at:
            outcome = await run_order(self._stub, self._order())
            failure = outcome.failure
            # NO_WORKER: a new call in the moment between the start of a scheduler and its first worker.
            is_refused = failure is not None and failure.reason in ("QUEUE_FULL", "TOO_MANY_CALLS", "NO_WORKER")
            if is_refused and not outcome.token_ids:
                self.counts["refused"] += 1
                await asyncio.sleep(0.1)
                continue
            self.counts["stayed"] += 1
            self.outcomes.append(outcome)

    async def behave_badly(self) -> None:
        """One who leaves, reads slowly, is in a hurry, floods, or asks for nonsense."""
        kinds = (self._leave, self._read_slowly, self._hurry, self._flood, self._ask_for_nonsense)
        while time.monotonic() < self._ends_at:
            kind = self._rng.choice(kinds)
            self.counts[kind.__name__] += 1
            try:
                await kind()
            except grpc.RpcError as error:
                self.counts[f"failed {refusal(error).status.name}"] += 1
            await asyncio.sleep(0.05 * self._rng.random())

    def _order(self, max_tokens: int | None = None) -> Order:
        rng = self._rng
        prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 200))]
        return Order(0, 0.0, tuple(prompt), max_tokens or rng.randrange(20, 200), rng.choice((None, 7)), None)

    async def _leave(self) -> None:
        call = self._stub.Generate(self._order(2000).request(), timeout=60)
        for _ in range(self._rng.randrange(1, 20)):
            await call.read()
        call.cancel()

    async def _read_slowly(self) -> None:
        call = self._stub.Generate(self._order(400).request(), timeout=60)
        for _ in range(10):
            await call.read()
            await asyncio.sleep(0.2)
        call.cancel()

    async def _hurry(self) -> None:
        await self._stub.Complete(
            pb.CompleteRequest(request=self._order(2000).request()), timeout=self._rng.uniform(0.01, 1.0)
        )

    async def _flood(self) -> None:
        calls = [self._stub.Generate(self._order(500).request(), timeout=60) for _ in range(60)]
        await asyncio.sleep(0.3 * self._rng.random())
        for call in calls:
            call.cancel()

    async def _ask_for_nonsense(self) -> None:
        request = self._order().request()
        request.sampling.temperature = -3.0
        request.sampling.stop.extend(["x"] * 40)
        await self._stub.Generate(request, timeout=60).read()


class Killer:
    """Kills parts in turn, and has each started again."""

    def __init__(self, deployment: Deployment, doomed_address: str) -> None:
        self.counts: Counter[str] = Counter()
        self.slowest_release_s = 0.0
        self._deployment = deployment
        self._doomed_address = doomed_address

    def process(self, name: str, address: str | None = None) -> Process:
        return next(
            p for p in self._deployment.processes if p.name == name and address in (None, p.address) and p.is_running
        )

    async def run(self, ends_at: float, pause_s: float) -> None:
        kills = (self._kill_worker, self._kill_scheduler, self._kill_front_end)
        number = 0
        while time.monotonic() < ends_at:
            kill = kills[number % len(kills)]
            await asyncio.to_thread(kill)
            self.counts[kill.__name__] += 1
            number += 1
            await asyncio.sleep(pause_s)

    def _kill_worker(self) -> None:
        self.process("worker-0").kill()
        start_worker(self._deployment, 0)

    def _kill_scheduler(self) -> None:
        self.process("scheduler").kill()
        start_scheduler(self._deployment)
        wait_until(self._answers, "the scheduler answers")

    def _answers(self) -> bool:
        try:
            return self._deployment.status().num_running >= 0
        except grpc.RpcError:
            return False

    def _kill_front_end(self) -> None:
        self.process("frontend", self._doomed_address).kill()
        killed_at = time.monotonic()
        wait_until(
            lambda: sum(f.num_live_requests > 0 for f in self._deployment.status().front_ends) <= 1,
            "what a killed front end held is free",
            10.0,
        )
        self.slowest_release_s = max(self.slowest_release_s, time.monotonic() - killed_at)
        self._deployment.start_frontend(listen=self._doomed_address, max_calls_per_peer="none")


def start_worker(deployment: Deployment, index: int) -> None:
    deployment.start_worker(index, num_blocks="513", script=_SCRIPT)


def start_scheduler(deployment: Deployment) -> None:
    deployment.start_scheduler(max_num_seqs="32", max_queued_requests="256", max_fruitless_epochs="0")


@pytest.mark.parametrize(
    "seconds, pause_s",
    [
        pytest.param(30.0, 2.0, id="short", marks=[pytest.mark.timeout(400)]),
        pytest.param(600.0, 4.0, id="long", marks=[pytest.mark.long, pytest.mark.timeout(1500)]),
    ],
)
async def test_soak_everything_at_once_leaves_nothing_and_ends_no_stream_that_stays(
    tmp_path: Path, seconds: float, pause_s: float
) -> None:
    with Deployment(tmp_path, num_workers=2) as deployment:
        for index in range(2):
            start_worker(deployment, index)
        start_scheduler(deployment)
        deployment.start_frontend(max_calls_per_peer="none")
        doomed_address = free_address("127.0.0.1:0", {deployment.frontend_address, deployment.scheduler_address})
        deployment.start_frontend(listen=doomed_address, max_calls_per_peer="none")
        await asyncio.to_thread(deployment.wait_ready)
        killer = Killer(deployment, doomed_address)
        living = [killer.process("frontend", deployment.frontend_address), killer.process("worker-1")]
        began = time.monotonic()
        ends_at = began + seconds
        async with connect(deployment.frontend_address) as safe_stub, connect(doomed_address) as doomed_stub:
            safe, doomed = Traffic(safe_stub, 1, ends_at), Traffic(doomed_stub, 2, ends_at)
            clients = [traffic.stay() for traffic in (safe, doomed) for _ in range(_NUM_STAYING)]
            clients += [traffic.behave_badly() for traffic in (safe, doomed) for _ in range(_NUM_ROUGH)]
            running = [asyncio.create_task(client) for client in clients]
            killing = asyncio.create_task(killer.run(ends_at, pause_s))
            await asyncio.sleep(seconds / 3)
            before = [Size.of(process) for process in living]
            await asyncio.gather(*running, killing)
        after = [Size.of(process) for process in living]
        check(safe.outcomes)
        assert safe.counts["stayed"] > seconds / 2
        for outcome in doomed.outcomes:
            assert_excused(outcome)
        await asyncio.to_thread(deployment.wait_ready)
        await asyncio.to_thread(deployment.wait_idle)
        print(
            f"chaos: soak of {seconds:.0f} s: {dict(killer.counts)}, clients that stayed {dict(safe.counts)}, worst "
            f"pause s {max(o.longest_gap_s for o in safe.outcomes):.2f}, front end's requests free after s "
            f"{killer.slowest_release_s:.2f}, sizes before {before}, after {after}"
        )
        for process, was, became in zip(living, before, after, strict=True):
            assert became.rss_mib - was.rss_mib < _MAX_GROWTH_MIB, (process.name, was, became)
            assert became.num_descriptors - was.num_descriptors < _MAX_MORE_DESCRIPTORS, (process.name, was, became)
            assert became.num_threads <= was.num_threads + 2, (process.name, was, became)


def assert_excused(outcome: Outcome) -> None:
    """A client of a front end that is killed: its text is right as far as it came, and it hears UNAVAILABLE."""
    cold = outcome.order.cold_run()
    assert outcome.token_ids == cold[: len(outcome.token_ids)]
    failure: Refusal | None = outcome.failure
    if failure is None:
        assert outcome.finished is not None and len(outcome.token_ids) == len(cold)
    else:
        assert failure.status is grpc.StatusCode.UNAVAILABLE, failure

"""The scheduler against the real scripted worker, which verifies every slot it is given: faults, kills, freezes, bad
networks. Whatever happens, every stream ends with the tokens of an undisturbed run, none twice."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from scheduler_svc.cli.status import status_lines
from tests.support.scheduler_process import RunningScheduler, running_scheduler, until
from tests.support.session_client import LENGTH, SessionClient, Stream
from tests.support.tcp_proxy import TcpProxy
from tests.support.worker_fixtures import own_worker, script
from worker_svc.runner.scripted import complete
from worker_svc.sampling import Sampling

GREEDY = Sampling()


def prompt(index: int, length: int = 12) -> list[int]:
    return [(31 * index + 7 * position) % 256 for position in range(length)]


async def right(streams: Sequence[Stream], timeout_s: float = 60.0) -> None:
    """All streams end with the tokens of a cold run."""
    for stream in streams:
        await stream.over(timeout_s)
        assert stream.reason == LENGTH
        assert stream.accepted is not None
        assert stream.tokens == complete(stream.prompt, stream.accepted.max_tokens, GREEDY)


async def undisturbed(scheduler: RunningScheduler, num: int = 16, num_tokens: int = 40) -> None:
    async with SessionClient(scheduler.address) as client:
        await right([client.submit(prompt(index), 30) for index in range(num)])
        assert client.errors == []
    await scheduler.all_free()


# --- one worker in this process
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_streams_have_the_tokens_of_a_cold_run(depth: int) -> None:
    async with own_worker() as worker, running_scheduler(worker.target.address, max_inflight_steps=depth) as scheduler:
        await scheduler.ready()
        await undisturbed(scheduler)
        assert [rank.epoch for rank in (await scheduler.status()).ranks] == [1]


async def test_f110_the_status_says_how_much_was_computed_again() -> None:
    async with own_worker(num_blocks=24) as worker, running_scheduler(worker.target.address) as scheduler:
        await scheduler.ready()
        await undisturbed(scheduler, num=12, num_tokens=30)
        status, totals = await scheduler.status(), scheduler.core.totals
        assert status.num_preemptions > 0 and status.num_recomputed_tokens > 0
        assert (status.num_computed_tokens, status.num_recomputed_tokens) == (
            totals.num_computed_tokens,
            totals.num_recomputed_tokens,
        )
        share = 100 * status.num_recomputed_tokens / status.num_computed_tokens
        assert f"tokens computed again ({share:.0f} %)" in status_lines(status)[1]


async def test_streams_survive_preemptions_in_a_small_pool() -> None:
    async with own_worker(num_blocks=24) as worker, running_scheduler(worker.target.address) as scheduler:
        await scheduler.ready()
        await undisturbed(scheduler, num=12, num_tokens=30)
        status = await scheduler.status()
        assert status.num_preemptions > 0
        assert [rank.epoch for rank in status.ranks] == [1]


async def test_rule_11_equal_prompts_share_blocks_that_the_same_step_computes() -> None:
    """F13: the worker fails a step in which a row does not find its own prefix, in this step or an earlier one."""
    shared = prompt(3, 21)
    async with own_worker() as worker, running_scheduler(worker.target.address) as scheduler:
        await scheduler.ready()
        async with SessionClient(scheduler.address) as client:
            # The first keeps the worker busy while the others gather for one step.
            streams = [client.submit(shared, 10) for _ in range(12)]
            await right(streams)
            cached = [stream.end.usage.num_cached_tokens for stream in streams if stream.end is not None]
            assert sorted(cached)[1] == 20
        assert (await scheduler.rank(worker.target.address)).epoch == 1
        await scheduler.all_free()


@pytest.mark.parametrize(
    "kind", ["fail", "missing_row", "out_of_range", "repeated_result", "withheld_result", "wrong_step_seq", "stall"]
)
async def test_a_scripted_fault_ends_one_epoch_and_no_stream(kind: str) -> None:
    extra: dict[str, Any] = {"seconds": 3.0} if kind == "stall" else {}
    faulty = script({"kind": kind, "at_step": 7, "epoch": 1, **extra})
    async with (
        own_worker(faulty) as worker,
        running_scheduler(worker.target.address, step_watchdog_s=0.6, first_steps_watchdog_s=0.6) as scheduler,
    ):
        await scheduler.ready()
        await undisturbed(scheduler)
        assert (await scheduler.rank(worker.target.address)).epoch >= 2


async def test_a_poisonous_request_fails_and_its_neighbours_complete(caplog: pytest.LogCaptureFixture) -> None:
    faulty = script({"kind": "fail", "request_id": "poison", "times": 0})
    caplog.set_level("INFO")
    async with own_worker(faulty) as worker, running_scheduler(worker.target.address, log_requests=True) as scheduler:
        await scheduler.ready()
        async with SessionClient(scheduler.address) as client:
            good = [client.submit(prompt(index), 40) for index in range(6)]
            await good[0].until(3)
            bad = await client.submit(prompt(99), 40, request_id="poison").over()
            assert bad.failure is not None and bad.failure.reason == "WORKER_FAULT"
            await right(good)
        await scheduler.all_free()
    (record,) = [vars(record) for record in caplog.records if record.message == "request failed"]
    assert (record["request_id"], record["reason"], record["num_completion_tokens"]) == ("poison", "worker_fault", 0)
    assert record["cause"] == bad.failure.message
    ended = [vars(record) for record in caplog.records if record.message == "request ended"]
    assert {line["request_id"] for line in ended} == {stream.request_id for stream in good}


async def test_d51_a_row_that_fails_alone_ends_its_request_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    faulty = script({"kind": "invalid_row", "request_id": "invalid", "times": 0})
    async with own_worker(faulty) as worker, running_scheduler(worker.target.address) as scheduler:
        await scheduler.ready()
        async with SessionClient(scheduler.address) as client:
            good = [client.submit(prompt(index), 40) for index in range(6)]
            await good[0].until(3)
            bad = await client.submit(prompt(99), 40, request_id="invalid").over()
            assert bad.failure is not None
            assert (bad.failure.code, bad.failure.reason) == (13, "MODEL_OUTPUT_INVALID")
            assert "as scripted" in bad.failure.message
            await right(good)
        assert (await scheduler.rank(worker.target.address)).epoch == 1
        await scheduler.all_free()
    (record,) = [vars(record) for record in caplog.records if record.message == "request failed"]
    assert (record["request_id"], record["reason"]) == ("invalid", "model_output_invalid")


async def test_a_draining_worker_hands_its_requests_over() -> None:
    async with (
        own_worker() as leaves,
        own_worker() as stays,
        running_scheduler(leaves.target.address, stays.target.address) as scheduler,
    ):
        await scheduler.rank_is(leaves.target.address, "up")
        await scheduler.rank_is(stays.target.address, "up")
        async with SessionClient(scheduler.address) as client:
            streams = [client.submit(prompt(index), 200) for index in range(20)]
            await streams[0].until(3)
            assert await leaves.server.drain(30.0)
            await scheduler.rank_is(leaves.target.address, "lost")
            await right(streams)
            assert client.errors == []
        await scheduler.all_free()
        assert (await scheduler.status()).ready


@asynccontextmanager
async def draining_too_small() -> AsyncIterator[tuple[RunningScheduler, SessionClient, list[Stream]]]:
    """Five requests, each of 13 blocks, on a worker with 39 that begins to drain before the first of them must go, and
    another worker that can hold none of them. In the end the first has left in order, and its drain cut nothing off."""
    async with (
        own_worker(script(delay_ms=20.0), num_blocks=40) as leaves,
        own_worker(num_blocks=6) as stays,
        running_scheduler(leaves.target.address, stays.target.address) as scheduler,
    ):
        await scheduler.rank_is(leaves.target.address, "up")
        await scheduler.rank_is(stays.target.address, "up")
        async with SessionClient(scheduler.address) as client:
            streams = [client.submit(prompt(index), 40) for index in range(5)]
            for stream in streams:
                await stream.until(1)
            drain = asyncio.create_task(leaves.server.drain(60.0))
            await scheduler.rank_is(leaves.target.address, "draining")
            view = scheduler.core.rank_view(leaves.target.address)
            assert view is not None and view.num_running == 5 and scheduler.core.totals.num_preemptions == 0
            yield scheduler, client, streams
            assert await drain
            assert client.errors == []
        await scheduler.rank_is(leaves.target.address, "lost")
        await scheduler.all_free()
        assert scheduler.core.totals.num_requeued_after_worker_loss == 0
        assert all(client.epoch == 1 for client in scheduler.service.pool.clients)


async def test_a_draining_worker_takes_back_whom_it_preempted_and_stays_until_they_have_finished() -> None:
    async with draining_too_small() as (_, _, streams):
        await right(streams)
        assert sum(stream.end.usage.num_preemptions for stream in streams if stream.end is not None) >= 2


async def test_a_draining_worker_stays_for_whom_it_preempted_when_nobody_is_left_in_its_batch() -> None:
    """Those that run are cancelled while they hold nearly all blocks: until those are back, its batch is empty."""
    async with draining_too_small() as (scheduler, client, streams):

        def num_held() -> int:
            view = scheduler.core.rank_view(scheduler.service.pool.clients[0].rank)
            assert view is not None
            return view.num_blocks - 1 - view.num_free_blocks - view.num_parked_blocks

        # Each of the preempted needs 8 of the 39.
        await until(lambda: scheduler.core.num_running == 3 and num_held() > 39 - 8)
        requests = scheduler.core.state.requests.values()
        running = {r.request_id for r in requests if r.run is not None and not r.run.ended}
        for stream in streams:
            if stream.request_id in running:
                client.cancel(stream)
        await right([stream for stream in streams if stream.request_id not in running])
        assert len(running) == 3


@pytest.mark.parametrize("trouble", ["cut", "stall", "delay"])
async def test_a_bad_network_costs_time_and_nothing_else(trouble: str) -> None:
    rng = random.Random(trouble)
    async with (
        own_worker() as worker,
        TcpProxy(worker.target.address) as proxy,
        running_scheduler(proxy.address, step_watchdog_s=8.0, first_steps_watchdog_s=8.0) as scheduler,
    ):
        await scheduler.ready()
        async with SessionClient(scheduler.address) as client:
            streams = [client.submit(prompt(index), 120) for index in range(12)]
            for turn in range(4):
                await streams[-1].until(10 * (turn + 1))
                if trouble == "cut":
                    proxy.cut()
                elif trouble == "stall" and turn == 1:
                    proxy.passing.clear()
                    await asyncio.sleep(rng.uniform(0.3, 0.6))
                    proxy.passing.set()
                elif trouble == "delay":
                    proxy.delay_s = 0.01 * turn
            await right(streams)
            assert client.errors == []
        await scheduler.all_free()
        # Neither worker nor epoch was given up.
        assert (await scheduler.rank(proxy.address)).epoch == 1


async def test_a_half_open_connection_is_noticed_also_when_idle() -> None:
    async with (
        own_worker() as worker,
        TcpProxy(worker.target.address) as proxy,
        running_scheduler(proxy.address, step_watchdog_s=30.0, first_steps_watchdog_s=30.0) as scheduler,
    ):
        await scheduler.ready()
        await undisturbed(scheduler, num=1, num_tokens=5)
        proxy.passing.clear()
        await scheduler.rank_is(proxy.address, "lost", 60)
        await scheduler.not_ready()
        proxy.passing.set()
        await scheduler.ready()
        await undisturbed(scheduler, num=1, num_tokens=5)


# --- worker processes
# ----------------------------------------------------------------------------------------------------


class WorkerProcess:
    """A scripted worker as a process, at one address for all its lives."""

    def __init__(self) -> None:
        self.address = ""
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        listen = self.address or "127.0.0.1:0"
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "worker_svc", "serve", "--runner", "scripted", "--listen", listen),
            *("--num-blocks", "128", "--log-format", "json", "--script", json.dumps({"delay_ms": 2.0})),
            stderr=asyncio.subprocess.PIPE,
        )
        assert self.process.stderr is not None
        async with asyncio.timeout(60):
            while True:
                line = await self.process.stderr.readline()
                assert line, "the worker did not start"
                facts = json.loads(line) if line.startswith(b"{") else {}
                if "address" in facts:
                    self.address = facts["address"]
                    break
        self._drain = asyncio.create_task(self.process.stderr.read())

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def kill(self) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self._drain


@asynccontextmanager
async def worker_processes(num: int) -> AsyncIterator[list[WorkerProcess]]:
    workers = [WorkerProcess() for _ in range(num)]
    try:
        await asyncio.gather(*(worker.start() for worker in workers))
        yield workers
    finally:
        for worker in workers:
            if worker.process is not None:
                await worker.kill()


async def chaos(scheduler: RunningScheduler, workers: list[WorkerProcess], blow: Any, num_blows: int) -> None:
    """Streams arrive, a tenth is cancelled, and every now and then a worker gets a blow."""
    rng = random.Random(11)
    async with SessionClient(scheduler.address) as client:
        streams: list[Stream] = []
        cancelled: list[Stream] = []

        async def arrive() -> None:
            for index in range(60):
                streams.append(client.submit(prompt(index), rng.randrange(50, 200)))
                if index % 10 == 9:
                    cancelled.append(streams[-1])
                    await streams[-1].until(rng.randrange(1, 30), 60)
                    client.cancel(streams[-1])
                await asyncio.sleep(rng.uniform(0.0, 0.1))

        arriving = asyncio.create_task(arrive())
        for _ in range(num_blows):
            await asyncio.sleep(rng.uniform(0.3, 0.8))
            await blow(rng.choice(workers), rng)
        await arriving
        for stream in cancelled:
            await stream.over(60)
        await right([stream for stream in streams if stream not in cancelled])
        assert client.errors == []
    await scheduler.all_free()


async def test_f65_workers_killed_again_and_again_lose_no_request() -> None:
    async def kill(worker: WorkerProcess, rng: random.Random) -> None:
        await worker.kill()
        await worker.start()

    async with worker_processes(2) as workers:
        addresses = [worker.address for worker in workers]
        # max_fruitless_epochs off: kills at random are nobody's fault.
        async with running_scheduler(*addresses, max_fruitless_epochs=0) as scheduler:
            for address in addresses:
                await scheduler.rank_is(address, "up")
            await chaos(scheduler, workers, kill, 5)
            await until(lambda: sum(client.epoch for client in scheduler.service.pool.clients) >= 7)
            status = await scheduler.status()
            assert status.num_requeued_after_worker_loss > 0
            assert {rank.host for rank in status.ranks} == {socket.gethostname()}


async def test_workers_stopped_and_continued_lose_no_request() -> None:
    async def stop(worker: WorkerProcess, rng: random.Random) -> None:
        worker.signal(signal.SIGSTOP)
        await asyncio.sleep(rng.uniform(0.2, 1.5))
        worker.signal(signal.SIGCONT)

    async with worker_processes(2) as workers:
        addresses = [worker.address for worker in workers]
        async with running_scheduler(
            *addresses, max_fruitless_epochs=0, step_watchdog_s=0.7, first_steps_watchdog_s=0.7
        ) as scheduler:
            for address in addresses:
                await scheduler.rank_is(address, "up")
            await chaos(scheduler, workers, stop, 5)


async def test_a_worker_that_dies_for_good_leaves_its_requests_to_the_other() -> None:
    async with worker_processes(2) as workers:
        addresses = [worker.address for worker in workers]
        # A watchdog far away: that nobody listens any more must be enough.
        async with running_scheduler(*addresses, step_watchdog_s=60.0, first_steps_watchdog_s=60.0) as scheduler:
            for address in addresses:
                await scheduler.rank_is(address, "up")
            async with SessionClient(scheduler.address) as client:
                streams = [client.submit(prompt(index), 150) for index in range(16)]
                await streams[0].until(2)
                await workers[0].kill()
                await right(streams, 20)
                assert client.errors == []
            await until(lambda: scheduler.core.rank_names == (addresses[1],))
            await scheduler.all_free()

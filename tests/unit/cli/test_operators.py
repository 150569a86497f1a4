"""`stepfence drain` and `stepfence reset-cache` against a real scheduler, over real gRPC."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import pytest

from scheduler_svc.cli import status
from stepfence.v1 import admin_service_pb2 as admin
from tests.support.scheduler_process import RunningScheduler, running_scheduler
from tests.support.session_client import SessionClient
from tests.support.worker_double import WorkerDouble, complete

PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture
async def double() -> AsyncIterator[WorkerDouble]:
    double = WorkerDouble()
    double.delay_s = 0.002
    await double.start()
    yield double
    await double.stop()


async def _drain(scheduler: RunningScheduler) -> int:
    return await asyncio.to_thread(status.drain, status.SchedulerCall(scheduler.address), None)


async def _reset(scheduler: RunningScheduler, preempt_running: bool = False) -> int:
    return await asyncio.to_thread(status.reset_cache, status.SchedulerCall(scheduler.address), preempt_running)


async def _exit_code(scheduler: RunningScheduler) -> int:
    assert scheduler.exit_code is not None
    async with asyncio.timeout(20):
        return await asyncio.shield(scheduler.exit_code)


async def test_drain_says_what_will_happen_and_does_not_wait_for_it(
    double: WorkerDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        async with SessionClient(scheduler.address) as client:
            stream = client.submit(PROMPT, 200)
            await stream.until(1)
            assert await _drain(scheduler) == 0
            assert capsys.readouterr().out == (
                "draining: new requests are refused, accepted ones may take up to its --drain-deadline-s, then the "
                "scheduler ends\n"
            )
            await stream.over()
            assert stream.tokens == complete(PROMPT, 200)
        assert await _exit_code(scheduler) == 0


async def test_a_drain_with_a_deadline_cuts_off_what_is_left(double: WorkerDouble) -> None:
    async with running_scheduler(double.address, step_watchdog_s=60.0) as scheduler:
        await scheduler.ready()
        async with SessionClient(scheduler.address) as client:
            stream = client.submit(PROMPT, 2000)
            await stream.until(1)
            # It would take for ever.
            double.answering.clear()
            command = [sys.executable, "-m", "scheduler_svc", "drain", "--target", scheduler.address]
            drain = await asyncio.create_subprocess_exec(
                *command, "--deadline-s", "0.25", stdout=asyncio.subprocess.PIPE
            )
            told, _ = await drain.communicate()
            assert (drain.returncode, b"may take up to 0.25 s" in told) == (0, True)
            # Its front end keeps it for the next scheduler.
            await client.ended.wait()
            assert not stream.is_over
        assert await _exit_code(scheduler) == 3


async def test_a_reset_succeeds_only_when_nothing_is_in_use_or_preempts_it(
    double: WorkerDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        assert await _reset(scheduler) == 0
        assert capsys.readouterr().out == "reset: all cached prefixes are forgotten\n"
        async with SessionClient(scheduler.address) as client:
            stream = client.submit(PROMPT, 1000)
            await stream.until(1)
            assert await _reset(scheduler) == 1
            told = capsys.readouterr()
            assert told.out == ""
            assert told.err.startswith(f"error: nothing was reset: blocks are in use on {double.address}; wait until ")
            assert "--preempt-running" in told.err
            assert await _reset(scheduler, preempt_running=True) == 0
            assert capsys.readouterr().out == "reset: all cached prefixes are forgotten\n"
            await stream.over()
            assert stream.tokens == complete(PROMPT, 1000)
            assert stream.end is not None and stream.end.usage.num_preemptions == 1


def test_a_scheduler_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert status.drain(status.SchedulerCall("127.0.0.1:1"), None) == 1
    assert status.reset_cache(status.SchedulerCall("127.0.0.1:1"), preempt_running=False) == 1
    assert capsys.readouterr().err.count("stepfence up") == 2


def _worker_lines(*ranks: admin.RankStatus) -> list[str]:
    lines = status.status_lines(admin.GetStatusResponse(ready=True, ranks=ranks))
    return [line.partition(", epoch")[0] for line in lines if line.startswith("worker ")]


def test_status_names_hosts_beside_addresses_in_columns() -> None:
    assert _worker_lines(
        admin.RankStatus(rank="172.18.0.5:50061", host="0123456789ab", state=admin.RANK_STATE_UP, epoch=1),
        admin.RankStatus(
            rank="172.18.0.12:50061", host="ba9876543210", state=admin.RANK_STATE_LOST, cause="no answer", epoch=2
        ),
        admin.RankStatus(rank="10.0.0.1:1", state=admin.RANK_STATE_CONNECTING),
    ) == [
        "worker 172.18.0.5:50061   0123456789ab        up",
        "worker 172.18.0.12:50061  (was ba9876543210)  lost (no answer)",
        "worker 10.0.0.1:1         -                   connecting",
    ]


def test_status_has_no_column_for_hosts_that_nobody_told() -> None:
    assert _worker_lines(admin.RankStatus(rank="127.0.0.1:50061", state=admin.RANK_STATE_UP)) == [
        "worker 127.0.0.1:50061  up"
    ]


def test_what_peers_call_themselves_cannot_move_the_cursor() -> None:
    evil = "\x1b[2J\nscheduler 9, ready\u202e"
    rank = admin.RankStatus(rank="a:1", state=admin.RANK_STATE_LOST, cause=evil)
    front_ends = [admin.FrontEndStatus(front_end_id=evil)]
    lines = status.status_lines(admin.GetStatusResponse(ready=True, ranks=[rank], front_ends=front_ends))
    assert len(lines) == 4 and all(line.isprintable() for line in lines)
    assert "\\x1b[2J\\nscheduler 9" in lines[3]

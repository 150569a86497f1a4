"""How the pool follows a name whose server is slow: what Docker's is when it has to ask further, in vain."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from scheduler_svc.workers.pool import WorkerPool
from scheduler_svc.workers.resolver import SystemResolver
from scheduler_svc.workers.session import RankState
from tests.support.virtual_time import run_virtually

NAME = "dns:///worker:50061"


class SlowNames:
    """An AddressResolver that answers what was true when it was asked; `delay_s` says how much later."""

    def __init__(self) -> None:
        self.answer: tuple[str, ...] | Exception = OSError("unknown")
        self.delay_s = 10.0
        self.num_waiting = 0
        self.most_waiting = 0

    async def resolve(self, host: str, port: int) -> tuple[str, ...]:
        answer = self.answer
        self.num_waiting += 1
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.num_waiting -= 1
        if isinstance(answer, Exception):
            raise answer
        return answer


class QuietClient:
    """A rank that never connects."""

    def __init__(self, rank: str) -> None:
        self.rank = rank
        self.state = RankState.CONNECTING
        self.cause = "nobody there"
        self.has_epoch = False
        self.is_orphaned = False

    async def run(self) -> None:
        while not self.is_orphaned:
            await asyncio.sleep(0.1)


@asynccontextmanager
async def _following(names: SlowNames) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool((NAME,), names, cast(Any, QuietClient))
    task = asyncio.create_task(pool.run())
    try:
        yield pool
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_worker_is_found_while_earlier_questions_still_wait_for_their_answers() -> None:
    async def check() -> None:
        names = SlowNames()
        async with _following(names) as pool:
            await asyncio.sleep(5.5)
            assert pool.not_ready_cause() == f"no worker is up ({NAME}: not resolved yet)"
            names.answer, names.delay_s = ("10.0.0.1:50061",), 0.02
            await asyncio.sleep(1.5)
            assert [client.rank for client in pool.clients] == ["10.0.0.1:50061"]
            # The answers to the earlier questions come now, and change nothing.
            await asyncio.sleep(20)
            assert [client.rank for client in pool.clients] == ["10.0.0.1:50061"]
            assert "unknown" not in pool.not_ready_cause()

    run_virtually(check())


def test_an_answer_is_not_undone_by_that_to_an_earlier_question() -> None:
    async def check() -> None:
        names = SlowNames()
        names.answer, names.delay_s = ("10.0.0.1:50061",), 3.5
        async with _following(names) as pool:
            await asyncio.sleep(0.5)
            names.answer, names.delay_s = ("10.0.0.2:50061",), 0.1
            for _ in range(100):
                await asyncio.sleep(0.1)
                assert [client.rank for client in pool.clients] in ([], ["10.0.0.2:50061"])
            assert pool.clients

    run_virtually(check())


def test_a_name_server_that_is_slow_is_told_and_not_flooded() -> None:
    async def check() -> None:
        names = SlowNames()
        names.delay_s = 300.0
        async with _following(names) as pool:
            await asyncio.sleep(299)
            assert names.most_waiting <= 12
            await asyncio.sleep(2)
            assert pool.not_ready_cause() == f"no worker is up ({NAME}: cannot be resolved: unknown)"
        assert names.num_waiting == 0

    run_virtually(check())


async def test_f120_a_name_that_cannot_be_asked_for_is_not_resolved_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are what a process runs out of; and a label of 70 characters is none that DNS can have."""
    resolver = SystemResolver()
    assert await resolver.resolve("127.0.0.1", 1) == ("127.0.0.1:1",)
    with pytest.raises(UnicodeError):
        await asyncio.wait_for(resolver.resolve("a" * 70, 1), 30)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await resolver.resolve("127.0.0.1", 1)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), UnicodeError("label too long")])
def test_f120_a_resolver_that_raises_anything_ends_nothing(error: Exception) -> None:
    async def scenario() -> None:
        names = SlowNames()
        names.delay_s = 0.0
        names.answer = error
        async with _following(names) as pool:
            await asyncio.sleep(5)
            assert str(error) in pool.not_ready_cause()
            names.answer = ("10.0.0.1:50061",)
            await asyncio.sleep(5)
            assert [client.rank for client in pool.clients] == ["10.0.0.1:50061"]
            # Known workers stay known.
            names.answer = error
            await asyncio.sleep(5)
            assert [client.rank for client in pool.clients] == ["10.0.0.1:50061"]

    run_virtually(scenario())

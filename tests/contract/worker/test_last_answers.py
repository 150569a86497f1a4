"""A stream that ends writes first what is answered, however slowly it is written."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from stepfence.v1 import step_pb2
from tests.support.scheduler_double import Book, SchedulerDouble, new_request
from tests.support.worker_fixtures import OwnWorker, Target, own_worker, script
from worker_svc.stream import Frame, StepStream

pytestmark = pytest.mark.own_worker


def _admission(book: Book, target: Target) -> step_pb2.SchedulerOutput:
    return book.step({0: 6}, new=[new_request("a", 0, target.prompt(6), target.table(24))])


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


class SlowWriter:
    """Holds back the frames of every worker's stream until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_write = asyncio.Event()
        self.may_write.set()
        write_next = StepStream.next_frame

        async def next_frame(stream: StepStream) -> Frame | None:
            # Nothing is taken before it may be written.
            await _until(lambda: self.may_write.is_set() and bool(stream._frames or stream.is_ending))
            return await write_next(stream)

        monkeypatch.setattr(StepStream, "next_frame", next_frame)


class HeldAnswers:
    """Holds back what the executor tells the event loop."""

    def __init__(self, mine: OwnWorker, monkeypatch: pytest.MonkeyPatch) -> None:
        self._calls: list[Callable[[], None]] = []
        self._post = mine.service._executor._post
        monkeypatch.setattr(mine.service._executor, "_post", self._calls.append)

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def let_go(self) -> None:
        for call in self._calls:
            self._post(call)


async def test_f132_answers_are_written_before_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    async with own_worker() as mine, SchedulerDouble(mine.target.address) as scheduler:
        writer = SlowWriter(monkeypatch)
        session, book = await mine.target.open(scheduler), Book()
        writer.may_write.clear()
        await session.send(_admission(book, mine.target))
        stream = mine.service._stream
        assert stream is not None and stream.epoch is not None
        epoch = stream.epoch
        await _until(lambda: epoch.executed_step_seq == 1)
        book.step({0: 1})
        await session.send(book.step({0: 1}))
        await _until(lambda: stream.is_ending)
        writer.may_write.set()
        assert (await session.result()).step_seq == 1
        assert (await session.ended()).reason == "STEP_GAP"


async def test_f132_a_step_behind_a_failed_one_does_not_hide_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        own_worker(script({"kind": "fail", "at_step": 2})) as mine,
        SchedulerDouble(mine.target.address) as scheduler,
    ):
        session, book = await mine.target.open(scheduler), Book()
        held = HeldAnswers(mine, monkeypatch)
        await session.send(_admission(book, mine.target))
        await session.send(book.step({0: 1}))
        await _until(lambda: held.num_calls == 2)
        stream = mine.service._stream
        assert stream is not None and stream.epoch is not None and stream.epoch.is_over
        taken: list[object] = []
        take = mine.service._take

        def noted(*frame: Any) -> None:
            taken.append(frame)
            take(*frame)

        monkeypatch.setattr(mine.service, "_take", noted)
        await session.send(book.step({0: 1}))
        await _until(lambda: len(taken) == 1)
        held.let_go()
        good, failed = await session.result(), await session.result()
        assert (good.step_seq, good.HasField("error")) == (1, False)
        assert (failed.step_seq, failed.error.kind) == (2, step_pb2.STEP_ERROR_KIND_EXECUTION)
        assert await session.read() is None and (await session.ended()).code is grpc.StatusCode.OK


async def test_f132_answers_are_written_before_the_end_of_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    async with own_worker() as mine, SchedulerDouble(mine.target.address) as scheduler:
        writer = SlowWriter(monkeypatch)
        session, book = await mine.target.open(scheduler), Book()
        writer.may_write.clear()
        await session.send(_admission(book, mine.target))
        stream = mine.service._stream
        assert stream is not None and stream.epoch is not None
        epoch = stream.epoch
        await _until(lambda: epoch.executed_step_seq == 1)
        # The deadline has passed: what is held is dropped, but not what is answered.
        assert not await mine.service.drain(0.0)
        writer.may_write.set()
        # The frame that says so, and the answer, in either order of their making.
        frames = [await session.read(), await session.read()]
        assert [frame.result.step_seq for frame in frames if frame is not None and frame.HasField("result")] == [1]
        assert (await session.ended()).reason == "DRAINING"


async def test_f132_a_peer_that_does_not_read_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("worker_svc.service._LAST_FRAMES_S", 0.05)
    async with own_worker() as mine, SchedulerDouble(mine.target.address) as scheduler:
        writer = SlowWriter(monkeypatch)
        session, book = await mine.target.open(scheduler), Book()
        writer.may_write.clear()
        await session.send(_admission(book, mine.target))
        stream = mine.service._stream
        assert stream is not None and stream.epoch is not None
        epoch = stream.epoch
        await _until(lambda: epoch.executed_step_seq == 1)
        book.step({0: 1})
        await session.send(book.step({0: 1}))
        assert (await session.ended()).reason == "STEP_GAP"
        assert any("could not be written" in record.message for record in caplog.records)


async def test_f126_answers_that_are_not_read_do_not_hold_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs any more; only the scheduler does not read."""
    async with own_worker() as mine, SchedulerDouble(mine.target.address) as scheduler:
        writer = SlowWriter(monkeypatch)
        session, book = await mine.target.open(scheduler), Book()
        book.handled(await session.run(_admission(book, mine.target)))
        writer.may_write.clear()
        await session.send(book.step({}, finished=["a"]))
        stream = mine.service._stream
        assert stream is not None and stream.epoch is not None
        epoch = stream.epoch
        await _until(lambda: epoch.executed_step_seq == 2)
        assert await asyncio.wait_for(mine.service.drain(600.0), 30)
        writer.may_write.set()
        # The answer, then the frame that says that the worker drains.
        frames = [await session.read(), await session.read()]
        assert [None if frame is None else frame.WhichOneof("frame") for frame in frames] == ["result", "draining"]
        assert (await session.ended()).reason == "DRAINING"


async def test_f109_a_stop_as_asked_writes_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with own_worker() as mine, SchedulerDouble(mine.target.address) as scheduler:
        session = await mine.target.open(scheduler)
        with caplog.at_level(logging.DEBUG):
            assert await mine.service.drain(5.0)
            while await session.read() is not None:
                pass
            await _until(lambda: any(record.message == "stream ended" for record in caplog.records))
            await mine.server.stop()
    assert [record for record in caplog.records if record.levelno > logging.INFO and "worker_svc" in record.name] == []

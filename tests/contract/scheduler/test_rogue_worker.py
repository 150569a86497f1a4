"""What a worker that is broken, or is none, tells a scheduler: it is refused with a reason and holds up nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from scheduler_svc.core.events import WorkerProtocolError
from scheduler_svc.workers import client, codec
from stepfence.v1 import model_pb2, step_pb2, worker_service_pb2
from tests.support.scheduler_process import running_scheduler
from tests.support.session_client import SessionClient
from tests.support.wire import bytes_field, repeated
from tests.support.worker_double import Capabilities, WorkerDouble, complete

_MIB = 1 << 20
_MODEL = 3
_PROMPT = [5, 6, 7]


@pytest.mark.parametrize(
    ("field", "cause"),
    [
        (bytes_field(_MODEL, bytes_field(1, b"m" * 257)), "name"),
        (bytes_field(_MODEL, bytes_field(6, b"d" * 257)), "digest"),
        (bytes_field(_MODEL, bytes_field(99, b"x" * 65_536)), "description of the model"),
        (bytes_field(_MODEL, bytes_field(4, b"\x01" * _MIB)), "eos_token_ids"),
        (bytes_field(12, b"\x01" * _MIB), "features"),
    ],
    ids=["name", "digest", "unknown fields", "end-of-sequence ids", "features"],
)
async def test_a_worker_with_an_endless_description_is_refused_and_another_one_serves(field: bytes, cause: str) -> None:
    rogue, honest = WorkerDouble(Capabilities(unknown_field=field)), WorkerDouble(incarnation=2002)
    await rogue.start()
    await honest.start()
    async with running_scheduler(rogue.address, honest.address) as scheduler:
        async with asyncio.timeout(30):
            while cause not in (await scheduler.rank(rogue.address)).cause:
                await asyncio.sleep(0.01)
        await scheduler.ready()
        async with SessionClient(scheduler.address) as session:
            stream = await session.submit(_PROMPT, 5).over()
            assert stream.tokens == complete(_PROMPT, 5)
        assert not rogue.opens
    await rogue.stop()
    await honest.stop()


async def test_a_tokenizer_of_endless_empty_pieces_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_MAX_TOKENIZER_BYTES", 100_000)
    num_pieces = 0

    class Endless(WorkerDouble):
        async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
            nonlocal num_pieces
            while True:
                num_pieces += 1
                chunk = model_pb2.TokenizerChunk(file_name="tokenizer.json")
                yield worker_service_pb2.GetTokenizerResponse(chunk=chunk)
                # As a worker that is not in the same process: the scheduler gets its turns.
                await asyncio.sleep(0)

    double = Endless()
    await double.start()
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        facts = scheduler.service.model.facts
        assert facts is not None
        async with asyncio.timeout(30):
            while scheduler.service.model.wants_tokenizer(facts):
                await asyncio.sleep(0.01)
        seen = num_pieces
        async with SessionClient(scheduler.address) as session:
            stream = await session.submit(_PROMPT, 5).over()
            assert stream.tokens == complete(_PROMPT, 5)
        assert 0 < seen < 10_000
    await double.stop()


def test_a_piece_of_a_tokenizer_has_a_name_of_bounded_length() -> None:
    chunk = model_pb2.TokenizerChunk(file_name="n" * 257, data=b"x")
    data = worker_service_pb2.GetTokenizerResponse(chunk=chunk).SerializeToString()
    with pytest.raises(WorkerProtocolError, match="file name"):
        codec.decode_tokenizer_piece(data)


def test_the_message_of_a_failed_step_is_cut() -> None:
    error = step_pb2.StepError(message="x" * _MIB)
    result = step_pb2.StepResult(epoch=1, step_seq=1, error=error)
    frame = codec.decode_worker_frame(worker_service_pb2.RunStepsResponse(result=result).SerializeToString())
    assert isinstance(frame, codec.StepResult)
    assert frame.error is not None and len(frame.error) < 500


def test_a_result_with_more_row_errors_than_rows_is_not_decoded() -> None:
    # Field 2 of the frame is the result; its row errors are messages of no bytes.
    field = step_pb2.StepResult.DESCRIPTOR.fields_by_name["row_errors"].number
    with pytest.raises(WorkerProtocolError, match="at most 16384 fields"):
        codec.decode_worker_frame(bytes_field(2, repeated(bytes_field(field, b""), 8 * _MIB)))

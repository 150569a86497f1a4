"""No frame that a front end may send, legal or not, holds up the event loop of a scheduler."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration

from scheduler_svc.rpc.channels import MAX_MESSAGE_BYTES
from stepfence.v1 import sampling_pb2
from stepfence.v1 import session_service_pb2 as pb
from tests.support.measured_scheduler import MeasuredScheduler
from tests.support.wire import bytes_field, repeated
from tests.support.worker_fixtures import own_worker

# The type stubs lack it.
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]

_ATTACH = "/stepfence.v1.SessionService/Attach"
_ROOM = MAX_MESSAGE_BYTES - 128
_MAX_MODEL_LEN = 140_000
_HELLO = pb.Hello(front_end_id="test", protocol_revision=2)


def _prompt(num_tokens: int, first: int = 65) -> bytes:
    return array("i", [first]).tobytes() + array("i", [66]).tobytes() * (num_tokens - 1)


def _submit(handle: int, prompt: bytes = _prompt(3), **fields: Any) -> pb.Submit:
    sampling = sampling_pb2.ResolvedSampling(top_p=1.0, max_tokens=4, stop_token_ids=fields.pop("stop_token_ids", ()))
    return pb.Submit(handle=handle, request_id=f"r{handle}", prompt_token_ids=prompt, sampling=sampling, **fields)


def _frame(*submits: pb.Submit) -> bytes:
    return pb.AttachRequest(submits=submits).SerializeToString()


def _again(handle: int, num_outputs: int) -> pb.Submit:
    return _submit(handle, output_token_ids=_prompt(num_outputs), age=Duration(seconds=1))


_PACKED = bytes_field(9, b"\x01" * (_ROOM - 64))
_HANDLES = range(1, 1025)
_FRAMES: dict[str, bytes] = {
    "stop ids without end": bytes_field(2, b"\x08\x01" + bytes_field(4, _PACKED)),
    "features without end": bytes_field(1, b"\x10\x02" + bytes_field(3, b"\x01" * (_ROOM - 64))),
    "a long id": bytes_field(2, b"\x08\x01" + bytes_field(2, b"x" * (_ROOM - 64))),
    "a long salt": bytes_field(2, b"\x08\x01" + bytes_field(6, "é".encode() * (_ROOM // 2 - 64))),
    "a long name": bytes_field(1, bytes_field(1, b"x" * (_ROOM - 64)) + b"\x10\x02"),
    "a long prompt": _frame(_submit(1, _prompt(_ROOM // 4 - 64))),
    "many fields": repeated(b"\x12\x00", _ROOM),
    "many prompts": _frame(*(_submit(handle, _prompt(4000, handle)) for handle in _HANDLES)),
    "many requests": _frame(*(_submit(handle, stop_token_ids=range(128)) for handle in _HANDLES)),
    "many refused requests": _frame(*(_submit(handle, _prompt(3, -1)) for handle in _HANDLES)),
    "many requests again": _frame(*(_again(handle, 4000) for handle in _HANDLES)),
    "long requests again": _frame(*(_again(handle, 130_000) for handle in range(1, 32))),
    "long prompts": _frame(*(_submit(handle, _prompt(130_000, handle)) for handle in range(1, 32))),
    "many ends": pb.AttachRequest(
        cancels=[pb.Cancel(handle=handle, reason=pb.CANCEL_REASON_CLIENT_GONE) for handle in _HANDLES],
        text_ended=[pb.TextEnded(handle=handle, num_tokens=1) for handle in _HANDLES],
    ).SerializeToString(),
    "something unknown": bytes_field(99, b"x" * (_ROOM - 64)),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def measured() -> AsyncIterator[MeasuredScheduler]:
    async with (
        own_worker(num_blocks=9000, max_model_len=_MAX_MODEL_LEN) as worker,
        MeasuredScheduler(worker.target.address) as scheduler,
    ):
        yield scheduler


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", _FRAMES)
async def test_no_frame_takes_long_in_one_turn(measured: MeasuredScheduler, kind: str) -> None:
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1))

    async def send() -> None:
        async with grpc.aio.insecure_channel(measured.address, options=options) as channel:
            attach: Any = channel.stream_stream(_ATTACH, _same, pb.AttachResponse.FromString)
            call = attach()
            if kind not in ("features without end", "a long name"):
                await call.write(pb.AttachRequest(hello=_HELLO).SerializeToString())
            await call.write(_FRAMES[kind])
            # One frame more, which is answered after it, or the stream has ended.
            try:
                await call.write(_frame(_submit(9999)))
                async with asyncio.timeout(60):
                    while True:
                        frame: Any = await call.read()
                        if frame is EOF or 9999 in [one.handle for one in (*frame.accepted, *frame.refused)]:
                            break
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass
            call.cancel()

    await measured.assert_short_turns(send)


def _same(data: bytes) -> bytes:
    return data

"""A scheduler as front ends see it: SessionService over real gRPC, with every answer in the test's hands.

    async with SessionDouble() as double:
        ...                                     # a front end at double.address
        request = await double.next_request()
        request.accept()
        request.send_tokens(b"Hel", b"lo")      # two frames
        request.end_length()

or, for many requests at once, `double.play = lambda submit: [b"some", b"tokens"]`: requests are accepted, get these
frames, and end with LENGTH. Cancel and TextEnded are answered as a scheduler does, unless
`answers_cancels` or `answers_text_ended` is off.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from stepfence.v1 import model_pb2, session_service_pb2, session_service_pb2_grpc, usage_pb2

# google.rpc.Code
CANCELLED, DEADLINE_EXCEEDED, INTERNAL, UNAVAILABLE = 1, 4, 13, 14
BYTE_TOKENIZER = {
    "byte_tokenizer.json": b'{"type": "byte", "vocab_size": 260, "chat_template": '
    b'"{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"}'
}
Frames = Iterable[Sequence[int]]


def byte_model(**changes: Any) -> model_pb2.ModelInfo:
    fields: dict[str, Any] = {
        "name": "bytes",
        "vocab_size": 260,
        "max_model_len": 1000,
        "eos_token_ids": [257],
        "tokenizer_digest": "bytes-1",
    }
    return model_pb2.ModelInfo(**{**fields, **changes})


def column(values: Iterable[int]) -> bytes:
    return array("i", values).tobytes()


class ScriptedRequest:
    """One submitted request, as the double sees it."""

    def __init__(self, double: SessionDouble, submit: session_service_pb2.Submit) -> None:
        self._double = double
        self.submit = submit
        self.handle = submit.handle
        self.request_id = submit.request_id
        self.prompt = _ids(submit.prompt_token_ids)
        self.sent: list[int] = []
        self.ended = False
        self.cancel_reason: int | None = None
        self.text_ended_at: int | None = None
        self.changed = asyncio.Event()

    def accept(self, max_tokens: int = 100) -> None:
        self._send(accepted=[session_service_pb2.SubmitAccepted(handle=self.handle, max_tokens=max_tokens)])

    def refuse(self, code: int, reason: str, message: str = "no", **fields: Any) -> None:
        failure = session_service_pb2.Failure(code=code, reason=reason, message=message, **fields)
        self._send(refused=[session_service_pb2.SubmitRefused(handle=self.handle, failure=failure)])
        self._over()

    def send_tokens(self, *frames: Sequence[int]) -> None:
        for frame in frames:
            self._double.send_tokens({self.handle: frame})

    def end_length(self) -> None:
        self.end_ok(usage_pb2.FINISH_REASON_LENGTH)

    def end_ok(self, reason: int, stop_token_id: int | None = None, num_tokens: int | None = None) -> None:
        self._end(
            num_tokens,
            ok=session_service_pb2.EndedOk(reason=reason, stop_token_id=stop_token_id),  # type: ignore[arg-type]
        )

    def fail(self, code: int, reason: str, message: str = "failed") -> None:
        self._end(None, failure=session_service_pb2.Failure(code=code, reason=reason, message=message))

    async def cancelled(self) -> int:
        """The reason it was cancelled with, when it is."""
        while self.cancel_reason is None:
            await self._change()
        return self.cancel_reason

    async def text_ended(self) -> int:
        while self.text_ended_at is None:
            await self._change()
        return self.text_ended_at

    async def _change(self) -> None:
        self.changed.clear()
        async with asyncio.timeout(30):
            await self.changed.wait()

    def _end(self, num_tokens: int | None, **outcome: Any) -> None:
        if self.ended:
            return
        usage = usage_pb2.Usage(
            num_prompt_tokens=len(self.prompt),
            num_completion_tokens=len(self.sent) if num_tokens is None else num_tokens,
            num_cached_tokens=3,
            num_preemptions=2,
            num_recomputed_tokens=11,
        )
        usage.queued.FromMilliseconds(1500)
        usage.preempted.FromNanoseconds(7)
        self._send(ended=[session_service_pb2.RequestEnded(handle=self.handle, usage=usage, **outcome)])
        self._over()

    def _over(self) -> None:
        self.ended = True
        self._double.live.pop(self.handle, None)

    def _send(self, **fields: Any) -> None:
        self._double.send(session_service_pb2.AttachResponse(**fields))


def _ids(data: bytes) -> list[int]:
    values = array("i")
    values.frombytes(data)
    return values.tolist()


class SessionDouble(session_service_pb2_grpc.SessionServiceServicer):
    """One scheduler for one front end. `stop` and `start` again: it comes back on the same port with nothing known."""

    def __init__(
        self,
        model: model_pb2.ModelInfo | None = None,
        files: Mapping[str, bytes] | None = None,
        features: Sequence[int] = (),
        revision: int = 2,
    ) -> None:
        # None: no worker has joined yet.
        self.model = byte_model() if model is None else model
        self.has_worker = True
        self.files = dict(BYTE_TOKENIZER if files is None else files)
        self.features: Any = features
        self.term = 0
        self.revision = revision
        self.play: Callable[[session_service_pb2.Submit], Frames] | None = None
        self.answers_cancels = True
        self.answers_text_ended = True
        self.attaches = True
        self.hellos: list[session_service_pb2.Hello] = []
        self.frames_up: list[session_service_pb2.AttachRequest] = []
        self.live: dict[int, ScriptedRequest] = {}
        # Every request ever, in order.
        self.requests: list[ScriptedRequest] = []
        self.num_tokenizer_calls = 0
        # Seconds before each part of the tokenizer.
        self.tokenizer_pause_s = 0.0
        # Status and message that end every GetTokenizer.
        self.tokenizer_refusal: tuple[grpc.StatusCode, str] | None = None
        self.address = ""
        self._port = 0
        self._server: grpc.aio.Server | None = None
        self._fresh: asyncio.Queue[ScriptedRequest] = asyncio.Queue()
        self._down: asyncio.Queue[session_service_pb2.AttachResponse | None] = asyncio.Queue()
        self._attached = asyncio.Event()
        self._players: set[asyncio.Task[None]] = set()

    # --- life ---

    async def start(self) -> None:
        self._server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", 10),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.max_receive_message_length", 16 << 20),
            )
        )
        session_service_pb2_grpc.add_SessionServiceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        self.address = f"127.0.0.1:{self._port}"
        await self._server.start()

    async def stop(self) -> None:
        self.drop_stream()
        for player in self._players:
            player.cancel()
        if self._server is not None:
            await self._server.stop(0)
        self.live.clear()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # --- the test's side ---

    async def attached(self) -> None:
        """When a front end is attached."""
        async with asyncio.timeout(30):
            await self._attached.wait()

    async def next_request(self) -> ScriptedRequest:
        async with asyncio.timeout(30):
            return await self._fresh.get()

    def send(self, frame: session_service_pb2.AttachResponse) -> None:
        self._down.put_nowait(frame)

    def send_tokens(self, rows: Mapping[int, Sequence[int]]) -> None:
        """One step's tokens of several requests, by handle."""
        for handle, token_ids in rows.items():
            if (request := self.live.get(handle)) is not None:
                request.sent += token_ids
        counts = [len(token_ids) for token_ids in rows.values()]
        tokens = session_service_pb2.TokenColumns(
            handles=column(rows),
            counts=b"" if set(counts) == {1} else column(counts),
            token_ids=column(token_id for token_ids in rows.values() for token_id in token_ids),
        )
        self.send(session_service_pb2.AttachResponse(tokens=tokens))

    def drop_stream(self) -> None:
        """The stream ends, as when the scheduler dies."""
        self._down.put_nowait(None)

    def say_readiness(self, is_ready: bool, cause: str = "") -> None:
        """As a scheduler whose workers come and go."""
        readiness = session_service_pb2.ReadinessChanged(ready=is_ready, cause=cause)
        self._down.put_nowait(session_service_pb2.AttachResponse(readiness=readiness))

    def worker_joins(self) -> None:
        self.has_worker = True
        self.send(session_service_pb2.AttachResponse(model_changed=session_service_pb2.ModelChanged(model=self.model)))

    # --- the front end's side ---

    async def Attach(
        self, request_iterator: AsyncIterator[session_service_pb2.AttachRequest], context: Any
    ) -> AsyncIterator[session_service_pb2.AttachResponse]:
        self._down = asyncio.Queue()
        self.live.clear()
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            if not self.attaches:
                await asyncio.Event().wait()
            incarnation = int.from_bytes(hashlib.sha256(str(id(self._server)).encode()).digest()[:8], "big")
            attached = session_service_pb2.Attached(
                scheduler_incarnation=incarnation,
                protocol_revision=self.revision,
                features=self.features,
                term=self.term,
            )
            yield session_service_pb2.AttachResponse(attached=attached)
            self._attached.set()
            while (frame := await self._down.get()) is not None:
                yield frame
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the double drops the stream")
        finally:
            self._attached.clear()
            reader.cancel()

    async def GetModel(
        self, request: session_service_pb2.SessionServiceGetModelRequest, context: Any
    ) -> session_service_pb2.SessionServiceGetModelResponse:
        if not self.has_worker:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "NO_WORKER")
        return session_service_pb2.SessionServiceGetModelResponse(model=self.model)

    async def GetTokenizer(
        self, request: session_service_pb2.SessionServiceGetTokenizerRequest, context: Any
    ) -> AsyncIterator[session_service_pb2.SessionServiceGetTokenizerResponse]:
        self.num_tokenizer_calls += 1
        if self.tokenizer_refusal is not None:
            await context.abort(*self.tokenizer_refusal)
        for name, data in self.files.items():
            for start in range(0, len(data), 1000):
                await asyncio.sleep(self.tokenizer_pause_s)
                chunk = model_pb2.TokenizerChunk(file_name=name, data=data[start : start + 1000])
                yield session_service_pb2.SessionServiceGetTokenizerResponse(chunk=chunk)

    async def _read(self, frames: AsyncIterator[session_service_pb2.AttachRequest]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            async for frame in frames:
                self.frames_up.append(frame)
                if frame.HasField("hello"):
                    self.hellos.append(frame.hello)
                self._take(frame)

    def _take(self, frame: session_service_pb2.AttachRequest) -> None:
        for submit in frame.submits:
            self._take_submit(submit)
        for cancel in frame.cancels:
            if (request := self.live.get(cancel.handle)) is not None:
                request.cancel_reason = cancel.reason
                request.changed.set()
                if self.answers_cancels:
                    request.fail(CANCELLED, "ABORTED")
        for text_ended in frame.text_ended:
            if (request := self.live.get(text_ended.handle)) is not None:
                request.text_ended_at = text_ended.num_tokens
                request.changed.set()
                if self.answers_text_ended:
                    request.end_ok(usage_pb2.FINISH_REASON_STOP, num_tokens=text_ended.num_tokens)

    def _take_submit(self, submit: session_service_pb2.Submit) -> None:
        request = ScriptedRequest(self, submit)
        if any(other.request_id == submit.request_id for other in self.live.values()):
            request.refuse(6, "DUPLICATE_REQUEST_ID")
            return
        assert submit.handle not in self.live, "a handle that has not ended was used again"
        self.live[submit.handle] = request
        self.requests.append(request)
        if self.play is None:
            self._fresh.put_nowait(request)
            return
        player = asyncio.create_task(self._play(request, self.play(submit)))
        self._players.add(player)
        player.add_done_callback(self._players.discard)

    async def _play(self, request: ScriptedRequest, frames: Frames) -> None:
        request.accept()
        for frame in frames:
            await asyncio.sleep(0)
            if request.ended:
                return
            request.send_tokens(frame)
        request.end_length()

"""A double of WorkerService over real gRPC, to try a scheduler with: it executes steps rightly, unless told otherwise.

It keeps rows, tokens and remembered answers as the contract says, checks what it is sent (a breach is noted in
`breaches` and ends the stream), and lets a test delay, withhold or distort answers, fail steps, cut streams, or come
back as a new process. Next tokens are a checksum of everything before them, so a test knows every right text
(`complete`).
"""

from __future__ import annotations

import asyncio
import zlib
from array import array
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf import duration_pb2

from stepfence.v1 import model_pb2, step_pb2, worker_service_pb2, worker_service_pb2_grpc

VOCAB_SIZE = 260
EOS = 257
TOKENIZER = (("tokenizer.json", b'{"kind":"double"}' * 100), ("tokenizer_config.json", b"{}"))


def next_token(tokens: Iterable[int]) -> int:
    """The right token after these: a printable byte."""
    return 32 + zlib.crc32(array("i", tokens).tobytes()) % 95


def complete(prompt: Iterable[int], num_tokens: int) -> list[int]:
    """The right output of so many tokens."""
    tokens = list(prompt)
    length = len(tokens)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[length:]


@dataclass
class Capabilities:
    """What the double declares."""

    model: str = "double"
    vocab_size: int = VOCAB_SIZE
    max_model_len: int = 4096
    tokenizer_digest: str = "digest-of-double"
    block_size_multiple: int = 1
    max_num_rows: int = 4096
    max_num_batched_tokens: int = 8192
    max_message_bytes: int = 16 << 20
    max_num_drafts: int = 16
    # Numbers of WorkerFeature, those of a later revision too.
    features: tuple[int, ...] = (
        worker_service_pb2.WORKER_FEATURE_DRAFTS,
        worker_service_pb2.WORKER_FEATURE_SAMPLED_DRAFTS,
    )
    protocol_revision: int = 2
    # Bytes of a field of a later revision.
    unknown_field: bytes = b""
    num_blocks: int = 512
    host: str = ""


@dataclass
class Row:
    """A request in the batch."""

    request_id: str
    tokens: list[int]
    num_computed: int
    num_blocks: int


@dataclass
class ReceivedStep:
    """A step frame as it arrived."""

    stream: int
    message: step_pb2.SchedulerOutput
    is_repetition: bool


@dataclass
class Session:
    """What the double holds for one epoch."""

    incarnation: int
    epoch: int
    opening: worker_service_pb2.Open
    rows: dict[int, Row] = field(default_factory=dict)
    answers: dict[int, step_pb2.StepResult] = field(default_factory=dict)
    executed: int = 0
    fence_seq: int = 0
    processed: int = 0
    is_over: bool = False


# What an answer becomes on its way out: other frames instead (possibly none).
Distortion = Callable[[step_pb2.StepResult], list[worker_service_pb2.RunStepsResponse]]


class BreachError(Exception):
    """The scheduler broke a rule."""


class WorkerDouble(worker_service_pb2_grpc.WorkerServiceServicer):
    """Start with `start()`, end with `stop()`. All attributes may be changed while it runs."""

    def __init__(self, capabilities: Capabilities | None = None, *, incarnation: int = 1001) -> None:
        self.capabilities = capabilities or Capabilities()
        self.incarnation = incarnation
        # Seconds before each answer.
        self.delay_s = 0.0
        # While cleared, steps are executed and not answered.
        self.answering = asyncio.Event()
        self.answering.set()
        self.distort: Distortion | None = None
        # Called with every new step before it is executed.
        self.on_step: Callable[[step_pb2.SchedulerOutput], None] | None = None
        self.capabilities_code: grpc.StatusCode | None = None
        # Every stream is refused with it.
        self.stream_code: grpc.StatusCode | None = None
        self.breaches: list[str] = []
        self.opens: list[worker_service_pb2.Open] = []
        self.steps: list[ReceivedStep] = []
        self.num_executed: dict[tuple[int, int, int], int] = {}
        self.session: Session | None = None
        self.num_streams = 0
        self.num_tokenizer_calls = 0
        # The end of every GetTokenizer.
        self.tokenizer_code: grpc.StatusCode | None = None
        self.port = 0
        self._server: grpc.aio.Server | None = None
        self._streams: dict[int, asyncio.Task[Any]] = {}
        self._outgoing: dict[int, asyncio.Queue[worker_service_pb2.RunStepsResponse | None]] = {}

    # --- life ---

    async def start(self, port: int = 0) -> str:
        """Listen on loopback; returns the address."""
        options = (
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", self.capabilities.max_message_bytes),
            ("grpc.http2.min_ping_interval_without_data_ms", 10),
            ("grpc.http2.max_ping_strikes", 0),
        )
        self._server = grpc.aio.server(options=options)
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return self.address

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def stop(self) -> None:
        """Vanish: streams break, the port is closed."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    async def restart(self) -> None:
        """Come back at the same address as a new process that knows nothing."""
        await self.stop()
        self.incarnation += 1
        self.session = None
        await self.start(self.port)

    def cut_streams(self) -> None:
        """Break every stream in transport; what is held stays."""
        for task in self._streams.values():
            task.cancel()

    def announce_draining(self, deadline_s: float = 5.0) -> None:
        """Say that it wants to leave."""
        self._push(
            worker_service_pb2.RunStepsResponse(
                draining=worker_service_pb2.Draining(deadline=duration_pb2.Duration(seconds=int(deadline_s)))
            )
        )

    def end_streams(self) -> None:
        """End every stream in order (status OK)."""
        self._push(None)

    def say(self, frame: worker_service_pb2.RunStepsResponse) -> None:
        """Send a frame out of turn."""
        self._push(frame)

    def _push(self, frame: worker_service_pb2.RunStepsResponse | None) -> None:
        for queue in self._outgoing.values():
            queue.put_nowait(frame)

    # --- service ---

    async def GetCapabilities(
        self, request: worker_service_pb2.GetCapabilitiesRequest, context: Any
    ) -> worker_service_pb2.GetCapabilitiesResponse:
        if self.capabilities_code is not None:
            await context.abort(self.capabilities_code, "not now")
        mine = self.capabilities
        response = worker_service_pb2.GetCapabilitiesResponse(
            protocol_revision=mine.protocol_revision,
            worker_incarnation=self.incarnation,
            model=model_pb2.ModelInfo(
                name=mine.model,
                vocab_size=mine.vocab_size,
                max_model_len=mine.max_model_len,
                eos_token_ids=[EOS],
                tokenizer_digest=mine.tokenizer_digest,
            ),
            block_size_multiple=mine.block_size_multiple,
            max_num_rows=mine.max_num_rows,
            max_num_batched_tokens=mine.max_num_batched_tokens,
            max_message_bytes=mine.max_message_bytes,
            max_num_drafts=mine.max_num_drafts,
            features=mine.features,  # type: ignore[arg-type]
            runner="double",
            host=mine.host,
        )
        response.MergeFromString(mine.unknown_field)
        return response

    async def GetTokenizer(
        self, request: worker_service_pb2.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[worker_service_pb2.GetTokenizerResponse]:
        self.num_tokenizer_calls += 1
        if self.tokenizer_code is not None:
            await context.abort(self.tokenizer_code, "no tokenizer today")
        for name, data in TOKENIZER:
            half = len(data) // 2
            for piece in (data[:half], data[half:]):
                chunk = model_pb2.TokenizerChunk(file_name=name, data=piece)
                yield worker_service_pb2.GetTokenizerResponse(chunk=chunk)

    async def RunSteps(  # type: ignore[override]
        self, request_iterator: AsyncIterator[worker_service_pb2.RunStepsRequest], context: Any
    ) -> None:
        self.num_streams += 1
        number = self.num_streams
        if self.stream_code is not None:
            await context.abort(self.stream_code, "not with this geometry")
        queue: asyncio.Queue[worker_service_pb2.RunStepsResponse | None] = asyncio.Queue()
        self._outgoing[number] = queue
        reader = asyncio.create_task(self._read(number, request_iterator, queue))
        writer = self._streams[number] = asyncio.create_task(self._write(queue, context))
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done() and not reader.cancelled() and isinstance(reader.exception(), BreachError):
                self.breaches.append(str(reader.exception()))
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(reader.exception()))
            if writer.cancelled():
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut by the test")
        finally:
            del self._outgoing[number], self._streams[number]
            reader.cancel()
            writer.cancel()

    async def _write(self, queue: asyncio.Queue[worker_service_pb2.RunStepsResponse | None], context: Any) -> None:
        while (frame := await queue.get()) is not None:
            await context.write(frame)

    async def _read(
        self,
        number: int,
        frames: AsyncIterator[worker_service_pb2.RunStepsRequest],
        queue: asyncio.Queue[worker_service_pb2.RunStepsResponse | None],
    ) -> None:
        async for frame in frames:
            if frame.WhichOneof("frame") == "open":
                self._open(frame.open, queue)
                continue
            if self.session is None or self.session.is_over:
                raise BreachError("a step without an open epoch")
            for answer in self._take(number, frame.step):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self.answering.wait()
                queue.put_nowait(answer)

    # --- the contract's rules, from the worker's side ---

    def _open(
        self,
        opening: worker_service_pb2.Open,
        queue: asyncio.Queue[worker_service_pb2.RunStepsResponse | None],
    ) -> None:
        self.opens.append(opening)
        session = self.session
        if session is None or (session.incarnation, session.epoch) != (opening.scheduler_incarnation, opening.epoch):
            is_same_scheduler = session is not None and session.incarnation == opening.scheduler_incarnation
            if session is not None and is_same_scheduler and opening.epoch < session.epoch:
                raise BreachError(f"epoch {opening.epoch} after {session.epoch}")
            session = self.session = Session(opening.scheduler_incarnation, opening.epoch, opening)
        elif session.is_over:
            raise BreachError(f"epoch {opening.epoch} is over and opened again")
        opened = worker_service_pb2.Opened(
            worker_incarnation=self.incarnation,
            num_blocks=self.capabilities.num_blocks,
            executed_step_seq=session.executed,
        )
        queue.put_nowait(worker_service_pb2.RunStepsResponse(opened=opened))

    def _take(self, number: int, step: step_pb2.SchedulerOutput) -> list[worker_service_pb2.RunStepsResponse]:
        session = self.session
        assert session is not None
        if step.epoch != session.epoch:
            raise BreachError(f"a step of epoch {step.epoch} in epoch {session.epoch}")
        is_repetition = step.step_seq in session.answers
        self.steps.append(ReceivedStep(number, step, is_repetition))
        if is_repetition:
            return self._say(session.answers[step.step_seq])
        if step.step_seq != session.executed + 1:
            raise BreachError(f"step {step.step_seq} after {session.executed}")
        self._check_numbers(session, step)
        if self.on_step is not None:
            self.on_step(step)
        key = (session.incarnation, session.epoch, step.step_seq)
        self.num_executed[key] = self.num_executed.get(key, 0) + 1
        result = self._execute(session, step)
        session.executed = step.step_seq
        session.answers[step.step_seq] = result
        if result.HasField("error"):
            session.is_over = True
        return self._say(result)

    def _check_numbers(self, session: Session, step: step_pb2.SchedulerOutput) -> None:
        expected = session.fence_seq + (1 if step.rows else 0)
        if step.fence_seq != expected:
            raise BreachError(f"step {step.step_seq}: fence_seq {step.fence_seq}, expected {expected}")
        session.fence_seq = expected
        if not session.processed <= step.processed_step_seq < step.step_seq:
            raise BreachError(f"step {step.step_seq}: processed_step_seq {step.processed_step_seq}")
        for seq in range(session.processed + 1, step.processed_step_seq + 1):
            if session.answers.pop(seq, None) is None:
                raise BreachError(f"step {seq} is processed and was never answered")
        session.processed = step.processed_step_seq
        if step.step_seq - session.processed > session.opening.max_inflight_steps + 8:
            raise BreachError(f"step {step.step_seq}: too many steps in flight")

    def _say(self, result: step_pb2.StepResult) -> list[worker_service_pb2.RunStepsResponse]:
        if self.distort is not None:
            return self.distort(result)
        return [worker_service_pb2.RunStepsResponse(result=result)]

    def _execute(self, session: Session, step: step_pb2.SchedulerOutput) -> step_pb2.StepResult:
        self._drop(session, {*step.preempted_request_ids, *step.finished_request_ids})
        for new in step.new_requests:
            self._drop(session, {new.request_id})
            if new.row in session.rows or new.row >= session.opening.num_rows:
                raise BreachError(f"step {step.step_seq}: row {new.row} is taken or does not exist")
            tokens = _ints(new.token_ids)
            session.rows[new.row] = Row(new.request_id, tokens, new.num_computed_tokens, len(new.block_table) // 4)
        for row in _ints(step.appended_rows):
            session.rows[row].num_blocks += 1
        return step_pb2.StepResult(
            epoch=step.epoch,
            step_seq=step.step_seq,
            sampled_token_ids=array("i", self._compute(session, step)).tobytes(),
            num_rows_held=len(session.rows),
        )

    def _drop(self, session: Session, request_ids: set[str]) -> None:
        for row in [row for row, held in session.rows.items() if held.request_id in request_ids]:
            del session.rows[row]

    def _compute(self, session: Session, step: step_pb2.SchedulerOutput) -> list[int]:
        rows, num_tokens = _ints(step.rows), _ints(step.num_tokens)
        if sum(num_tokens) > session.opening.max_num_batched_tokens:
            raise BreachError(f"step {step.step_seq}: {sum(num_tokens)} tokens")
        sampled = []
        for row, count in zip(rows, num_tokens, strict=True):
            held = session.rows.get(row)
            if held is None:
                raise BreachError(f"step {step.step_seq}: row {row} is unknown")
            held.num_computed += count
            if held.num_computed > held.num_blocks * session.opening.block_size:
                raise BreachError(f"step {step.step_seq}: {held.request_id} has too few blocks")
            if held.num_computed > len(held.tokens):
                raise BreachError(f"step {step.step_seq}: {held.request_id} computes tokens nobody knows")
            if held.num_computed == len(held.tokens):
                held.tokens.append(next_token(held.tokens))
                sampled.append(held.tokens[-1])
        return sampled


def _ints(column: bytes) -> list[int]:
    return list(memoryview(column).cast("i")) if column else []

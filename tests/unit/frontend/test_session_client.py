"""The session logic on virtual time over a transport in memory."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import warnings
from array import array
from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.frontend.calls import CancelReason, Ended, ResolvedSampling, Submission
from scheduler_svc.frontend.errors import Failure, RequestError, SessionLost
from scheduler_svc.frontend.limits import Limits
from scheduler_svc.frontend.outbox import Outbox
from scheduler_svc.frontend.session_client import SessionClient
from scheduler_svc.frontend.text import ByteTokenizer, Tokenizer
from scheduler_svc.frontend.usage import Usage
from stepfence.v1 import model_pb2, session_service_pb2, usage_pb2
from stepfence.v1.session_service_pb2 import AttachRequest, AttachResponse
from tests.support.virtual_time import run_virtually as run

SAMPLING = ResolvedSampling(0, 1, 0, 0, 10, 0, 1, (), ())


def submission(request_id: str, num_prompt_tokens: int = 1) -> Submission:
    return Submission(request_id, array("I", [65] * num_prompt_tokens), SAMPLING)


class MemoryStream:
    def __init__(self) -> None:
        self.sent: list[tuple[float, AttachRequest]] = []
        self.down: asyncio.Queue[AttachResponse | None] = asyncio.Queue()
        self.closed = False
        self.blocked = asyncio.Event()
        self.blocked.set()

    async def send(self, frame: AttachRequest) -> None:
        await self.blocked.wait()
        if self.closed:
            raise SessionLost("closed")
        self.sent.append((asyncio.get_running_loop().time(), frame))

    async def receive(self) -> AttachResponse:
        frame = None if self.closed else await self.down.get()
        if frame is None:
            raise SessionLost("over")
        return frame

    def close(self) -> None:
        self.closed = True
        self.down.put_nowait(None)


FEATURES = [session_service_pb2.SESSION_FEATURE_PRIORITY, session_service_pb2.SESSION_FEATURE_RESUBMIT]
ATTACHED = session_service_pb2.Attached(protocol_revision=2, features=FEATURES)


class MemoryTransport:
    """refusals: how many attempts to attach fail before one succeeds."""

    def __init__(self, refusals: int = 0) -> None:
        self.refusals = refusals
        self.attempts: list[float] = []
        self.streams: list[MemoryStream] = []
        self.num_joined_after = 0
        self.attached = ATTACHED

    def attach(self) -> MemoryStream:
        self.attempts.append(asyncio.get_running_loop().time())
        stream = MemoryStream()
        self.streams.append(stream)
        if len(self.attempts) <= self.refusals:
            stream.close()
        else:
            stream.down.put_nowait(AttachResponse(attached=self.attached))
        return stream

    async def get_model(self) -> model_pb2.ModelInfo | None:
        if self.num_joined_after > 0:
            self.num_joined_after -= 1
            return None
        return model_pb2.ModelInfo(name="m", vocab_size=260, max_model_len=100, tokenizer_digest="d")

    async def get_tokenizer(self) -> Sequence[model_pb2.TokenizerChunk]:
        return [model_pb2.TokenizerChunk(file_name="byte_tokenizer.json", data=b"{}")]


class Sink:
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.usage: Usage | None = None

    def accepted(self, max_tokens: int) -> None:
        self.heard.append("accepted")

    def tokens(self, token_ids: Sequence[int]) -> None:
        self.heard.append(f"tokens {list(token_ids)}")

    def refused(self, failure: Failure) -> None:
        self.heard.append(f"refused {failure.reason}")

    def ended(self, ended: Ended) -> None:
        self.heard.append("ended" if ended.failure is None else f"ended {ended.failure.reason}")
        self.usage = ended.usage


async def _load(files: Mapping[str, bytes]) -> Tokenizer:
    return ByteTokenizer({})


def client(transport: MemoryTransport, limits: Limits | None = None) -> SessionClient:
    return SessionClient(transport, _load, front_end_id="fe", rng=random.Random(1), limits=limits)


def submits(stream: MemoryStream) -> list[session_service_pb2.Submit]:
    return [submit for _, frame in stream.sent for submit in frame.submits]


async def until_ready(session: SessionClient) -> None:
    while session.not_ready_cause is not None:
        await asyncio.sleep(0.001)


def test_it_tries_again_for_ever_with_growing_jittered_pauses() -> None:
    async def scenario() -> None:
        transport = MemoryTransport(refusals=200)
        session = client(transport)
        running = asyncio.create_task(session.run())
        await until_ready(session)
        pauses = [later - earlier for earlier, later in zip(transport.attempts, transport.attempts[1:], strict=False)]
        assert len(pauses) == 200
        assert 0.075 <= pauses[0] <= 0.125
        assert all(0.3 <= pause <= 0.5 for pause in pauses[4:])
        assert len({round(pause, 6) for pause in pauses[4:]}) > 100
        running.cancel()

    run(scenario())


def test_after_a_good_session_the_first_pause_is_short_again() -> None:
    async def scenario() -> None:
        transport = MemoryTransport(refusals=20)
        session = client(transport)
        running = asyncio.create_task(session.run())
        await until_ready(session)
        lost_at = asyncio.get_running_loop().time()
        transport.streams[-1].close()
        await asyncio.sleep(0)
        while len(transport.attempts) < 22:
            await asyncio.sleep(0.001)
        assert transport.attempts[-1] - lost_at < 0.13
        running.cancel()

    run(scenario())


def test_a_stream_that_ends_with_its_first_frame_leaves_nothing_unfinished() -> None:
    """Found by the simulation: work beside the receiving that is given up before it began."""

    class OverAtOnce(MemoryTransport):
        def attach(self) -> MemoryStream:
            stream = super().attach()
            stream.down.put_nowait(None)
            return stream

    async def scenario() -> None:
        session = client(OverAtOnce())
        running = asyncio.create_task(session.run())
        await asyncio.sleep(5)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        gc.collect()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(scenario())
    assert [str(warning.message) for warning in told] == []


def test_something_is_sent_every_second_with_the_number_of_open_streams() -> None:
    async def scenario() -> None:
        transport = MemoryTransport()
        session = client(transport)
        running = asyncio.create_task(session.run())
        await until_ready(session)
        session.num_live_streams = 5
        await asyncio.sleep(10.5)
        frames = transport.streams[0].sent
        assert frames[0][1].hello.front_end_id == "fe"
        times = [moment for moment, _ in frames]
        assert all(later - earlier <= 1.0 for earlier, later in itertools.pairwise(times))
        assert {frame.num_live_streams for moment, frame in frames if moment > 1.5} == {5}
        running.cancel()

    run(scenario())


def test_the_end_of_the_last_stream_is_told_before_the_next_heartbeat() -> None:
    async def scenario() -> None:
        transport = MemoryTransport()
        session = client(transport)
        running = asyncio.create_task(session.run())
        await until_ready(session)
        session.num_live_streams = 1
        await asyncio.sleep(5.1)
        session.num_live_streams = 0
        session.no_stream_left()
        await asyncio.sleep(0.1)
        frames = transport.streams[0].sent
        assert frames[-1][1].num_live_streams == 0
        num_frames = len(frames)
        await asyncio.sleep(0.5)
        assert len(transport.streams[0].sent) == num_frames
        running.cancel()

    run(scenario())


def test_the_model_is_asked_for_until_a_worker_has_joined() -> None:
    async def scenario() -> None:
        transport = MemoryTransport()
        transport.num_joined_after = 50
        session = client(transport)
        running = asyncio.create_task(session.run())
        await until_ready(session)
        assert asyncio.get_running_loop().time() > 10
        assert session.model.description.name == "m"
        assert session.accepts_priority
        running.cancel()

    run(scenario())


def test_every_request_hears_exactly_one_end() -> None:
    async def scenario() -> None:
        transport = MemoryTransport()
        session = client(transport)
        running = asyncio.create_task(session.run())
        await until_ready(session)
        sinks = [Sink() for _ in range(4)]
        handles = [session.submit(submission(f"r{number}"), sink) for number, sink in enumerate(sinks)]
        session.cancel(handles[3], CancelReason.CLIENT_GONE)
        session.release(handles[3])
        refused = session_service_pb2.SubmitRefused(
            handle=handles[1], failure=session_service_pb2.Failure(code=8, reason="QUEUE_FULL")
        )
        ended = [
            session_service_pb2.RequestEnded(handle=handle, ok=session_service_pb2.EndedOk(reason=1))  # type: ignore[arg-type]
            for handle in (handles[0], handles[3])
        ]
        down = transport.streams[0].down
        down.put_nowait(AttachResponse(accepted=[session_service_pb2.SubmitAccepted(handle=handles[0])]))
        down.put_nowait(AttachResponse(refused=[refused], ended=ended))
        # Said twice: the second time about nobody.
        down.put_nowait(AttachResponse(refused=[refused], ended=ended))
        await asyncio.sleep(0.01)
        assert session.num_handles == 1
        transport.streams[0].close()
        await asyncio.sleep(0.01)
        assert [sink.heard for sink in sinks] == [["accepted", "ended"], ["refused QUEUE_FULL"], [], []]
        await asyncio.sleep(31)
        assert session.num_handles == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert sinks[2].heard == ["refused SCHEDULER_UNAVAILABLE"]
        assert session.num_handles == 0
        running.cancel()

    run(scenario())


def test_what_was_cancelled_before_the_loss_is_not_sent_after_it() -> None:
    async def scenario() -> None:
        transport = MemoryTransport()
        session = client(transport)
        running = asyncio.create_task(session.run())
        await until_ready(session)
        transport.streams[0].blocked.clear()
        sinks = [Sink(), Sink()]
        handle = session.submit(submission("being sent"), sinks[0])
        await asyncio.sleep(0.01)
        session.cancel(handle, CancelReason.ABORTED)
        session.submit(submission("waiting"), sinks[1])
        transport.streams[0].close()
        await asyncio.sleep(3)
        assert [sink.heard for sink in sinks] == [["refused ABORTED"], []]
        assert session.not_ready_cause is None
        assert [submit.request_id for submit in submits(transport.streams[1])] == ["waiting"]
        assert not any(frame.cancels or frame.text_ended for _, frame in transport.streams[1].sent)
        running.cancel()

    run(scenario())


def test_stopping_ends_what_is_live() -> None:
    async def scenario() -> None:
        transport = MemoryTransport()
        session = client(transport)
        running = asyncio.create_task(session.run())
        await until_ready(session)
        sink = Sink()
        session.submit(submission("r"), sink)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert sink.heard == ["refused SCHEDULER_UNAVAILABLE"]
        assert transport.streams[0].closed

    run(scenario())


def test_a_scheduler_that_does_not_read_makes_new_requests_be_refused_and_holds_a_bounded_number() -> None:
    async def scenario() -> None:
        transport = MemoryTransport()
        session = client(transport, Limits(max_outbox_bytes=10_000))
        running = asyncio.create_task(session.run())
        await until_ready(session)
        transport.streams[0].blocked.clear()
        told: Failure | None = None
        num_taken = 0
        for number in range(1000):
            try:
                session.submit(submission(f"r{number}", 100), Sink())
                num_taken += 1
            except RequestError as error:
                told = error.failure
        assert told is not None
        assert (told.code, told.reason, told.retry_after_s) == (8, "QUEUE_FULL", 1.0)
        assert 10 < num_taken < 50
        transport.streams[0].blocked.set()
        await asyncio.sleep(0.1)
        session.submit(submission("again"), Sink())
        await asyncio.sleep(0.1)
        submitted = [submit.request_id for _, frame in transport.streams[0].sent for submit in frame.submits]
        assert submitted == [*(f"r{number}" for number in range(num_taken)), "again"]
        running.cancel()

    run(scenario())


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["submit", "cancel", "text ended", "take"]), st.integers(1, 9)), max_size=40
)


@given(ACTIONS, st.integers(1, 400))
def test_frames_keep_the_order_in_which_things_happened(actions: list[tuple[str, int]], max_frame_bytes: int) -> None:
    outbox = Outbox(Limits(max_frame_bytes=max_frame_bytes))
    happened: list[tuple[str, int]] = []
    frames = []
    for kind, handle in actions:
        if kind == "take":
            frames.append(outbox.take())
            continue
        happened.append((kind, handle))
        if kind == "submit":
            outbox.put_submit(session_service_pb2.Submit(handle=handle, prompt_token_ids=bytes(50)))
        elif kind == "cancel":
            outbox.put_cancel(session_service_pb2.Cancel(handle=handle))
        else:
            outbox.put_text_ended(session_service_pb2.TextEnded(handle=handle, num_tokens=1))
    while (frame := outbox.take()) is not None:
        frames.append(frame)
    # The other side takes the parts of a frame in the order of its fields.
    taken = [
        (kind, message.handle)
        for frame in frames
        if frame is not None
        for kind, messages in (("submit", frame.submits), ("cancel", frame.cancels), ("text ended", frame.text_ended))
        for message in messages
    ]
    assert taken == happened
    assert not outbox.full
    assert not outbox.filled.is_set()


def test_handles_are_not_used_again_while_they_are_taken() -> None:
    async def scenario() -> None:
        transport = MemoryTransport()
        session = client(transport)
        running = asyncio.create_task(session.run())
        await until_ready(session)
        first = session.submit(submission("a"), Sink())
        session._next_handle = 2**31 - 1
        last = session.submit(submission("b"), Sink())
        following = session.submit(submission("c"), Sink())
        assert (first, last, following) == (1, 2**31 - 1, 2)
        running.cancel()

    run(scenario())


def test_f118_a_frame_has_so_many_of_each_kind_and_no_more() -> None:
    outbox = Outbox(Limits(max_frame_items=3))
    for handle in range(1, 8):
        outbox.put_submit(session_service_pb2.Submit(handle=handle))
    for handle in range(1, 8):
        outbox.put_cancel(session_service_pb2.Cancel(handle=handle))
    for handle in range(1, 8):
        outbox.put_text_ended(session_service_pb2.TextEnded(handle=handle, num_tokens=1))
    sizes = []
    while (frame := outbox.take()) is not None:
        sizes.append((len(frame.submits), len(frame.cancels), len(frame.text_ended)))
    assert sizes == [(3, 0, 0), (3, 0, 0), (1, 3, 0), (0, 3, 0), (0, 1, 3), (0, 0, 3), (0, 0, 1)]


def test_no_turn_takes_the_tokens_of_a_whole_frame() -> None:
    """What a token costs depends on the stop strings of its request, and a frame has the tokens of all requests."""

    async def scenario() -> None:
        transport = MemoryTransport()
        session = client(transport)
        running = asyncio.create_task(session.run())
        await until_ready(session)
        per_turn: list[int] = [0]

        class Counting(Sink):
            def tokens(self, token_ids: Sequence[int]) -> None:
                per_turn[-1] += len(token_ids)
                super().tokens(token_ids)

        async def count_turns() -> None:
            while True:
                await asyncio.sleep(0)
                per_turn.append(0)

        sinks = [Counting() for _ in range(300)]
        handles = [session.submit(submission(str(index)), sink) for index, sink in enumerate(sinks)]
        await asyncio.sleep(0.01)
        counting = asyncio.create_task(count_turns())
        counts = [1] * 299 + [1000]
        tokens = session_service_pb2.TokenColumns(
            handles=array("i", handles).tobytes(),
            counts=array("i", counts).tobytes(),
            token_ids=array("i", range(sum(counts))).tobytes(),
        )
        ended = [
            session_service_pb2.RequestEnded(
                handle=h, ok=session_service_pb2.EndedOk(reason=usage_pb2.FINISH_REASON_LENGTH)
            )
            for h in handles
        ]
        transport.streams[-1].down.put_nowait(AttachResponse(tokens=tokens, ended=ended))
        while sinks[-1].heard[-1:] != ["ended"]:
            await asyncio.sleep(0)
        counting.cancel()
        assert sum(per_turn) == sum(counts)
        assert max(per_turn) <= 64
        assert sinks[0].heard == ["tokens [0]", "ended"]
        assert sinks[298].heard == ["tokens [298]", "ended"]
        assert len(sinks[-1].heard) > 2
        running.cancel()

    run(scenario())

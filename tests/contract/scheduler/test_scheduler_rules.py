"""The scheduler's side of the contract's rules, against a worker double over real gRPC. Test names begin with the
rule."""

from __future__ import annotations

import asyncio
import random
import urllib.request
from array import array
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stepfence.v1 import step_pb2, worker_service_pb2
from tests.support.scheduler_process import RunningScheduler, running_scheduler, state_of, until
from tests.support.session_client import LENGTH, STOP, SessionClient, Stream
from tests.support.worker_double import BreachError, Capabilities, WorkerDouble, complete

Response = worker_service_pb2.RunStepsResponse


@pytest.fixture
async def double() -> AsyncIterator[WorkerDouble]:
    double = WorkerDouble()
    await double.start()
    yield double
    await double.stop()


def prompt(index: int, length: int = 9) -> list[int]:
    return [(7 * index + 3 * position) % 256 for position in range(length)]


async def right(streams: list[Stream], num_tokens: int) -> None:
    """All streams end well with the right tokens, each once."""
    for stream in streams:
        await stream.over()
        assert stream.reason == LENGTH
        assert stream.tokens == complete(stream.prompt, num_tokens)


async def served(scheduler: RunningScheduler, *, num: int = 8, num_tokens: int = 20) -> None:
    """A batch of requests completes as it should, and nothing stays behind."""
    async with SessionClient(scheduler.address) as client:
        await right([client.submit(prompt(index), num_tokens) for index in range(num)], num_tokens)
        assert client.errors == []
    await scheduler.all_free()


# --- rules 1, 2, 4, 5, 6 ----------------------------------------------------------------------------------------------


async def test_rule_1_steps_are_numbered_without_gap_and_each_is_acknowledged(double: WorkerDouble) -> None:
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        await served(scheduler)
        view = await scheduler.rank(double.address)
    numbers = [step.message.step_seq for step in double.steps]
    assert numbers == list(range(1, len(numbers) + 1))
    assert view.sent_step_seq == view.acked_step_seq == len(numbers)
    assert view.num_rows_held == 0
    # Numbering, fences, windows, rows and block tables are checked by the double.
    assert double.breaches == []


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_rule_1_no_more_steps_with_tokens_are_in_flight_than_open_says(double: WorkerDouble, depth: int) -> None:
    double.answering.clear()
    async with running_scheduler(double.address, max_inflight_steps=depth) as scheduler:
        await scheduler.ready()
        async with SessionClient(scheduler.address) as client:
            streams = [client.submit(prompt(index), 10) for index in range(4)]
            for stream in streams:
                await stream.answered()
            # The double reads the next step only after it has answered, so ask the one who sends.
            await until(lambda: (view := scheduler.core.rank_view(double.address)) and view.sent_step_seq >= 1)
            view = await scheduler.rank(double.address)
            assert view.sent_step_seq - view.acked_step_seq <= depth
            double.answering.set()
            await right(streams, 10)
    assert double.opens[0].max_inflight_steps == depth
    assert double.opens[0].num_rows == 64 * (depth + 1)


def ints(column: bytes) -> list[int]:
    return list(memoryview(column).cast("i")) if column else []


class Holders:
    """Who has had which block, and until which step: read from the steps as they were sent, once each."""

    def __init__(self) -> None:
        self.num_reused_after_use = 0
        self._tables: dict[str, list[int]] = {}
        self._rows: dict[int, str] = {}
        self._last_used: dict[int, int] = {}

    def take(self, step: step_pb2.SchedulerOutput) -> None:
        """Asserts rule 5 for the blocks that this step gives somebody to write."""
        for request_id in (*step.preempted_request_ids, *step.finished_request_ids):
            self._tables.pop(request_id, None)
        for new in step.new_requests:
            table = self._tables[new.request_id] = ints(new.block_table)
            self._rows[new.row] = new.request_id
            block_size = -(-len(ints(new.token_ids)) // max(1, len(table)))
            self._given(table[new.num_computed_tokens // max(1, block_size) :], new.request_id, step)
        for row, block in zip(ints(step.appended_rows), ints(step.appended_blocks), strict=True):
            self._given([block], self._rows[row], step)
            self._tables[self._rows[row]].append(block)
        for row in ints(step.rows):
            for block in self._tables[self._rows[row]]:
                self._last_used[block] = step.step_seq

    def _given(self, blocks: list[int], request_id: str, step: step_pb2.SchedulerOutput) -> None:
        others = {block for held_by, table in self._tables.items() if held_by != request_id for block in table}
        for block in blocks:
            assert block not in others, f"step {step.step_seq}: block {block} still belongs to somebody"
            last_used = self._last_used.get(block, 0)
            assert last_used <= step.processed_step_seq, (
                f"step {step.step_seq} gives out block {block}, which step {last_used} used; processed are "
                f"{step.processed_step_seq}"
            )
            self.num_reused_after_use += last_used > 0


@pytest.mark.parametrize("depth", [2, 3])
async def test_rule_5_a_freed_block_is_not_given_out_before_its_fence_is_acknowledged(depth: int) -> None:
    double = WorkerDouble(Capabilities(num_blocks=25))
    await double.start()
    double.delay_s = 0.002
    rng = random.Random(depth)
    try:
        async with running_scheduler(
            double.address, max_inflight_steps=depth, enable_prefix_caching=False, max_num_batched_tokens=64
        ) as scheduler:
            await scheduler.ready()
            async with SessionClient(scheduler.address) as client:
                streams = [client.submit(prompt(index), 30) for index in range(24)]
                for number, stream in enumerate(streams):
                    await stream.until(rng.randrange(1, 20))
                    if number % 3 == 0:
                        client.cancel(stream)
                    if number % 6 == 0:
                        # However long an acknowledgement takes, time opens no fence.
                        double.answering.clear()
                        await asyncio.sleep(0.2)
                        double.answering.set()
                for stream in streams:
                    await stream.over()
                await right([stream for number, stream in enumerate(streams) if number % 3], 30)
                assert client.errors == []
            # Opened by acknowledgement alone, without new traffic.
            await scheduler.all_free()
    finally:
        await double.stop()
    holders = Holders()
    for received in double.steps:
        holders.take(received.message)
    assert holders.num_reused_after_use > 20
    assert any(received.message.deferred_frees for received in double.steps)
    assert double.breaches == []


async def test_rule_6_a_token_of_a_preempted_request_is_delivered_once_and_becomes_part_of_the_recompute() -> None:
    double = WorkerDouble(Capabilities(num_blocks=21))
    await double.start()
    double.delay_s = 0.001
    try:
        async with running_scheduler(double.address, enable_prefix_caching=False) as scheduler:
            await scheduler.ready()
            async with SessionClient(scheduler.address) as client:
                await right([client.submit(prompt(index), 40) for index in range(8)], 40)
                assert client.errors == []
            assert (await scheduler.status()).num_preemptions > 0
            await scheduler.all_free()
    finally:
        await double.stop()
    # Tokens each request has had sampled, in every step sent before the one that brings it back.
    known: dict[str, int] = {}
    rows: dict[int, tuple[str, int]] = {}
    num_resumed = num_late = 0
    for step in (received.message for received in double.steps):
        for request_id in step.preempted_request_ids:
            num_late += known[request_id] > 0 and step.processed_step_seq < step.step_seq - 1
        for new in step.new_requests:
            length = len(ints(new.token_ids))
            if new.request_id in known:
                num_resumed += 1
                assert length == new.num_prompt_tokens + known[new.request_id]
            known.setdefault(new.request_id, 0)
            rows[new.row] = (new.request_id, length - new.num_computed_tokens)
        for row, count in zip(ints(step.rows), ints(step.num_tokens), strict=True):
            request_id, left = rows[row]
            left -= count
            if left == 0:
                known[request_id] += 1
                left = 1
            rows[row] = (request_id, left)
    # Some were preempted while a step of theirs was on its way.
    assert num_resumed > 0 and num_late > 0
    assert double.breaches == []


async def test_rule_6_a_token_of_an_aborted_request_is_dropped(double: WorkerDouble) -> None:
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        async with SessionClient(scheduler.address) as client:
            stays, leaves = client.submit(prompt(1), 40), client.submit(prompt(2), 40)
            await leaves.until(3)
            double.answering.clear()
            num_steps = len(double.steps)
            await until(lambda: len(double.steps) > num_steps or not double.answering.is_set())
            client.cancel(leaves)
            await leaves.over()
            assert leaves.failure is not None
            assert (leaves.failure.code, leaves.failure.reason) == (grpc.StatusCode.CANCELLED.value[0], "ABORTED")
            assert leaves.tokens == complete(leaves.prompt, 40)[: len(leaves.tokens)]
            assert leaves.end is not None and leaves.end.usage.num_completion_tokens == len(leaves.tokens)
            double.answering.set()
            await right([stays], 40)
            assert client.errors == []
        await scheduler.all_free()


async def test_rule_6_an_id_used_again_at_once_gets_its_own_tokens(double: WorkerDouble) -> None:
    """F18: the step in flight names the run, not the id."""
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        async with SessionClient(scheduler.address) as client:
            for round_ in range(10):
                first = client.submit(prompt(round_), 50, request_id="same")
                await first.until(2)
                client.cancel(first)
                await first.over()
                second = client.submit(prompt(round_ + 100), 6, request_id="same")
                await right([second], 6)
            assert client.errors == []
        await scheduler.all_free()


# --- rule 7: streams, epochs, incarnations
# -----------------------------------------------------------------------------


async def test_rule_7_a_cut_stream_is_opened_with_the_same_epoch_and_replayed(double: WorkerDouble) -> None:
    rng = random.Random(5)
    double.delay_s = 0.001
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        async with SessionClient(scheduler.address) as client:
            streams = [client.submit(prompt(index), 150) for index in range(16)]
            for cut in range(5):
                await until(lambda: double.num_streams == cut + 1)  # noqa: B023
                await streams[0].until(len(streams[0].tokens) + rng.randrange(1, 12))
                double.cut_streams()
            await right(streams, 150)
            assert client.errors == []
        await scheduler.all_free()
        status = await scheduler.status()
    assert double.num_streams == 6
    assert {opening.epoch for opening in double.opens} == {1}
    assert set(double.num_executed.values()) == {1}
    assert status.num_requeued_after_worker_loss == 0
    assert double.breaches == []


async def test_rule_7_a_replayed_step_has_the_same_bytes(double: WorkerDouble) -> None:
    # The first five answers are lost with their streams.
    left = 5

    def lose(result: step_pb2.StepResult) -> list[Response]:
        nonlocal left
        if left > 0:
            left -= 1
            double.cut_streams()
            return []
        return [Response(result=result)]

    double.distort = lose
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        await served(scheduler, num=3)
    first: dict[int, bytes] = {}
    repeated = 0
    for step in double.steps:
        data = step.message.SerializeToString(deterministic=True)
        assert first.setdefault(step.message.step_seq, data) == data
        repeated += step.is_repetition
    assert repeated >= 5
    assert {opening.epoch for opening in double.opens} == {1}
    assert set(double.num_executed.values()) == {1}


async def test_rule_7_f65_a_restarted_worker_gets_a_new_epoch_and_every_stream_goes_on(double: WorkerDouble) -> None:
    double.delay_s = 0.002
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        async with SessionClient(scheduler.address) as client:
            streams = [client.submit(prompt(index), 60) for index in range(12)]
            for kill in range(3):
                await streams[0].until(5 * (kill + 1))
                await double.restart()
            await right(streams, 60)
            assert client.errors == []
            usage = [stream.end.usage for stream in streams if stream.end is not None]
        await scheduler.all_free()
        status = await scheduler.status()
    epochs = [opening.epoch for opening in double.opens]
    assert epochs == sorted(set(epochs)) and len(epochs) == 4
    assert len({opening.scheduler_incarnation for opening in double.opens}) == 1
    assert status.num_requeued_after_worker_loss >= 12
    assert all(each.num_recomputed_tokens > 0 for each in usage)


async def test_rule_7_a_worker_away_for_a_while_is_found_again(double: WorkerDouble) -> None:
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        async with SessionClient(scheduler.address) as client:
            stream = client.submit(prompt(1), 300)
            await stream.until(3)
            await double.stop()
            lost = await scheduler.rank_is(double.address, "lost")
            assert lost.cause
            await scheduler.not_ready()
            double.incarnation += 1
            double.session = None
            await double.start(double.port)
            await right([stream], 300)
        await scheduler.ready()


async def test_rule_7_watchdog_a_worker_without_answer_loses_its_epoch(double: WorkerDouble) -> None:
    async with running_scheduler(double.address, step_watchdog_s=0.3, first_steps_watchdog_s=0.3) as scheduler:
        await scheduler.ready()
        async with SessionClient(scheduler.address) as client:
            streams = [client.submit(prompt(index), 30) for index in range(4)]
            await streams[0].until(3)
            double.answering.clear()
            await until(lambda: len(double.opens) >= 2)
            double.answering.set()
            await right(streams, 30)
            assert client.errors == []
        await scheduler.all_free()
    assert double.opens[1].epoch == 2


async def test_rule_7_the_first_steps_of_an_epoch_may_take_longer(double: WorkerDouble) -> None:
    double.delay_s = 0.6
    async with running_scheduler(double.address, step_watchdog_s=0.3, first_steps_watchdog_s=20) as scheduler:
        await scheduler.ready()
        async with SessionClient(scheduler.address) as client:
            stream = client.submit(prompt(1), 2)
            await right([stream], 2)
    assert [opening.epoch for opening in double.opens] == [1]


async def test_rule_7_late_results_of_an_ended_epoch_change_nothing(double: WorkerDouble) -> None:
    held: list[step_pb2.StepResult] = []

    def hold(result: step_pb2.StepResult) -> list[Response]:
        if result.epoch == 1 and result.step_seq > 4:
            held.append(result)
            return []
        return [Response(result=result)]

    double.distort = hold
    async with running_scheduler(double.address, step_watchdog_s=0.3, first_steps_watchdog_s=0.3) as scheduler:
        await scheduler.ready()
        async with SessionClient(scheduler.address) as client:
            stream = client.submit(prompt(1), 400)
            await until(lambda: len(double.opens) == 2 and len(stream.tokens) > 20)
            double.say(Response(result=held[0]))
            # In an epoch of its own it is a wrong answer.
            await until(lambda: len(double.opens) == 3)
            await right([stream], 400)
            assert client.errors == []
        await scheduler.all_free()


async def test_rule_7_a_new_scheduler_opens_the_worker_with_another_incarnation(double: WorkerDouble) -> None:
    for _ in range(2):
        async with running_scheduler(double.address) as scheduler:
            await scheduler.ready()
            await served(scheduler, num=2)
    assert [opening.epoch for opening in double.opens] == [1, 1]
    assert len({opening.scheduler_incarnation for opening in double.opens}) == 2


# --- rules 3, 8, 9: refusals, failures, wrong answers
# -------------------------------------------------------------------


async def test_rule_3_a_step_the_worker_refuses_ends_the_epoch_and_nothing_else(double: WorkerDouble) -> None:
    def refuse(step: step_pb2.SchedulerOutput) -> None:
        if (step.epoch, step.step_seq) == (1, 5):
            raise BreachError("refused by the test")

    double.on_step = refuse
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        await served(scheduler)
    assert [opening.epoch for opening in double.opens] == [1, 2]
    assert double.breaches == ["refused by the test"]


async def test_rule_8_a_failed_step_ends_the_epoch(double: WorkerDouble) -> None:
    def fail(result: step_pb2.StepResult) -> list[Response]:
        if (result.epoch, result.step_seq) == (1, 6):
            error = step_pb2.StepError(kind=step_pb2.STEP_ERROR_KIND_EXECUTION, message="out of memory")
            return [Response(result=step_pb2.StepResult(epoch=1, step_seq=6, error=error))]
        return [Response(result=result)]

    double.distort = fail
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        await served(scheduler)
    assert [opening.epoch for opening in double.opens] == [1, 2]


def _ids(*ids: int) -> bytes:
    return array("i", ids).tobytes()


def _changed(**fields: object) -> Callable[[step_pb2.StepResult], list[Response]]:
    def change(result: step_pb2.StepResult) -> list[Response]:
        wrong = step_pb2.StepResult()
        wrong.CopyFrom(result)
        for name, value in fields.items():
            setattr(wrong, name, value(result) if callable(value) else value)
        return [Response(result=wrong)]

    return change


WRONG_ANSWERS: dict[str, Callable[[step_pb2.StepResult], list[Response]]] = {
    "a row missing": _changed(sampled_token_ids=lambda result: result.sampled_token_ids[4:]),
    "a row too many": _changed(sampled_token_ids=lambda result: result.sampled_token_ids + _ids(65)),
    "an id out of range": _changed(sampled_token_ids=lambda result: _ids(260) + result.sampled_token_ids[4:]),
    "a negative id": _changed(sampled_token_ids=lambda result: _ids(-1) + result.sampled_token_ids[4:]),
    "a broken column": _changed(sampled_token_ids=lambda result: result.sampled_token_ids + b"x"),
    "counts that do not add up": _changed(sampled_counts=_ids(1, 1, 1, 1, 1, 1, 1, 1, 1, 1)),
    "a negative count": _changed(sampled_counts=lambda result: _ids(-1, *[1] * (len(result.sampled_token_ids) // 4))),
    "rows without a token": _changed(
        sampled_counts=lambda result: _ids(*[0] * (len(result.sampled_token_ids) // 4)), sampled_token_ids=b""
    ),
    "a step twice": lambda result: [Response(result=result), Response(result=result)],
    "a step left out": _changed(step_seq=lambda result: result.step_seq + 1),
    "a step of the past": _changed(step_seq=lambda result: result.step_seq - 1),
    "another epoch": _changed(epoch=lambda result: result.epoch + 1),
    "opened again": lambda result: [Response(opened=worker_service_pb2.Opened(worker_incarnation=1001, num_blocks=9))],
    "an empty frame": lambda result: [Response()],
}


@pytest.mark.parametrize("kind", WRONG_ANSWERS)
async def test_rule_9_a_wrong_answer_is_a_failure(double: WorkerDouble, kind: str) -> None:
    is_told = False

    def distort(result: step_pb2.StepResult) -> list[Response]:
        nonlocal is_told
        if not is_told and result.step_seq >= 4 and result.sampled_token_ids:
            is_told = True
            return WRONG_ANSWERS[kind](result)
        return [Response(result=result)]

    double.distort = distort
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        await served(scheduler, num=4)
    assert is_told
    assert [opening.epoch for opening in double.opens] == [1, 2]


async def test_rule_9_a_request_that_kills_every_epoch_fails_alone(double: WorkerDouble) -> None:
    """D31: the poison request ends INTERNAL / WORKER_FAULT, the others complete."""
    poison = "poison"
    held_poison = False

    def note(step: step_pb2.SchedulerOutput) -> None:
        nonlocal held_poison
        held_poison = any(new.request_id == poison for new in step.new_requests)

    def fail(result: step_pb2.StepResult) -> list[Response]:
        if held_poison:
            error = step_pb2.StepError(kind=step_pb2.STEP_ERROR_KIND_EXECUTION, message="poisoned")
            return [Response(result=step_pb2.StepResult(epoch=result.epoch, step_seq=result.step_seq, error=error))]
        return [Response(result=result)]

    double.on_step, double.distort = note, fail
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        async with SessionClient(scheduler.address) as client:
            good = [client.submit(prompt(index), 30) for index in range(5)]
            await good[0].until(2)
            bad = await client.submit(prompt(50), 30, request_id=poison).over()
            await right(good, 30)
            assert bad.failure is not None
            assert (bad.failure.code, bad.failure.reason) == (grpc.StatusCode.INTERNAL.value[0], "WORKER_FAULT")
            assert bad.tokens == []
        await scheduler.all_free()


# --- rule 10: sizes and limits
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capabilities", "cause"),
    [
        (Capabilities(protocol_revision=1), "protocol revision 1, this scheduler revision 2"),
        (Capabilities(block_size_multiple=16), "multiple of 16"),
        (Capabilities(max_num_rows=100), "at most 100 rows"),
        (Capabilities(max_num_batched_tokens=200), "at most 200 tokens"),
        (Capabilities(max_message_bytes=10_000), "at most 10000 bytes"),
        (Capabilities(num_blocks=1), "1 blocks"),
    ],
)
async def test_rule_10_a_worker_that_cannot_serve_is_refused_with_the_reason(
    capabilities: Capabilities, cause: str
) -> None:
    double = WorkerDouble(capabilities)
    await double.start()
    async with running_scheduler(double.address) as scheduler:
        async with asyncio.timeout(20):
            while cause not in (await scheduler.rank(double.address)).cause:
                await asyncio.sleep(0.01)
        status = await scheduler.status()
        assert not status.ready and cause in status.not_ready_cause
        assert double.steps == []
    await double.stop()


async def test_rule_10_a_worker_that_refuses_the_geometry_is_asked_rarely_and_told_of_once(
    double: WorkerDouble, caplog: pytest.LogCaptureFixture
) -> None:
    double.stream_code = grpc.StatusCode.INVALID_ARGUMENT
    async with running_scheduler(double.address) as scheduler:
        async with asyncio.timeout(60):
            while "not with this geometry" not in (await scheduler.rank(double.address)).cause:
                await asyncio.sleep(0.01)
            before = asyncio.get_running_loop().time()
            assert double.num_streams == 1
            while double.num_streams < 2:
                await asyncio.sleep(0.01)
        assert asyncio.get_running_loop().time() - before > 2
        assert "not with this geometry" in (await scheduler.status()).not_ready_cause
        double.stream_code = None
        await scheduler.ready()
    (told,) = [vars(record) for record in caplog.records if record.message == "rank refused"]
    assert told["host"] == ""


async def test_rule_10_d44_a_rank_with_another_model_is_refused_until_it_agrees(double: WorkerDouble) -> None:
    other = WorkerDouble(Capabilities(model="other"), incarnation=2001)
    async with running_scheduler(double.address, await_second := "127.0.0.1:1") as scheduler:
        await scheduler.ready()
        assert state_of(await scheduler.rank(await_second)) != "up"
    await other.start()
    async with running_scheduler(double.address, other.address) as scheduler:
        async with asyncio.timeout(20):
            while {state_of(rank) for rank in (await scheduler.status()).ranks} != {"up", "connecting"}:
                await asyncio.sleep(0.01)
            while True:
                causes = [rank.cause for rank in (await scheduler.status()).ranks if state_of(rank) == "connecting"]
                if causes and "its model is" in causes[0]:
                    break
                await asyncio.sleep(0.01)
    await other.stop()


async def test_rule_10_no_step_is_planned_that_is_too_large_for_a_message() -> None:
    """Admissions of long prompts whose blocks are cached need few tokens of the budget, but all their ids."""
    double = WorkerDouble(Capabilities(max_message_bytes=40_000, max_model_len=1000))
    await double.start()
    shared = [index % 256 for index in range(900)]
    async with running_scheduler(double.address, max_num_seqs=16, max_model_len=1000) as scheduler:
        await scheduler.ready()
        async with SessionClient(scheduler.address) as client:
            await right([client.submit(shared, 3)], 3)
            double.answering.clear()
            blocker = client.submit([1, 2, 3], 5)
            await blocker.answered()
            streams = [client.submit([*shared, index], 10) for index in range(15)]
            for stream in streams:
                await stream.answered()
            double.answering.set()
            await right([blocker], 5)
            await right(streams, 10)
            assert client.errors == []
        await scheduler.all_free()
    assert double.breaches == []
    assert [opening.epoch for opening in double.opens] == [1]
    sizes = [len(step.message.SerializeToString()) for step in double.steps]
    assert max(sizes) <= 40_000
    # They would all have been admitted at once otherwise.
    assert 1 < max(len(step.message.new_requests) for step in double.steps) < 15
    assert [step.message.step_seq for step in double.steps] == list(range(1, len(double.steps) + 1))
    assert all(step.message.rows for step in double.steps if step.message.new_requests)
    await double.stop()


# --- draining workers, stop ids
# ------------------------------------------------------------------------------------------


async def test_a_draining_worker_gets_nothing_new_and_its_leaving_blames_nobody(double: WorkerDouble) -> None:
    other = WorkerDouble(incarnation=2001)
    await other.start()
    async with running_scheduler(double.address, other.address) as scheduler:
        await scheduler.rank_is(double.address, "up")
        await scheduler.rank_is(other.address, "up")
        async with SessionClient(scheduler.address) as client:
            streams = [client.submit(prompt(index), 60) for index in range(16)]
            await until(lambda: double.session is not None and len(double.session.rows) > 0)
            double.announce_draining()
            await scheduler.rank_is(double.address, "draining")
            await until(lambda: double.session is not None and not double.session.rows, 30)
            num_steps = sum(bool(step.message.new_requests) for step in double.steps)
            double.end_streams()
            await scheduler.rank_is(double.address, "lost")
            await right(streams, 60)
            late = client.submit(prompt(77), 5)
            await right([late], 5)
            assert client.errors == []
        assert sum(bool(step.message.new_requests) for step in double.steps) == num_steps
        assert (await scheduler.status()).ready
    await other.stop()


# --- which one it was, and how often it happens
# ------------------------------------------------------------------------------------------


async def losses(scheduler: RunningScheduler) -> dict[str, float]:
    """stepfence_worker_losses_total by cause, as scraped."""
    url = f"http://{scheduler.process.metrics_address}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())
    (family,) = [each for each in text_string_to_metric_families(text) if each.name == "stepfence_worker_losses"]
    return {sample.labels["cause"]: sample.value for sample in family.samples}


async def test_who_was_lost_can_be_found_afterwards_by_its_host_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    double = WorkerDouble(Capabilities(host="0123456789ab"))
    await double.start()
    async with running_scheduler(double.address, metrics_listen="127.0.0.1:0") as scheduler:
        await scheduler.ready()
        assert (await scheduler.rank(double.address)).host == "0123456789ab"
        assert await losses(scheduler) == {"lost": 0, "left": 0}
        double.announce_draining()
        await scheduler.rank_is(double.address, "draining")
        await double.stop()
        lost = await scheduler.rank_is(double.address, "lost")
        assert lost.host == "0123456789ab"
        await until(lambda: "rank lost" in caplog.text)
        # Another container, at the same address.
        double.capabilities.host = "ba9876543210"
        await double.restart()
        await scheduler.rank_is(double.address, "up")
        assert (await scheduler.rank(double.address)).host == "ba9876543210"
        assert await losses(scheduler) == {"lost": 0, "left": 1}
        # It fails, and the next one has no host name.
        double.capabilities.host = ""
        await double.restart()
        await until(lambda: [record.message for record in caplog.records].count("rank up") == 3)
        assert (await scheduler.rank(double.address)).host == ""
        assert await losses(scheduler) == {"lost": 1, "left": 1}
    await double.stop()
    told = [(record.message, vars(record)["host"]) for record in caplog.records if hasattr(record, "host")]
    first, second = "0123456789ab", "ba9876543210"
    assert told[:4] == [
        ("rank up", first),
        ("rank draining", first),
        ("stream to rank lost", first),
        ("rank lost", first),
    ]
    assert told[4] == ("rank up", second)
    assert ("rank lost", second) in told and told[-2:] == [("rank up", ""), ("rank lost", "")]


async def test_a_refused_worker_is_told_with_its_host_name(caplog: pytest.LogCaptureFixture) -> None:
    double = WorkerDouble(Capabilities(max_num_rows=100, host="0123456789ab"))
    await double.start()
    async with running_scheduler(double.address):
        await until(lambda: "rank refused" in caplog.text)
    (told,) = [vars(record) for record in caplog.records if record.message == "rank refused"]
    assert told["host"] == "0123456789ab"
    await double.stop()


async def test_stop_ids_end_a_request_and_are_named(double: WorkerDouble) -> None:
    expected = complete(prompt(3), 30)
    stop = expected[7]
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        async with SessionClient(scheduler.address) as client:
            stream = await client.submit(prompt(3), 30, stop_token_ids=[stop]).over()
            assert stream.reason == STOP
            assert stream.tokens == expected[: expected.index(stop) + 1]
            assert stream.end is not None and stream.end.ok.stop_token_id == stop
        await scheduler.all_free()

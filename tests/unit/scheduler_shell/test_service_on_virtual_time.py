"""The scheduler's whole logic on a clock that jumps, with workers on a simulated network (D48): waits of seconds and
minutes are exact here, and one seed is one history."""

from __future__ import annotations

import asyncio
import logging
import random
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from google.protobuf import duration_pb2

from scheduler_svc import codec
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import Event, StepAcked
from scheduler_svc.core.output import SchedulerOutput
from scheduler_svc.rpc.wire import unpack
from scheduler_svc.service import SchedulerService, ServiceOptions
from scheduler_svc.session import FrontEndSession
from scheduler_svc.workers.client import RankClient
from scheduler_svc.workers.session import Timeouts
from stepfence.v1 import sampling_pb2, session_service_pb2, worker_service_pb2
from tests.support.simulated_workers import SimulatedNetwork, SimulatedWorker
from tests.support.virtual_time import run_virtually
from tests.support.worker_double import Capabilities, complete

A, B = "10.0.0.1:50061", "10.0.0.2:50061"


class Names:
    """AddressResolver by hand."""

    def __init__(self) -> None:
        self.addresses: tuple[str, ...] = ()
        self.error: OSError | None = None

    async def resolve(self, host: str, port: int) -> tuple[str, ...]:
        if self.error is not None:
            raise self.error
        return tuple(f"{address}:{port}" for address in self.addresses)


class History:
    """Recorder and memory of readiness."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, str]] = []
        self.readiness: list[tuple[float, bool]] = []

    def event(self, event: Event) -> None:
        self.entries.append((_now(), repr(event)))

    def scheduled(self, rank: str, output: SchedulerOutput | None) -> None:
        self.entries.append((_now(), repr(output)))


def _now() -> float:
    return asyncio.get_running_loop().time()


class World:
    """A scheduler service, its network and one front end."""

    def __init__(self, workers: tuple[str, ...], *, log_requests: bool = False, **config: Any) -> None:
        self.network = SimulatedNetwork()
        self.names = Names()
        self.history = History()
        self.timeouts = Timeouts()
        self.service = SchedulerService(
            SchedulerConfig(**{"block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 64, **config}),
            ServiceOptions(workers=workers, timeouts=self.timeouts, log_requests=log_requests),
            transport=self.network,
            resolver=self.names,
            rng=random.Random(1),
            recorder=self.history,
            on_readiness=lambda is_ready, _: self.history.readiness.append((_now(), is_ready)),
        )
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self.front_end: FrontEndSession | None = None
        self.attached = asyncio.Event()

    def add(self, address: str, incarnation: int = 100, **options: Any) -> SimulatedWorker:
        worker = self.network.workers[address] = SimulatedWorker(incarnation=incarnation, **options)
        return worker

    def client(self, address: str) -> RankClient:
        return next(client for client in self.service.pool.clients if client.rank == address)

    async def up(self, address: str) -> None:
        while all(client.rank != address or not client.is_connected for client in self.service.pool.clients):
            await asyncio.sleep(0.01)

    async def attach(self) -> FrontEndSession:
        """Another front end."""
        session = self.service.hub.attach()
        hello = session_service_pb2.Hello(front_end_id="sim", protocol_revision=2)
        await session.take(codec.decode_session_frame(session_service_pb2.AttachRequest(hello=hello)))
        return session

    async def submit(self, handle: int, prompt: list[int], max_tokens: int, by: FrontEndSession | None = None) -> None:
        if self.front_end is None:
            self.front_end = await self.attach()
            self.attached.set()
        submit = session_service_pb2.Submit(
            handle=handle,
            request_id=f"r{handle}",
            prompt_token_ids=array("i", prompt).tobytes(),
            sampling=sampling_pb2.ResolvedSampling(max_tokens=max_tokens, top_p=1.0),
        )
        frame = codec.decode_session_frame(session_service_pb2.AttachRequest(submits=[submit]))
        await (by or self.front_end).take(frame)

    async def listen(self) -> None:
        """Take every frame down, for ever."""
        await self.attached.wait()
        assert self.front_end is not None
        while (frame := await self.front_end.next_frame()) is not None:
            handles = unpack(frame.tokens.handles)
            assert not frame.tokens.counts
            for handle, token in zip(handles, unpack(frame.tokens.token_ids), strict=True):
                assert handle not in self.ends
                self.tokens.setdefault(handle, []).append(token)
            for refused in frame.refused:
                self.ends[refused.handle] = refused.failure.reason
            for ended in frame.ended:
                assert ended.handle not in self.ends
                self.ends[ended.handle] = "ok" if ended.HasField("ok") else ended.failure.reason

    async def over(self, *handles: int) -> None:
        while any(handle not in self.ends for handle in handles):
            await asyncio.sleep(0.01)


@asynccontextmanager
async def world(*workers: str, log_requests: bool = False, **config: Any) -> AsyncIterator[World]:
    made = World(workers, log_requests=log_requests, **config)
    tasks = [asyncio.create_task(made.service.run()), asyncio.create_task(made.listen())]
    try:
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def virtually(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Run an async test on virtual time, at most a day of it."""

    def run() -> None:
        async def bounded() -> None:
            async with asyncio.timeout(86_400):
                await test()

        run_virtually(bounded())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@virtually
async def test_the_watchdog_waits_ten_seconds_for_the_oldest_step() -> None:
    async with world(A) as sim:
        worker = sim.add(A)
        await sim.up(A)
        await sim.submit(1, [1, 2, 3], 30)
        while len(sim.tokens.get(1, [])) < 10:
            await asyncio.sleep(0.001)
        worker.running.clear()
        before = _now()
        while sim.client(A).epoch == 1:
            await asyncio.sleep(0.01)
        assert 10.0 <= _now() - before <= 10.7
        worker.running.set()
        await sim.over(1)
        assert sim.tokens[1] == complete([1, 2, 3], 30)


@virtually
async def test_the_first_three_steps_may_take_two_minutes() -> None:
    async with world(A) as sim:
        worker = sim.add(A, step_s=100.0)
        await sim.up(A)
        await sim.submit(1, [1, 2, 3], 3)
        while len(sim.tokens.get(1, [])) < 3:
            await asyncio.sleep(1)
        assert sim.client(A).epoch == 1
        # A fourth step has ten seconds.
        worker.step_s = 11.0
        await sim.submit(2, [1, 2, 3, 4], 3)
        while sim.client(A).epoch == 1:
            await asyncio.sleep(0.1)


@virtually
async def test_a_slow_worker_is_not_a_lost_one() -> None:
    """Each of two steps in flight takes 6 s: the second one's 10 s begin when the first is answered."""
    async with world(A) as sim:
        sim.add(A, step_s=6.0)
        await sim.up(A)
        await sim.submit(1, [1, 2, 3], 20)
        await sim.over(1)
        assert sim.tokens[1] == complete([1, 2, 3], 20)
        assert sim.client(A).epoch == 1


@virtually
async def test_an_outage_shorter_than_the_watchdog_keeps_the_epoch_and_a_longer_one_does_not() -> None:
    async with world(A) as sim:
        worker = sim.add(A)
        await sim.up(A)
        await sim.submit(1, [1, 2, 3], 600)
        for outage_s, epoch in ((9.0, 1), (12.0, 2)):
            num_tokens = len(sim.tokens.get(1, []))
            while len(sim.tokens.get(1, [])) < num_tokens + 10:
                await asyncio.sleep(0.01)
            worker.hangs = True
            worker.cut()
            await asyncio.sleep(outage_s)
            worker.hangs = False
            await sim.up(A)
            assert sim.client(A).epoch == epoch
        await sim.over(1)
        assert sim.tokens[1] == complete([1, 2, 3], 600)
        assert worker.double.breaches == []


@virtually
async def test_when_nobody_listens_any_more_the_epoch_ends_after_a_second() -> None:
    async with world(A, B) as sim:
        worker = sim.add(A)
        sim.add(B, 200)
        await sim.up(A)
        await sim.up(B)
        for handle in range(1, 11):
            await sim.submit(handle, [handle], 100)
        while len(sim.tokens) < 10:
            await asyncio.sleep(0.01)
        worker.is_listening = False
        worker.cut()
        before = _now()
        while A in sim.service.core.rank_names:
            await asyncio.sleep(0.01)
        assert 1.0 <= _now() - before <= 2.0
        await sim.over(*range(1, 11))
        assert all(sim.tokens[handle] == complete([handle], 100) for handle in range(1, 11))


@virtually
async def test_reconnects_are_spread_between_a_tenth_and_half_a_second() -> None:
    async with world(A) as sim:
        await asyncio.sleep(1000)
        # Half to all of 0.5 s each, apart from the first few.
        assert 1000 / 0.5 <= sim.network.num_connections <= 1000 / 0.25 + 10


@virtually
async def test_readiness_follows_within_two_seconds() -> None:
    async with world(A) as sim:
        await asyncio.sleep(1)
        assert sim.history.readiness == [(0.0, False)]
        worker = sim.add(A)
        await sim.up(A)
        assert sim.history.readiness[-1][1]
        await asyncio.sleep(10)
        worker.is_listening = False
        worker.cut()
        lost_at = _now()
        await asyncio.sleep(2)
        at, is_ready = sim.history.readiness[-1]
        assert not is_ready and at - lost_at <= 2.0
        assert A in sim.service.not_ready_cause()


@virtually
async def test_a_short_cut_does_not_make_readiness_flicker() -> None:
    async with world(A) as sim:
        worker = sim.add(A)
        await sim.up(A)
        for _ in range(10):
            worker.cut()
            await asyncio.sleep(2)
        assert [is_ready for _, is_ready in sim.history.readiness] == [False, True]


@virtually
async def test_a_process_that_stood_still_itself_does_not_blame_its_workers() -> None:
    async with world(A) as sim:
        sim.add(A, step_s=1.0)
        await sim.up(A)
        await sim.submit(1, [1], 10)
        while len(sim.tokens.get(1, [])) < 5:
            await asyncio.sleep(0.1)
        # As after a suspended laptop: a minute has passed for the clock and nothing has happened.
        loop: Any = asyncio.get_running_loop()
        loop._jumping.now += 60
        await sim.over(1)
        assert sim.client(A).epoch == 1
        assert sim.tokens[1] == complete([1], 10)


@virtually
async def test_every_address_of_a_name_is_a_rank_that_comes_and_goes() -> None:
    async with world("dns:///worker:50061") as sim:
        await asyncio.sleep(60)  # the name does not exist yet
        assert "has no address" in sim.service.not_ready_cause()
        first, second = sim.add(A), sim.add(B, 200)
        sim.names.addresses = ("10.0.0.1",)
        await sim.up(A)
        sim.names.addresses = ("10.0.0.1", "10.0.0.2")
        await sim.up(B)
        # Gone from the name, alive: kept. A name server in trouble changes nothing.
        sim.names.addresses = ("10.0.0.2",)
        await asyncio.sleep(10)
        sim.names.error = OSError("server failure")
        await asyncio.sleep(10)
        assert [client.rank for client in sim.service.pool.clients] == [A, B]
        assert "server failure" in sim.service.pool._unresolved["dns:///worker:50061"]
        sim.names.error = None
        first.is_listening = False
        first.cut()
        await asyncio.sleep(5)
        assert [client.rank for client in sim.service.pool.clients] == [B]
        assert sim.service.core.rank_names == (B,)
        # Back under the same address: epochs go on counting, as the worker may remember the old ones.
        first.is_listening = True
        sim.names.addresses = ("10.0.0.1", "10.0.0.2")
        await sim.up(A)
        assert sim.client(A).epoch == 2
        assert first.double.breaches == second.double.breaches == []


@virtually
async def test_f87_two_addresses_of_one_worker_are_one_rank_and_do_not_throw_each_other_out() -> None:
    async with world(A, B) as sim:
        worker = sim.add(A)
        sim.network.workers[B] = worker
        await asyncio.sleep(60)
        (rank,) = sim.service.core.rank_names
        assert [opening.epoch for opening in worker.double.opens] == [1]
        (refused,) = [client for client in sim.service.pool.clients if client.rank != rank]
        assert refused.cause == f"the same worker process is rank {rank} already"


@virtually
async def test_a_drained_worker_is_not_opened_again() -> None:
    async with world(A) as sim:
        worker = sim.add(A)
        await sim.up(A)
        draining = worker_service_pb2.RunStepsResponse(
            draining=worker_service_pb2.Draining(deadline=duration_pb2.Duration(seconds=5))
        )
        worker.streams[0].say(draining)
        await asyncio.sleep(0.1)
        assert sim.client(A).state.value == "draining"
        assert not sim.service.is_ready
        worker.streams[0].end()
        await asyncio.sleep(30)
        assert sim.service.core.rank_names == ()
        assert len(worker.double.opens) == 1
        worker.restart()
        await sim.up(A)
        assert sim.client(A).epoch == 2


@virtually
async def test_rule_7_a_worker_that_forgot_the_epoch_is_not_sent_the_rest_of_it() -> None:
    """Found by the simulation: while this scheduler was cut off, another one had opened the same worker process."""
    async with world(A) as sim:
        worker = sim.add(A)
        await sim.up(A)
        await sim.submit(1, [1, 2, 3], 60)
        while len(sim.tokens.get(1, [])) < 10:
            await asyncio.sleep(0.001)
        worker.cut()
        worker.double.session = None
        await sim.over(1)
        assert sim.tokens[1] == complete([1, 2, 3], 60)
        assert sim.client(A).epoch == 2
        assert worker.double.breaches == []


@virtually
async def test_rule_10_a_pool_no_worker_can_have_is_refused_before_it_is_counted_here() -> None:
    """Every block takes memory in this process: a number out of thin air must not take all of it."""
    async with world(A) as sim:
        worker = sim.add(A, capabilities=Capabilities(num_blocks=(1 << 24) + 1))
        await asyncio.sleep(1)
        assert sim.service.core.rank_names == ()
        assert "its pool has 16777217 blocks" in sim.client(A).cause
        worker.double.capabilities = Capabilities()
        await sim.up(A)


@virtually
async def test_d44_a_misfit_is_asked_again_every_few_seconds() -> None:
    async with world(A, B) as sim:
        sim.add(A)
        await sim.up(A)
        other = sim.add(B, 200, capabilities=Capabilities(vocab_size=300))
        await asyncio.sleep(20)
        assert "its vocabulary is 300, the other ranks' is 260" in sim.client(B).cause
        assert other.double.opens == []
        other.double.capabilities = Capabilities()
        before = _now()
        await sim.up(B)
        assert _now() - before <= 3.1


@virtually
async def test_d44_a_rank_out_of_reach_still_stands_behind_its_model() -> None:
    async with world(A, B) as sim:
        first = sim.add(A)
        await sim.up(A)
        sim.add(B, 200, capabilities=Capabilities(model="other"))
        first.hangs = True
        first.cut()
        await asyncio.sleep(8)
        assert sim.service.core.rank_names == (A,)
        assert sim.client(A).state.value == "lost"
        assert "its model is" in sim.client(B).cause
        # Its epoch over and nothing live, nothing stands behind the first model any more.
        await asyncio.sleep(8)
        assert sim.service.core.rank_names == (B,)
        assert sim.service.model.facts is not None and sim.service.model.facts.name == "other"


@virtually
async def test_f18_a_lost_front_end_does_not_take_the_successor_of_its_request_along() -> None:
    """Its request ends, another front end takes the same id, and then its stream breaks, all before one turn."""
    async with world(A) as sim:
        worker = sim.add(A)
        await sim.up(A)
        worker.running.clear()
        await sim.submit(1, [1], 1)
        while (view := sim.service.core.rank_view(A)) is None or view.sent_step_seq == 0:
            await asyncio.sleep(0.001)
        other = await sim.attach()
        await asyncio.sleep(1)
        assert sim.front_end is not None
        sim.service.loop.post(StepAcked(A, 1, 1, [65]))
        await sim.submit(1, [1], 50, by=other)
        sim.service.hub.detach(sim.front_end)
        await asyncio.sleep(0.1)
        assert (other.num_live_requests, sim.service.core.num_live_requests) == (1, 1)
        assert sim.service.hub.sessions == (other,)


@virtually
async def test_an_idle_scheduler_without_workers_sleeps() -> None:
    async with world():
        await asyncio.sleep(1)
        loop: Any = asyncio.get_running_loop()
        before = loop._jumping.num_jumps
        await asyncio.sleep(1000)
        assert loop._jumping.num_jumps - before == 1


def _history_of(seed: int) -> list[tuple[float, str]]:
    async def run() -> list[tuple[float, str]]:
        rng = random.Random(seed)
        async with world(A, B) as sim:
            workers = [sim.add(A, step_s=0.01), sim.add(B, 200, step_s=0.013)]
            await sim.up(A)
            for handle in range(1, 41):
                prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 30))]
                await sim.submit(handle, prompt, rng.randrange(1, 60))
                sim.tokens.setdefault(handle, [])
                await asyncio.sleep(rng.uniform(0, 0.05))
                trouble = rng.choice(workers)
                if rng.random() < 0.2:
                    trouble.cut()
                elif rng.random() < 0.1:
                    trouble.restart()
            await sim.over(*range(1, 41))
            assert set(sim.ends.values()) == {"ok"}
            for worker in workers:
                assert worker.double.breaches == []
            return sim.history.entries

    return run_virtually(run())


def test_one_seed_is_one_history() -> None:
    first, again, other = _history_of(3), _history_of(3), _history_of(4)
    assert len(first) > 200
    assert first == again
    assert first != other


@contextmanager
def told_of_requests() -> Iterator[list[dict[str, Any]]]:
    """The lines of the log about ended requests: their messages, levels and fields."""
    lines: list[dict[str, Any]] = []
    standard = {*vars(logging.makeLogRecord({})), "message"}

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() in ("request ended", "request failed"):
                facts = {name: value for name, value in vars(record).items() if name not in standard}
                lines.append({"message": record.getMessage(), "level": record.levelname, **facts})

    logger, listener = logging.getLogger("scheduler_svc.service"), Listener()
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)


@virtually
async def test_every_request_has_one_line_that_says_what_it_cost() -> None:
    """Steps of a second each, one request at a time."""
    with told_of_requests() as lines:
        async with world(A, log_requests=True, max_num_seqs=1, enable_prefix_caching=False) as sim:
            worker = sim.add(A, step_s=1.0)
            await sim.up(A)
            await sim.submit(1, [1, 2, 3], 3)
            await sim.submit(2, [4, 5, 6], 4)
            await sim.submit(3, [7, 8], 4)
            await sim.over(1)
            while len(sim.tokens.get(2, [])) < 2:
                await asyncio.sleep(0.1)
            worker.restart()
            while sim.client(A).epoch == 1:
                await asyncio.sleep(0.01)
            assert sim.front_end is not None
            cancel = session_service_pb2.Cancel(handle=3, reason=session_service_pb2.CANCEL_REASON_CLIENT_GONE)
            await sim.front_end.take(codec.decode_session_frame(session_service_pb2.AttachRequest(cancels=[cancel])))
            await sim.over(2, 3)
    first, gone, second = lines
    assert {line["level"] for line in lines} == {"INFO"}
    assert {line["message"] for line in lines} == {"request ended"}
    assert first == {
        "message": "request ended",
        "level": "INFO",
        "request_id": "r1",
        "reason": "length",
        "num_prompt_tokens": 3,
        "num_completion_tokens": 3,
        "num_cached_tokens": 0,
        "num_preemptions": 0,
        "num_recomputed_tokens": 0,
        "queued_s": 0.0,
        "preempted_s": 0.0,
        "total_s": 3.0,
    }
    assert (gone["request_id"], gone["reason"], gone["cause"]) == ("r3", "aborted", "client_gone")
    assert gone["queued_s"] == gone["total_s"] > 5.0
    assert (second["request_id"], second["num_preemptions"], second["queued_s"]) == ("r2", 1, 3.0)
    assert second["num_recomputed_tokens"] > 0 and second["preempted_s"] > 0
    assert second["total_s"] > second["queued_s"] + second["preempted_s"]
    assert all(line[name] == round(line[name], 3) for line in lines for name in line if name.endswith("_s"))


@virtually
async def test_without_the_setting_requests_that_end_well_leave_no_line() -> None:
    with told_of_requests() as lines:
        async with world(A) as sim:
            sim.add(A)
            await sim.up(A)
            await sim.submit(1, [1, 2, 3], 3)
            await sim.over(1)
    assert lines == []


@virtually
async def test_a_failed_request_has_its_warning_and_no_second_line() -> None:
    for log_requests in (False, True):
        with told_of_requests() as lines:
            async with world(A, log_requests=log_requests, max_fruitless_epochs=1) as sim:
                worker = sim.add(A, step_s=1.0)
                await sim.up(A)
                await sim.submit(1, [1, 2, 3], 3)
                await asyncio.sleep(0.5)
                worker.restart()
                await sim.over(1)
        (line,) = lines
        assert (line["message"], line["level"], line["request_id"]) == ("request failed", "WARNING", "r1")
        assert (line["reason"], line["num_prompt_tokens"], line["num_completion_tokens"]) == ("worker_fault", 3, 0)
        assert "workers in a row failed" in line["cause"] and line["total_s"] >= 0.5

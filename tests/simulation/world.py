"""A whole deployment in one seed: scheduler, workers, front ends and clients, and everything that goes wrong.

    failure-free construction ──► trouble while clients come and go ──► everything healed ──► all must end, all be free

The seed decides the configuration, the load, which kinds of trouble there are, when each strikes and how every message
is delayed. So a failure is a number, and the number is the failure again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from scheduler_svc.core.config import Policy, SchedulerConfig
from scheduler_svc.frontend.errors import Code, RequestError
from scheduler_svc.service import SchedulerService, ServiceOptions
from scheduler_svc.workers.session import Timeouts
from tests.simulation.clients import Client, Wish, make_wishes
from tests.simulation.frontend import FrontEndProcess
from tests.simulation.hosts import Process, SimulationLoop, current_process
from tests.simulation.network import Network
from tests.simulation.scheduler import Names, SchedulerProcess
from tests.simulation.worker import ON_PURPOSE, Temper, WorkerProcess, WorkerSetting

_SCHEDULER: Final = "scheduler:50052"
# Virtual seconds within which everything must have ended once nothing goes wrong any more.
_PATIENCE_S: Final = 300.0
_MAX_ATTEMPTS: Final = 5
_WORTH_ANOTHER_TRY: Final = (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)


class SimulationFailure(AssertionError):
    """Something happened that must not. The text begins with the seed."""


@dataclass
class Report:
    """What a world went through."""

    num_steps: int = 0
    digest: str = ""
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Setting:
    """What the seed decided before anything happened."""

    config: SchedulerConfig
    options: ServiceOptions
    workers: tuple[WorkerSetting, ...]
    front_ends: tuple[str, ...]
    names: bool
    trouble_s: float
    mean_pause_s: float
    troubles: tuple[str, ...]
    temper: Temper
    wishes: tuple[Wish, ...]


@dataclass(frozen=True, slots=True)
class _Frame:
    """What several parts of a setting depend on. Tokens and blocks."""

    max_len: int
    block_size: int
    max_num_seqs: int
    is_priority: bool
    num_workers: int
    num_blocks: int


def _draw_frame(rng: random.Random) -> _Frame:
    max_len = rng.choice((48, 64, 96))
    block_size = rng.choice((2, 4, 8))
    max_num_seqs = rng.choice((2, 4, 8, 16))
    is_priority = rng.random() < 0.3
    num_workers = rng.choice((1, 2, 2, 3))
    # From barely one longest sequence to plenty.
    num_blocks = 1 + -(-max_len // block_size) * rng.choice((1, 2, 3, 6))
    return _Frame(max_len, block_size, max_num_seqs, is_priority, num_workers, num_blocks)


def _draw_config(rng: random.Random, frame: _Frame) -> SchedulerConfig:
    proposes = rng.random() < 0.15
    return SchedulerConfig(
        block_size=frame.block_size,
        max_num_seqs=frame.max_num_seqs,
        max_num_batched_tokens=rng.choice((frame.max_num_seqs, 2 * frame.max_num_seqs, 64)),
        max_model_len=frame.max_len,
        policy=Policy.PRIORITY if frame.is_priority else Policy.FCFS,
        enable_prefix_caching=rng.random() < 0.8,
        watermark=rng.choice((0.0, 0.0, 0.05)),
        long_prefill_token_threshold=rng.choice((0, 0, 8)),
        prefill_schedule_interval=rng.choice((1, 1, 1, 3)),
        max_inflight_steps=rng.choice((1, 2, 2, 3)),
        num_speculative_tokens=3 if proposes else 0,
        max_preemptions=rng.choice((3, 3, 0, None)),
        # Blows at random are no request's fault.
        max_fruitless_epochs=0,
        max_queued_requests=rng.choice((1024, 1024, 8)),
        no_worker_grace_s=rng.choice((30.0, 5.0)),
    )


def _draw_options(rng: random.Random, names: list[str]) -> tuple[ServiceOptions, bool]:
    """And whether workers are found by name."""
    watchdog_s = rng.choice((0.5, 2.0, 10.0))
    is_named = rng.random() < 0.2
    options = ServiceOptions(
        workers=("dns:///worker:50061",) if is_named else tuple(names),
        timeouts=Timeouts(
            step_watchdog_s=watchdog_s, first_steps_watchdog_s=rng.choice((watchdog_s, 3.0 * watchdog_s))
        ),
        drain_deadline_s=rng.choice((1.0, 30.0)),
    )
    return options, is_named


def _draw_workers(rng: random.Random, frame: _Frame, names: list[str]) -> tuple[WorkerSetting, ...]:
    max_model_len = rng.choice((frame.max_len, frame.max_len, 128))
    return tuple(
        WorkerSetting(
            name,
            frame.num_blocks,
            max_model_len,
            load_s=rng.choice((0.05, 1.0)),
            keep_state_s=rng.choice((10.0, 1.0)),
        )
        for name in names
    )


def draw_setting(rng: random.Random, troubles: tuple[str, ...] | None = None) -> Setting:
    """Everything that stays the same in a world. troubles: the kinds of trouble, instead of drawn ones."""
    frame = _draw_frame(rng)
    config = _draw_config(rng, frame)
    names = [f"worker-{index}:50061" for index in range(frame.num_workers)]
    options, is_named = _draw_options(rng, names)
    workers = _draw_workers(rng, frame, names)
    trouble_s = rng.uniform(4.0, 14.0)
    is_misbehaving = rng.random() < 0.25
    kinds = tuple(kind for kind in TROUBLES if rng.random() < 0.5) if troubles is None else troubles
    temper = Temper(
        step_s=rng.choice((0.005, 0.01, 0.02, 0.05)),
        fail_share=rng.choice((0.0, 0.005)) if is_misbehaving else 0.0,
        wrong_share=rng.choice((0.0, 0.005)) if is_misbehaving else 0.0,
    )
    wishes = make_wishes(
        rng,
        rng.randrange(20, 160),
        trouble_s,
        max_len=frame.max_len,
        is_priority=frame.is_priority,
        num_ids=rng.choice((3, 30)),
    )
    front_ends = tuple(f"frontend-{index}:50051" for index in range(rng.choice((1, 2))))
    mean_pause_s = rng.choice((0.15, 0.4, 1.0))
    return Setting(
        config, options, workers, front_ends, is_named, trouble_s, mean_pause_s, kinds, temper, tuple(wishes)
    )


class World:
    """One run of one seed. `run` returns what happened, or raises SimulationFailure."""

    def __init__(self, seed: int, loop: SimulationLoop, *, check_every: int, troubles: tuple[str, ...] | None) -> None:
        self.seed = seed
        self.loop = loop
        self.report = Report()
        self._rng = random.Random(seed)
        self.setting = draw_setting(self._rng, troubles)
        self.network = Network(loop, random.Random(self._rng.getrandbits(64)))
        self._check_every = check_every
        self._names = Names()
        self._violations: list[str] = []
        self._history: deque[str] = deque(maxlen=60)
        self.workers: dict[str, WorkerProcess | None] = {}
        self._settings = {worker.address: worker for worker in self.setting.workers}
        self._tempers: dict[str, Temper] = {}
        self.scheduler: SchedulerProcess | None = None
        # Those that went on after they had been replaced.
        self._zombies: list[SchedulerProcess] = []
        self._lives: list[SchedulerProcess] = []
        self.front_ends: dict[str, FrontEndProcess | None] = {}
        self.clients: list[Client] = []
        self._helpers: list[asyncio.Task[None]] = []
        # Steps that a worker was sent once more.
        self.num_repeated = 0
        # When a scheduler was told to drain.
        self._drained_at: list[float] = []
        self._is_healing = False

    # --- talk ---

    def now(self) -> float:
        return self.loop.time()

    def accuse(self, what: str) -> None:
        self._violations.append(f"{self.now():.4f} {what}")

    def note(self, what: str) -> None:
        self._history.append(f"{self.now():.4f} {what}")

    def rank_lost(self, address: str, cause: str, by: Process | None) -> None:
        """A watchdog may not fire while nothing is on its way and the worker has nothing to do: then somebody owes an
        answer and will never give it."""
        worker = self.workers[address]
        if not cause.startswith("watchdog: no result") or worker is None or by is None or not worker.is_idle:
            return
        calls = [
            c for c in self.network.calls_between(_SCHEDULER, address) if c.client is by and c.method == "RunSteps"
        ]
        if calls and all(call.is_quiet and call.server is worker.process for call in calls):
            self.accuse(f"{address} was idle, and nothing was on its way, but: {cause}")

    def _judge(self) -> None:
        problems = self._violations + self.loop.failures
        if problems:
            history = "\n  ".join(self._history)
            raise SimulationFailure(
                f"seed {self.seed}: {problems[0]}" + f" (and {len(problems) - 1} more)" * (len(problems) > 1) + f"\n"
                f"setting: {self.setting.config} {self.setting.options.timeouts}\nhistory:\n  {history}"
            )

    # --- lives ---

    def start_worker(self, address: str) -> None:
        self.note(f"{address} starts")
        temper = self._tempers[address] = Temper(
            self.setting.temper.step_s, self.setting.temper.fail_share, self.setting.temper.wrong_share
        )
        if self._is_healing:
            temper.fail_share = temper.wrong_share = 0.0
        rng = random.Random(self._rng.getrandbits(64))
        self.workers[address] = WorkerProcess(
            self.network, self._settings[address], temper, rng, self.accuse, self._note_repetition
        )
        self._name_workers()

    def _note_repetition(self) -> None:
        self.num_repeated += 1

    def start_scheduler(self) -> None:
        self.note("the scheduler starts")
        self.scheduler = SchedulerProcess(
            self.network,
            _SCHEDULER,
            self.setting.config,
            self.setting.options,
            names=self._names,
            rng=random.Random(self._rng.getrandbits(64)),
            accuse=self.accuse,
            check_every=self._check_every,
            trusts_workers=not (self.setting.temper.fail_share or self.setting.temper.wrong_share),
        )
        self._lives.append(self.scheduler)

    def start_front_end(self, address: str) -> None:
        self.note(f"{address} starts")
        rng = random.Random(self._rng.getrandbits(64))
        self.front_ends[address] = FrontEndProcess(self.network, address, _SCHEDULER, rng=rng, now=self.now)

    def _name_workers(self) -> None:
        alive = [address for address, worker in self.workers.items() if worker is not None]
        self._names.addresses = tuple(alive)

    def kill_worker(self, address: str, *, is_told: bool) -> None:
        worker = self.workers[address]
        if worker is None:
            return
        self.note(f"{address} dies" + "" * is_told + " without a word" * (not is_told))
        self.network.sever(worker.process, is_told=is_told)
        worker.process.kill()
        self.workers[address] = None
        self._name_workers()

    def kill_scheduler(self, life: SchedulerProcess) -> None:
        self.note("the scheduler dies")
        self.network.sever(life.process, is_told=True)
        life.process.kill()
        if self.scheduler is life:
            self.scheduler = None

    def kill_front_end(self, address: str) -> None:
        front_end = self.front_ends[address]
        if front_end is None:
            return
        self.note(f"{address} dies")
        self.network.sever(front_end.process, is_told=self._rng.random() < 0.7)
        front_end.process.kill()
        self.front_ends[address] = None

    # --- a run ---

    async def run(self) -> Report:
        self._start_all()
        coming = [asyncio.create_task(self._bring(wish)) for wish in self.setting.wishes]
        ends_at = self.now() + self.setting.trouble_s
        while self.now() < ends_at:
            await asyncio.sleep(self._rng.expovariate(1 / self.setting.mean_pause_s))
            self._judge()
            if self.setting.troubles:
                weights = [TROUBLES[kind][0] for kind in self.setting.troubles]
                (kind,) = self._rng.choices(self.setting.troubles, weights)
                self.report.counts[kind] += 1
                self._help(TROUBLES[kind][1](self))
        await self._heal()
        await self._until(lambda: all(task.done() for task in coming), "every client came to an end")
        for client in self.clients:
            self._judge_client(client)
        await self._until(lambda: not self._leftovers(), "nothing is left")
        self._finish()
        self._judge()
        return self.report

    async def tear_down(self) -> None:
        """Let everything unwind; what happens from here on is of no interest."""
        for task in self._helpers:
            task.cancel()
        for life in (*self._zombies, *([self.scheduler] if self.scheduler is not None else ())):
            self.kill_scheduler(life)
        for address in self.workers:
            self.kill_worker(address, is_told=True)
        for address in self.front_ends:
            self.kill_front_end(address)
        await asyncio.sleep(60.0)

    def _start_all(self) -> None:
        starts: list[Callable[[], None]] = [self.start_scheduler]
        starts += [lambda a=w.address: self.start_worker(a) for w in self.setting.workers]  # type: ignore[misc]
        starts += [lambda a=a: self.start_front_end(a) for a in self.setting.front_ends]  # type: ignore[misc]
        self._rng.shuffle(starts)
        for start in starts:
            start()

    def _help(self, work: Coroutine[Any, Any, None]) -> None:
        self._helpers.append(asyncio.create_task(work))

    async def _until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = self.now() + _PATIENCE_S
        while not holds():
            self._judge()
            if self.now() > deadline:
                self.accuse(f"not within {_PATIENCE_S:g} s: {what}; left: {self._leftovers()}")
                self._judge()
            await asyncio.sleep(0.25)

    async def _heal(self) -> None:
        """Let every trouble run to its end, then bring everybody back."""
        self._is_healing = True
        for temper in self._tempers.values():
            temper.fail_share = temper.wrong_share = 0.0
        await asyncio.gather(*self._helpers)
        for zombie in self._zombies:
            self.kill_scheduler(zombie)
        self._zombies.clear()
        if self.scheduler is None:
            self.start_scheduler()
        for address, worker in self.workers.items():
            if worker is None:
                self.start_worker(address)
        for address, front_end in self.front_ends.items():
            if front_end is None:
                self.start_front_end(address)
        self.note("healed")

    def _finish(self) -> None:
        assert self.scheduler is not None
        self.scheduler.observer.check()
        report = self.report
        report.num_steps = sum(life.observer.num_steps for life in self._lives)
        report.digest = "".join(life.observer.digest.hexdigest() for life in self._lives)
        report.counts["steps sent again"] += self.num_repeated
        report.counts["messages"] += self.network.num_messages
        report.counts["epochs"] += sum(joined for life in self._lives for _, joined, _, _ in life.observer.changes)
        for client in self.clients:
            report.counts[_outcome(client)] += 1

    # --- clients ---

    async def _bring(self, wish: Wish) -> None:
        """A client comes, and comes again when it was turned away or cut off."""
        await asyncio.sleep(wish.at_s)
        for _ in range(_MAX_ATTEMPTS):
            alive = [front_end for front_end in self.front_ends.values() if front_end is not None]
            if alive:
                client = self._start_client(wish, self._rng.choice(alive))
                assert client.task is not None
                await asyncio.wait({client.task})
                if client.failure is None or client.failure.code not in _WORTH_ANOTHER_TRY:
                    return
            await asyncio.sleep(self._rng.uniform(0.1, 1.0))

    def _start_client(self, wish: Wish, front_end: FrontEndProcess) -> Client:
        client = Client(wish, front_end, self.now, self.accuse)
        self.clients.append(client)
        client.task = front_end.process.spawn(client.run(), f"client {wish.index}")
        # The deadline of a call is gRPC's: at that moment the call is over, whatever the server says.
        for seconds in (wish.leaves_s, wish.deadline_s):
            if seconds is not None:
                self.network.after(seconds, lambda: self._leave(client))
        if wish.aborts_s is not None:
            self.network.after(wish.aborts_s, lambda: self._abort(client))
        return client

    def _leave(self, client: Client) -> None:
        if client.task is not None and not client.is_over:
            client.is_gone = True
            client.task.cancel()

    def _abort(self, client: Client) -> None:
        if client.request_id and not client.is_over and not client.is_gone:
            try:
                client.front_end.front_end.abort(client.request_id)
            except RequestError:
                return
            client.was_aborted = True

    def _judge_client(self, client: Client) -> None:
        """An end other than success must have its reason in what went wrong."""
        assert client.task is not None
        if client.is_gone or client.finished is not None or client.task.cancelled():
            return
        failure = client.failure
        if failure is None:
            self.accuse(f"client {client.wish.index} just ended: {client.task.exception()!r}")
            return
        excuse = _EXCUSES.get(failure.reason)
        if excuse is None or not excuse(self, client):
            self.accuse(f"client {client.wish.index} ({client.started_at:.3f} to {client.ended_at}) failed: {failure}")

    def had_no_rank_since(self, moment: float) -> bool:
        """Whether, in some scheduler's life since then, there was a time without any rank."""
        for life in self._lives:
            ranks: set[str] = set()
            since = -1.0
            for when, joined, rank, _ in life.observer.changes:
                if not ranks and when >= moment:
                    return True
                (ranks.add if joined else ranks.discard)(rank)
                since = when
            if not ranks and (life is self.scheduler or since >= moment or not life.observer.changes):
                return True
        return False

    def was_drained_before(self, moment: float) -> bool:
        return any(at <= moment for at in self._drained_at)

    def has_twin(self, client: Client) -> bool:
        """Whether another request with the same id was live at the time."""
        return any(other is not client and other.wish.request_id == client.wish.request_id for other in self.clients)

    # --- rest ---

    def _leftovers(self) -> list[str]:
        scheduler = self.scheduler
        if scheduler is None or scheduler.service is None or scheduler.has_ended:
            return ["no scheduler"]
        core = scheduler.service.core
        left = [] if not core.num_live_requests else [f"{core.num_live_requests} live requests"]
        if len(core.state.ranks) != len(self.workers):
            left.append(f"{len(core.state.ranks)} of {len(self.workers)} ranks: {scheduler.service.not_ready_cause()}")
        for facts in core.audit():
            if facts.free != facts.usable or facts.violations:
                left.append(f"{facts}")
        left += [
            f"{address} holds rows or is dead"
            for address, worker in self.workers.items()
            if worker is None or worker.num_rows_held
        ]
        return left + self._leftovers_of_front_ends(scheduler.service)

    def _leftovers_of_front_ends(self, service: SchedulerService) -> list[str]:
        left = []
        for address, front_end in self.front_ends.items():
            if front_end is None or front_end.session.not_ready_cause or front_end.session.num_handles:
                left.append(f"{address}: {None if front_end is None else front_end.session.not_ready_cause}")
            elif front_end.front_end.num_live or front_end.front_end.num_streams:
                left.append(f"{address}: {front_end.front_end.num_live} live")
        if len(service.hub.sessions) != len(self.front_ends):
            left.append(f"{len(service.hub.sessions)} sessions")
        return left

    # --- troubles: each returns when it is over ---

    def _some_worker(self) -> str:
        return self._rng.choice(list(self.workers))

    def _some_path(self) -> tuple[str, str]:
        """Between the scheduler and somebody."""
        # A front end's stream takes all its requests with it: more often, and nothing else would ever happen.
        other = self._some_worker() if self._rng.random() < 0.9 else self._rng.choice(list(self.front_ends))
        return (_SCHEDULER, other) if self._rng.random() < 0.5 else (other, _SCHEDULER)

    async def kill_a_worker(self) -> None:
        address = self._some_worker()
        self.kill_worker(address, is_told=True)
        await self._back_after(address, self._rng.choice((0.02, 0.3, 3.0)))

    async def lose_a_worker(self) -> None:
        address = self._some_worker()
        self.kill_worker(address, is_told=False)
        await self._back_after(address, self._rng.choice((0.3, 3.0, 12.0)))

    async def _back_after(self, address: str, mean_s: float) -> None:
        await asyncio.sleep(self._rng.uniform(0.2, 1.0) * mean_s)
        if self.workers[address] is None:
            self.start_worker(address)

    async def freeze_a_worker(self) -> None:
        worker = self.workers[self._some_worker()]
        if worker is not None:
            await self._freeze(worker.process)

    async def _freeze(self, process: Any) -> None:
        if process.is_frozen:
            return
        seconds = self._rng.choice((0.05, 0.5, 3.0, 14.0)) * self._rng.uniform(0.5, 1.0)
        self.note(f"{process.name} freezes for {seconds:.3f} s")
        self.network.freeze(process)
        await asyncio.sleep(seconds)
        process.thaw()

    async def slow_a_worker(self) -> None:
        address = self._some_worker()
        self.note(f"{address} is slow")
        temper = self._tempers[address]
        temper.step_s = self.setting.temper.step_s * self._rng.choice((5, 40))
        await asyncio.sleep(self._rng.uniform(0.1, 2.0))
        temper.step_s = self.setting.temper.step_s

    async def drain_a_worker(self) -> None:
        address = self._some_worker()
        worker = self.workers[address]
        if worker is None or worker.service is None or worker.service.is_draining or worker.process.is_frozen:
            return
        self.note(f"{address} drains")
        draining = worker.process.spawn(worker.service.drain(self._rng.choice((0.1, 5.0))), "drain")
        while not draining.done() and worker.process.is_alive:
            await asyncio.sleep(0.05)
        await asyncio.sleep(self._rng.uniform(0.0, 0.5))
        if self.workers[address] is worker:
            self.kill_worker(address, is_told=True)
            await self._back_after(address, 1.0)

    async def cut(self) -> None:
        for _ in range(self._rng.choice((1, 1, 4))):
            one, other = self._some_path()
            self.note(f"cut {one} {other}")
            self.network.cut(one, other)
            await asyncio.sleep(self._rng.uniform(0.0, 0.2))

    async def hold_up_and_cut(self) -> None:
        """What was on its way for a while is lost: steps, or results, that the other side has to do without."""
        paths = [self._some_path()]
        if self._rng.random() < 0.3:
            paths.append(paths[0][::-1])
        seconds = self._rng.uniform(0.01, 0.4)
        self.note(f"held up for {seconds:.3f} s and cut: {paths}")
        for path in paths:
            self.network.block(*path)
        await asyncio.sleep(seconds)
        self.network.cut(*paths[0])
        for path in paths:
            self.network.unblock(*path)

    async def block_one_way(self) -> None:
        await self._block([self._some_path()])

    async def partition(self) -> None:
        one, other = self._some_path()
        await self._block([(one, other), (other, one)])

    async def _block(self, paths: list[tuple[str, str]]) -> None:
        seconds = self._rng.choice((0.05, 0.5, 3.0, 14.0)) * self._rng.uniform(0.5, 1.0)
        self.note(f"blocked for {seconds:.3f} s: {paths}")
        for path in paths:
            self.network.block(*path)
        await asyncio.sleep(seconds)
        for path in paths:
            self.network.unblock(*path)

    async def slow_path(self) -> None:
        one, other = self._some_path()
        self.note(f"slow {one} {other}")
        self.network.slow_down(one, other, self._rng.choice((0.02, 0.2, 1.0)))
        await asyncio.sleep(self._rng.uniform(0.1, 2.0))
        self.network.slow_down(one, other, 0.0)

    async def kill_the_scheduler(self) -> None:
        if self.scheduler is None:
            return
        self.kill_scheduler(self.scheduler)
        await self._next_scheduler()

    async def _next_scheduler(self) -> None:
        await asyncio.sleep(self._rng.choice((0.02, 0.3, 2.0)) * self._rng.uniform(0.5, 1.0))
        if self.scheduler is None:
            self.start_scheduler()

    async def freeze_the_scheduler(self) -> None:
        if self.scheduler is not None:
            await self._freeze(self.scheduler.process)

    async def replace_a_frozen_scheduler(self) -> None:
        """It is taken for dead, another one starts at its address, and then it goes on for a while."""
        old = self.scheduler
        if old is None or old.process.is_frozen:
            return
        self.note("the scheduler freezes and is replaced")
        self.network.freeze(old.process)
        self.scheduler = None
        self._zombies.append(old)
        await asyncio.sleep(self._rng.uniform(0.1, 4.0))
        if self.scheduler is None:
            self.start_scheduler()
        await asyncio.sleep(self._rng.uniform(0.1, 4.0))
        self.note("the replaced scheduler goes on")
        old.process.thaw()
        await asyncio.sleep(self._rng.uniform(0.0, 4.0))
        if old in self._zombies:
            self._zombies.remove(old)
            self.kill_scheduler(old)

    async def drain_the_scheduler(self) -> None:
        life = self.scheduler
        if life is None or life.service is None or life.process.is_frozen or life.service.is_draining:
            return
        self.note("the scheduler drains")
        self._drained_at.append(self.now())
        service = life.service

        async def ask() -> None:
            service.drain()

        life.process.spawn(ask(), "drain")
        while not life.has_ended and life.process.is_alive:
            await asyncio.sleep(0.05)
        if self.scheduler is life:
            self.kill_scheduler(life)
            await self._next_scheduler()

    async def reset_the_prefix_cache(self) -> None:
        life = self.scheduler
        if life is None or life.service is None:
            return
        self.note("prefix cache reset")
        life.process.spawn(life.service.reset_prefix_cache(preempt_running=self._rng.random() < 0.5), "reset")

    async def kill_a_front_end(self) -> None:
        address = self._rng.choice(list(self.front_ends))
        self.kill_front_end(address)
        await asyncio.sleep(self._rng.uniform(0.0, 1.0))
        if self.front_ends[address] is None:
            self.start_front_end(address)

    async def freeze_a_front_end(self) -> None:
        front_end = self.front_ends[self._rng.choice(list(self.front_ends))]
        if front_end is not None:
            await self._freeze(front_end.process)


def _outcome(client: Client) -> str:
    if client.finished is not None:
        return "completed"
    return "left" if client.is_gone or client.failure is None else f"failed {client.failure.reason}"


_EXCUSES: Final[dict[str, Callable[[World, Client], bool]]] = {
    "SCHEDULER_UNAVAILABLE": lambda world, c: c.was_without_scheduler,
    "NO_WORKER": lambda world, c: (
        c.came_too_early or world.had_no_rank_since(c.started_at - world.setting.config.no_worker_grace_s - 5.0)
    ),
    "QUEUE_FULL": lambda world, c: world.setting.config.max_queued_requests < 100,
    "DEADLINE_EXCEEDED": lambda world, c: (
        c.wish.deadline_s is not None
        and c.ended_at is not None
        and c.ended_at - c.started_at >= 0.9 * c.wish.deadline_s - 0.001
    ),
    "DUPLICATE_REQUEST_ID": lambda world, c: world.has_twin(c),
    "ABORTED": lambda world, c: c.was_aborted,
    # Who was accepted goes on with the next scheduler.
    "DRAINING": lambda world, c: not c.was_accepted and c.ended_at is not None and world.was_drained_before(c.ended_at),
}

Trouble = Callable[[World], Coroutine[Any, Any, None]]
# With how often each strikes, where it may: what takes everybody's work away leaves less to be wronged.
TROUBLES: Final[dict[str, tuple[float, Trouble]]] = {
    "worker killed": (4.0, World.kill_a_worker),
    "worker gone without a word": (2.0, World.lose_a_worker),
    "worker frozen": (3.0, World.freeze_a_worker),
    "worker slow": (2.0, World.slow_a_worker),
    "worker drained": (2.0, World.drain_a_worker),
    "streams cut": (6.0, World.cut),
    "held up and cut": (6.0, World.hold_up_and_cut),
    "blocked one way": (3.0, World.block_one_way),
    "partitioned": (3.0, World.partition),
    "path slow": (2.0, World.slow_path),
    "scheduler killed": (0.3, World.kill_the_scheduler),
    "scheduler frozen": (1.0, World.freeze_the_scheduler),
    "scheduler replaced while frozen": (0.3, World.replace_a_frozen_scheduler),
    "scheduler drained": (0.3, World.drain_the_scheduler),
    "prefix cache reset": (1.0, World.reset_the_prefix_cache),
    "front end killed": (0.5, World.kill_a_front_end),
    "front end frozen": (0.5, World.freeze_a_front_end),
}


class _Log(logging.Handler):
    """Errors in the log are failures, unless a worker fails on purpose; lost ranks are looked at."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            error = None if record.exc_info is None else record.exc_info[1]
            if error is None or ON_PURPOSE not in str(error):
                self._world.accuse(f"logged: {record.getMessage()}: {error!r}")
        elif record.msg == "rank lost":
            facts: Any = record
            self._world.rank_lost(facts.rank, facts.cause, current_process())


def run_world(seed: int, *, check_every: int = 1, troubles: tuple[str, ...] | None = None) -> Report:
    """Run one seed to its end. check_every: invariants are checked after every so many plans. Raises
    SimulationFailure."""

    async def run() -> Report:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulationLoop)
        world = World(seed, loop, check_every=check_every, troubles=troubles)
        handler = _Log(world)
        root = logging.getLogger()
        handlers, root.handlers = root.handlers, [handler]
        level = root.level
        root.setLevel(logging.WARNING)
        try:
            return await world.run()
        finally:
            await world.tear_down()
            root.handlers = handlers
            root.setLevel(level)

    with asyncio.Runner(loop_factory=SimulationLoop) as runner:
        return runner.run(run())

"""Workers for tests: scripted ones in this process, and what a test of any worker needs to know about it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from stepfence.v1 import sampling_pb2, worker_service_pb2
from tests.support.scheduler_double import GREEDY, Book, SchedulerDouble, StepSession, ids_of, new_request
from worker_svc.faulty_service import FaultyWorkerService
from worker_svc.runner.base import Runner
from worker_svc.runner.script import Fault, FaultKind, Script
from worker_svc.runner.scripted import ScriptedRunner
from worker_svc.server import WorkerServer
from worker_svc.service import WorkerService

NUM_ROWS = 12
MAX_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Target:
    """A worker under test, seen from outside."""

    address: str
    capabilities: worker_service_pb2.GetCapabilitiesResponse

    @property
    def block_size(self) -> int:
        unit: int = self.capabilities.block_size_multiple
        return unit * -(-4 // unit)

    def open_message(self, scheduler: SchedulerDouble, epoch: int = 1, **changes: int) -> worker_service_pb2.Open:
        message = worker_service_pb2.Open(
            scheduler_incarnation=scheduler.incarnation,
            epoch=epoch,
            protocol_revision=2,
            block_size=self.block_size,
            num_rows=NUM_ROWS,
            max_num_batched_tokens=max(MAX_TOKENS, 3 * self.block_size),
            max_model_len=self.capabilities.model.max_model_len,
            max_inflight_steps=3,
        )
        for name, value in changes.items():
            setattr(message, name, value)
        return message

    async def open(self, scheduler: SchedulerDouble, epoch: int = 1, **changes: int) -> StepSession:
        return await scheduler.open(self.open_message(scheduler, epoch, **changes))

    def prompt(self, length: int, salt: int = 0) -> list[int]:
        """Token ids that are ordinary in any vocabulary, different for each salt."""
        return [40 + (7 * position * position + 13 * position + 29 * salt) % 80 for position in range(length)]

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table(self, num_tokens: int, first_block: int = 1) -> list[int]:
        """Blocks in a row for so many tokens."""
        return list(range(first_block, first_block + self.num_blocks(num_tokens)))


@dataclass(slots=True)
class OwnWorker:
    """A scripted worker in this process."""

    target: Target
    server: WorkerServer
    service: WorkerService
    runner: ScriptedRunner
    exit_codes: list[int]


@asynccontextmanager
async def own_worker(
    script: Script | None = None,
    *,
    num_blocks: int = 256,
    max_model_len: int = 1024,
    keep_state_s: float = 10.0,
    open_timeout_s: float = 10.0,
    wrap: Callable[[ScriptedRunner], Runner] = lambda runner: runner,
    secret: str | None = None,
) -> AsyncIterator[OwnWorker]:
    """Start one, loaded and ready, and stop it afterwards. `wrap` may put something around the runner."""
    exit_codes: list[int] = []
    runner = ScriptedRunner(script, num_blocks=num_blocks, max_model_len=max_model_len, leave=exit_codes.append)
    options: dict[str, Any] = {"keep_state_s": keep_state_s, "open_timeout_s": open_timeout_s}
    service: WorkerService
    if script is not None and script.faults:
        service = FaultyWorkerService(lambda: wrap(runner.load()), distort=runner.distort, **options)
    else:
        service = WorkerService(lambda: wrap(runner.load()), **options)
    server = WorkerServer(service, secret)
    address = await server.listen("127.0.0.1:0")
    try:
        await server.load()
        yield OwnWorker(await target_at(address, secret), server, service, runner, exit_codes)
    finally:
        runner.release()
        await server.stop()


async def target_at(address: str, secret: str | None = None) -> Target:
    metadata = () if secret is None else (("authorization", f"Bearer {secret}"),)
    async with SchedulerDouble(address) as scheduler:
        return Target(address, await scheduler.capabilities(metadata))


def script(*faults: dict[str, Any], **fields: Any) -> Script:
    """A script with faults; each is given as the fields of Fault, the kind by its name."""
    made = tuple(Fault(**{**fault, "kind": FaultKind(fault["kind"])}) for fault in faults)
    return Script(faults=made, **fields)


async def generate(
    target: Target,
    session: StepSession,
    book: Book,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    request_id: str = "cold",
    row: int = 0,
    first_block: int = 1,
    sampling: sampling_pb2.ResolvedSampling = GREEDY,
    chunk: int | None = None,
) -> list[int]:
    """Run one request by itself to the end, one step at a time, and drop it; its output tokens."""
    table = target.table(len(prompt) + num_tokens, first_block)
    added = [new_request(request_id, row, prompt, table, sampling=sampling)]
    outputs: list[int] = []
    remaining = len(prompt)
    while len(outputs) < num_tokens:
        count = min(remaining, chunk or remaining) if remaining else 1
        result = await session.run(book.step({row: count}, new=added))
        book.handled(result)
        added = []
        remaining = max(0, remaining - count)
        sampled = ids_of(result.sampled_token_ids)
        assert len(sampled) == (0 if remaining else 1), result
        outputs += sampled
    book.handled(await session.run(book.step(finished=[request_id])))
    return outputs

"""Field cases that need the whole split as processes, by their number."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from scheduler_svc.cli.health import check
from scheduler_svc.cli.ports import free_address
from stepfence.v1 import generation_service_pb2 as pb
from stepfence.v1 import usage_pb2
from tests.chaos.load import Order, Outcome, run_order
from tests.e2e.client import DEADLINE_S, _AsCall, connect, generate, refusal, sampling
from tests.support.processes import Deployment, Process, flags, wait_until

_SLOW = json.dumps({"delay_ms": 10.0, "verify": "full"})


def order(index: int, max_tokens: int) -> Order:
    return Order(index, 0.0, tuple(range(index, index + 20)), max_tokens, seed=None, leaves_after=None)


@contextmanager
def deployed(folder: Path, worker: dict[str, str] | None = None, **scheduler: str) -> Iterator[Deployment]:
    with Deployment(folder) as deployment:
        deployment.start_worker(0, **{"script": _SLOW, **(worker or {})})
        deployment.start_scheduler(**scheduler)
        deployment.start_frontend()
        deployment.wait_ready()
        yield deployment


def process_of(deployment: Deployment, name: str) -> Process:
    return next(process for process in deployment.processes if process.name == name)


def serves(address: str) -> bool:
    return bool(check(address, None, 20.0).serving)


async def until(condition: Callable[[], object], what: str) -> None:
    await asyncio.to_thread(wait_until, condition, what)


async def test_f60_what_is_too_large_is_refused_with_a_reason_and_what_is_large_passes(tmp_path: Path) -> None:
    with deployed(tmp_path, {"script": "{}", "num_blocks": "2049", "max_model_len": "20000"}) as deployment:
        async with connect(deployment.frontend_address) as stub:
            # 6 MB of ids: within what a message may have, far beyond what the model has.
            many = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1000] * 1_500_000))
            with pytest.raises(grpc.RpcError) as error:
                await generate(stub, many)
            refused = refusal(error.value)
            assert (refused.status, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG")
            # Over the message limit gRPC itself refuses, and the call before anything was parsed.
            huge = pb.GenerateRequest(text="x" * ((16 << 20) + 1))
            with pytest.raises(grpc.RpcError) as error:
                await generate(stub, huge)
            assert refusal(error.value).status is grpc.StatusCode.RESOURCE_EXHAUSTED
            # One answer of 8,000 tokens.
            request = pb.GenerateRequest(text="long", sampling=sampling(max_tokens=8000, ignore_eos=True))
            answer = await stub.Complete(pb.CompleteRequest(request=request), timeout=DEADLINE_S)
            assert len(answer.token_ids) == 8000
        await asyncio.to_thread(deployment.wait_idle)


async def test_f62_no_green_health_in_front_of_a_dead_or_silent_worker(tmp_path: Path) -> None:
    with Deployment(tmp_path) as deployment:
        deployment.start_scheduler(step_watchdog_s="1", first_steps_watchdog_s="1")
        deployment.start_frontend()
        fronts = (deployment.scheduler_address, deployment.frontend_address)

        async def all_serve(wanted: bool, what: str) -> float:
            began = time.monotonic()
            await until(lambda: all(serves(address) is wanted for address in fronts), what)
            return time.monotonic() - began

        for address in fronts:
            await until(lambda address=address: check(address, "", 20.0).serving, "it lives")  # type: ignore[misc]
        # (c) nobody has registered; (d) the worker that comes cannot warm up.
        assert not any(serves(address) for address in fronts)
        failing = deployment.start_worker(script=json.dumps({"load_error": "no such weights"}))
        assert failing.wait() == 1
        assert not any(serves(address) for address in fronts)
        assert deployment.worker_addresses[0] in deployment.status().not_ready_cause
        worker = deployment.start_worker(script=_SLOW)
        await all_serve(True, "everything serves")
        async with connect(deployment.frontend_address) as stub:
            # (a) killed
            await asyncio.to_thread(worker.kill)
            took_s = await all_serve(False, "nothing serves without a worker")
            assert deployment.worker_addresses[0] in deployment.status().not_ready_cause
            worker = deployment.start_worker(script=_SLOW)
            await all_serve(True, "everything serves again")
            # (b) and (e): it answers nothing any more, and what is queued does not move.
            running = asyncio.create_task(run_order(stub, order(1, 300)))
            await until(lambda: deployment.status().num_running == 1, "it runs")
            worker.signal(signal.SIGSTOP)
            frozen_s = await all_serve(False, "nothing serves with a silent worker")
            assert "watchdog" in deployment.status().not_ready_cause or "lost" in deployment.status().not_ready_cause
            for address in fronts:
                assert check(address, "", 20.0).serving
            worker.signal(signal.SIGCONT)
            await all_serve(True, "everything serves when it goes on")
            outcome = await running
            assert outcome.token_ids == outcome.order.cold_run()
        print(f"chaos: not ready after a kill {took_s:.1f} s, after a freeze {frozen_s:.1f} s (watchdog 1 s)")
        await asyncio.to_thread(deployment.wait_idle)


def start_planted(part: str, plant: str) -> subprocess.CompletedProcess[str]:
    """Start a part in which something was changed before; its end."""
    given = {"listen": free_address("127.0.0.1:0", set()), "log_format": "json"}
    if part == "worker":
        start, arguments = "worker_svc.__main__", ["serve", "--runner", "scripted", *flags(given)]
    else:
        start, arguments = "scheduler_svc.__main__", [part, *flags(given)]
    if part == "scheduler":
        arguments += ["--metrics-listen", "none"]
    code = f"import runpy, sys; sys.argv[1:] = {arguments!r}; {plant}; "
    code += f"runpy.run_module('{start}', run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)


_FATAL = {
    "scheduler": "import scheduler_svc.core.scheduler as m; m.Scheduler.__init__ = None",
    "frontend": "import scheduler_svc.frontend.session_client as m; m.SessionClient.__init__ = None",
    "worker": "import worker_svc.service as m; m.WorkerService.__init__ = None",
}


@pytest.mark.parametrize("part", _FATAL)
def test_f63_a_fatal_error_does_not_exit_with_0(part: str) -> None:
    ended = start_planted(part, _FATAL[part])
    assert ended.returncode == 1, ended.stderr
    assert "TypeError" in ended.stderr


async def test_f65_a_worker_that_restarts_empty_loses_no_request_and_no_token(tmp_path: Path) -> None:
    """Three requests, one of them without a token yet; two steps are on their way when the worker dies."""
    with deployed(
        tmp_path, {"script": json.dumps({"delay_ms": 60.0, "verify": "full"})}, max_num_seqs="2"
    ) as deployment:
        async with connect(deployment.frontend_address) as stub:
            warm = await run_order(stub, order(9, 2))
            outcomes = [Outcome(order(index, 40)) for index in range(3)]
            running = [asyncio.create_task(run_order(stub, each.order, each)) for each in outcomes]
            while not (len(outcomes[0].token_ids) >= 5 and len(outcomes[1].token_ids) >= 5):
                await asyncio.sleep(0.005)
            assert not outcomes[2].token_ids
            await asyncio.to_thread(process_of(deployment, "worker-0").kill)
            deployment.start_worker(script=_SLOW)
            await asyncio.gather(*running)
            for outcome in outcomes:
                assert outcome.failure is None and outcome.token_ids == outcome.order.cold_run()
            (rank,) = (await asyncio.to_thread(deployment.status)).ranks
            assert rank.epoch == 2
            # Nothing of the old pool is taken for cached: the same prompt as before the death is computed anew.
            again = await run_order(stub, order(9, 2))
            assert warm.finished is not None and again.finished is not None
            assert again.token_ids == warm.token_ids and again.finished.usage.num_cached_tokens == 0
        await asyncio.to_thread(deployment.wait_idle)


async def test_f68_a_failure_amid_the_stream_is_no_success_and_tells_what_was_delivered(tmp_path: Path) -> None:
    script = json.dumps({"faults": [{"kind": "fail", "at_step": 8, "request_id": "doomed", "times": 0}]})
    with deployed(tmp_path, {"script": script}, max_fruitless_epochs="1") as deployment:
        async with connect(deployment.frontend_address) as stub:
            tokens: list[int] = []
            with pytest.raises(grpc.RpcError) as error:
                request = pb.GenerateRequest(
                    request_id="doomed", text="a stream", sampling=sampling(max_tokens=50, ignore_eos=True)
                )
                async for response in stub.Generate(request, timeout=DEADLINE_S):
                    tokens += response.delta.token_ids
                    assert not response.HasField("finished")
            refused = refusal(error.value)
            assert (refused.status, refused.reason) == (grpc.StatusCode.INTERNAL, "WORKER_FAULT")
            assert usage_of(error.value).num_completion_tokens == len(tokens) == 7
        await asyncio.to_thread(deployment.wait_idle)


def usage_of(error: Any) -> usage_pb2.Usage:
    """The partial usage that came with a status."""
    status = rpc_status.from_call(_AsCall(error))  # type: ignore[arg-type]
    assert status is not None
    (packed,) = [detail for detail in status.details if detail.Is(usage_pb2.Usage.DESCRIPTOR)]
    usage = usage_pb2.Usage()
    packed.Unpack(usage)
    return usage


@pytest.mark.parametrize("part", ["scheduler", "frontend"])
async def test_f83_a_signal_lets_three_running_and_two_queued_finish(tmp_path: Path, part: str) -> None:
    with deployed(tmp_path, max_num_seqs="3") as deployment:
        async with connect(deployment.frontend_address) as stub:
            outcomes = [Outcome(order(index, 150)) for index in range(5)]
            running = [asyncio.create_task(run_order(stub, each.order, each)) for each in outcomes]
            await until(
                lambda: (deployment.status().num_running, deployment.status().num_waiting) == (3, 2), "3 run, 2 wait"
            )
            leaving = process_of(deployment, part)
            leaving.signal(signal.SIGTERM)
            await until(lambda: not serves(leaving.address), "readiness is off first")
            refused = (await run_order(stub, order(7, 1))).failure
            assert refused is not None
            assert (refused.status, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
            await asyncio.gather(*running)
            for outcome in outcomes:
                assert outcome.failure is None and outcome.token_ids == outcome.order.cold_run()
        assert await asyncio.to_thread(leaving.wait) == 0


async def test_f83_what_the_drain_deadline_cuts_off_is_told_to_its_clients_and_by_the_exit_code(
    tmp_path: Path,
) -> None:
    with deployed(tmp_path) as deployment:
        process_of(deployment, "frontend").stop()
        deployment.start_frontend(drain_deadline_s="0.5")
        deployment.wait_ready()
        async with connect(deployment.frontend_address) as stub:
            outcomes = [Outcome(order(index, 3000)) for index in range(3)]
            running = [asyncio.create_task(run_order(stub, each.order, each)) for each in outcomes]
            while not all(outcome.token_ids for outcome in outcomes):
                await asyncio.sleep(0.01)
            leaving = process_of(deployment, "frontend")
            leaving.signal(signal.SIGTERM)
            await asyncio.gather(*running)
            for outcome in outcomes:
                assert outcome.failure is not None
                assert (outcome.failure.status, outcome.failure.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
                assert outcome.token_ids == outcome.order.cold_run()[: len(outcome.token_ids)]
        assert await asyncio.to_thread(leaving.wait) == 3


async def test_f83_what_a_scheduler_has_at_its_drain_deadline_goes_on_with_the_next_one(tmp_path: Path) -> None:
    with deployed(tmp_path, drain_deadline_s="0.5") as deployment:
        async with connect(deployment.frontend_address) as stub:
            outcomes = [Outcome(order(index, 400)) for index in range(3)]
            running = [asyncio.create_task(run_order(stub, each.order, each)) for each in outcomes]
            while not all(outcome.token_ids for outcome in outcomes):
                await asyncio.sleep(0.01)
            leaving = process_of(deployment, "scheduler")
            leaving.signal(signal.SIGTERM)
            assert await asyncio.to_thread(leaving.wait) == 3
            assert not any(outcome.finished for outcome in outcomes)
            deployment.start_scheduler()
            await asyncio.gather(*running)
            for outcome in outcomes:
                assert outcome.failure is None and outcome.token_ids == outcome.order.cold_run()


@pytest.mark.parametrize("part", ["scheduler", "frontend", "worker-0"])
async def test_f83_a_second_signal_ends_at_once(tmp_path: Path, part: str) -> None:
    with deployed(tmp_path) as deployment:
        async with connect(deployment.frontend_address) as stub:
            outcome = Outcome(order(1, 3000))
            running = asyncio.create_task(run_order(stub, outcome.order, outcome))
            while not outcome.token_ids:
                await asyncio.sleep(0.01)
            leaving = process_of(deployment, part)
            leaving.signal(signal.SIGTERM)
            await until(lambda: not serves(leaving.address), "it drains")
            assert leaving.is_running
            leaving.signal(signal.SIGTERM)
            assert await asyncio.to_thread(leaving.wait) == 143
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

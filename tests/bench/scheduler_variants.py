"""What a step costs when not everybody just decodes, as ratios to steady decoding in the same run.

    python -m tests.bench.scheduler_variants [--running 32,256,1024] [--steps 300] [--gc tamed] [--json]

    steady    everybody decodes (tests.bench.scheduler_step)
    turnover  1 % of the requests end in each step and are replaced; prompts of 64 to 191 tokens, outputs of 100; the
              pool is full of cached blocks, so that every new block evicts one. Arrivals included
    chunk     one long prompt is computed, 512 tokens a step, beside everybody else's decoding
    thrash    a pool of a third of what all would need at their greatest, outputs of 512 tokens: preemptions all the
              time, under the default configuration and under the reference's

Microseconds of the thread's CPU time per step, median and mean; `ratio` is the mean per row to that of steady.
--gc: `tamed` as the scheduler process does, Python's `default`, or `off`; collections are counted by generation."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import RequestArrived
from tests.bench import scheduler_step
from tests.bench.stepping import BLOCK_SIZE, RANK, Prompts, Stepper, Times, blocks_for, tame_garbage_collector

_OUTPUT_TOKENS = 100
_CHUNK = 512
_LONG_PROMPT = 1 << 15


def _config(num_running: int, max_model_len: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=num_running,
        max_num_batched_tokens=max(8192, num_running),
        max_model_len=max_model_len,
        block_size=BLOCK_SIZE,
    )


def turnover(num_running: int) -> Stepper:
    """A rank whose pool has been through many requests."""
    prompts = Prompts()

    def prompt_tokens() -> int:
        return 64 + prompts.num_made * 37 % 128

    def some(count: int) -> list[RequestArrived]:
        return [prompts.request(prompt_tokens(), _OUTPUT_TOKENS) for _ in range(count)]

    per_request = blocks_for(191 + _OUTPUT_TOKENS)
    stepper = Stepper(
        _config(num_running, 512), num_running * per_request + 1, replace=some, clock_ns=time.thread_time_ns
    )
    # The first ones end one after the other, so that later ones do.
    stepper.arrive(
        [prompts.request(prompt_tokens(), 1 + i * _OUTPUT_TOKENS // num_running) for i in range(num_running)]
    )
    pool = stepper.scheduler.state.ranks[RANK].kv.pool
    while len(pool.index) < pool.num_free:
        stepper.run(50)
    stepper.run(100)
    return stepper


def chunk(num_running: int) -> Stepper:
    """Everybody decodes and one more prompt is always on its way in."""
    prompts = Prompts()

    def long_one(count: int) -> list[RequestArrived]:
        return [prompts.request(_LONG_PROMPT, 1)]

    config = replace(_config(num_running + 1, _LONG_PROMPT + 64), long_prefill_token_threshold=_CHUNK)
    num_blocks = num_running * blocks_for(4096) + 2 * blocks_for(_LONG_PROMPT) + 1
    stepper = Stepper(config, num_blocks, replace=long_one, clock_ns=time.thread_time_ns)
    short = scheduler_step.PROMPT_TOKENS
    stepper.arrive([prompts.request(short + i % BLOCK_SIZE, 4000) for i in range(num_running)])
    stepper.run(2 * BLOCK_SIZE)
    stepper.arrive(long_one(1))
    stepper.run(BLOCK_SIZE)
    return stepper


def thrash(config: SchedulerConfig, num_running: int) -> Stepper:
    """More requests than the pool holds, always."""
    prompts = Prompts()

    def some(count: int) -> list[RequestArrived]:
        return [prompts.request(64 + prompts.num_made % BLOCK_SIZE, 512) for _ in range(count)]

    num_blocks = num_running * blocks_for(64 + 512) // 3 + 1
    stepper = Stepper(config, num_blocks, replace=some, clock_ns=time.thread_time_ns)
    stepper.arrive(some(num_running))
    stepper.run(600)
    return stepper


def _thrash_default(num_running: int) -> Stepper:
    return thrash(_config(num_running, 1024), num_running)


def _thrash_reference(num_running: int) -> Stepper:
    ours = _config(num_running, 1024)
    theirs = SchedulerConfig.reference(
        max_num_seqs=ours.max_num_seqs,
        max_num_batched_tokens=ours.max_num_batched_tokens,
        max_model_len=ours.max_model_len,
        block_size=ours.block_size,
    )
    return thrash(theirs, num_running)


VARIANTS: dict[str, Callable[[int], Stepper]] = {
    "steady": lambda num_running: scheduler_step.start(num_running, 2000, clock_ns=time.thread_time_ns),
    "turnover": turnover,
    "chunk": chunk,
    "thrash": _thrash_default,
    "thrash_reference": _thrash_reference,
}


def measure(name: str, num_running: int, num_steps: int) -> dict[str, Any]:
    """One variant: what its steps cost, and what happened in them."""
    stepper = VARIANTS[name](num_running)
    before = stepper.num_ended, stepper.num_preempted
    rows = 0
    collections = _num_collections()
    stepper.times = Times()
    for _ in range(num_steps):
        rows += stepper.step()
    times = stepper.times
    collections = [after - before for after, before in zip(_num_collections(), collections, strict=True)]
    return {
        "median_us": round(times.median(), 1),
        "mean_us": round(times.mean(), 1),
        "p99_us": round(times.quantile(99), 1),
        "most_us": round(max(times.total), 1),
        "rows": round(rows / num_steps, 1),
        "us_per_row": round(times.mean() / (rows / num_steps), 2),
        "ended_per_step": round((stepper.num_ended - before[0]) / num_steps, 2),
        "preempted_per_step": round((stepper.num_preempted - before[1]) / num_steps, 2),
        "collections": collections,
    }


def _num_collections() -> list[int]:
    return [generation["collections"] for generation in gc.get_stats()]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", default="32,256,1024", help="requests side by side, several with commas")
    parser.add_argument("--steps", type=int, default=300, help="steps measured in each variant")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="which, with commas")
    parser.add_argument("--gc", choices=("tamed", "default", "off"), default="tamed", help="garbage collector")
    parser.add_argument("--json", action="store_true", help="print JSON lines only")
    arguments = parser.parse_args()
    if arguments.gc == "tamed":
        tame_garbage_collector()
    elif arguments.gc == "off":
        gc.disable()
    for num_running in map(int, arguments.running.split(",")):
        steady = measure("steady", num_running, arguments.steps)["us_per_row"]
        for name in arguments.variants.split(","):
            result = measure(name, num_running, arguments.steps)
            result["ratio"] = round(result["us_per_row"] / steady, 2)
            line = json.dumps({"variant": name, "running": num_running, **result})
            print(line if arguments.json else f"{name:17} {num_running:5} {result}", flush=True)


if __name__ == "__main__":
    main()

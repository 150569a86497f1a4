"""What one decode step costs the scheduler: schedule + acknowledge, columns built and read, per running request.

    python -m tests.bench.scheduler_step --running 256 [--steps 320] [--json]

All requests run from the start and decode steadily: 64-token prompts, prefix cache on, block size 16, `fence always`,
two steps in flight, block boundaries staggered. Medians over the steps; the last line is a JSON object. Compare
numbers of one run on one machine only."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

from scheduler_svc.core.config import SchedulerConfig
from tests.bench.stepping import BLOCK_SIZE, Prompts, Stepper, blocks_for, tame_garbage_collector

PROMPT_TOKENS = 64


def start(num_running: int, num_steps: int, clock_ns: Callable[[], int] = time.perf_counter_ns) -> Stepper:
    """Everybody decoding, at staggered places within their blocks."""
    max_tokens = num_steps + 256
    config = SchedulerConfig(
        max_num_seqs=num_running,
        max_num_batched_tokens=max(8192, num_running),
        max_model_len=PROMPT_TOKENS + BLOCK_SIZE + max_tokens,
        block_size=BLOCK_SIZE,
    )
    num_blocks = num_running * blocks_for(config.max_model_len) + 1
    stepper = Stepper(config, num_blocks, clock_ns=clock_ns)
    prompts = Prompts()
    # Decoding starts in one step or a few; what staggers the boundaries is the length of the prompts.
    stepper.arrive([prompts.request(PROMPT_TOKENS + i % BLOCK_SIZE, max_tokens) for i in range(num_running)])
    while stepper.step() < num_running:
        pass
    stepper.run(BLOCK_SIZE)
    return stepper


def measure(num_running: int, num_steps: int) -> dict[str, float]:
    """Median microseconds of schedule, ack and both."""
    times = start(num_running, num_steps).run(num_steps)
    return {
        "running": num_running,
        "schedule_us": round(statistics.median(times.schedule), 1),
        "ack_us": round(statistics.median(times.ack), 1),
        "total_us": round(times.median(), 1),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256, help="requests that decode side by side")
    parser.add_argument("--steps", type=int, default=320, help="decode steps measured")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    arguments = parser.parse_args()
    tame_garbage_collector()
    result = measure(arguments.running, arguments.steps)
    if not arguments.json:
        per_request = result["total_us"] / result["running"]
        print(f"{arguments.running} running: {per_request:.2f} us per request and step")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

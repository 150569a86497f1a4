"""What one decode step costs the scheduler: schedule + acknowledge, columns built and read, per running request.

    python -m tests.bench.scheduler_step --running 256 [--steps 320] [--json]

All requests run from the start and decode steadily: 64-token prompts, prefix cache on, block size 16, `fence always`,
two steps in flight, block boundaries staggered. Medians over the steps; the last line is a JSON object. Compare
numbers of one run on one machine only."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from array import array

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import RankJoined, RequestArrived, StepAcked
from scheduler_svc.core.output import SchedulerOutput
from scheduler_svc.core.scheduler import Scheduler

PROMPT_TOKENS = 64


def read_columns(output: SchedulerOutput) -> tuple[bytes, ...]:
    """What a codec does with a step: turn the columns into bytes."""
    columns = (output.rows, output.num_tokens, output.appended_rows, output.appended_blocks)
    return tuple(column.tobytes() for column in columns)


def start(num_running: int, num_steps: int) -> Scheduler:
    """A scheduler with everybody decoding, at staggered places within their blocks."""
    per_request = (PROMPT_TOKENS + 16 + num_steps + 64) // 16 + 2
    config = SchedulerConfig(
        max_num_seqs=num_running, max_num_batched_tokens=max(8192, num_running), max_model_len=8192, block_size=16
    )
    scheduler = Scheduler(config)
    scheduler.handle(RankJoined("bench", 1, num_running * per_request + 1, 8192, 32000))
    for i in range(num_running):
        prompt = array("i", [(i * 7919 + j * 31) % 32000 for j in range(PROMPT_TOKENS + i % 16)])
        scheduler.handle(RequestArrived(f"r{i}", i, prompt, max_tokens=num_steps + 256, eos_token_ids=(2,)))
    return scheduler


def measure(num_running: int, num_steps: int) -> dict[str, float]:
    """Median microseconds of schedule, ack and both."""
    scheduler = start(num_running, num_steps)
    window: list[bytes] = []
    schedule_us: list[float] = []
    ack_us: list[float] = []
    step = 0
    acked = 0
    clock = time.perf_counter_ns
    while len(schedule_us) < num_steps:
        begin = clock()
        output = scheduler.schedule("bench")
        columns = read_columns(output) if output is not None else ()
        scheduled = clock()
        assert output is not None and columns
        step += 1
        record = scheduler.state.ranks["bench"].window.records[-1]
        window.append(array("i", [100 + (step * 13 + i) % 30000 for i in range(record.num_sampling)]).tobytes())
        is_decode = output.total_num_tokens == num_running and len(record.requests) == num_running
        if len(window) < 2:
            continue
        reply = window.pop(0)
        acked += 1
        before = clock()
        scheduler.handle(StepAcked("bench", 1, acked, memoryview(reply).cast("i").tolist()))
        after = clock()
        if is_decode and step > 40:
            schedule_us.append((scheduled - begin) / 1000)
            ack_us.append((after - before) / 1000)
    total = [s + a for s, a in zip(schedule_us, ack_us, strict=True)]
    return {
        "running": num_running,
        "schedule_us": round(statistics.median(schedule_us), 1),
        "ack_us": round(statistics.median(ack_us), 1),
        "total_us": round(statistics.median(total), 1),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256, help="requests that decode side by side")
    parser.add_argument("--steps", type=int, default=320, help="decode steps measured")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    arguments = parser.parse_args()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    result = measure(arguments.running, arguments.steps)
    if not arguments.json:
        per_request = result["total_us"] / result["running"]
        print(f"{arguments.running} running: {per_request:.2f} us per request and step")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

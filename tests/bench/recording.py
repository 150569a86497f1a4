"""What a recording costs the loop: microseconds per step beside what the step itself costs, and bytes per step.

    python -m tests.bench.recording [--running 32,256,1024] [--steps 320]

Steady decoding as in tests.bench.scheduler_step; a turn is a Tick, an acknowledgement, a step and the question for a
second one. The file is written where temporary files are. CPU time of the thread, medians."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from array import array
from pathlib import Path

from scheduler_svc.core.events import StepAcked, Tick
from scheduler_svc.journal import Recorder
from tests.bench import scheduler_step
from tests.bench.stepping import RANK, tame_garbage_collector


def measure(num_running: int, num_steps: int, path: Path) -> dict[str, float]:
    """Record `num_steps` turns of a core that decodes steadily."""
    stepper = scheduler_step.start(num_running, 2 * num_steps, clock_ns=time.thread_time_ns)
    scheduler = stepper.scheduler
    recorder = Recorder(path, scheduler.config)
    before = path.stat().st_size
    step_us: list[float] = []
    recording_us: list[float] = []
    clock = time.thread_time_ns
    window = scheduler.state.ranks[RANK].window
    for turn in range(num_steps):
        oldest = window.oldest
        assert oldest is not None
        tick = Tick(float(turn) + 0.123456789)
        sampled = array("i", [100 + (turn * 13 + i) % 30000 for i in range(num_running)])
        acked = StepAcked(RANK, 1, oldest.step_seq, sampled.tolist())
        begin = clock()
        scheduler.handle(tick)
        scheduler.handle(acked)
        output = scheduler.schedule(RANK)
        nothing = scheduler.schedule(RANK)
        done = clock()
        recorder.event(tick)
        recorder.event(acked)
        recorder.scheduled(RANK, output)
        recorder.scheduled(RANK, nothing)
        recorded = clock()
        step_us.append((done - begin) / 1000)
        recording_us.append((recorded - done) / 1000)
    num_bytes = path.stat().st_size - before
    recorder.close()
    return {
        "running": num_running,
        "step_us": round(statistics.median(step_us), 1),
        "recording_us": round(statistics.median(recording_us), 1),
        "bytes_per_step": round(num_bytes / num_steps),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", default="32,256,1024", help="requests side by side, several with commas")
    parser.add_argument("--steps", type=int, default=320, help="steps measured")
    arguments = parser.parse_args()
    tame_garbage_collector()
    for num_running in map(int, arguments.running.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(num_running, arguments.steps, Path(folder) / "recording.jsonl")))


if __name__ == "__main__":
    main()

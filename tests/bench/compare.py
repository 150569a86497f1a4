"""What a change costs the scheduler: two checkouts measured in turns, so that a busy machine spoils both alike.

    python -m tests.bench.compare /path/to/before [/path/to/after] [--pairs 10] [--running 32 256 1024] [--steps 320]

Every pair runs `tests.bench.scheduler_step` once with each checkout, in processes of their own, in alternating order,
and takes the thread's CPU time per step (plan and acknowledgement together). Printed is the median over the pairs of
after divided by before, with the quartiles. The Python that runs this must have the dependencies of both."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

_MEASURE = """
import json, sys, time
from tests.bench.scheduler_step import start
from tests.bench.stepping import tame_garbage_collector
tame_garbage_collector()
times = start({running}, {steps}, time.thread_time_ns).run({steps})
print(json.dumps(times.median()))
"""


def measure(checkout: Path, running: int, steps: int) -> float:
    """Median CPU microseconds of one step in this checkout."""
    environment = {**os.environ, "PYTHONPATH": f"{checkout}:{checkout / 'protos'}"}
    command = [sys.executable, "-c", _MEASURE.format(running=running, steps=steps)]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def ratios(before: Path, after: Path, running: int, *, pairs: int, steps: int) -> list[float]:
    """Cost of `after` as a multiple of that of `before`, one number a pair."""
    found = []
    for pair in range(pairs):
        order = (before, after) if pair % 2 else (after, before)
        cost = {checkout: measure(checkout, running, steps) for checkout in order}
        found.append(cost[after] / cost[before])
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path, nargs="?", default=Path(__file__).parents[2])
    parser.add_argument("--pairs", type=int, default=10, help="at least 2")
    parser.add_argument("--running", type=int, nargs="+", default=[32, 256, 1024], help="requests side by side")
    parser.add_argument("--steps", type=int, default=320, help="steps measured in each process")
    arguments = parser.parse_args()
    before, after = arguments.before.resolve(), arguments.after.resolve()
    for running in arguments.running:
        found = ratios(before, after, running, pairs=arguments.pairs, steps=arguments.steps)
        low, median, high = statistics.quantiles(found, n=4)
        print(f"{running} running: {median:.3f} ({low:.3f} to {high:.3f}, {arguments.pairs} pairs)", flush=True)


if __name__ == "__main__":
    main()

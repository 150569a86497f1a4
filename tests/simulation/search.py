"""Play worlds until so many steps were sent, and tell what they went through.

    python -m tests.simulation.search --steps 1000000 --seed 1

A failure prints its seed; `--seed N --worlds 1` plays it again.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator

from tests.simulation.world import Report, SimulationFailure, run_world

# In short searches every plan is checked against all invariants; in long ones, every world in so many.
_CHECK_STRIDE = 7


def play(seed: int, *, check_all: bool) -> Report:
    """One world. Where not every plan is checked, one in seven is."""
    return run_world(seed, check_every=1 if check_all or seed % _CHECK_STRIDE == 0 else _CHECK_STRIDE)


def worlds(first_seed: int, num_steps: int, *, check_all: bool) -> Iterator[Report]:
    """World after world until so many steps were sent. Raises SimulationFailure."""
    done = 0
    seed = first_seed
    while done < num_steps:
        report = play(seed, check_all=check_all)
        done += report.num_steps
        seed += 1
        yield report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worlds", type=int, default=None, help="play so many, whatever their steps")
    given = parser.parse_args()
    began = time.monotonic()
    counts: Counter[str] = Counter()
    num_steps = num_worlds = 0
    num_failed = 0
    try:
        for report in worlds(given.seed, given.steps, check_all=given.worlds is not None):
            num_steps += report.num_steps
            num_worlds += 1
            counts.update(report.counts)
            if num_worlds == given.worlds:
                break
    except SimulationFailure as failure:
        print(failure)
        num_failed = 1
    print(f"protocol simulation: {num_steps} steps in {num_worlds} worlds, {time.monotonic() - began:.0f} s")
    for name, count in sorted(counts.items()):
        print(f"  {name}: {count}")
    return num_failed


if __name__ == "__main__":
    raise SystemExit(main())

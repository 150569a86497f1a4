"""Plant each fault in a copy of the core and run the tests of the core against it: every one must be caught.

    python -m tests.mutants [--jobs N] [--only TEXT]

Prints which test caught which fault. Exit status 1 if a fault survives, or cannot be planted, or if the tests fail
without any fault."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.faults import FAULTS, Fault
from tests.mutants.planting import plant

ROOT = Path(__file__).parents[2]
_COPIED = ("pyproject.toml", "scheduler_svc", "protos", "tests/__init__.py", "tests/conftest.py", "tests/support")
_TESTS = ("tests/unit/__init__.py", "tests/unit/core", "tests/conformance")
# In the order in which they are run: the quick and pointed ones first, recorded truths only if those notice nothing.
_UNIT = (
    *(
        "block_pool",
        "prefix_index",
        "queues",
        "policy",
        "plan",
        "submission",
        "drafts",
        "resources",
        "features",
        "set_aside",
        "resubmission",
    ),
    *("step_bytes", "inflight", "several_ranks", "quarantine", "time", "pause_and_reset", "throttle", "unpinned"),
    *("traps", "explain", "row_errors", "field_cases", "tenants"),
)
_STAGES = (tuple(f"tests/unit/core/test_{name}.py" for name in _UNIT), ("tests/conformance",))
# A test that takes so long has met a fault that loops. Seconds.
_TEST_TIMEOUT_S = 20
_RUN_TIMEOUT_S = 180
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """killed_by: the first test that failed; None: all passed, the fault survives. problem: it could not be judged."""

    fault: Fault | None
    killed_by: str | None
    seconds: float
    problem: str = ""


def copy_tree(root: Path) -> None:
    """Whatever the tests of the core need."""
    for name in (*_COPIED, *_TESTS):
        source, target = ROOT / name, root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        else:
            shutil.copy(source, target)


def judge(fault: Fault | None) -> Outcome:
    """Run the tests with a fault planted, up to the first that fails."""
    started = time.monotonic()
    killed_by, problem = None, ""
    with tempfile.TemporaryDirectory(prefix="stepfence-mutant-") as folder:
        root = Path(folder)
        copy_tree(root)
        if fault is not None:
            plant(fault, root)
        for tests in _STAGES:
            killed_by, problem = run_tests(root, tests)
            if killed_by or problem:
                break
    return Outcome(fault, killed_by, time.monotonic() - started, problem)


def run_tests(root: Path, tests: tuple[str, ...]) -> tuple[str | None, str]:
    """The first test that fails in the copy at `root`, or None; and why that cannot be said, if it cannot."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no"]
    command += [f"--timeout={_TEST_TIMEOUT_S}", *tests]
    # The copy, and not the checkout that is installed here, is what is tested.
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'protos'}", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=_RUN_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"no end after {_RUN_TIMEOUT_S} s"
    if done.returncode == 0:
        return None, ""
    found = _FAILED.search(done.stdout)
    if done.returncode != 1 or found is None:
        return None, f"pytest ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}"
    return found[1].removeprefix("tests/"), ""


def judge_all(faults: list[Fault], jobs: int) -> Iterator[Outcome]:
    """The run without a fault first, then each fault, in order."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(judge, [None, *faults])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--only", default="", help="only faults whose name contains this")
    arguments = parser.parse_args()
    faults = [fault for fault in FAULTS if arguments.only in fault.name]
    started = time.monotonic()
    num_bad = 0
    for outcome in judge_all(faults, arguments.jobs):
        name = "(no fault)" if outcome.fault is None else outcome.fault.name
        if outcome.problem:
            verdict = f"PROBLEM   {outcome.problem}"
        elif outcome.fault is None:
            verdict = "passes" if outcome.killed_by is None else f"FAILS     {outcome.killed_by}"
        else:
            verdict = "SURVIVES" if outcome.killed_by is None else f"killed by {outcome.killed_by}"
        bad = bool(outcome.problem) or (outcome.killed_by is None) is (outcome.fault is not None)
        num_bad += bad
        print(f"{name:60} {outcome.seconds:5.1f} s  {verdict}", flush=True)
        if bad and outcome.fault is None:
            break
    print(f"{len(faults)} faults, {num_bad} not caught, {time.monotonic() - started:.0f} s")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())

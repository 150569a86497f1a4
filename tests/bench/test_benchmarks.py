"""The benchmarks measure what they say; how long it takes is no matter here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import compare, recording, scheduler_step, scheduler_variants
from tests.bench.stepping import BLOCK_SIZE, RANK, Prompts


def test_the_last_line_of_the_step_benchmark_is_json() -> None:
    command = [sys.executable, "-m", "tests.bench.scheduler_step", "--running", "20", "--steps", "40"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result) == ["running", "schedule_us", "ack_us", "total_us"]
    assert result["running"] == 20
    assert 0 < result["schedule_us"] < result["total_us"]
    assert 0 < result["ack_us"] < result["total_us"]


def test_every_measured_step_is_a_decode_of_everybody_with_staggered_growth() -> None:
    stepper = scheduler_step.start(64, 40)
    for _ in range(40):
        record = stepper.scheduler.state.ranks[RANK].window.records[-1]
        assert record.num_tokens == [1] * 64
        blocks = sum(len(r.blocks) for r in stepper.scheduler.state.ranks[RANK].running)
        stepper.step()
        grown = sum(len(r.blocks) for r in stepper.scheduler.state.ranks[RANK].running) - blocks
        assert grown == 64 // BLOCK_SIZE
    assert len(stepper.times.total) >= 40


def test_no_two_prompts_share_a_block() -> None:
    prompts = Prompts()
    starts = {bytes(prompts.request(64, 1).prompt[:BLOCK_SIZE]) for _ in range(500)}
    assert len(starts) == 500


@pytest.mark.parametrize("variant", scheduler_variants.VARIANTS)
def test_variants_do_what_they_are_named_for(variant: str) -> None:
    result = scheduler_variants.measure(variant, 32, 200)
    assert 0 < result["median_us"] <= result["p99_us"] <= result["most_us"]
    assert (result["ended_per_step"] > 0) == (variant != "steady")
    assert (result["preempted_per_step"] > 0) == variant.startswith("thrash")
    if variant == "chunk":
        assert result["rows"] == pytest.approx(33, abs=0.5)
    if variant == "turnover":
        assert result["ended_per_step"] == pytest.approx(0.32, abs=0.1)


def test_in_turnover_every_new_block_was_a_cached_one() -> None:
    stepper = scheduler_variants.turnover(32)
    pool = stepper.scheduler.state.ranks[RANK].kv.pool
    free = pool.free_order()
    assert sum(pool.index.hash_of(block) is None for block in free) < len(free) / 10


def test_a_recording_is_measured_with_its_steps(tmp_path: Path) -> None:
    result = recording.measure(32, 50, tmp_path / "r")
    assert result["recording_us"] > 0
    # A column of sampled ids at least.
    assert result["bytes_per_step"] > 32 * 4


def test_two_checkouts_are_compared_in_turns() -> None:
    root = Path(__file__).parents[2]
    found = compare.ratios(root, root, 20, pairs=2, steps=40)
    assert len(found) == 2 and all(0 < ratio < 100 for ratio in found)

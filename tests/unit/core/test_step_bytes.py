"""The message of a step is limited while the step is planned (contract rule 10)."""

from __future__ import annotations

import pytest

from scheduler_svc.core import reasons
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.step_bytes import columns_bytes, largest_row_bytes, row_bytes
from tests.support.core_harness import World

CONFIG = SchedulerConfig(block_size=4, max_num_seqs=8, max_num_batched_tokens=128, max_model_len=64)
COLUMNS = columns_bytes(CONFIG.num_rows, CONFIG.max_num_batched_tokens)


def world(num_bytes: int) -> World:
    """One rank, whose messages have so many bytes for the entries of admitted requests."""
    made = World(CONFIG, ranks={})
    made.join("r0", 100, max_step_bytes=COLUMNS + num_bytes)
    return made


def entry(num_tokens: int, request_id: str) -> int:
    return row_bytes(num_tokens, -(-num_tokens // 4), request_id, b"")


@pytest.mark.parametrize("missing", [0, 1])
def test_admission_stops_when_the_message_is_full(missing: int) -> None:
    w = world(entry(10, "a") + entry(7, "b") - missing)
    for name, length in (("a", 10), ("b", 7), ("c", 1)):
        w.submit(name, length, 3)
    output = w.schedule()
    assert w.rows_of(output) == [("a", 10), ("b", 7)][: 2 - missing]
    explanation = w.scheduler.explain("c" if not missing else "b")
    assert explanation is not None and explanation.reason is reasons.STEP_TOO_LARGE
    w.run()
    w.check_texts()


def test_the_first_request_of_a_step_always_fits() -> None:
    w = world(1)
    for name in "ab":
        w.submit(name, 20, 3)
    assert w.rows_of(w.step()) == [("a", 20)]
    assert w.rows_of(w.step()) == [("a", 1), ("b", 20)]
    w.run()
    w.check_texts()


def test_the_longest_request_has_room_beside_a_full_step() -> None:
    assert entry(64, "i" * 256) <= largest_row_bytes(64, 4)


def test_requests_that_end_in_a_crowd_are_announced_a_message_at_a_time() -> None:
    """More of them than rows, since they had been preempted and have none. Until all are announced no request starts,
    since it might have the id of one of them."""
    config = SchedulerConfig(block_size=4, max_num_seqs=2, max_num_batched_tokens=32, max_inflight_steps=1)
    assert config.num_rows == 4
    w = World(config, ranks={})
    w.join("r0", 100, max_step_bytes=columns_bytes(4, 32) + largest_row_bytes(config.max_model_len, 4))
    names = [f"n{index}" for index in range(11)]
    w.rank().finished += [(name, -1) for name in names]
    w.submit("n10", 5, 2)
    announced = [w.step() for _ in range(3)]
    assert [output and list(output.finished_request_ids) for output in announced] == [names[:4], names[4:8], names[8:]]
    assert [output and len(output.new_requests) for output in announced] == [0, 0, 1]
    w.run()
    w.check_texts()

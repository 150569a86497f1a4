"""Order and memory of one epoch, without threads or gRPC."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.worker.builders import Steps, added, capabilities, geometry, ints
from worker_svc.epoch import Epoch
from worker_svc.errors import ContractError, StepRefused
from worker_svc.limits import MAX_EMPTY_STEPS_UNPROCESSED
from worker_svc.step import Step, StepAnswer, StepOutput


def _epoch(**changes: int) -> Epoch:
    epoch = Epoch(7, 1, geometry(**changes))
    epoch.start(40, capabilities())
    return epoch


def _answer(step_seq: int) -> StepAnswer:
    return StepAnswer(epoch=1, step_seq=step_seq, output=StepOutput(ints([step_seq]), None, 0))


def _run(epoch: Epoch, step: Step) -> None:
    assert epoch.accept(step)
    epoch.remember(_answer(step.step_seq))


def test_answers_are_kept_until_they_are_processed_and_no_longer() -> None:
    epoch, steps = _epoch(), Steps()
    for processed in (0, 0, 1):
        _run(epoch, steps.next(processed=processed))
    assert epoch.answer(1) is None
    assert epoch.answer(2) == _answer(2) and epoch.answer(3) == _answer(3)


def test_nothing_is_processed_before_it_was_answered() -> None:
    epoch, steps = _epoch(), Steps()
    assert epoch.accept(steps.next())
    assert epoch.accept(steps.next(processed=0))
    with pytest.raises(StepRefused) as caught:
        epoch.accept(steps.next(processed=1))
    assert caught.value.reason == "PROCESSED_AHEAD"


def test_a_step_on_its_way_is_not_executed_again() -> None:
    epoch, steps = _epoch(), Steps()
    step = steps.next()
    assert epoch.accept(step) is True
    assert epoch.accept(step) is False
    assert epoch.num_unanswered == 1


def test_a_refusal_is_final() -> None:
    epoch, steps = _epoch(), Steps()
    good = steps.next()
    steps.next()
    with pytest.raises(StepRefused, match="STEP_GAP"):
        epoch.accept(steps.next())
    with pytest.raises(StepRefused, match="EPOCH_OVER"):
        epoch.accept(good)
    assert epoch.is_over and epoch.num_rows_held == 0


def test_steps_without_tokens_may_be_sent_beside_a_full_window_but_not_without_end() -> None:
    epoch, steps = _epoch(max_inflight_steps=1), Steps()
    assert epoch.accept(steps.next({0: 1}, new=[added("a", 0, [1, 2], [1])]))
    for _ in range(MAX_EMPTY_STEPS_UNPROCESSED):
        assert epoch.accept(steps.next(processed=0))
    with pytest.raises(StepRefused, match="WINDOW_FULL"):
        epoch.accept(steps.next(processed=0))


def test_memory_of_a_long_epoch_stays_small() -> None:
    epoch, steps = _epoch(), Steps()
    for _ in range(2000):
        _run(epoch, steps.next())
    assert len(epoch._answers) == 1 and not epoch._drafted and not epoch._window


@given(st.lists(st.integers(1, 6), max_size=30))
def test_whatever_the_order_of_steps_each_is_taken_at_most_once_and_in_order(order: list[int]) -> None:
    epoch = _epoch()
    made = [Steps() for _ in range(6)]
    steps = {}
    for number, maker in enumerate(made, start=1):
        for _ in range(number):
            steps[number] = maker.next(processed=0)
    taken = []
    for number in order:
        try:
            if epoch.accept(steps[number]):
                taken.append(number)
                epoch.remember(_answer(number))
        except ContractError:
            break
    assert taken == list(range(1, len(taken) + 1))

"""Ids of a prompt must be the model's."""

from __future__ import annotations

from array import array

import pytest

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import RankJoined, RefusalReason, RequestAccepted, RequestArrived, RequestRefused
from scheduler_svc.core.scheduler import Scheduler


@pytest.mark.parametrize(
    "ids,accepted",
    [
        ([0, 999], True),
        ([5, 1000, 7], False),
        ([-1, 5], False),
        ([-(2**31), 5], False),
        ([2**31 - 1], False),
    ],
)
def test_a_prompt_with_an_id_outside_the_vocabulary_is_refused(ids: list[int], accepted: bool) -> None:
    scheduler = Scheduler(SchedulerConfig())
    scheduler.handle(RankJoined("a", 1, 100, 64, 1000))
    (effect,) = scheduler.handle(RequestArrived("r", 1, array("i", ids), max_tokens=2))
    if accepted:
        assert isinstance(effect, RequestAccepted)
    else:
        assert isinstance(effect, RequestRefused)
        assert effect.reason is RefusalReason.INVALID_PARAMETER
        assert "0 to 999" in effect.message

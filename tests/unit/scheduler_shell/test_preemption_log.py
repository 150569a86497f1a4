"""One warning a minute for preemptions, with the numbers and what helps."""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import RequestPreempted
from scheduler_svc.core.stats import Totals
from scheduler_svc.preemption_log import GATHER_S, PERIOD_S, PreemptionLog
from tests.support.virtual_time import run_virtually

_PREEMPTED = RequestPreempted("w", "victim", "other", "blocks", 3, 40, 0)


@dataclass
class _View:
    num_running: int = 9
    num_blocks: int = 64


@dataclass
class _Core:
    """As much of the core as the log asks for."""

    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    totals: Totals = field(default_factory=Totals)
    view: _View | None = field(default_factory=_View)

    def rank_view(self, rank: str) -> _View | None:
        return self.view


async def _preempt(core: _Core, log: PreemptionLog, times: int, pause_s: float, **changes: Any) -> None:
    for _ in range(times):
        log.preempted(replace(_PREEMPTED, **changes))
        core.totals.num_computed_tokens += 100
        core.totals.num_recomputed_tokens += 24
        await asyncio.sleep(pause_s)


def _lines(caplog: pytest.LogCaptureFixture, level: int) -> list[Any]:
    return [record for record in caplog.records if record.levelno == level]


def test_f110_many_preemptions_are_one_warning_with_their_numbers(caplog: pytest.LogCaptureFixture) -> None:
    core = _Core()

    async def work() -> None:
        log = PreemptionLog(core)  # type: ignore[arg-type]
        # More than one a second, for longer than the first warning takes and shorter than until the next one.
        await _preempt(core, log, 300, (GATHER_S + PERIOD_S / 2) / 300)
        await asyncio.sleep(2 * PERIOD_S)

    with caplog.at_level(logging.DEBUG):
        run_virtually(work())
    first, second = _lines(caplog, logging.WARNING)
    assert first.num_preemptions + second.num_preemptions == 300
    assert (first.recomputed_share, first.rank, first.num_blocks, first.num_running) == (0.24, "w", 64, 9)
    assert 0 < first.seconds <= GATHER_S + 0.1 and second.seconds > GATHER_S
    for words in ("--kv-memory", "--num-blocks", "--max-num-seqs 8", "--watermark"):
        assert words in first.getMessage()
    assert len(_lines(caplog, logging.DEBUG)) >= 300 and _lines(caplog, logging.INFO) == []


def test_f110_warnings_are_a_minute_apart(caplog: pytest.LogCaptureFixture) -> None:
    core, moments = _Core(), list[float]()

    async def work() -> None:
        log = PreemptionLog(core)  # type: ignore[arg-type]
        loop = asyncio.get_running_loop()

        def note(record: logging.LogRecord) -> bool:
            if record.levelno == logging.WARNING:
                moments.append(loop.time())
            return True

        logger = logging.getLogger("scheduler_svc.preemption_log")
        logger.addFilter(note)
        try:
            await _preempt(core, log, 600, 0.5)
        finally:
            logger.removeFilter(note)

    run_virtually(work())
    assert len(moments) == 5
    assert all(later - earlier >= PERIOD_S for earlier, later in itertools.pairwise(moments))


def test_f110_fewer_requests_are_no_remedy_where_few_run(caplog: pytest.LogCaptureFixture) -> None:
    core = _Core(view=_View(num_running=1))

    async def work() -> None:
        await _preempt(core, PreemptionLog(core), 1, 2 * GATHER_S)  # type: ignore[arg-type]

    run_virtually(work())
    (warning,) = _lines(caplog, logging.WARNING)
    assert "--max-model-len" in warning.getMessage() and "--max-num-seqs" not in warning.getMessage()


def test_f110_a_rank_that_is_gone_when_the_warning_is_due_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    core = _Core(view=None)

    async def work() -> None:
        await _preempt(core, PreemptionLog(core), 1, 2 * GATHER_S)  # type: ignore[arg-type]

    run_virtually(work())
    assert len(_lines(caplog, logging.WARNING)) == 1


def test_f110_what_a_lost_worker_had_is_a_line_for_each_request_and_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = _Core()

    async def work() -> None:
        await _preempt(core, PreemptionLog(core), 3, 1.0, cause="rank_lost")  # type: ignore[arg-type]
        await asyncio.sleep(2 * PERIOD_S)

    with caplog.at_level(logging.DEBUG):
        run_virtually(work())
    assert [record.getMessage() for record in _lines(caplog, logging.INFO)] == ["preempted"] * 3
    assert _lines(caplog, logging.WARNING) == []

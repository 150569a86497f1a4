"""Health of the real processes, with a watcher at each that never reads."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import pytest

from scheduler_svc.cli.health import check
from tests.support.deaf_caller import DeafWatcher
from tests.support.processes import Deployment, wait_until

pytestmark = pytest.mark.e2e

_GENERATION = "stepfence.v1.GenerationService"
_SESSION = "stepfence.v1.SessionService"
_WORKER = "stepfence.v1.WorkerService"


def _is_not_ready(address: str) -> bool:
    return check(address, None, 10.0).text.endswith("NOT_SERVING")


def test_f119_a_watcher_that_does_not_read_freezes_no_readiness_and_keeps_no_process(tmp_path: Path) -> None:
    with Deployment(tmp_path) as stepfence, contextlib.ExitStack() as watchers:
        worker = stepfence.start_worker(runner="scripted", num_blocks="65")
        scheduler = stepfence.start_scheduler()
        frontend = stepfence.start_frontend()
        stepfence.wait_ready()
        (worker_address,) = stepfence.worker_addresses
        deaf = [
            watchers.enter_context(DeafWatcher(address, service))
            for address, service in (
                (worker_address, _WORKER),
                (stepfence.scheduler_address, _SESSION),
                (stepfence.frontend_address, _GENERATION),
            )
        ]
        assert worker.stop() == 0
        for address in (stepfence.scheduler_address, stepfence.frontend_address):
            wait_until(partial(_is_not_ready, address), f"{address} is not ready")
        worker = stepfence.start_worker(runner="scripted", num_blocks="65")
        stepfence.wait_ready()
        assert frontend.stop() == 0
        assert scheduler.stop() == 0
        assert worker.stop() == 0
        assert [watcher.num_answer_bytes for watcher in deaf] == [0, 0, 0]
        assert not [p.name for p in (worker, scheduler, frontend) if '"level": "error"' in p.output()]

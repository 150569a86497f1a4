"""Each part alone, stopped as asked while the others run: it says so, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scheduler_svc.cli.health import check
from tests.support.processes import Deployment, wait_until


@pytest.mark.parametrize("name", ["worker-0", "scheduler", "frontend"])
def test_f109_a_part_that_is_stopped_writes_no_warning(tmp_path: Path, name: str) -> None:
    with Deployment(tmp_path) as stepfence:
        stepfence.start_worker()
        stepfence.start_scheduler()
        frontend = stepfence.start_frontend()
        stepfence.wait_ready()
        wait_until(
            lambda: check(frontend.address, "stepfence.v1.GenerationService", 5.0).serving, "the front end is ready"
        )
        (part,) = (process for process in stepfence.processes if process.name == name)
        # What the loss of its only worker means to the scheduler is in the scheduler's own log.
        assert part.stop() == 0
        lines = [json.loads(line) for line in part.output().splitlines()]
        assert lines and [line for line in lines if line["level"] != "info"] == []

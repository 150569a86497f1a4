"""docs/metrics.md lists what is exported, by its name, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.metrics import PrometheusMetrics, collect

ROOT = Path(__file__).parents[3]


def test_the_table_of_metrics_is_complete() -> None:
    exported = {
        metric.name + ("_total" if metric.type == "counter" else "")
        for metric in collect(Scheduler(SchedulerConfig()), PrometheusMetrics(lambda: 0.0), "m")
    }
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)) == exported

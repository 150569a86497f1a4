"""How many cores this process may use. More threads than that wait for each other (docs/benchmarks-cpu.md)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from worker_svc import control_groups

_PERIOD_V1: Final = "cpu.cfs_period_us"


def num_usable_cores(root: Path = Path("/")) -> int:
    """The cores it may run on (its affinity, which a container's cpuset sets), or as many as its CPU quota is worth
    (Docker's --cpus, Kubernetes' limits), rounded up, when that is fewer. `root` is where /proc and /sys are looked
    for."""
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas(root)]))


def _quotas(root: Path) -> Iterator[int]:
    """In cores, rounded up; of this process's cgroup and of those above it."""
    # Version 2: "QUOTA PERIOD" or "max PERIOD", in microseconds; version 1 has a file for each, -1 for no quota.
    for file, text in control_groups.settings(root, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        if file.name == "cpu.max":
            quota, _, period = text.partition(" ")
        else:
            quota, period = text, "".join(control_groups.lines(root / str(file.parent / _PERIOD_V1).lstrip("/"))[:1])
        if quota.isdecimal() and period.strip().isdecimal() and int(period):
            yield -(-int(quota) // int(period))

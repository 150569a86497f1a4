"""How many cores a process may use, read from made-up trees."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from worker_svc.cores import num_usable_cores

_V2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
_V1 = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def _tree(root: Path, mountinfo: str, cgroup: str, files: Mapping[str, str]) -> Path:
    for name, text in {"proc/self/mountinfo": mountinfo, "proc/self/cgroup": cgroup, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_a_quota_it_is_the_affinity(tmp_path: Path) -> None:
    assert num_usable_cores(tmp_path) == 8
    files = {"sys/fs/cgroup/cpu.max": "max 100000\n"}
    assert num_usable_cores(_tree(tmp_path, _V2, "0::/\n", files)) == 8


@pytest.mark.parametrize(("quota", "cores"), [("200000 100000", 2), ("150000 100000", 2), ("1000 100000", 1)])
def test_a_quota_of_version_2_counts_in_whole_cores(tmp_path: Path, quota: str, cores: int) -> None:
    assert num_usable_cores(_tree(tmp_path, _V2, "0::/\n", {"sys/fs/cgroup/cpu.max": f"{quota}\n"})) == cores


def test_the_smallest_quota_on_the_way_up_holds(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/a/b/cpu.max": "600000 100000\n", "sys/fs/cgroup/a/cpu.max": "300000 100000\n"}
    assert num_usable_cores(_tree(tmp_path, _V2, "0::/a/b\n", files)) == 3


@pytest.mark.parametrize(("quota", "cores"), [("250000", 3), ("-1", 8), ("", 8)])
def test_version_1_has_two_files(tmp_path: Path, quota: str, cores: int) -> None:
    group = "sys/fs/cgroup/cpu,cpuacct/docker/x"
    files = {f"{group}/cpu.cfs_quota_us": f"{quota}\n", f"{group}/cpu.cfs_period_us": "100000\n"}
    assert num_usable_cores(_tree(tmp_path, _V1, "5:cpu,cpuacct:/docker/x\n", files)) == cores

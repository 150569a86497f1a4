"""How much memory a process may use, read from made-up trees, and what is said when something does not fit."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from worker_svc import memory
from worker_svc.memory import ALLOWANCE_BYTES, MemoryLimit, NotEnoughMemory, Part, check, kv_part, memory_limit

_GIB = 1 << 30
_UNLIMITED = -1
_V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
_V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
_CPU = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"


def _tree(root: Path, mountinfo: str, cgroup: str, files: Mapping[str, object] | None = None) -> Path:
    """/proc and /sys of a process on a machine of 64 GiB."""
    texts = {
        "proc/meminfo": "MemTotal:       67108864 kB\nMemFree:         1000 kB\n",
        "proc/self/mountinfo": f"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n{mountinfo}",
        "proc/self/cgroup": cgroup,
        **{name: f"{text}\n" for name, text in (files or {}).items()},
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def _limit(root: Path) -> MemoryLimit:
    found = memory_limit(root, _UNLIMITED)
    assert found is not None
    return found


def test_a_machine_without_control_groups_has_its_own_memory(tmp_path: Path) -> None:
    found = _limit(_tree(tmp_path, "", ""))
    assert found.num_bytes == 64 * _GIB
    assert "MemTotal in /proc/meminfo" in found.source


def test_version_2_in_a_container_is_the_root_of_what_is_mounted(tmp_path: Path) -> None:
    found = _limit(_tree(tmp_path, _V2, "0::/\n", {"sys/fs/cgroup/memory.max": 4 * _GIB}))
    assert found.num_bytes == 4 * _GIB
    assert "/sys/fs/cgroup/memory.max" in found.source


@pytest.mark.parametrize("own, parent, expected", [("max", 2 * _GIB, 2), (_GIB, 2 * _GIB, 1), (3 * _GIB, "max", 3)])
def test_version_2_counts_its_own_group_and_those_above(
    own: str | int, parent: str | int, expected: int, tmp_path: Path
) -> None:
    root = _tree(
        tmp_path,
        _V2,
        "0::/user.slice/a b.scope\n",
        {"sys/fs/cgroup/user.slice/memory.max": parent, "sys/fs/cgroup/user.slice/a b.scope/memory.max": own},
    )
    assert _limit(root).num_bytes == expected * _GIB


@pytest.mark.parametrize("cgroup", ["4:memory:/docker/abc\n0::/\n", "4:cpu,memory:/docker/abc\n", "4:memory:/\n"])
def test_version_1_in_a_container_shows_its_group_as_the_root_of_the_mount(cgroup: str, tmp_path: Path) -> None:
    mounts = _CPU + _V1.format(root="/docker/abc")
    files = {"sys/fs/cgroup/memory/memory.limit_in_bytes": 2 * _GIB}
    found = _limit(_tree(tmp_path, mounts, cgroup, files))
    assert found.num_bytes == 2 * _GIB
    assert "/sys/fs/cgroup/memory/memory.limit_in_bytes" in found.source


def test_version_1_outside_a_container_goes_up_from_its_own_group(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
        "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": 5 * _GIB,
        "sys/fs/cgroup/memory/jobs/one/memory.limit_in_bytes": 9223372036854771712,
        "sys/fs/cgroup/memory/others/memory.limit_in_bytes": 1,
    }
    root = _tree(tmp_path, _V1.format(root="/"), "4:memory:/jobs/one\n3:cpu:/others\n", files)
    assert _limit(root).num_bytes == 5 * _GIB


def test_a_limit_above_the_machines_memory_is_none(tmp_path: Path) -> None:
    found = _limit(_tree(tmp_path, _V2, "0::/\n", {"sys/fs/cgroup/memory.max": 65 * _GIB}))
    assert found.num_bytes == 64 * _GIB


def test_the_address_space_counts_when_it_is_limited(tmp_path: Path) -> None:
    found = memory_limit(_tree(tmp_path, "", ""), 8 * _GIB)
    assert found is not None and found.num_bytes == 8 * _GIB
    assert "ulimit -v" in found.source


@pytest.mark.parametrize("broken", ["", "nonsense\n", " - \n", "1 2 3 - cgroup2 x y\n", "30 23 0:26 /a\\04 /b - x\n"])
def test_what_cannot_be_read_limits_nothing(broken: str, tmp_path: Path) -> None:
    assert memory_limit(tmp_path, _UNLIMITED) is None
    root = _tree(tmp_path, broken, f"{broken}0::/nowhere\n:::\n", {"proc/meminfo": broken})
    assert memory_limit(root, _UNLIMITED) is None


def test_what_does_not_fit_is_refused_with_its_numbers_settings_and_limit() -> None:
    weights = Part("of weights (dtype = float32)", 650 << 20, "set dtype to bfloat16")
    kv = kv_part(999 * _GIB, kv_memory=999 * _GIB, num_blocks=None)
    with pytest.raises(NotEnoughMemory) as refused:
        check([weights, kv], MemoryLimit(4 * _GIB, "the limit of its container"))
    assert str(refused.value) == (
        "not enough memory: 650 MiB of weights (dtype = float32) + 999 GiB of KV cache (kv_memory) + 512 MiB for "
        "Python, torch and the results of a step = 1000 GiB, and this process may use 4 GiB (the limit of its "
        "container): set dtype to bfloat16, or lower kv_memory, or raise the limit"
    )


@pytest.mark.parametrize(
    "kv_memory, num_blocks, said",
    [(None, None, "set kv_memory lower"), (5, None, "lower kv_memory"), (5, 7, r"num_blocks = 7\).*lower num_blocks")],
)
def test_the_setting_that_gave_the_pool_its_size_is_named(
    kv_memory: int | None, num_blocks: int | None, said: str
) -> None:
    with pytest.raises(NotEnoughMemory, match=said):
        check([kv_part(2 * _GIB, kv_memory=kv_memory, num_blocks=num_blocks)], MemoryLimit(_GIB, ""))


@pytest.mark.parametrize("percent, warned", [(91, True), (100, True), (89, False)])
def test_little_room_is_a_warning(percent: int, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    limit = 10 * _GIB
    check([Part("of things", percent * limit // 100 - ALLOWANCE_BYTES)], MemoryLimit(limit, "the limit"))
    assert [record.getMessage() for record in caplog.records] == (["little memory is left"] if warned else [])
    for record in caplog.records:
        assert record.levelno == logging.WARNING
        assert "10 GiB (the limit)" in vars(record)["cause"]


def test_without_a_limit_everything_goes(caplog: pytest.LogCaptureFixture) -> None:
    check([Part("of things", 1 << 60)], None)
    assert not caplog.records


def test_a_hopeless_place_is_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda: MemoryLimit(300_000_000, "the limit"))
    with pytest.raises(NotEnoughMemory, match=r"1 GiB of KV cache \(kv_memory, by default\)"):
        memory.check_start(kv_memory=None, num_blocks=None)
    with pytest.raises(NotEnoughMemory, match="512 MiB for Python, torch"):
        memory.check_start(kv_memory=None, num_blocks=10)
    monkeypatch.setattr(memory, "memory_limit", lambda: MemoryLimit(1550 << 20, "the limit"))
    memory.check_start(kv_memory=None, num_blocks=None)
    assert not caplog.records

"""How much memory this process may use, and whether what it is asked to hold fits. For the CPU: on a GPU,
gpu_memory_utilization rules.

Pages of the KV pool are taken from the system when they are first used. So a worker that was promised too much starts,
serves, and is killed under load without a word of its own; hence the arithmetic before anything is allocated.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from worker_svc import control_groups

log = logging.getLogger(__name__)

# KV of a worker on a CPU that is told neither kv_memory nor num_blocks.
DEFAULT_CPU_KV_BYTES: Final = 1 << 30
# Python, torch with its libraries, gRPC, and the intermediate results of a step: measured 450 MiB with torch 2.13 and
# SmolLM2 at 32 requests and steps of 2,048 tokens (docs/worker.md, Memory).
ALLOWANCE_BYTES: Final = 512 << 20
# Above this share of the limit a worker starts with a warning.
_WARNED_SHARE: Final = 0.9


class NotEnoughMemory(ValueError):
    """What is asked for cannot be held here. The text names the numbers, the settings and the limit."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The most that this process may use, in bytes, and who says so."""

    num_bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class Part:
    """Something that will be held: what it is, its size in bytes, and how to make it smaller ("" = there is no way)."""

    name: str
    num_bytes: int
    remedy: str = ""


def memory_limit(root: Path = Path("/"), address_space: int | None = None) -> MemoryLimit | None:
    """The smallest limit that holds for this process; None when none can be found out.

    Asked are: the machine's memory (MemTotal of /proc/meminfo); memory.max (cgroup v2) or memory.limit_in_bytes (v1) of
    this process's cgroup and of those above it, as far as they can be seen from here; RLIMIT_AS. Swap is not counted.
    `root` is where /proc and /sys are looked for; `address_space` stands for RLIMIT_AS (bytes; None = ask).
    """
    if address_space is None:
        address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    limits = [*_physical(root), *_control_groups(root)]
    if address_space not in (resource.RLIM_INFINITY, -1):
        limits.append(MemoryLimit(address_space, "this process's address space: ulimit -v, RLIMIT_AS"))
    return min(limits, key=lambda limit: limit.num_bytes, default=None)


def check(parts: Sequence[Part], limit: MemoryLimit | None, *, warns: bool = True) -> None:
    """Raise NotEnoughMemory when these and ALLOWANCE_BYTES exceed the limit; log a warning when little would be left
    (`warns`)."""
    if limit is None:
        return
    needed = sum(part.num_bytes for part in parts) + ALLOWANCE_BYTES
    if needed <= _WARNED_SHARE * limit.num_bytes:
        return
    shown = [f"{_gib(part.num_bytes)} {part.name}" for part in parts]
    shown.append(f"{_gib(ALLOWANCE_BYTES)} for Python, torch and the results of a step")
    remedies = [part.remedy for part in parts if part.remedy] + ["raise the limit"]
    told = (
        f"{' + '.join(shown)} = {_gib(needed)}, and this process may use {_gib(limit.num_bytes)} ({limit.source}): "
        f"{', or '.join(remedies)}"
    )
    if needed > limit.num_bytes:
        raise NotEnoughMemory(f"not enough memory: {told}")
    if warns:
        log.warning("little memory is left", extra={"cause": told})


def kv_part(num_bytes: int, *, kv_memory: int | None, num_blocks: int | None, tokens: str = "") -> Part:
    """The KV cache as a part, named after the setting that gave its size; `tokens` says how many a block holds."""
    if num_blocks is not None:
        return Part(f"of KV cache (num_blocks = {num_blocks}{tokens})", num_bytes, "lower num_blocks")
    if kv_memory is not None:
        return Part("of KV cache (kv_memory)", num_bytes, "lower kv_memory")
    return Part("of KV cache (kv_memory, by default)", num_bytes, "set kv_memory lower")


def check_start(*, kv_memory: int | None, num_blocks: int | None) -> None:
    """Raise NotEnoughMemory when it is plain before torch and the model are there: the KV cache alone is too much, or
    the place is too small for any model.

    num_blocks counts nothing yet: the size of a block is the model's and the scheduler's.
    """
    num_bytes = 0 if num_blocks is not None else kv_memory or DEFAULT_CPU_KV_BYTES
    parts = [kv_part(num_bytes, kv_memory=kv_memory, num_blocks=num_blocks)] if num_bytes else []
    check(parts, memory_limit(), warns=False)


def _gib(num_bytes: int) -> str:
    """Readable, in units of 1024, to four digits: two numbers that differ a little should not look alike."""
    size, unit = num_bytes / 2**20, "MiB"
    if size >= 1024:
        size, unit = size / 2**10, "GiB"
    return f"{size:.4g} {unit}"


def _physical(root: Path) -> Iterator[MemoryLimit]:
    for line in control_groups.lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemTotal" and (kib := value.split()[:1]) and kib[0].isdecimal():
            yield MemoryLimit(int(kib[0]) * 1024, "the memory of this machine: MemTotal in /proc/meminfo")


def _control_groups(root: Path) -> Iterator[MemoryLimit]:
    for file, text in control_groups.settings(root, "memory", "memory.max", "memory.limit_in_bytes"):
        if text.isdecimal():
            yield MemoryLimit(int(text), f"the limit of its container or control group: {file}")

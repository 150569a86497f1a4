"""What the control groups of this process allow it: cgroups of Linux, version 2 and 1, as far as they are seen here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# What mountinfo writes for a space and the like.
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


def settings(root: Path, controller: str, file_v2: str, file_v1: str) -> Iterator[tuple[Path, str]]:
    """The first line of a setting in this process's cgroup and in each above it, with the path of its file, in every
    mounted hierarchy that has `controller`. `root` is where /proc and /sys are looked for."""
    paths = _own(root, controller)
    for mount in _mounts(root, controller, file_v2, file_v1):
        path = paths.get(mount.controller)
        if path is None:
            continue
        # Inside a container the mount often shows the container's own cgroup as its root, while the path may still be
        # the host's: then only the mount itself can be seen.
        shown = Path(path).relative_to(mount.root) if Path(path).is_relative_to(mount.root) else Path()
        for directory in (shown, *shown.parents):
            file = Path(mount.point) / directory / mount.file
            for line in lines(root / str(file).lstrip("/"))[:1]:
                yield file, line.strip()


@dataclass(frozen=True, slots=True)
class _Mount:
    """A mounted hierarchy: where, which of its directories is seen there, its controller ("" = version 2), and the name
    of the setting's file."""

    point: str
    root: str
    controller: str
    file: str


def _mounts(root: Path, controller: str, file_v2: str, file_v1: str) -> Iterator[_Mount]:
    # id parent major:minor root point options [optional ...] - type source options (proc_pid_mountinfo(5))
    for line in lines(root / "proc/self/mountinfo"):
        mounted, separator, kind = line.partition(" - ")
        fields, types = mounted.split(), kind.split()
        if not separator or len(fields) < 5 or len(types) < 3:
            continue
        shown, point = (_OCTAL.sub(lambda found: chr(int(found[1], 8)), field) for field in fields[3:5])
        if types[0] == "cgroup2":
            yield _Mount(point, shown, "", file_v2)
        elif types[0] == "cgroup" and controller in types[2].split(","):
            yield _Mount(point, shown, controller, file_v1)


def _own(root: Path, controller: str) -> dict[str, str]:
    """Paths by controller, "" for version 2: lines of hierarchy:controllers:path (cgroups(7))."""
    paths = {}
    for line in lines(root / "proc/self/cgroup"):
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            paths[""] = path
        elif controller in controllers.split(","):
            paths[controller] = path
    return paths


def lines(path: Path) -> list[str]:
    """Of a file; nothing where there is none, or none that may be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []

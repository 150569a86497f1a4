"""Files whose content may be replaced while the process runs."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

# Seconds between two looks at the files.
LOOK_S: Final = 1.0

T = TypeVar("T")

log = logging.getLogger(__name__)


class Reread(Generic[T]):
    """What some files hold: `value`, whose number is `version`, from 1 on. `look_again` reads the files again when they
    have changed, once a second at most. Files that cannot be used any more are reported, once for each cause, and what
    was read last stays in use. Safe to use from several threads."""

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], T],
        *,
        name: str,
        unusable: type[Exception],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """name: what the log calls the files. unusable: what `read` raises for files that cannot be used; raised here,
        too."""
        self._paths = tuple(paths)
        self._read = read
        self._name = name
        self._unusable = unusable
        self._clock = clock
        self._lock = threading.Lock()
        self._reported = ""
        # Before the files are read: a change in between is seen with the next look.
        self._stamps = self._present_stamps()
        self.value = read()
        self.version = 1
        self._looked_at = clock()

    def look_again(self) -> int:
        """The version that is in use from now on."""
        with self._lock:
            now = self._clock()
            if now - self._looked_at >= LOOK_S:
                self._looked_at = now
                self._refresh()
            return self.version

    def _refresh(self) -> None:
        stamps = self._present_stamps()
        if stamps == self._stamps:
            return
        try:
            self.value = self._read()
        except self._unusable as error:
            if str(error) != self._reported:
                self._reported = str(error)
                log.error(
                    "%s cannot be read again: what was read last stays in use", self._name, extra={"cause": str(error)}
                )
            return
        self._stamps = stamps
        self._reported = ""
        self.version += 1
        log.info("%s were read again", self._name, extra={"files": [str(path) for path in self._paths]})

    def _present_stamps(self) -> list[tuple[int, ...] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, ...] | None:
    """What changes with the file; None: it cannot be looked at."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev

"""Where converted and downloaded models are kept, and how processes take turns there. No torch."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


def cache_root() -> Path:
    """$STEPFENCE_CACHE_DIR, else ~/.cache/stepfence. `models` below it holds converted models, `downloads` what they
    come from."""
    configured = os.environ.get("STEPFENCE_CACHE_DIR")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "stepfence"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock on a file (made when missing) that other processes of this machine respect; ends with
    them. Waits for a process that holds it, and says so in the log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process, which holds %s", path, extra={"path": str(path)})
            fcntl.flock(handle, fcntl.LOCK_EX)
            log.info("went on: %s is free", path, extra={"path": str(path)})
        yield

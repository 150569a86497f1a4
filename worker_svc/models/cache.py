"""Where converted and downloaded models are kept, and how processes take turns there. No torch."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


class NoCacheDirectory(OSError):
    """It is not known where models are kept. The message says what to set."""


def cache_root() -> Path:
    """$STEPFENCE_CACHE_DIR, else ~/.cache/stepfence. `models` below it holds converted models, `downloads` what they
    come from. Raises NoCacheDirectory when it lies below a home directory that is not known."""
    configured = os.environ.get("STEPFENCE_CACHE_DIR")
    try:
        return Path(configured).expanduser() if configured else Path.home() / ".cache" / "stepfence"
    except RuntimeError as error:
        whose = f"STEPFENCE_CACHE_DIR is {configured!r}, but that user has" if configured else "this user has"
        raise NoCacheDirectory(
            f"{whose} no home directory to keep models in: set STEPFENCE_CACHE_DIR to a directory that can be written"
        ) from error


def explained(error: OSError) -> str:
    """The text of a failure in the cache, which names the setting that chooses another directory."""
    if isinstance(error, NoCacheDirectory):
        return str(error)
    return f"{error}; STEPFENCE_CACHE_DIR chooses where models are kept"


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

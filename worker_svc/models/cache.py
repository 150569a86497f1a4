"""Where converted and downloaded models are kept, and how processes take turns there. No torch."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_root() -> Path:
    """$STEPFENCE_CACHE_DIR, else ~/.cache/stepfence. `models` below it holds converted models, `downloads` what they
    come from."""
    configured = os.environ.get("STEPFENCE_CACHE_DIR")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "stepfence"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock on a file (made when missing) that other processes of this machine respect; ends with
    them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield

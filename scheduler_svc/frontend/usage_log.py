"""The record of use: a line of JSON for each request that was accepted and has ended, for billing and audit. No line
holds text or token ids of a request.

The lines are written by a thread. A file that was moved away (logrotate) is made anew."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import logging.handlers
import queue
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scheduler_svc.frontend.usage import Usage

# Lines that wait for the disk; more are lost, and counted.
_MAX_WAITING: Final = 100_000
# Seconds between two complaints, and for the last lines.
_QUIET_S: Final = 60.0
_CLOSE_S: Final = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """One request. finish: "stop", "length", or the reason of its failure. Times in seconds; first_token_s None: it had
    no output."""

    request_id: str
    tenant: str
    model: str
    # "grpc" or "openai".
    api: str
    finish: str
    usage: Usage
    first_token_s: float | None
    total_s: float


class UsageLog:
    """Where the records go. path "-": standard output. `close` writes what waits."""

    def __init__(self, path: Path, *, max_waiting: int = _MAX_WAITING) -> None:
        """Raises OSError when the file cannot be written."""
        writer: logging.Handler
        if str(path) == "-":
            writer = _Stream(sys.stdout)
        else:
            writer = _File(path, encoding="utf-8")
        writer.setFormatter(logging.Formatter("%(message)s"))
        # None: the end.
        self._queue: queue.Queue[logging.LogRecord | None] = queue.Queue(max_waiting)
        self._writer = writer
        self._thread = threading.Thread(target=self._write, name="usage-log", daemon=True)
        self._lost = 0
        self._complaints = _Rarely()
        self._thread.start()

    def add(self, record: UsageRecord) -> None:
        """Write it soon. Never waits."""
        try:
            self._queue.put_nowait(logging.makeLogRecord({"msg": _line(record), "levelno": logging.INFO}))
        except queue.Full:
            self._lost += 1
            if self._complaints.is_due():
                log.error("records of use are lost: their file takes them too slowly", extra={"num_lost": self._lost})

    def close(self) -> None:
        """Write what waits, and end the thread; a disk that takes nothing is given up after a while."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)

    def _write(self) -> None:
        while (record := self._queue.get()) is not None:
            self._writer.handle(record)
        with contextlib.suppress(OSError):
            self._writer.close()


class _Rarely:
    """Whether a complaint is due: the first one, and others after a while."""

    def __init__(self) -> None:
        self._last = -_QUIET_S

    def is_due(self) -> bool:
        now = time.monotonic()
        if now - self._last < _QUIET_S:
            return False
        self._last = now
        return True


class _Complains(logging.Handler):
    """A handler whose failures are said in the log, now and then. While the disk is full, lines are lost."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._complaints = _Rarely()

    def handleError(self, record: logging.LogRecord) -> None:
        if self._complaints.is_due():
            log.error("a record of use could not be written", extra={"cause": str(sys.exc_info()[1])})


class _File(_Complains, logging.handlers.WatchedFileHandler):
    pass


class _Stream(_Complains, logging.StreamHandler):  # type: ignore[type-arg]
    pass


def _line(record: UsageRecord) -> str:
    usage = record.usage
    now = datetime.datetime.now(datetime.UTC)
    return json.dumps(
        {
            "time": now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "request_id": record.request_id,
            "tenant": record.tenant,
            "model": record.model,
            "api": record.api,
            "finish": record.finish,
            "prompt_tokens": usage.num_prompt_tokens,
            "cached_tokens": usage.num_cached_tokens,
            "completion_tokens": usage.num_completion_tokens,
            "preemptions": usage.num_preemptions,
            "recomputed_tokens": usage.num_recomputed_tokens,
            "queued_s": round(usage.queued_ns / 1e9, 6),
            "preempted_s": round(usage.preempted_ns / 1e9, 6),
            "first_token_s": None if record.first_token_s is None else round(record.first_token_s, 6),
            "total_s": round(record.total_s, 6),
        },
        separators=(",", ":"),
    )

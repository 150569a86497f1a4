"""How processes take turns in the cache of models."""

from __future__ import annotations

import fcntl
import logging
import threading
from pathlib import Path

import pytest

from tests.support.processes import wait_until
from worker_svc.models.cache import locked


def test_f129_a_lock_that_is_held_elsewhere_is_waited_for_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path, went_on = tmp_path / "downloads" / "model.lock", threading.Event()

    def take_it() -> None:
        with locked(path):
            went_on.set()

    path.parent.mkdir()
    # Another open file holds it, as that of another process would.
    with path.open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        waiting = threading.Thread(target=take_it, daemon=True)
        waiting.start()
        wait_until(lambda: caplog.records, "the wait is in the log")
        assert not went_on.is_set()
    waiting.join(30)
    assert went_on.is_set()
    first, second = caplog.messages
    assert first == f"waiting for another process, which holds {path}"
    assert second == f"went on: {path} is free"


def test_f129_a_free_lock_is_taken_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with locked(tmp_path / "model.lock"):
        pass
    assert caplog.messages == []

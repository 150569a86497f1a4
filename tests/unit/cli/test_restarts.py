"""When `stepfence up` starts a part again, and when it gives up."""

from __future__ import annotations

import signal

from scheduler_svc.cli.restarts import PAUSES_S, RESTARTS_IN_WINDOW, SETTLED_S, WINDOW_S, Restarts, ending


def test_the_pause_grows_while_a_part_ends_soon() -> None:
    restarts = Restarts()
    pauses = [restarts.after_end(now=float(index), lived_s=1.0) for index in range(RESTARTS_IN_WINDOW)]
    assert pauses == [0.5, 1.0, 2.0, 5.0, 5.0]


def test_a_part_that_had_settled_is_started_again_at_once() -> None:
    restarts = Restarts()
    restarts.after_end(now=0.0, lived_s=1.0)
    assert restarts.after_end(now=50.0, lived_s=SETTLED_S + 1) == PAUSES_S[0]


def test_too_many_restarts_within_the_window_are_refused() -> None:
    restarts = Restarts()
    for index in range(RESTARTS_IN_WINDOW):
        assert restarts.after_end(now=float(index), lived_s=100.0) is not None
    assert restarts.after_end(now=WINDOW_S, lived_s=100.0) is None
    # The first of them has left the window.
    assert restarts.after_end(now=WINDOW_S + 0.5, lived_s=100.0) is not None
    assert restarts.after_end(now=WINDOW_S + 0.6, lived_s=100.0) is None


def test_f109_a_killed_process_is_not_said_to_have_told_why() -> None:
    assert "last lines" in ending(1)
    assert "last lines" not in ending(-signal.SIGKILL) and "memory" in ending(-signal.SIGKILL)
    assert ending(-signal.SIGSEGV) == "signal SIGSEGV"

"""The parts of `stepfence up`: their ports, their log lines, their end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.cli import restarts, up
from scheduler_svc.cli.merged_log import MergedLog
from scheduler_svc.cli.part import Part, tethered
from scheduler_svc.cli.ports import free_address
from scheduler_svc.config import SettingsError, UpSettings

_PATIENCE_S = 30.0


def _part(code: str) -> tuple[Part, list[tuple[str, str]]]:
    lines: list[tuple[str, str]] = []
    part = Part("worker", [sys.executable, "-u", "-c", code], dict(os.environ), lambda *line: lines.append(line))
    return part, lines


async def _until(lines: list[tuple[str, str]], text: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not any(text in line for _, line in lines):
        assert time.monotonic() < deadline, lines
        await asyncio.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_taken_port_gives_the_next_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        chosen: set[str] = set()
        first = free_address(f"127.0.0.1:{port}", chosen)
        second = free_address(f"127.0.0.1:{port}", chosen)
    assert port < int(first.rpartition(":")[2]) < int(second.rpartition(":")[2])
    assert chosen == {first, second}


def test_whoever_must_move_takes_no_port_that_another_part_asks_for() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        moved = free_address(f"127.0.0.1:{port}", set(), frozenset({port, port + 1, port + 2}))
    assert int(moved.rpartition(":")[2]) > port + 2
    own = free_address("127.0.0.1:0", set())
    assert free_address(own, set(), frozenset({int(own.rpartition(":")[2])})) == own


def test_up_moves_only_the_part_whose_port_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = UpSettings(
            listen=f"127.0.0.1:{port}",
            scheduler_listen=f"127.0.0.1:{port + 1}",
            worker_listen=f"127.0.0.1:{port + 2}",
            workers=2,
            metrics_listen=None,
            openai=False,
            runner="scripted",
        )
        chosen = up.choose_addresses(settings, MergedLog("text"))
    told = capsys.readouterr().err.splitlines()
    assert int(chosen.frontend.rpartition(":")[2]) > port + 3
    assert told[0].strip() == f"up 127.0.0.1:{port} is taken: using {chosen.frontend} instead (--listen)"
    # The other ports may be taken by somebody else on this machine, but never by the front end.
    assert not {f"127.0.0.1:{port + 1}", f"127.0.0.1:{port + 2}", f"127.0.0.1:{port + 3}"} & {chosen.frontend}


def test_up_says_which_worker_moved(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = UpSettings(
            listen="127.0.0.1:0",
            scheduler_listen="127.0.0.1:0",
            worker_listen=f"127.0.0.1:{port - 1}",
            workers=2,
            metrics_listen=None,
            openai=False,
            runner="scripted",
        )
        chosen = up.choose_addresses(settings, MergedLog("json"))
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    moved = next(line for line in told if line["message"].startswith(f"127.0.0.1:{port} "))
    assert moved["message"] == f"127.0.0.1:{port} is taken: using {chosen.workers[1]} instead (--worker-listen)"
    assert moved["level"] == "warning"


def test_a_line_of_up_itself_has_the_level_it_is_said_with(capsys: pytest.CaptureFixture[str]) -> None:
    for level in ("info", "warning", "error"):
        MergedLog("json").show("up", "told", level)
    assert [json.loads(line)["level"] for line in capsys.readouterr().err.splitlines()] == ["info", "warning", "error"]


def test_a_merged_log_marks_every_line_with_its_part(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        ("worker-1", '{"time": "T", "level": "info", "logger": "l", "message": "ready"}'),
        ("scheduler", "Traceback (most recent call last):"),
        ("scheduler", '{"cut off'),
        ("frontend", "{}"),
        ("up", "Ctrl-C ends it."),
    ]
    for line in lines:
        MergedLog("json").show(*line)
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["part"] for line in told] == [part for part, _ in lines]
    assert told[0] == {"time": "T", "level": "info", "logger": "l", "message": "ready", "part": "worker-1"}
    assert [line.get("message") for line in told[1:]] == [lines[1][1], lines[2][1], None, lines[4][1]]
    for line in lines:
        MergedLog("text").show(*line)
    assert capsys.readouterr().err.splitlines() == [f"{part:>9} {line}" for part, line in lines]


def test_port_zero_gives_any_free_port_and_a_strange_host_is_an_error() -> None:
    assert int(free_address("127.0.0.1:0", set()).rpartition(":")[2]) > 0
    with pytest.raises(SettingsError, match=r"192\.0\.2\.1:50051: no port from 50051 on"):
        free_address("192.0.2.1:50051", set())


async def test_output_is_passed_on_line_by_line_to_the_last_piece() -> None:
    part, lines = _part("import sys; print('one'); print('x' * 3_000_000); sys.stderr.write('rest')")
    await part.start()
    assert await part.wait() == 0
    texts = [line for name, line in lines if name == "worker"]
    assert texts[0] == "one" and texts[-1] == "rest"
    assert "".join(texts[1:-1]) == "x" * 3_000_000


async def test_a_part_is_asked_to_end_and_its_exit_code_is_told() -> None:
    part, lines = _part(
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\nprint('up')\ntime.sleep(600)"
    )
    await part.start()
    await _until(lines, "up")
    assert part.exit_code is None
    assert await part.end(_PATIENCE_S) == 3 == part.exit_code


async def test_a_part_that_does_not_end_is_killed_with_all_it_started() -> None:
    part, lines = _part(
        "import signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('child', child.pid)\ntime.sleep(600)"
    )
    await part.start()
    await _until(lines, "child")
    child = int(lines[0][1].split()[1])
    assert await part.end(0.2) == -signal.SIGKILL
    deadline = time.monotonic() + _PATIENCE_S
    while _is_alive(child):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_part_that_never_started_ends_at_once() -> None:
    part, _ = _part("")
    assert await part.end(1.0) is None and part.exit_code is None
    part.signal(signal.SIGTERM)


def test_parts_do_not_outlive_a_killed_parent() -> None:
    child = tethered([sys.executable, "-u", "-c", "import os, time; print(os.getpid()); time.sleep(600)"])
    child[child.index("scheduler_svc.cli.tether") + 1] = "PARENT"
    code = (
        f"import os, subprocess, time\nchild = {child!r}\n"
        "child[child.index('PARENT')] = str(os.getpid())\nsubprocess.Popen(child)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert _is_alive(pid)
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + _PATIENCE_S
        while _is_alive(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_part_whose_parent_is_gone_already_does_not_start() -> None:
    command = [sys.executable, "-m", "scheduler_svc.cli.tether", "1", sys.executable, "-c", "print('started')"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (answer.returncode, answer.stdout) == (1, "")


class _Unforkable:
    """A part of which no process can be made, for some attempts; then `up` is ending."""

    name = "frontend"

    def __init__(self, num_failures: int) -> None:
        self.num_left = num_failures

    async def start(self) -> bool:
        if not self.num_left:
            return False
        self.num_left -= 1
        raise BlockingIOError(11, "Resource temporarily unavailable")


async def test_a_part_of_which_no_process_can_be_made_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(restarts, "PAUSES_S", (0.0,))
    free = "127.0.0.1:0"
    settings = UpSettings(
        runner="scripted", workers=0, listen=free, openai_listen=free, scheduler_listen=free, metrics_listen=None
    )
    running = up._Up(settings)
    running._ready_once = True
    part: Any = _Unforkable(2)
    await asyncio.wait_for(running._keep(part), 30)
    assert part.num_left == 0
    said = capsys.readouterr().err
    assert said.count("no process could be made for it: Resource temporarily unavailable): starting it again") == 2

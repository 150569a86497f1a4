"""Logs: JSON lines with facts as fields, readable on a terminal."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from scheduler_svc import logs
from worker_svc import logs as worker_logs


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _keep_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def _logged(log_format: str, stream: io.StringIO) -> str:
    logs.configure(log_format, stream=stream)
    logging.getLogger("stepfence.test").info(
        "preempted %s", "r1", extra={"victim": "r1", "blocks": 3, "level": "low", "name_": "삼겹살"}
    )
    return stream.getvalue()


@pytest.mark.parametrize(("log_format", "stream"), [("json", _Terminal()), ("auto", io.StringIO())])
def test_json_lines_carry_facts_as_fields(log_format: str, stream: io.StringIO) -> None:
    line = json.loads(_logged(log_format, stream))
    assert line["message"] == "preempted r1" and line["victim"] == "r1" and line["blocks"] == 3
    assert line["level"] == "info" and line["level_"] == "low"
    assert line["name_"] == "삼겹살"
    assert line["logger"] == "stepfence.test" and line["time"].endswith("Z")


@pytest.mark.parametrize(("log_format", "stream"), [("text", io.StringIO()), ("auto", _Terminal())])
def test_a_terminal_gets_readable_lines(log_format: str, stream: io.StringIO) -> None:
    line = _logged(log_format, stream)
    assert "INFO" in line and "preempted r1  victim=r1  blocks=3" in line and not line.startswith("{")


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_traceback_is_part_of_the_record(log_format: str) -> None:
    stream = io.StringIO()
    logs.configure(log_format, stream=stream)
    try:
        raise KeyError("gone")
    except KeyError:
        logging.getLogger("stepfence.test").exception("failed", extra={"path": io.StringIO})
    text = stream.getvalue()
    assert "KeyError: 'gone'" in text and "Traceback" in text
    if log_format == "json":
        assert text.count("\n") == 1


def test_configuring_again_does_not_double_lines() -> None:
    first, second = io.StringIO(), io.StringIO()
    logs.configure("json", stream=first)
    assert _logged("json", second).count("\n") == 1
    assert first.getvalue() == ""


# A line break, escape codes of one and of two bytes, a line separator, a change of direction, half a surrogate pair.
HOSTILE = "a\n12:00:00.000 ERROR   forged\x1b[2J\x9b2J\u2028\u202e\ud800"


@pytest.mark.parametrize("configure", [logs.configure, worker_logs.configure], ids=["scheduler", "worker"])
@pytest.mark.parametrize("log_format", ["json", "text"])
def test_f99_what_a_client_chose_stays_on_its_line_and_moves_no_cursor(
    log_format: str, configure: Callable[..., None]
) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)
    configure(log_format, stream=stream)
    log = logging.getLogger("stepfence.test")
    log.info("ended %s", HOSTILE, extra={"request_id": HOSTILE, "삼": "é"})
    text = raw.getvalue().decode("utf-8")
    assert text.count("\n") == 1 and text[:-1].isprintable()
    if log_format == "json":
        assert json.loads(text)["request_id"] == HOSTILE
    else:
        assert "  삼=é" in text
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.exception("failed")
    stream.flush()
    lines = raw.getvalue().decode("utf-8").split("\n")[1:-1]
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("12:00") for line in lines[1:])


@pytest.mark.parametrize("module", [logs, worker_logs], ids=["scheduler", "worker"])
def test_one_place_in_the_code_writes_a_bounded_number_of_lines(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_LINES", 3)
    stream = io.StringIO()
    module.configure("json", stream=stream)
    for number in range(10):
        logging.getLogger("a").warning("a peer is wrong", extra={"number": number})
    logging.getLogger("a").warning("another place")
    # The period is over.
    handler: Any = logging.getLogger().handlers[0]
    handler._ends_at = 0.0
    logging.getLogger("a").warning("later")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["message"] for line in lines[:4]] == ["a peer is wrong"] * 3 + ["another place"]
    assert lines[4]["num_lines"] == 7 and lines[4]["level"] == "warning"
    assert lines[5]["message"] == "later"


@pytest.mark.parametrize("module", ["scheduler_svc.server", "worker_svc.server"])
def test_grpc_writes_no_lines_of_its_own_unless_asked_to(module: str) -> None:
    code = f"import {module}, os; print(os.environ['GRPC_VERBOSITY'])"
    clean = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    for given, kept in ((clean, "NONE"), ({**clean, "GRPC_VERBOSITY": "INFO"}, "INFO")):
        answer = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True)
        assert answer.stdout.strip() == kept

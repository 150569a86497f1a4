"""The record of use: one line for each accepted request, with what it has cost, however it ends."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.frontend.usage import Usage
from scheduler_svc.frontend.usage_log import UsageLog, UsageRecord
from tests.contract.frontend.harness import complete, front_end, refusal, sampled, text_request, until
from tests.contract.openai.harness import COMPLETIONS, Port
from tests.support.session_double import INTERNAL, SessionDouble


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_every_end_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "use.jsonl"
    async with SessionDouble() as double, front_end(double, usage_log=path, openai_listen="127.0.0.1:0") as under_test:
        stub = under_test.stub

        async def next_one() -> Any:
            request = await double.next_request()
            request.accept()
            request.send_tokens(b"ab")
            return request

        # Ended by length, and by a stop string behind which the scheduler had gone on.
        call = stub.Complete(complete(text_request("secret words", request_id="length")), timeout=30)
        (await next_one()).end_length()
        await call
        call = stub.Complete(complete(sampled("four", stop=["b"])), timeout=30)
        request = await next_one()
        await request.text_ended()
        request.end_ok(1, num_tokens=2)
        await call
        # Failed; refused, which costs nothing; left by its client, and by one of the other port.
        failing = stub.Complete(complete(text_request(request_id="failed")), timeout=30)
        (await next_one()).fail(INTERNAL, "WORKER_FAULT")
        await refusal(failing)
        refused = stub.Complete(complete(text_request(request_id="refused")), timeout=30)
        (await double.next_request()).refuse(8, "QUEUE_FULL")
        await refusal(refused)
        left = stub.Generate(text_request(request_id="left"), timeout=30)
        request = await next_one()
        while not (await left.read()).delta.text:
            pass
        left.cancel()
        await request.cancelled()
        double.play = lambda submit: [b"xyz"]
        await Port(under_test.process.openai_address).post(COMPLETIONS, {"prompt": ["a", "b"]})
        await until(lambda: len(lines(path)) == 6)
        await under_test.until_nothing_is_left()
    found = lines(path)
    by_id = {line["request_id"]: line for line in found}
    assert [line["finish"] for line in found] == ["length", "stop", "WORKER_FAULT", "CLIENT_GONE", "length", "length"]
    assert [line["api"] for line in found] == ["grpc"] * 4 + ["openai"] * 2
    assert "refused" not in by_id
    first = by_id["length"]
    assert (first["prompt_tokens"], first["cached_tokens"], first["completion_tokens"]) == (12, 3, 2)
    assert (first["preemptions"], first["recomputed_tokens"], first["queued_s"]) == (2, 11, 1.5)
    assert (first["tenant"], first["model"]) == ("", "bytes")
    assert 0 <= first["first_token_s"] <= first["total_s"]
    # As the scheduler said it after the client had left.
    assert (by_id["left"]["completion_tokens"], by_id["left"]["preemptions"]) == (2, 2)
    assert "secret" not in path.read_text()


async def test_a_client_that_left_is_recorded_when_the_front_end_stops_before_the_scheduler_answers(
    tmp_path: Path,
) -> None:
    path = tmp_path / "use.jsonl"
    async with SessionDouble() as double, front_end(double, usage_log=path) as under_test:
        double.answers_cancels = False
        call = under_test.stub.Generate(text_request("four"), timeout=30)
        request = await double.next_request()
        request.accept()
        request.send_tokens(b"abc")
        while not (await call.read()).delta.text:
            pass
        call.cancel()
        await request.cancelled()
    (line,) = lines(path)
    assert (line["finish"], line["prompt_tokens"], line["completion_tokens"]) == ("CLIENT_GONE", 4, 3)


def record(index: int) -> UsageRecord:
    return UsageRecord(f"r{index}", "acme", "m", "grpc", "stop", Usage(), None, 1.0)


def test_a_file_that_was_moved_away_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "use.jsonl"
    log = UsageLog(path)
    log.add(record(0))
    log.close()
    log = UsageLog(path)
    os.rename(path, tmp_path / "use.1")
    log.add(record(1))
    log.close()
    assert [line["request_id"] for line in lines(tmp_path / "use.1") + lines(path)] == ["r0", "r1"]


def test_what_cannot_be_written_is_said_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = UsageLog(Path("/dev/full"))
    for index in range(100):
        log.add(record(index))
    log.close()
    assert sum("could not be written" in one.message for one in caplog.records) == 1
    with pytest.raises(OSError, match="No such file"):
        UsageLog(tmp_path / "missing" / "use.jsonl")


def test_lines_that_the_disk_does_not_take_are_counted(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    log = UsageLog(tmp_path / "pipe", max_waiting=10)
    for index in range(2000):
        log.add(record(index))
    assert any("are lost" in one.message for one in caplog.records)
    os.close(reader)
    log.close()

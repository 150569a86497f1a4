"""`stepfence generate` against a front end of the test's own making, over real gRPC."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from scheduler_svc.cli import generate
from stepfence.v1 import generation_service_pb2 as pb
from stepfence.v1 import generation_service_pb2_grpc as pb_grpc
from stepfence.v1 import usage_pb2

Script = Callable[[pb.GenerateRequest, grpc.ServicerContext], Iterator[pb.GenerateResponse]]


class _FrontEnd(pb_grpc.GenerationServiceServicer):
    """Plays `script` and keeps what it was asked."""

    def __init__(self) -> None:
        self.script: Script = lambda request, context: iter(())
        self.requests: list[pb.GenerateRequest] = []
        self.gone = threading.Event()

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        context.add_callback(self.gone.set)
        yield from self.script(request, context)


@pytest.fixture
def front_end() -> Iterator[tuple[_FrontEnd, str]]:
    server = grpc.server(futures.ThreadPoolExecutor(2), options=(("grpc.so_reuseport", 0),))
    servicer = _FrontEnd()  # type: ignore[abstract]
    pb_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait()


def _accepted() -> pb.GenerateResponse:
    return pb.GenerateResponse(accepted=pb.Accepted(request_id="r1", num_prompt_tokens=5))


def _delta(text: str, *ids: int) -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.Delta(text=text, token_ids=ids))


def _finished() -> pb.GenerateResponse:
    usage = usage_pb2.Usage(num_prompt_tokens=5, num_completion_tokens=3, num_cached_tokens=4, num_preemptions=2)
    usage.num_recomputed_tokens = 7
    usage.queued.FromMilliseconds(12)
    usage.preempted.FromMilliseconds(1500)
    return pb.GenerateResponse(finished=pb.Finished(reason=usage_pb2.FINISH_REASON_LENGTH, usage=usage))


def _run(target: str, **options: Any) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = generate.run(generate.GenerateOptions(prompt="hello", target=target, **options), out, err)
    return code, out.getvalue(), err.getvalue()


def _refuse(context: Any, code: grpc.StatusCode, message: str, *details: Any) -> None:
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    status = status_pb2.Status(code=code.value[0], message=message, details=packed)
    context.abort_with_status(rpc_status.to_status(status))


def test_text_goes_to_stdout_and_the_cost_to_stderr(front_end: tuple[_FrontEnd, str]) -> None:
    servicer, target = front_end
    servicer.script = lambda request, context: iter([_accepted(), _delta(" wor", 1), _delta("ld", 2, 3), _finished()])
    code, out, err = _run(target)
    assert (code, out) == (0, " world\n")
    assert err == (
        "r1 [length] 5 prompt tokens (4 cached), 3 completion tokens, queued 0.012 s, preempted 2x for 1.500 s, "
        "7 tokens computed again\n"
    )


def test_json_is_one_event_a_line(front_end: tuple[_FrontEnd, str]) -> None:
    servicer, target = front_end
    servicer.script = lambda request, context: iter([_accepted(), _delta("é\n", 1), _finished()])
    code, out, err = _run(target, json_lines=True)
    events = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert events[0] == {"accepted": {"request_id": "r1", "num_prompt_tokens": 5}}
    assert events[1]["delta"] == {"index": 0, "text": "é\n", "token_ids": [1]}
    assert events[2]["finished"]["reason"] == "FINISH_REASON_LENGTH"
    assert events[2]["finished"]["usage"]["num_preemptions"] == 2


def test_flags_reach_the_request_and_what_is_not_given_stays_unset(front_end: tuple[_FrontEnd, str]) -> None:
    servicer, target = front_end
    _run(target)
    _run(
        target,
        max_tokens=0,
        temperature=0.0,
        seed=2**64 - 1,
        stop=("a", "b"),
        priority=-1,
        chat=True,
        system="be brief",
    )
    bare, full = servicer.requests
    assert bare == pb.GenerateRequest(text="hello", sampling=bare.sampling)
    assert not bare.sampling.HasField("temperature") and not bare.sampling.HasField("max_tokens")
    assert full.sampling.HasField("max_tokens") and full.sampling.HasField("temperature")
    assert (full.sampling.seed, list(full.sampling.stop), full.priority) == (2**64 - 1, ["a", "b"], -1)
    assert [(m.role, m.content) for m in full.chat.messages] == [("system", "be brief"), ("user", "hello")]


def test_a_number_that_fits_no_field_is_said_before_anything_is_sent(front_end: tuple[_FrontEnd, str]) -> None:
    servicer, target = front_end
    code, _, err = _run(target, max_tokens=2**40)
    assert code == 2 and err.startswith("error: ") and servicer.requests == []


def test_a_refusal_shows_status_reason_advice_and_the_field(front_end: tuple[_FrontEnd, str]) -> None:
    servicer, target = front_end
    info = error_details_pb2.ErrorInfo(reason="EXCEEDS_KV_CAPACITY", domain="stepfence")
    bad = error_details_pb2.BadRequest()
    bad.field_violations.add(field="sampling.max_tokens", description="at most 40")

    def script(request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "needs 90 tokens, 64 available", info, bad)
        yield _accepted()

    servicer.script = script
    code, out, err = _run(target)
    assert (code, out) == (2, "")
    assert (
        "INVALID_ARGUMENT / EXCEEDS_KV_CAPACITY: needs 90 tokens, 64 available; sampling.max_tokens: at most 40" in err
    )
    assert "lower --max-tokens" in err
    assert "[failed]" not in err, "what was not accepted costs nothing"


def test_a_failure_on_the_way_shows_what_was_used(front_end: tuple[_FrontEnd, str]) -> None:
    servicer, target = front_end
    info = error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="stepfence")
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(2500)

    def script(request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        yield _accepted()
        yield _delta("half", 1)
        _refuse(
            context, grpc.StatusCode.RESOURCE_EXHAUSTED, "full", info, retry, usage_pb2.Usage(num_completion_tokens=1)
        )

    servicer.script = script
    code, out, err = _run(target)
    assert (code, out) == (1, "half\n")
    assert "the server asks to wait 2.5 s" in err
    assert err.splitlines()[-1].startswith("r1 [failed] 0 prompt tokens, 1 completion tokens")
    servicer.script = script
    _, out, _ = _run(target, json_lines=True)
    error = json.loads(out.splitlines()[-1])["error"]
    assert (error["status"], error["reason"]) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
    assert error["usage"]["num_completion_tokens"] == 1


def test_a_failure_that_tells_no_cost_tells_the_request_all_the_same(front_end: tuple[_FrontEnd, str]) -> None:
    servicer, target = front_end

    def script(request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        yield _accepted()
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    servicer.script = script
    code, _, err = _run(target)
    assert (code, err.splitlines()[-1]) == (1, "r1 [failed] its cost is not known")


def test_nobody_there_says_how_to_start_somebody() -> None:
    code, _, err = _run("127.0.0.1:1")
    assert code == 1 and "stepfence up" in err and "127.0.0.1:1" in err


def test_ctrl_c_ends_the_request_on_the_server(front_end: tuple[_FrontEnd, str]) -> None:
    servicer, target = front_end
    release = threading.Event()

    def script(request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        yield _accepted()
        yield _delta("first", 1)
        release.wait(60)

    servicer.script = script
    command = [sys.executable, "-m", "scheduler_svc", "generate", "hello", "--target", target]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(5) == "first"
        process.send_signal(signal.SIGINT)
        assert servicer.gone.wait(30)
        release.set()
        assert process.wait(30) == 130
        assert process.stderr.read().splitlines()[-2:] == [
            "error: interrupted",
            "r1 [interrupted] its cost is not known",
        ]


def test_output_that_nobody_reads_any_more_ends_the_request_quietly(front_end: tuple[_FrontEnd, str]) -> None:
    servicer, target = front_end

    def script(request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        while context.is_active():
            yield _delta("line\n", 1)

    servicer.script = script
    command = f"{sys.executable} -m scheduler_svc generate hello --target {target} | head -n 1"
    answer = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert (answer.stdout, answer.stderr) == ("line\n", "")
    assert servicer.gone.wait(30)


_WRONG_USAGE: list[tuple[tuple[str, ...], bytes, str]] = [
    (("generate", "hi", "--seed", "99999999999999999999999"), b"", "--seed"),
    (("generate", "hi", "--priority", "99999999999"), b"", "--priority"),
    (("generate", "hi", "--top-k", "-99999999999"), b"", "--top-k"),
    (("generate", "hi", "--max-tokens", "99999999999"), b"", "--max-tokens"),
    (("generate", "hi", "--min-tokens", "99999999999"), b"", "--min-tokens"),
    (("generate", "-"), b"a\xff", "standard input is not UTF-8"),
    (("generate", "a\udcff"), b"", "the prompt is not UTF-8"),
    (("generate", "a", "--stop", "\udcff"), b"", "--stop is not UTF-8"),
    (("generate", "a", "--chat", "--system", "\udcff"), b"", "--system is not UTF-8"),
    (("generate", "a", "--cache-salt", "\udcff"), b"", "--cache-salt is not UTF-8"),
    (("generate", "hi", "--system", "be kind"), b"", "--system"),
    (("generate", "hi", "--target", ""), b"", "--target"),
    (("health", "--target", ""), b"", "must be HOST:PORT"),
    (("health", "--target", "localhost"), b"", "must be HOST:PORT"),
    (("status", "--target", " "), b"", "must be HOST:PORT"),
    (("audit", "--target", "localhost:"), b"", "must be HOST:PORT"),
    (("drain", "--deadline-s", "inf"), b"", "--deadline-s"),
    (("drain", "--deadline-s", "-1"), b"", "--deadline-s"),
    (("reset-cache", "--target", "localhost"), b"", "must be HOST:PORT"),
]


@pytest.mark.parametrize(("arguments", "typed", "told"), _WRONG_USAGE)
def test_wrong_usage_names_the_flag_and_exits_with_2(arguments: tuple[str, ...], typed: bytes, told: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "scheduler_svc", *map(os.fsencode, arguments)],
        input=typed,
        capture_output=True,
        timeout=60,
        check=False,
    )
    error = answer.stderr.decode(errors="replace")
    assert (answer.returncode, answer.stdout) == (2, b""), error
    assert told in error and "Traceback" not in error


def test_a_prompt_beyond_what_grpc_carries_is_refused_like_one_that_is_too_large(
    front_end: tuple[_FrontEnd, str],
) -> None:
    out, err = io.StringIO(), io.StringIO()
    options = generate.GenerateOptions(prompt="a" * (16 * 1024 * 1024 + 1), target=front_end[1])
    assert generate.run(options, out, err) == 2
    assert err.getvalue().startswith("error: INVALID_ARGUMENT / PROMPT_TOO_LARGE: the request has ")
    assert "shorten the prompt" in err.getvalue()
    assert front_end[0].requests == []

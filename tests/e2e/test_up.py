"""`stepfence up` from start to end, with scripted workers: ready, called, broken, ended."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import openai
import pytest

from scheduler_svc.cli.health import check
from scheduler_svc.cli.part import tethered
from scheduler_svc.cli.restarts import RESTARTS_IN_WINDOW
from tests.support.processes import PATIENCE_S, Process, start_process, wait_until

# From the signal to the end of the last process.
_END_S = 5.0

Up = Callable[..., Process]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """Starts `stepfence up` with scripted workers on free ports."""
    started: list[Process] = []

    def start(*arguments: str, environment: dict[str, str] | None = None) -> Process:
        names = ("--listen", "--openai-listen", "--scheduler-listen", "--worker-listen")
        ports = [argument for name in names for argument in (name, "127.0.0.1:0")]
        command = [sys.executable, "-m", "scheduler_svc", "up", "--runner", "scripted", "--metrics-listen", "none"]
        log = tmp_path / f"up-{len(started)}.log"
        started.append(start_process("up", [*command, *ports, *arguments], log, environment))
        return started[-1]

    yield start
    for process in started:
        children = _parts(process)
        if process.is_running:
            process.kill()
        wait_until(partial(_all_ended, children), "no part outlives up")


def _parts(process: Process) -> list[int]:
    """Process ids of the children of `up`."""
    try:
        return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _all_ended(pids: list[int]) -> bool:
    return not any(map(_is_alive, pids))


def _part(process: Process, words: str) -> int:
    """Process id of the child whose command line has these words."""
    for pid in _parts(process):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        if words in command:
            return pid
    raise AssertionError(f"no child runs {words!r}\n{process.tail()}")


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _has_count(process: Process, words: str, count: int) -> bool:
    return process.output().count(words) >= count


def _ready(process: Process, patience_s: float = PATIENCE_S) -> str:
    """Wait until `up` says it is ready; the address clients call."""
    wait_until(lambda: "Ctrl-C ends it." in process.output() or not process.is_running, "up is ready", patience_s)
    found = re.search(r"clients call (\S+) ", process.output())
    assert found is not None, process.tail()
    return found.group(1)


def _openai(process: Process) -> openai.OpenAI:
    """A client of the port that `up` named."""
    found = re.search(r"base_url (\S+),", process.output())
    assert found is not None, process.tail()
    return openai.OpenAI(base_url=found.group(1), api_key="any", max_retries=0)


def _generate(
    address: str, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scheduler_svc", "generate", "hello", "--target", address, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
        timeout=PATIENCE_S,
        check=False,
    )


def test_it_says_how_to_call_it_and_the_commands_work(up: Up) -> None:
    process = up("--workers", "2")
    address = _ready(process)
    output = process.output()
    assert f"--target {address}" in output
    assert _generate(address, "--max-tokens", "5").returncode == 0
    asked = re.search(r"status --target (\S+)", output)
    assert asked is not None, output
    status = [sys.executable, "-m", "scheduler_svc", "status", "--target", asked.group(1)]
    assert subprocess.run(status, capture_output=True, timeout=PATIENCE_S, check=False).returncode == 0
    called = next(line for line in output.splitlines() if "GenerationService/Complete" in line)
    answer = subprocess.run(
        called.split("up", 1)[1].strip(),
        shell=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert '"FINISH_REASON_LENGTH"' in answer.stdout, answer
    assert len(_parts(process)) == 4


def test_openais_client_is_served_where_it_says(up: Up) -> None:
    process = up("--served-model-name", "small, gpt-4o")
    _ready(process)
    with _openai(process) as client:
        assert [model.id for model in client.models.list().data] == ["small", "gpt-4o"]
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id, messages=[{"role": "user", "content": "Hello"}], max_tokens=7
        )
    assert answer.usage is not None and answer.usage.completion_tokens == 7
    without = up("--no-openai")
    _ready(without)
    assert "base_url" not in without.output()


def test_f86_a_proxy_of_the_environment_is_not_between_the_parts(up: Up) -> None:
    """A proxy that refuses everything; `no_proxy` is unset, as it is on most machines that have one."""
    with socket.socket() as nothing_listens:
        nothing_listens.bind(("127.0.0.1", 0))
        proxy = f"http://127.0.0.1:{nothing_listens.getsockname()[1]}"
        named = {name: proxy for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
        environment = {**named, "no_proxy": "", "NO_PROXY": "", "no_grpc_proxy": ""}
        process = up(environment=environment)
        address = _ready(process)
        assert _generate(address, "--max-tokens", "5", environment=environment).returncode == 0
        # Unless it is asked for.
        through = _generate(address, "--max-tokens", "5", "--proxy", environment=environment)
        assert through.returncode == 1 and "UNAVAILABLE" in through.stderr


def test_f124_its_parts_share_a_secret_that_only_this_user_can_read(up: Up, tmp_path: Path) -> None:
    home = {"XDG_STATE_HOME": str(tmp_path / "state")}
    process = up(environment=home)
    _ready(process)
    secret = tmp_path / "state" / "stepfence" / "cluster-secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    asked = re.search(r"status --target (\S+)", process.output())
    assert asked is not None, process.output()
    admin = [sys.executable, "-m", "scheduler_svc", "drain", "--target", asked.group(1)]

    def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env={**os.environ, **environment}
        )

    stranger = run(admin, XDG_STATE_HOME=str(tmp_path / "other"))
    assert stranger.returncode == 1 and "CLUSTER_SECRET_MISSING" in stranger.stderr
    assert "--cluster-secret-file" in stranger.stderr
    other = tmp_path / "made"
    assert run([sys.executable, "-m", "scheduler_svc", "make-secret", str(other)]).returncode == 0
    wrong = run([*admin, "--cluster-secret-file", str(other)])
    assert wrong.returncode == 1 and "CLUSTER_SECRET_WRONG" in wrong.stderr
    assert process.is_running
    # The user who started it needs no flag.
    status = [sys.executable, "-m", "scheduler_svc", "status", "--target", asked.group(1)]
    assert run(status, **home).returncode == 0
    assert run([*status, "--cluster-secret-file", str(secret)]).returncode == 0


def test_without_a_home_the_secret_is_temporary_and_named(up: Up, tmp_path: Path) -> None:
    process = up(environment={"XDG_STATE_HOME": "", "HOME": "", "TMPDIR": str(tmp_path)})
    _ready(process)
    asked = re.search(r"status (--target \S+ --cluster-secret-file (\S+))", process.output())
    assert asked is not None, process.output()
    command = [sys.executable, "-m", "scheduler_svc", "status", *asked.group(1).split()]
    assert subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False).returncode == 0
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    assert not Path(asked.group(2)).exists()


def test_a_log_for_machines_has_no_other_lines(up: Up) -> None:
    process = up("--log-format", "json")
    _ready(process)
    process.signal(signal.SIGTERM)
    assert process.wait() == 0, process.tail()
    lines = [json.loads(line) for line in process.output().splitlines()]
    assert {line["part"] for line in lines} == {"up", "scheduler", "frontend", "worker"}
    assert all(line["time"] and line["message"] for line in lines)
    # From start to stop, nothing went wrong.
    assert {line["level"] for line in lines} == {"info"}
    listening = {line["part"]: line for line in lines if line["message"].startswith("listening on ")}
    assert listening.keys() == {"scheduler", "frontend", "worker"}
    assert all(line["message"] == f"listening on {line['address']}" for line in listening.values())


def test_a_log_for_machines_tells_what_failed_from_what_did_not(up: Up) -> None:
    process = up("--log-format", "json")
    _ready(process)
    os.kill(_part(process, "worker_svc"), signal.SIGKILL)
    wait_until(lambda: "starting it again" in process.output(), "the worker's end was told")
    refused = up("--log-format", "json", "--script", '{"delay_s": 1}')
    assert refused.wait() == 2, refused.tail()
    lines = [json.loads(line) for process in (process, refused) for line in process.output().splitlines()]
    levels = {line["message"].split(" (")[0]: line["level"] for line in lines if line["part"] == "up"}
    assert (levels["the worker ended"], levels["the worker could not start"]) == ("warning", "error")


@pytest.mark.model
@pytest.mark.timeout(400)
def test_a_real_model_answers_and_everything_ends_at_a_signal(up: Up) -> None:
    from tests.support.oracle import assert_greedy_equal, oracle, prompts

    expected = oracle(prompts())[0]
    assert prompts()[0].text == "The capital of France is"
    process = up("--runner", "model", "--model", "smollm2", "--threads", "2", "--kv-memory", "64MiB")
    address = _ready(process, patience_s=300)
    command = [sys.executable, "-m", "scheduler_svc", "generate", "The capital of France is", "--target", address]
    options = ["--max-tokens", "16", "--temperature", "0", "--json"]
    answer = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300, check=True)
    events = [json.loads(line) for line in answer.stdout.splitlines()]
    assert_greedy_equal([token for event in events for token in event.get("delta", {}).get("token_ids", [])], expected)
    assert "Paris" in "".join(event.get("delta", {}).get("text", "") for event in events)
    with _openai(process) as client:
        completion = client.completions.create(
            model="smollm2-135m-instruct", prompt="The capital of France is", max_tokens=16, temperature=0
        )
        assert completion.choices[0].text == "".join(event.get("delta", {}).get("text", "") for event in events)
        chat = client.chat.completions.create(
            model="smollm2-135m-instruct",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            stream=True,
        )
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chat)
    assert "Paris" in said
    parts = _parts(process)
    asked = time.monotonic()
    process.signal(signal.SIGTERM)
    assert process.wait() == 0, process.tail()
    assert _all_ended(parts)
    assert time.monotonic() - asked < _END_S


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_quickly_with_exit_code_0(up: Up, number: signal.Signals) -> None:
    process = up()
    _ready(process)
    parts = _parts(process)
    asked = time.monotonic()
    process.signal(number)
    assert process.wait() == 0, process.tail()
    assert _all_ended(parts)
    assert time.monotonic() - asked < _END_S


def test_running_requests_finish_within_the_drain_deadline(up: Up) -> None:
    process = up("--drain-deadline-s", "60")
    address = _ready(process)
    command = [sys.executable, "-m", "scheduler_svc", "generate", "hello", "--target", address, "--max-tokens", "2000"]
    with subprocess.Popen([*command, "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as client:
        assert client.stdout is not None and client.stderr is not None
        client.stdout.read(1)
        process.signal(signal.SIGTERM)
        assert client.wait(PATIENCE_S) == 0, client.stderr.read()
        assert b"2000 completion tokens" in client.stderr.read()
    assert process.wait() == 0, process.tail()


def test_what_the_drain_deadline_cuts_off_is_told_by_exit_code_3(up: Up) -> None:
    process = up("--drain-deadline-s", "0.1")
    address = _ready(process)
    command = [sys.executable, "-m", "scheduler_svc", "generate", "hello", "--target", address, "--ignore-eos"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as client:
        assert client.stdout is not None and client.stderr is not None
        client.stdout.read(1)
        process.signal(signal.SIGTERM)
        client.stdout.read()
        assert client.wait(PATIENCE_S) == 1
        assert b"UNAVAILABLE / DRAINING" in client.stderr.read()
    assert process.wait() == 3, process.tail()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("num_lines", [0, 2, 5])
def test_it_works_and_ends_without_a_reader_of_its_log(number: signal.Signals, num_lines: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ports = ["--listen", address, "--scheduler-listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0"]
    command = [sys.executable, "-m", "scheduler_svc", "up", "--runner", "scripted", "--metrics-listen", "none", *ports]
    with subprocess.Popen(tethered(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        for _ in range(num_lines):
            process.stdout.readline()
        process.stdout.close()
        wait_until(lambda: check(address, "stepfence.v1.GenerationService", 5.0).serving, "the front end is ready")
        assert _generate(address, "--max-tokens", "5").returncode == 0
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_at_once(up: Up, number: signal.Signals, code: int) -> None:
    process = up("--drain-deadline-s", "600")
    address = _ready(process)
    command = [sys.executable, "-m", "scheduler_svc", "generate", "hello", "--target", address, "--ignore-eos"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as client:
        assert client.stdout is not None
        client.stdout.read(1)
        parts = _parts(process)
        process.signal(number)
        wait_until(lambda: "once more ends at once" in process.output(), "the first signal was taken")
        process.signal(number)
        assert process.wait() == code, process.tail()
        assert _all_ended(parts)
        client.kill()


def test_parts_end_when_up_is_killed(up: Up) -> None:
    process = up()
    _ready(process)
    parts = _parts(process)
    assert len(parts) == 3
    process.kill()
    wait_until(lambda: _all_ended(parts), "the parts have ended")


def test_a_killed_worker_is_started_again_and_requests_go_on(up: Up) -> None:
    process = up()
    address = _ready(process)
    before = _generate(address, "--max-tokens", "20", "--temperature", "0")
    worker = _part(process, "worker_svc")
    os.kill(worker, signal.SIGKILL)
    after = _generate(address, "--max-tokens", "20", "--temperature", "0")
    assert (after.returncode, after.stdout) == (0, before.stdout), after.stderr
    assert "starting it again" in process.output()
    assert _part(process, "worker_svc") != worker


@pytest.mark.parametrize(
    ("words", "name"), [("scheduler_svc scheduler", "scheduler"), ("scheduler_svc frontend", "frontend")]
)
def test_a_killed_scheduler_or_front_end_is_started_again_as_it_was(up: Up, words: str, name: str) -> None:
    process = up("--workers", "2")
    address = _ready(process)
    before = _generate(address, "--max-tokens", "20", "--temperature", "0")
    killed = _part(process, words)
    command, others = _command(killed), set(_parts(process)) - {killed}
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: f"the {name} is ready again" in process.output(), f"the {name} is back")
    wait_until(lambda: check(address, "stepfence.v1.GenerationService", 5.0).serving, "the front end is ready")
    after = _generate(address, "--max-tokens", "20", "--temperature", "0")
    assert (after.returncode, after.stdout) == (0, before.stdout), after.stderr
    assert f"the {name} ended (signal SIGKILL" in process.output()
    # Where it listens is part of the command.
    assert _command(_part(process, words)) == command
    assert others < set(_parts(process)) and len(_parts(process)) == 4
    process.signal(signal.SIGTERM)
    assert process.wait() == 0, process.tail()


def test_d57_a_text_goes_on_while_up_starts_its_scheduler_again(up: Up) -> None:
    process = up()
    address = _ready(process)
    arguments = ("--max-tokens", "3000", "--temperature", "0", "--ignore-eos")
    whole = _generate(address, *arguments)
    assert whole.returncode == 0, whole.stderr
    command = [sys.executable, "-m", "scheduler_svc", "generate", "hello", "--target", address, *arguments]
    # Unbuffered: communicate() does not see what a read ahead has taken.
    with subprocess.Popen(command, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        first = running.stdout.read(20)
        os.kill(_part(process, "scheduler_svc scheduler"), signal.SIGKILL)
        rest, errors = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 0, errors
    assert (first + rest).decode() == whole.stdout
    wait_until(lambda: "the scheduler is ready again" in process.output(), "the scheduler is back")


def test_a_part_that_ends_too_often_ends_up_with_a_sentence(up: Up) -> None:
    process = up()
    _ready(process)
    parts, killed = _parts(process), set[int]()

    def kill_once_more() -> bool:
        """Kill the front end, if it is another one than the last; True when `up` has ended."""
        for pid in set(_parts(process)) - killed:
            if b"scheduler_svc\0frontend" in _command(pid):
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
        return not process.is_running

    wait_until(kill_once_more, "up gives up")
    assert process.wait() == 1, process.tail()
    assert len(killed) == RESTARTS_IN_WINDOW + 1
    assert "the frontend ended 6 times within 60 s (signal SIGKILL" in process.output()
    assert "ending everything" in process.output()
    assert _all_ended([*parts, *killed])


def test_a_scheduler_started_again_keeps_the_recordings_before_it(up: Up, tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    process = up("--record", str(record))
    address = _ready(process)
    for index in range(3):
        wait_until(lambda: check(address, "stepfence.v1.GenerationService", 5.0).serving, "the front end is ready")
        name = f"request-{index}"
        assert _generate(address, "--max-tokens", "5", "--request-id", name).returncode == 0, process.tail()
        if index < 2:
            ended = process.output().count("the scheduler is ready again")
            os.kill(_part(process, "scheduler_svc scheduler"), signal.SIGKILL)
            is_back = partial(_has_count, process, "the scheduler is ready again", ended + 1)
            wait_until(is_back, "the scheduler is back")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0, process.tail()
    assert f"{record}.2" in process.output()
    for index, path in enumerate((Path(f"{record}.1"), Path(f"{record}.2"), record)):
        command = [sys.executable, "-m", "scheduler_svc", "replay", str(path), "--explain", f"request-{index}"]
        told_of = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert told_of.returncode == 0, told_of


def test_a_scheduler_that_was_drained_ends_up_in_order(up: Up) -> None:
    process = up()
    _ready(process)
    asked = re.search(r"status --target (\S+)", process.output())
    assert asked is not None, process.output()
    drain = [sys.executable, "-m", "scheduler_svc", "drain", "--target", asked.group(1)]
    assert subprocess.run(drain, capture_output=True, timeout=PATIENCE_S, check=False).returncode == 0
    assert process.wait() == 0, process.tail()
    assert "was drained" in process.output()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_f101_a_signal_while_starting_cuts_nothing_off(up: Up, number: signal.Signals, num_parts: int) -> None:
    process = up("--workers", "1")
    wait_until(lambda: len(_parts(process)) >= num_parts, "some parts have begun to start", PATIENCE_S)
    process.signal(number)
    assert process.wait() == 0, process.tail()
    assert "cut off" not in process.output()


def test_f101_a_front_end_that_was_down_when_the_signal_came_cuts_nothing_off(up: Up) -> None:
    """Its old exit code is a signal's, but it is not this stop that ended it."""
    process = up()
    _ready(process)
    os.kill(_part(process, "scheduler_svc frontend"), signal.SIGKILL)
    wait_until(lambda: "the frontend ended" in process.output(), "its end was noticed")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0, process.tail()
    assert "cut off" not in process.output()


def test_a_taken_port_is_told_and_the_next_one_used(up: Up) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = up("--listen", f"127.0.0.1:{port}")
        address = _ready(process)
    assert address != f"127.0.0.1:{port}"
    assert f"127.0.0.1:{port} is taken: using {address} instead (--listen)" in process.output()
    assert check(address, None, PATIENCE_S).serving


def test_settings_that_cannot_work_end_it_with_2(up: Up) -> None:
    refused = up("--block-size", "0")
    assert refused.wait() == 2
    assert "block_size (on the command line)" in refused.output()
    worker = up("--script", '{"delay_s": 1}')
    assert worker.wait() == 2, worker.tail()
    assert "could not start" in worker.output() and "delay_s" in worker.output()


def test_settings_of_the_environment_reach_the_parts(up: Up) -> None:
    environment = {"STEPFENCE_MAX_INFLIGHT_STEPS": "3", "STEPFENCE_NUM_BLOCKS": "33"}
    process = up(environment={**environment, "STEPFENCE_SCRIPT": '{"delay_ms": 0.5}'})
    _ready(process)
    worker = Path(f"/proc/{_part(process, 'worker_svc')}/cmdline").read_bytes().split(b"\0")
    scheduler = Path(f"/proc/{_part(process, 'scheduler_svc scheduler')}/cmdline").read_bytes().split(b"\0")
    assert worker[worker.index(b"--num-blocks") + 1] == b"33"
    assert worker[worker.index(b"--script") + 1] == b'{"delay_ms": 0.5}'
    assert scheduler[scheduler.index(b"--max-inflight-steps") + 1] == b"3"


def test_without_workers_it_is_up_and_says_so(up: Up) -> None:
    process = up("--workers", "0")
    wait_until(lambda: "without workers" in process.output() or not process.is_running, "up without workers")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0, process.tail()

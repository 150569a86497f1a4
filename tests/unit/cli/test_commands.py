"""The command line as a person meets it: flags, help, errors and exit codes, in processes of its own where that
matters."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler_svc.cli import app as cli
from scheduler_svc.cli.delegates import with_file_settings
from scheduler_svc.cli.options import as_flags, refuse_unknown_flags
from scheduler_svc.config import FrontendSettings, SchedulerSettings, SettingsError, UpSettings


def _run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scheduler_svc", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **(environment or {})},
    )


def _capture(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, list[object]]:
    """Run the command line in this process with the services replaced by a note of their settings."""
    seen: list[object] = []

    def note(settings: object) -> int:
        seen.append(settings)
        return 7

    from scheduler_svc import server
    from scheduler_svc.cli import up
    from scheduler_svc.frontend import server as frontend_server

    for module in (server, frontend_server, up):
        monkeypatch.setattr(module, "run", note)
    monkeypatch.setattr(sys, "argv", ["stepfence", *arguments])
    return cli.main(), seen


def test_flags_become_settings_and_the_services_exit_code_is_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    code, seen = _capture(
        monkeypatch,
        *("scheduler", "--worker", "a:1", "--worker", "dns:///b:2", "--block-size=8", "--no-enable-prefix-caching"),
    )
    assert code == 7
    assert seen == [SchedulerSettings(worker=("a:1", "dns:///b:2"), block_size=8, enable_prefix_caching=False)]


def test_every_setting_survives_the_way_over_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = SchedulerSettings(worker=("a:1", "b:2"), max_preemptions=None, metrics_listen=None, watermark=0.5)
    assert _capture(monkeypatch, "scheduler", *as_flags(scheduler)) == (7, [scheduler])
    frontend = FrontendSettings(
        listen="127.0.0.1:0", max_prompt_bytes=5, max_calls_per_peer=None, gateway=("10.0.0.0/8", "2001:db8::1")
    )
    assert _capture(monkeypatch, "frontend", *as_flags(frontend)) == (7, [frontend])


def test_up_takes_the_settings_of_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    code, seen = _capture(
        monkeypatch, "up", "--runner", "scripted", "--workers", "2", "--num-blocks", "64", "--policy", "priority"
    )
    assert code == 7
    assert seen == [UpSettings(runner="scripted", workers=2, num_blocks=64, policy="priority")]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("scheduler", "--max-num-seq", "4"), "--max-num-seq: unknown setting; did you mean --max-num-seqs"),
        (("scheduler", "--swap-space", "4"), "--swap-space: not a setting of Stepfence: a preempted request"),
        (("up", "--num-scheduler-steps=8"), "use max_inflight_steps"),
        (("scheduler", "--gpu-memory-utilization", "0.5"), "a setting of the worker, not of this part"),
        (("frontend", "--block-size", "8"), "a setting of the scheduler, not of this part"),
        (("scheduler", "--block-size", "none"), "block_size (on the command line)"),
        (("scheduler", "--config", "/no/such/file.toml"), "/no/such/file.toml: cannot be read"),
        (("scheduler", "--disable-radix-cache"), "use --no-enable-prefix-caching"),
        (("up", "--bogus", "3"), "--bogus: unknown setting; see `stepfence up --help`"),
        (("scenario", "run", "--bogus"), "--bogus: unknown setting; see `stepfence scenario run --help`"),
    ],
)
def test_what_is_wrong_is_said_and_exits_with_2(
    arguments: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, seen = _capture(monkeypatch, *arguments)
    assert (code, seen) == (2, [])
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("command", ["scheduler", "up"])
def test_settings_that_exclude_each_other_are_one_line_and_exit_with_2(command: str) -> None:
    runner = ("--runner", "scripted") if command == "up" else ()
    answer = _run(command, *runner, "--no-enable-chunked-prefill", "--max-model-len", "4000")
    assert (answer.returncode, answer.stderr.count("\n"), answer.stdout) == (2, 1, "")
    assert answer.stderr.startswith("error: without chunked prefill ")
    assert "(2048)" in answer.stderr and "max_model_len (4000)" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--model", "nosuch"), "error: model: 'nosuch' is neither the path of a model nor a known name"),
        (("--model", "/no/such"), "error: model: '/no/such' is neither the path of a model nor a known name"),
        (("--device", "tpu"), "error: device (on the command line)"),
        (("--dtype", "int8"), "error: dtype (on the command line)"),
    ],
)
def test_up_refuses_at_once_what_no_worker_can_do(arguments: tuple[str, ...], told: str) -> None:
    answer = _run("up", *arguments)
    assert (answer.returncode, answer.stderr.count("\n"), answer.stdout) == (2, 1, "")
    assert answer.stderr.startswith(told)


_NOT_AN_ADDRESS = "must be HOST:PORT, for example 127.0.0.1:50051 (given: 'foo')"


@pytest.mark.parametrize(
    ("arguments", "environ", "told"),
    [
        (("generate", "hi", "--target", "foo"), {}, f"--target: {_NOT_AN_ADDRESS}"),
        (("generate", "hi"), {"STEPFENCE_TARGET": "foo"}, f"STEPFENCE_TARGET (in the environment): {_NOT_AN_ADDRESS}"),
        (
            ("generate", "hi", "--target", "foo"),
            {"STEPFENCE_TARGET": "127.0.0.1:1"},
            f"--target: {_NOT_AN_ADDRESS}",
        ),
        (("status",), {"STEPFENCE_SCHEDULER": "foo"}, f"STEPFENCE_SCHEDULER (in the environment): {_NOT_AN_ADDRESS}"),
        (("generate", "hi", "--system", "be kind"), {}, "--system: goes with --chat only"),
        (("generate",), {}, "missing argument 'PROMPT'; see `stepfence generate --help`"),
        (("no-such-command",), {}, "no such command 'no-such-command'; see `stepfence --help`"),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_flag_or_the_variable(
    arguments: tuple[str, ...],
    environ: dict[str, str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert _capture(monkeypatch, *arguments) == (2, [])
    assert capsys.readouterr().err == f"error: {told}\n"


@pytest.mark.parametrize(
    ("arguments", "flag"), [(("generate", "hi", "--timeout"), "--timeout"), (("health", "--timeout"), "--timeout")]
)
@pytest.mark.parametrize("value", ["inf", "nan", "1e300"])
def test_a_time_to_wait_is_finite(
    arguments: tuple[str, ...],
    flag: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _capture(monkeypatch, *arguments, value) == (2, [])
    assert capsys.readouterr().err.startswith(f"error: {flag}: ")


def _help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    assert _capture(monkeypatch, *arguments, "--help") == (0, [])
    return capsys.readouterr().out


@pytest.mark.parametrize("group", [(), ("scenario",)])
def test_every_command_is_described_in_one_line(
    group: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = _help(monkeypatch, capsys, *group).partition("Commands:\n")[2].splitlines()
    assert listed and all(line.endswith(".") and not line.endswith("...") and len(line) <= 80 for line in listed)


@pytest.mark.parametrize("command", [("generate",), ("replay",), ("scenario", "run")])
def test_help_speaks_no_python(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _help(monkeypatch, capsys, *command)
    assert "<" not in told.replace("<=", "") and "[Path]" not in told
    assert told.partition("Arguments:\n")[2].split()[0] in ("PROMPT", "FILE", "FILES")


def test_help_names_what_kind_of_value_a_flag_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _help(monkeypatch, capsys, "up")
    kinds = dict(re.findall(r"^  (--[a-z-]+) ([A-Z:]+)\b", told, re.M))
    expected = {
        "SHARE": {"--watermark", "--gpu-memory-utilization"},
        "FILE": {
            "--config",
            "--record",
            "--cluster-secret-file",
            "--client-tokens-file",
            "--tenant-limits-file",
            "--usage-log",
        },
        "JSON": {"--script"},
        "DIR": {"--client-tls-dir"},
        "ADDRESS": {"--gateway"},
        "BYTES": {"--max-prompt-bytes", "--kv-memory"},
        "NAME": {"--model", "--served-model-name", "--runner", "--device", "--dtype", "--policy", "--log-format"},
        "HOST:PORT": {"--listen", "--scheduler-listen", "--worker-listen", "--metrics-listen", "--openai-listen"},
    }
    for kind, flags in expected.items():
        assert {flag for flag, shown in kinds.items() if shown == kind} == flags
    assert all(
        kind in ("N", "SECONDS") for flag, kind in kinds.items() if not any(flag in f for f in expected.values())
    )


def test_up_does_not_promise_a_log_that_it_never_writes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "else JSON" not in " ".join(_help(monkeypatch, capsys, "up").split())
    assert "else JSON" in " ".join(_help(monkeypatch, capsys, "scheduler").split())


@pytest.mark.parametrize("command", ["generate", "health", "status", "audit", "drain", "reset-cache", "replay"])
def test_help_of_what_answers_by_exit_code_names_them(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(r"Exit codes?:? 0", _help(monkeypatch, capsys, command))


def test_flags_after_a_double_dash_are_the_prompts_business() -> None:
    refuse_unknown_flags(["--seed", "1", "--", "--unknown"], {"--seed"}, "stepfence generate")
    with pytest.raises(SettingsError, match="--seeds"):
        refuse_unknown_flags(["--seeds", "--"], {"--seed"}, "stepfence generate")


@pytest.mark.parametrize("command", ["up", "scheduler", "frontend"])
def test_help_names_every_flag_with_its_default_and_no_flag_is_cut(command: str) -> None:
    answer = _run(command, "--help", environment={"COLUMNS": "80"})
    assert answer.returncode == 0
    fields = {
        "up": UpSettings.model_fields,
        "scheduler": SchedulerSettings.model_fields,
        "frontend": FrontendSettings.model_fields,
    }[command]
    words = answer.stdout.split()
    for name in fields:
        assert f"--{name.replace('_', '-')}" in words, name
    assert answer.stdout.count("default:") >= len(fields)
    assert "STEPFENCE_CONFIG" in answer.stdout and "[scheduler]" in answer.stdout


def test_without_a_command_there_is_help_and_the_version_is_printed() -> None:
    assert "Usage:" in _run().stdout + _run().stderr
    assert _run("--version").stdout.startswith("stepfence ")
    assert _run("no-such-command").returncode == 2


def test_worker_flags_reach_the_worker_untouched() -> None:
    answer = _run("worker", "--no-such-flag", "1")
    assert answer.returncode == 2
    assert "--no-such-flag" in answer.stderr
    assert (
        _run("worker", "--bogus").stderr
        == "stepfence worker: --bogus: unknown setting; see `stepfence worker --help`\n"
    )


def test_the_workers_section_of_the_file_fills_in_what_flags_and_environment_leave_open(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[worker]\nnum_blocks = 9\ndevice = 'cuda'\nlisten = 'a:1'\nscript = {step_seconds = 0.5}\n")
    environ = {"STEPFENCE_DEVICE": "cpu", "STEPFENCE_CONFIG": "/not/this/one.toml"}
    from_file = ["--num-blocks", "9", "--script", '{"step_seconds": 0.5}']
    expected = ["--listen=b:2", "--from-file", str(file), *from_file]
    for config in (["--config", str(file)], [f"--config={file}"]):
        assert with_file_settings([*config, "--listen=b:2"], environ) == expected
    assert with_file_settings(["--listen=b:2"], {**environ, "STEPFENCE_CONFIG": str(file)}) == expected
    assert with_file_settings(["--listen=b:2"], {}) == ["--listen=b:2"]
    with pytest.raises(SettingsError, match="--config"):
        with_file_settings(["--config"], {})
    file.write_text("[worker]\nblock_size = 9\n")
    with pytest.raises(SettingsError, match="a setting of the scheduler"):
        with_file_settings([], {"STEPFENCE_CONFIG": str(file)})


def test_the_worker_and_fetch_model_explain_themselves() -> None:
    assert "--num-blocks" in _run("worker", "--help").stdout
    assert _run("fetch-model", "--help").returncode == 0
    unknown = _run("fetch-model", "no-such-model")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr == (
        "stepfence fetch-model: unknown model 'no-such-model', and no such path; known: smollm2\n"
    )


def test_f125_fetch_model_takes_the_model_of_the_environment_and_leaves_paths_alone(tmp_path: Path) -> None:
    """As the service of the compose file calls it."""
    model = tmp_path / "model.gguf"
    model.touch()
    found = _run("fetch-model", environment={"STEPFENCE_MODEL": str(model)})
    assert (found.returncode, found.stdout, found.stderr) == (0, f"{model}\n", "")
    unknown = _run("fetch-model", environment={"STEPFENCE_MODEL": "gpt-17"})
    assert unknown.returncode == 2 and "'gpt-17'" in unknown.stderr
    # Its log is that of a service, where that is asked for.
    logged = _run("fetch-model", environment={"STEPFENCE_MODEL": "gpt-17", "STEPFENCE_LOG_FORMAT": "json"})
    line = json.loads(logged.stderr)
    assert (logged.returncode, line["level"], line["message"]) == (2, "error", "the model could not be fetched")
    assert "smollm2]" in " ".join(_run("fetch-model", "--help").stdout.split())


def test_the_workers_help_and_errors_speak_of_the_command_that_was_called() -> None:
    told = _run("worker", "--help").stdout
    assert told.startswith("usage: stepfence worker ") and "--config FILE" in told
    assert _run("fetch-model", "--help").stdout.startswith("usage: stepfence fetch-model ")
    for wrong in (("--no-such-flag", "1"), ("--num-blocks", "1"), ("--listen",)):
        answer = _run("worker", *wrong)
        assert (answer.returncode, answer.stderr.count("\n")) == (2, 1)
        assert answer.stderr.startswith("stepfence worker: ")


def test_ctrl_c_ends_fetch_model_with_one_line(tmp_path: Path) -> None:
    # A wheel index that accepts and never answers.
    with socket.socket() as index:
        index.bind(("127.0.0.1", 0))
        index.listen()
        environment = {
            **os.environ,
            "STEPFENCE_CACHE_DIR": str(tmp_path),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/simple",
        }
        command = [sys.executable, "-m", "scheduler_svc", "fetch-model", "smollm2"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
            index.settimeout(60)
            connection, _ = index.accept()
            with connection:
                process.send_signal(signal.SIGINT)
                _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in error
    assert error.splitlines()[-1].strip() == "stepfence fetch-model: interrupted; the next call goes on from here"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("README.md", b"# Words"),
        ("s.json", b""),
        ("s.json", b"[1]"),
        ("s.json", b"[{}, null]"),
        ("s.jsonl", b"{}\n{"),
        ("s.json", b"\xff\xfe"),
        ("s.json.gz", b"not gzip"),
        ("s.json.gz", gzip.compress(b"[]" * 50)[:-9]),
    ],
)
def test_a_file_without_scenarios_is_one_line_that_says_what_it_should_hold(
    tmp_path: Path, name: str, content: bytes
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    answer = _run("scenario", "run", str(file))
    assert (answer.returncode, answer.stdout, answer.stderr.count("\n")) == (2, "", 1), answer
    assert answer.stderr.startswith(f"error: {file}: not a file of scenarios: it must hold one JSON object with name")


def test_scenarios_that_cannot_be_run_are_counted_on_stderr(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    good = {"name": "good", "ops": [{"op": "add", "id": "a", "prompt_len": 3}]}
    file.write_text(json.dumps([good, *({"name": f"bad-{index}", "ops": [{"op": "dance"}]} for index in range(7))]))
    answer = _run("scenario", "run", str(file))
    assert (answer.returncode, answer.stdout.count("\n")) == (1, 8)
    lines = answer.stderr.splitlines()
    assert lines[0] == "error: 7 of 8 scenarios could not be run:"
    assert len(lines) == 7 and "bad-0: ScenarioError: " in lines[1] and "dance" in lines[1] and "2 more" in lines[-1]
    assert "one JSON result a scenario" in " ".join(_run("scenario", "run", "--help").stdout.split())


def test_scenarios_that_do_not_exist_are_an_error() -> None:
    answer = _run("scenario", "run", "/no/such/file.json")
    assert answer.returncode != 0 and "/no/such/file.json" in answer.stderr


def test_f102_a_character_that_the_terminal_lacks_is_escaped() -> None:
    code = "from scheduler_svc.cli import app; app.app = lambda **_: print('caf\\u00e9 \\U0001f600'); app.main()"
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, check=True, timeout=60)
    assert shown.stdout.decode() == "caf\\xe9 \\U0001f600\n"

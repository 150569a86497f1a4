"""Settings: where they come from, and what is said when they are wrong."""

from __future__ import annotations

import io
import json
import logging

import pytest

from scheduler_svc.config import FrontendSettings, SchedulerSettings
from worker_svc import logs
from worker_svc.config import OTHER_SETTINGS, REPLACEMENTS, FileSettings, SettingsError, WorkerSettings
from worker_svc.server import checked_options, server_options


def test_flags_come_before_the_environment_and_that_before_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPFENCE_NUM_BLOCKS", "100")
    monkeypatch.setenv("STEPFENCE_KV_MEMORY", "1.5GiB")
    settings = WorkerSettings.load({"num_blocks": "200", "dtype": None})
    assert (settings.num_blocks, settings.kv_memory, settings.dtype) == (200, 3 * 2**29, "float32")
    assert WorkerSettings(num_blocks=3).kv_memory is None


@pytest.mark.parametrize(
    "text, value",
    [
        ("1GiB", 2**30),
        ("512 MiB", 2**29),
        ("2gb", 2 * 10**9),
        ("1.5TiB", 3 * 2**39),
        ("99TB", 99 * 10**12),
        ("123", 123),
        ("none", None),
        (77, 77),
    ],
)
def test_memory_may_be_written_with_a_unit(text: object, value: int | None) -> None:
    assert WorkerSettings.load({"kv_memory": text}).kv_memory == value


@pytest.mark.parametrize(
    "flags, said",
    [
        ({"kv_memory": "1 lot"}, "512MiB"),
        ({"kv_memory": "0"}, "--kv-memory: "),
        ({"listen": "localhost"}, "HOST:PORT"),
        ({"listen": "::1:50061"}, "brackets"),
        ({"listen": "a:70000"}, "HOST:PORT"),
        ({"num_blocks": "0"}, "--num-blocks: "),
        ({"gpu_memory_utilization": "1.5"}, "--gpu-memory-utilization: "),
        ({"script": "{}"}, "runner"),
        ({"runner": "scripted", "script": '{"eos": 1}'}, "--script: eos: "),
        ({"device": "tpu"}, "cpu"),
    ],
)
def test_wrong_values_are_named_with_what_is_expected(flags: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        WorkerSettings.load(flags)


def test_a_wrong_value_is_called_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPFENCE_KV_MEMORY", "99XB")
    file = FileSettings("/etc/stepfence.toml", {"num_blocks": "1", "dtype": "int8", "threads": "3"})
    with pytest.raises(SettingsError) as error:
        WorkerSettings.load({"dtype": "int4"}, file)
    kv_memory, num_blocks, dtype = sorted(str(error.value).splitlines(), key=lambda line: "STEPFENCE" not in line)
    assert kv_memory.startswith("STEPFENCE_KV_MEMORY (in the environment): must be a number of bytes")
    assert {num_blocks.split(": ")[0], dtype.split(": ")[0]} == {
        "[worker] num_blocks (in /etc/stepfence.toml)",
        "--dtype",
    }
    monkeypatch.setenv("STEPFENCE_KV_MEMORY", "1GiB")
    settings = WorkerSettings.load({"num_blocks": "5", "dtype": "auto"}, file)
    assert (settings.num_blocks, settings.threads, settings.dtype) == (5, 3, "auto")


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN", "1e300"])
@pytest.mark.parametrize(
    "field, script",
    [
        ("load_delay_s", '{{"load_delay_s": {}}}'),
        ("delay_ms", '{{"delay_ms": {}}}'),
        ("jitter_ms", '{{"jitter_ms": {}}}'),
        ("seconds", '{{"faults": [{{"kind": "stall", "at_step": 1, "seconds": {}}}]}}'),
    ],
)
def test_a_script_takes_no_time_that_never_ends(field: str, script: str, number: str) -> None:
    with pytest.raises(SettingsError, match=rf"--script: (faults\.0\.)?{field}: "):
        WorkerSettings.load({"runner": "scripted", "script": script.format(number)})


def test_a_script_comes_from_the_environment_as_it_would_from_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPFENCE_SCRIPT", '{"eos_at": 3}')
    script = WorkerSettings.load({"runner": "scripted"}).script
    assert script is not None and script.eos_at == 3
    monkeypatch.setenv("STEPFENCE_SCRIPT", "{")
    with pytest.raises(SettingsError, match="JSON"):
        WorkerSettings.load({"runner": "scripted"})


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_obsolete_settings_say_what_to_use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "port":
        name = "host"
    monkeypatch.setenv(f"STEPFENCE_{name.upper()}", "1")
    with pytest.raises(SettingsError, match="not a setting of Stepfence"):
        WorkerSettings.load()


@pytest.mark.parametrize(
    "name",
    ["SCHEDULER_SERVICE_HOST", "SERVICE_HOST", "PORT", "WORKER_PORT_50061_TCP", "A_SERVICE_PORT_GRPC", "CACHE_DIR"],
)
def test_variables_of_others_are_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"STEPFENCE_{name}", "tcp://10.0.0.1:80")
    WorkerSettings.load()


def test_settings_of_the_other_services_are_known_by_name() -> None:
    theirs = {*SchedulerSettings.model_fields, *FrontendSettings.model_fields} - set(WorkerSettings.model_fields)
    assert theirs <= set(OTHER_SETTINGS)


def test_an_option_that_grpc_would_ignore_fails_at_start() -> None:
    assert ("grpc.so_reuseport", 0) in server_options()
    with pytest.raises(ValueError, match="min_recv_ping"):
        checked_options((("grpc.http2.min_recv_ping_interval_without_data_ms", 10),))


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_facts_are_in_the_log_line(log_format: str) -> None:
    stream = io.StringIO()
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        logs.configure(log_format, stream=stream)
        logging.getLogger("worker_svc.test").warning("opened", extra={"epoch": 3, "level": "mine"})
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        logging.captureWarnings(False)
    line = stream.getvalue()
    if log_format == "json":
        parsed = json.loads(line)
        assert (parsed["message"], parsed["epoch"], parsed["level"], parsed["level_"]) == (
            "opened",
            3,
            "warning",
            "mine",
        )
    else:
        assert "opened" in line and "epoch=3" in line


def test_a_pool_needs_a_block_beside_the_null_block() -> None:
    with pytest.raises(SettingsError, match=r"--num-blocks: must be at least 2: block 0"):
        WorkerSettings.load({"num_blocks": "1"})
    assert WorkerSettings.load({"num_blocks": "2"}).num_blocks == 2


def test_a_model_may_have_several_names() -> None:
    assert WorkerSettings(served_model_name="small, org/small ,gpt-4o").served_names == ("small", "org/small", "gpt-4o")
    assert WorkerSettings().served_names == ()
    for wrong in ("a,", ",", "a,a", "a\x1b[0m", "x" * 257):
        with pytest.raises(ValueError, match="names must differ|printable"):
            WorkerSettings(served_model_name=wrong)


def test_names_may_be_given_one_by_one() -> None:
    from worker_svc.__main__ import _parse, _parser

    options = _parse(_parser(), ["serve", "--served-model-name", "a", "--served-model-name", "b,c"])
    assert options["served_model_name"] == "a,b,c"

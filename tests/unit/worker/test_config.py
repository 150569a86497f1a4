"""Settings: where they come from, and what is said when they are wrong."""

from __future__ import annotations

import io
import json
import logging

import pytest

from scheduler_svc.config import FrontendSettings, SchedulerSettings
from worker_svc import logs
from worker_svc.config import OTHER_SETTINGS, REPLACEMENTS, SettingsError, WorkerSettings
from worker_svc.server import checked_options, server_options


def test_flags_come_before_the_environment_and_that_before_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPFENCE_NUM_BLOCKS", "100")
    monkeypatch.setenv("STEPFENCE_KV_MEMORY", "1.5GiB")
    settings = WorkerSettings.load({"num_blocks": "200", "dtype": None})
    assert (settings.num_blocks, settings.kv_memory, settings.dtype) == (200, 3 * 2**29, "float32")
    assert WorkerSettings(num_blocks=3).kv_memory is None


@pytest.mark.parametrize(
    "text, value", [("1GiB", 2**30), ("512 MiB", 2**29), ("2gb", 2 * 10**9), ("123", 123), ("none", None), (77, 77)]
)
def test_memory_may_be_written_with_a_unit(text: object, value: int | None) -> None:
    assert WorkerSettings.load({"kv_memory": text}).kv_memory == value


@pytest.mark.parametrize(
    "flags, said",
    [
        ({"kv_memory": "1 lot"}, "512MiB"),
        ({"kv_memory": "0"}, "kv_memory"),
        ({"listen": "localhost"}, "HOST:PORT"),
        ({"listen": "::1:50061"}, "brackets"),
        ({"listen": "a:70000"}, "HOST:PORT"),
        ({"num_blocks": "0"}, "num_blocks"),
        ({"gpu_memory_utilization": "1.5"}, "gpu_memory_utilization"),
        ({"script": "{}"}, "runner"),
        ({"runner": "scripted", "script": '{"eos": 1}'}, "script.eos"),
        ({"device": "tpu"}, "cpu"),
    ],
)
def test_wrong_values_are_named_with_what_is_expected(flags: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        WorkerSettings.load(flags)


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
    with pytest.raises(SettingsError, match=r"num_blocks \(on the command line\): must be at least 2: block 0"):
        WorkerSettings.load({"num_blocks": "1"})
    assert WorkerSettings.load({"num_blocks": "2"}).num_blocks == 2

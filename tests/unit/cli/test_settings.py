"""Settings: where values come from, and that nothing unknown passes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scheduler_svc.config import (
    KNOWN_MODELS,
    SERVICES,
    FrontendSettings,
    SchedulerSettings,
    SettingsError,
    UpSettings,
)
from scheduler_svc.retired_settings import REPLACEMENTS, WORKER_SETTINGS
from worker_svc import fetch_model
from worker_svc.config import REPLACEMENTS as WORKER_REPLACEMENTS
from worker_svc.config import SettingsError as WorkerSettingsError
from worker_svc.config import WorkerSettings, flag

ROOT = Path(__file__).parents[3]
# Name and value of each line of .env.example that sets something, or would without its #.
EXAMPLE = dict(re.findall(r"^#?(STEPFENCE_[A-Z_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.M))


def _file(folder: Path, text: str) -> Path:
    path = folder / "stepfence.toml"
    path.write_text(text, encoding="utf-8")
    return path


def _problems(message: pytest.ExceptionInfo[SettingsError]) -> str:
    return str(message.value)


def test_flags_win_over_the_environment_and_the_environment_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _file(tmp_path, "[scheduler]\nblock_size = 8\nmax_num_seqs = 3\nwatermark = 0.25\n")
    monkeypatch.setenv("STEPFENCE_BLOCK_SIZE", "32")
    monkeypatch.setenv("STEPFENCE_MAX_NUM_SEQS", "5")
    loaded = SchedulerSettings.load({"block_size": "64"}, path)
    assert (loaded.block_size, loaded.max_num_seqs, loaded.watermark) == (64, 5, 0.25)


def test_the_file_can_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPFENCE_CONFIG", str(_file(tmp_path, "[frontend]\nmax_prompt_bytes = 10\n")))
    assert FrontendSettings.load().max_prompt_bytes == 10


def test_classes_by_themselves_do_not_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPFENCE_BLOCK_SIZE", "32")
    assert SchedulerSettings().block_size == 16


def test_workers_are_listed_with_commas_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPFENCE_WORKER", "a:1, dns:///workers:50061")
    assert SchedulerSettings.load().worker == ("a:1", "dns:///workers:50061")


@pytest.mark.parametrize("word", ["none", "None", ""])
def test_none_can_be_written(word: str) -> None:
    loaded = SchedulerSettings.load({"max_preemptions": word, "metrics_listen": word, "max_model_len": word})
    assert (loaded.max_preemptions, loaded.metrics_listen, loaded.max_model_len) == (None, None, None)


def test_an_unknown_environment_variable_names_the_nearest_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPFENCE_MAX_NUM_SEQ", "4")
    with pytest.raises(SettingsError) as error:
        SchedulerSettings.load()
    assert "STEPFENCE_MAX_NUM_SEQ: unknown setting; did you mean STEPFENCE_MAX_NUM_SEQS" in _problems(error)


def test_an_unknown_key_of_the_file_names_the_nearest_setting_of_its_section(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as error:
        SchedulerSettings.load({}, _file(tmp_path, "[scheduler]\nmax_inflight_step = 1\n"))
    assert "[scheduler] max_inflight_step: unknown setting; did you mean max_inflight_steps" in _problems(error)


@pytest.mark.parametrize("text", ["block_size = 16\n", "[schedule]\nblock_size = 16\n", "[[scheduler]]\n"])
def test_a_setting_outside_a_section_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match=r"one of the sections \[scheduler\]"):
        SchedulerSettings.load({}, _file(tmp_path, text))


@pytest.mark.parametrize("text", ["[scheduler\n", "\udcff"])
def test_a_broken_or_missing_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "stepfence.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(SettingsError, match="stepfence.toml"):
        SchedulerSettings.load({}, path)
    with pytest.raises(SettingsError, match="no-such.toml"):
        SchedulerSettings.load({}, tmp_path / "no-such.toml")


def test_every_problem_is_told_with_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPFENCE_BLOCK_SIZE", "0")
    path = _file(tmp_path, "[scheduler]\nwatermark = 1.5\n")
    with pytest.raises(SettingsError) as error:
        SchedulerSettings.load({"policy": "lifo"}, path)
    told = _problems(error)
    assert "STEPFENCE_BLOCK_SIZE (in the environment): " in told
    assert f"watermark (in {path})" in told
    assert "policy (on the command line)" in told and "'lifo'" in told


@pytest.mark.parametrize(("name", "advice"), sorted(REPLACEMENTS.items()))
def test_a_setting_of_another_system_says_what_to_use(name: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"STEPFENCE_{name.upper()}", "1")
    if name in ("port", "target"):
        # STEPFENCE_PORT is what an orchestrator injects; STEPFENCE_TARGET belongs to client commands.
        SchedulerSettings.load()
        return
    with pytest.raises(SettingsError) as error:
        SchedulerSettings.load()
    assert f"STEPFENCE_{name.upper()}: not a setting of Stepfence: {advice}" in _problems(error)


def test_a_worker_setting_in_the_schedulers_section_says_whose_it_is(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="gpu_memory_utilization: a setting of the worker"):
        SchedulerSettings.load({}, _file(tmp_path, "[scheduler]\ngpu_memory_utilization = 0.5\n"))


@pytest.mark.parametrize(
    "name",
    [
        "STEPFENCE_SERVICE_HOST",
        "STEPFENCE_PORT",
        "STEPFENCE_SCHEDULER_SERVICE_HOST",
        "STEPFENCE_SCHEDULER_SERVICE_PORT",
        "STEPFENCE_SCHEDULER_SERVICE_PORT_GRPC",
        "STEPFENCE_SCHEDULER_PORT",
        "STEPFENCE_SCHEDULER_PORT_50052_TCP",
        "STEPFENCE_SCHEDULER_PORT_50052_TCP_ADDR",
    ],
)
def test_what_an_orchestrator_injects_is_ignored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "tcp://10.0.0.1:50052")
    assert SchedulerSettings.load() == SchedulerSettings()


def test_the_variables_of_compose_disturb_no_part_that_is_started_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One environment may serve several parts: compose.yaml is one of those that read it."""
    files = [ROOT / "compose.yaml", ROOT / "compose.scripted.yaml"]
    used = {name for file in files for name in re.findall(r"\bSTEPFENCE_[A-Z_]+", file.read_text())}
    assert {"STEPFENCE_TAG", "STEPFENCE_WORKER_MEMORY", "STEPFENCE_THREADS"} <= used & EXAMPLE.keys()
    for name in used - EXAMPLE.keys():
        monkeypatch.setenv(name, "")
    for name, value in EXAMPLE.items():
        monkeypatch.setenv(name, value)
    for settings in (SchedulerSettings, FrontendSettings, UpSettings, WorkerSettings):
        settings.load()
    monkeypatch.setenv("STEPFENCE_TAGS", "local")
    with pytest.raises(SettingsError, match="did you mean STEPFENCE_TAG"):
        SchedulerSettings.load()


def test_the_example_of_an_environment_sets_nothing_and_shows_the_defaults() -> None:
    text = (ROOT / ".env.example").read_text()
    assert not [line for line in text.splitlines() if line and not line.startswith("#")]
    compose = dict(re.findall(r"\$\{(STEPFENCE_[A-Z_]+):-([^}]*)\}", (ROOT / "compose.yaml").read_text()))
    defaults = {
        name: "none" if info.default is None else str(info.default).lower()
        for settings in (WorkerSettings, FrontendSettings, SchedulerSettings)
        for name, info in settings.model_fields.items()
    }
    for name, value in EXAMPLE.items():
        expected = compose.get(name) or defaults[name.removeprefix("STEPFENCE_").lower()]
        # none stands for 1GiB on a CPU.
        expected = "1GiB" if name == "STEPFENCE_KV_MEMORY" else expected.removesuffix(".0")
        assert value == expected, name


@pytest.mark.parametrize("advice", sorted({*REPLACEMENTS.values(), *WORKER_REPLACEMENTS.values()}))
def test_what_replaces_a_retired_setting_exists(advice: str) -> None:
    known = frozenset().union(*SERVICES.values())
    flags = {f"--{name.replace('_', '-')}" for name in known}
    flags |= {
        f"--no-{name.replace('_', '-')}" for name, info in UpSettings.model_fields.items() if info.annotation is bool
    }
    assert set(re.findall(r"[a-z]+(?:_[a-z]+)+", advice)) <= known
    assert set(re.findall(r"--[a-z-]+", advice)) <= flags
    # What is typed on a command line cannot be given as `name = value`.
    assert " = " not in advice or "--" in advice


@pytest.mark.parametrize("name", ["step_watchdog_s", "first_steps_watchdog_s", "no_worker_grace_s", "drain_deadline_s"])
@pytest.mark.parametrize("value", ["inf", "nan", "1e9"])
def test_times_are_finite(name: str, value: str) -> None:
    for settings in (SchedulerSettings, UpSettings):
        with pytest.raises(SettingsError, match=name):
            settings.load({name: value})
    if name == "drain_deadline_s":
        with pytest.raises(SettingsError, match=name):
            FrontendSettings.load({name: value})
        with pytest.raises(WorkerSettingsError, match=flag(name)):
            WorkerSettings.load({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("watermark", "nan"),
        ("num_speculative_tokens", "65"),
        ("block_size", "65537"),
        ("max_num_seqs", str(2**32)),
        ("max_num_batched_tokens", str(2**32)),
        ("max_model_len", str(2**32)),
        ("max_prompt_bytes", str((16 << 20) + 1)),
        ("gpu_memory_utilization", "nan"),
        ("num_blocks", str(2**31)),
        ("threads", "1025"),
    ],
)
def test_numbers_stay_within_what_messages_and_machines_hold(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name):
        UpSettings.load({name: value})
    if name in WorkerSettings.model_fields:
        with pytest.raises(WorkerSettingsError, match=flag(name)):
            WorkerSettings.load({name: value})


@pytest.mark.parametrize("address", ["", "50051", "host", "host:", ":1", "host:x", "host:65536", "::1:50051"])
def test_an_address_that_cannot_be_is_refused(address: str) -> None:
    with pytest.raises(SettingsError, match="HOST:PORT|IPv6"):
        FrontendSettings.load({"listen": address})


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:50051", "worker-1.local:65535"])
def test_an_address_that_can_be_is_taken(address: str) -> None:
    assert FrontendSettings.load({"listen": address}).listen == address


def test_a_small_step_means_few_sequences_unless_told_otherwise() -> None:
    assert SchedulerSettings.load({"max_num_batched_tokens": "16"}).max_num_seqs == 16
    assert SchedulerSettings.load({"max_num_batched_tokens": "4096"}).max_num_seqs == 128
    with pytest.raises(SettingsError, match=r"max_num_batched_tokens \(16\) must be at least max_num_seqs \(32\)"):
        SchedulerSettings.load({"max_num_batched_tokens": "16", "max_num_seqs": "32"})


def test_up_takes_each_part_from_its_section_and_its_own_section_wins(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        "[scheduler]\nlisten='127.0.0.1:1'\nblock_size=8\nworker=['a:1']\n"
        "[frontend]\nlisten='127.0.0.1:2'\nscheduler='b:2'\n"
        "[worker]\nlisten='127.0.0.1:3'\nmodel='tiny'\n"
        "[up]\nworkers=2\nblock_size=4\n",
    )
    loaded = UpSettings.load({}, path)
    assert (loaded.scheduler_listen, loaded.listen, loaded.worker_listen) == (
        "127.0.0.1:1",
        "127.0.0.1:2",
        "127.0.0.1:3",
    )
    assert (loaded.model, loaded.workers, loaded.block_size) == ("tiny", 2, 4)


def test_up_hands_every_scheduling_setting_on() -> None:
    given = UpSettings.load({"policy": "priority", "max_inflight_steps": "3", "max_preemptions": "none"})
    scheduler = given.scheduler_settings("127.0.0.1:9", ("127.0.0.1:10",))
    assert (scheduler.policy, scheduler.max_inflight_steps, scheduler.max_preemptions) == ("priority", 3, None)
    assert (scheduler.listen, scheduler.worker) == ("127.0.0.1:9", ("127.0.0.1:10",))
    for name in SchedulerSettings.model_fields:
        if name not in ("listen", "worker", "tls_dir", "tls_server_name"):
            assert getattr(scheduler, name) == getattr(given, name)


def test_settings_cannot_change_after_the_start() -> None:
    with pytest.raises(ValueError, match="frozen"):
        SchedulerSettings().block_size = 4  # type: ignore[misc]


def test_every_setting_says_what_it_is() -> None:
    for settings in (SchedulerSettings, FrontendSettings, UpSettings):
        for name, info in settings.model_fields.items():
            assert info.description and info.description.endswith("."), name


def test_no_known_setting_is_called_retired() -> None:
    assert not REPLACEMENTS.keys() & frozenset().union(*SERVICES.values())


def test_the_workers_settings_are_the_workers_own() -> None:
    assert frozenset(WorkerSettings.model_fields) == WORKER_SETTINGS


def test_up_takes_the_workers_section_as_the_worker_does(tmp_path: Path) -> None:
    text = (
        "[worker]\ngpu_memory_utilization = 0.8\nkv_memory = 1073741824\nrunner = 'scripted'\n"
        "script = {step_seconds = 0.5}\n"
    )
    loaded = UpSettings.load({}, _file(tmp_path, text))
    assert (loaded.gpu_memory_utilization, loaded.kv_memory) == (0.8, "1073741824")
    assert loaded.script == '{"step_seconds": 0.5}'
    assert UpSettings.load({"kv_memory": "1.5 GiB", "gpu_memory_utilization": "0.5"}).kv_memory == "1.5 GiB"


def test_up_reads_the_script_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPFENCE_SCRIPT", '{"step_seconds": 0.5}')
    assert UpSettings.load({"runner": "scripted"}).script == '{"step_seconds": 0.5}'


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("kv_memory", "much", "like 512MiB"),
        ("kv_memory", "1XB", "like 512MiB"),
        ("gpu_memory_utilization", "1.5", "less than or equal to 1"),
        ("num_blocks", "1", "at least 2: block 0"),
        ("device", "tpu", "'cpu' or 'cuda'"),
        ("dtype", "int8", "'float32', 'bfloat16' or 'auto'"),
        ("script", "{", "must be JSON"),
        ("script", "{}", "script goes with runner = scripted only"),
    ],
)
def test_up_refuses_what_its_workers_would_refuse(name: str, value: str, told: str) -> None:
    with pytest.raises(SettingsError) as error:
        UpSettings.load({name: value})
    assert told in _problems(error)


def test_up_knows_the_models_that_workers_fetch() -> None:
    assert sorted(KNOWN_MODELS) == sorted(fetch_model.KNOWN_MODELS)


@pytest.mark.parametrize("name", ["max_num_seqs", "watermark", "max_model_len", "drain_deadline_s"])
def test_f104_true_in_a_file_is_no_number(tmp_path: Path, name: str) -> None:
    path = _file(tmp_path, f"[scheduler]\n{name} = true\n")
    with pytest.raises(SettingsError, match=f"{name} .in .*: must not be true or false"):
        SchedulerSettings.load({}, path)


def test_f104_true_stays_true_where_it_is_meant(tmp_path: Path) -> None:
    assert not SchedulerSettings.load(
        {}, _file(tmp_path, "[scheduler]\nenable_prefix_caching = false\n")
    ).enable_prefix_caching


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size", "cpu_offload_gb"])
def test_f109_what_one_worker_cannot_do_is_not_promised_of_several(name: str) -> None:
    for answer in (REPLACEMENTS[name], WORKER_REPLACEMENTS[name]):
        assert "one device" in answer and "start more workers" not in answer

"""Settings of the worker, read once at start and frozen.

A value comes from the flag, else from STEPFENCE_<NAME> in the environment, else from the settings file that whoever
started this process has read, else it is the default. `load` combines them; `WorkerSettings(num_blocks=64)` means
exactly that. Whatever is not understood is an error that says what was meant."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from worker_svc.runner.script import MAX_SECONDS, Script

_MAX_NAME_BYTES: Final = 256
ENV_PREFIX: Final = "STEPFENCE_"
# Orchestrators put such names into every container beside a service that is called stepfence-something.
_INJECTED: Final = re.compile(r"^STEPFENCE_(.*_)?(SERVICE_HOST|(SERVICE_)?PORT(_.*)?)$")

# Settings of the other services and commands, which share one environment with the worker: no errors here. A test holds
# this equal to the scheduler's and the front end's own.
OTHER_SETTINGS: Final = (
    "block_size",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "first_steps_watchdog_s",
    "log_requests",
    "long_prefill_token_threshold",
    "max_fruitless_epochs",
    "max_inflight_steps",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_preemptions",
    "max_prompt_bytes",
    "max_calls",
    "max_calls_per_peer",
    "client_tokens_file",
    "tenant_limits_file",
    "usage_log",
    "client_tls_dir",
    "tls_server_name",
    "gateway",
    "max_queued_requests",
    "max_queued_tokens",
    "metrics_listen",
    "openai",
    "openai_listen",
    "no_worker_grace_s",
    "num_speculative_tokens",
    "policy",
    "prefill_schedule_interval",
    "record",
    "scheduler_grace_s",
    "scheduler",
    "scheduler_listen",
    "step_watchdog_s",
    "watermark",
    "worker",
    "worker_listen",
    "workers",
)
# Read by commands themselves or by compose.yaml, not by a service.
COMMAND_VARIABLES: Final = (
    "cache_dir",
    "cache_salt",
    "chat",
    "config",
    "frontend_memory",
    "ignore_eos",
    "json",
    "max_tokens",
    "min_p",
    "min_tokens",
    "priority",
    "scheduler_memory",
    "seed",
    "tag",
    "target",
    "temperature",
    "timeout",
    "token_file",
    "top_k",
    "top_p",
    "worker_memory",
)

_RECOMPUTE: Final = "a preempted request is always recomputed; give the pool more room with kv_memory or num_blocks"
_ONE_DEVICE: Final = (
    "not there yet: a model must fit into the memory of one device; more workers serve more requests, each with the "
    "whole model"
)
# What people bring from other systems, and what to use here (D18).
REPLACEMENTS: Final[dict[str, str]] = {
    "swap_space": _RECOMPUTE,
    "cpu_offload_gb": _ONE_DEVICE,
    "preemption_mode": _RECOMPUTE,
    "num_scheduler_steps": "steps are kept in flight instead: use the scheduler's max_inflight_steps",
    "multi_step_stream_outputs": "every step is answered by itself; there is nothing to set",
    "use_v2_block_manager": "there is one block manager, in the scheduler; leave it out",
    "num_gpu_blocks_override": "use num_blocks",
    "kv_cache_memory_bytes": "use kv_memory",
    "mem_fraction_static": "use gpu_memory_utilization",
    "page_size": "use the scheduler's block_size",
    "context_length": "use max_model_len",
    "model_path": "use model",
    "tokenizer": "the tokenizer comes with the model; leave it out",
    "host": "use listen, HOST:PORT",
    "port": "use listen, HOST:PORT",
    "bind": "use listen, HOST:PORT",
    "log_level": "use log_format for the form of logs; the level is fixed",
    "tensor_parallel_size": _ONE_DEVICE,
    "data_parallel_size": "start more workers: each is a rank of its own",
    "pipeline_parallel_size": _ONE_DEVICE,
}

_UNITS: Final = {
    **{"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40},
    **{"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
}
_SIZE: Final = re.compile(r"^(\d+(?:\.\d+)?)\s*([a-z]*)$")
# Bounds that keep numbers within what timers, messages and memory can hold; far beyond what makes sense.
_MAX_LEN: Final = 1 << 30
_MAX_NUM_BLOCKS: Final = (1 << 31) - 1
_MAX_THREADS: Final = 1024


class SettingsError(Exception):
    """The settings cannot be used. The text names each one at fault, where it came from and what to do."""


def parse_address(value: str) -> tuple[str, int]:
    """HOST:PORT as two; an IPv6 host in brackets. Raises ValueError."""
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("must be HOST:PORT, for example 127.0.0.1:50061 (port 0: any free one)")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError("write an IPv6 host in brackets, for example [::1]:50061")
    return host, int(port)


def _address(value: str) -> str:
    parse_address(value)
    return value


def parse_bytes(value: object) -> object:
    """ "1GiB", "512 MiB", "1.5GB" or plain bytes, as bytes. Raises ValueError; leaves other types to pydantic."""
    if not isinstance(value, str) or _none(value) is None:
        return _none(value)
    match = _SIZE.match(value.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError("must be a number of bytes, or like 512MiB, 1GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def _none(value: object) -> object:
    return None if isinstance(value, str) and value.strip().lower() in ("", "none") else value


def _script(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"must be JSON: {error}") from None


def _two_blocks(value: int | None) -> int | None:
    if value is not None and value < 2:
        raise ValueError("must be at least 2: block 0 (the null block) holds nothing")
    return value


OptionalBytes = Annotated[int | None, Field(ge=1), BeforeValidator(parse_bytes)]
OptionalLength = Annotated[int | None, Field(ge=1, le=_MAX_LEN), BeforeValidator(_none)]
OptionalThreads = Annotated[int | None, Field(ge=1, le=_MAX_THREADS), BeforeValidator(_none)]
OptionalPath = Annotated[Path | None, BeforeValidator(_none)]
OptionalNumBlocks = Annotated[
    int | None, Field(le=_MAX_NUM_BLOCKS), AfterValidator(_two_blocks), BeforeValidator(_none)
]


@dataclass(frozen=True, slots=True)
class FileSettings:
    """What the [worker] section of a settings file gave, by field name, as text."""

    path: str
    values: Mapping[str, str]


def _names(value: str) -> str:
    names = [name.strip() for name in value.split(",")] if value else []
    if any(not name or len(name.encode()) > _MAX_NAME_BYTES or not name.isprintable() for name in names):
        raise ValueError(f"each name must have 1 to {_MAX_NAME_BYTES} bytes, all of them printable")
    if len(set(names)) < len(names):
        raise ValueError("names must differ from each other")
    return ",".join(names)


class WorkerSettings(BaseSettings):
    """Settings of `worker_svc serve`. Times in seconds, lengths in tokens."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENV_PREFIX, env_ignore_empty=True, protected_namespaces=()
    )

    listen: Annotated[str, AfterValidator(_address)] = Field("127.0.0.1:50061", description="HOST:PORT to listen on.")
    model: str = Field("smollm2", min_length=1, description="Path of a model, or a known name; fetched when not there.")
    runner: Literal["model", "scripted"] = Field("model", description="model, or scripted (no torch, made-up text).")
    device: Literal["cpu", "cuda"] = Field("cpu", description="cpu or cuda.")
    dtype: Literal["float32", "bfloat16", "auto"] = Field("float32", description="float32, bfloat16 or auto.")
    num_blocks: OptionalNumBlocks = Field(
        None, description="KV blocks, the null block included (at least 2); none = from kv_memory (scripted: 4096)."
    )
    kv_memory: OptionalBytes = Field(
        None, description="Memory for KV, in bytes or as 1GiB; none = 1GiB (cpu), gpu_memory_utilization (cuda)."
    )
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Share of the GPU's memory to use (cuda).")
    max_model_len: OptionalLength = Field(
        None, description="Longest sequence in tokens, prompt and output; none = the model's (scripted: 8192)."
    )
    served_model_name: Annotated[str, AfterValidator(_names)] = Field(
        "",
        description="Names under which clients ask for the model, with commas between them, or repeatable. Unset: the "
        "model's own.",
    )
    threads: OptionalThreads = Field(
        None, description="Threads to compute with; none = as many as the cores it may use, up to 8."
    )
    cluster_secret_file: OptionalPath = Field(
        None, description="File with the secret that all parts of a deployment share; none = no secret."
    )
    tls_dir: OptionalPath = Field(
        None, description="Directory with tls.crt, tls.key and ca.crt for TLS between the parts; none = plain text."
    )
    drain_deadline_s: float = Field(
        30.0,
        ge=0,
        le=MAX_SECONDS,
        allow_inf_nan=False,
        description="Seconds that running requests may still take after a stop signal.",
    )
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="auto (readable on a terminal, else JSON), json or text."
    )
    script: Annotated[Script | None, BeforeValidator(_script)] = Field(
        None, description="JSON with delays and faults of the scripted runner (docs/worker.md); none = no faults."
    )

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names of served_model_name."""
        return tuple(self.served_model_name.split(",")) if self.served_model_name else ()

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.script is not None and self.runner != "scripted":
            raise ValueError("script goes with runner = scripted only")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)

    @classmethod
    def load(cls, flags: Mapping[str, object] | None = None, file: FileSettings | None = None) -> Self:
        """Combine flags (by field name; None = not given), the environment and what a settings file gave. Raises
        SettingsError, with each setting called as it was given."""
        refuse_unknown_environment(os.environ)
        given = {name: value for name, value in (flags or {}).items() if value is not None}
        from_environment = _EnvironmentText(cls)()
        from_file = {} if file is None else file.values
        names = {
            **{name: f"[worker] {name} (in {file.path})" for name in from_file if file is not None},
            **{name: f"{ENV_PREFIX}{name.upper()} (in the environment)" for name in from_environment},
            **{name: flag(name) for name in given},
        }
        try:
            return cls(**{**from_file, **from_environment, **given})
        except ValidationError as error:
            raise SettingsError(_explain(error, names)) from None


class _EnvironmentText(EnvSettingsSource):
    """Variables as text: `script` reads its JSON itself, with an error message of its own."""

    def decode_complex_value(self, field_name: str, field: Any, value: Any) -> Any:
        return value


def flag(name: str) -> str:
    """The command line's spelling of a setting."""
    return "--" + name.replace("_", "-")


def refuse_unknown_environment(environ: Mapping[str, str]) -> None:
    """Raise SettingsError when a STEPFENCE_* variable belongs to no part of Stepfence."""
    known = {*WorkerSettings.model_fields, *OTHER_SETTINGS, *COMMAND_VARIABLES}
    problems = [
        f"{variable}: {advice(name, lambda other: ENV_PREFIX + other.upper())}"
        for variable in sorted(environ)
        if variable.startswith(ENV_PREFIX) and not _INJECTED.match(variable)
        for name in [variable.removeprefix(ENV_PREFIX).lower()]
        if name not in known
    ]
    if problems:
        raise SettingsError("\n".join(problems))


def advice(name: str, spell: Callable[[str], str], command: str = "stepfence worker") -> str:
    """What to say about a setting that is not the worker's: its replacement, its owner, the nearest known names, or the
    command whose help lists what there is."""
    if name in REPLACEMENTS:
        return f"not a setting of Stepfence: {REPLACEMENTS[name]}"
    if name in OTHER_SETTINGS:
        return "a setting of the scheduler or the front end, not of the worker"
    near = difflib.get_close_matches(name, sorted(WorkerSettings.model_fields), n=3, cutoff=0.6)
    if near:
        return f"unknown setting; did you mean {' or '.join(map(spell, near))}?"
    return f"unknown setting; see `{command} --help`"


def _explain(error: ValidationError, names: Mapping[str, str]) -> str:
    """One line for each thing that is wrong; `names` says how a setting was called by whoever gave it."""
    lines = []
    for item in error.errors(include_url=False):
        message = item["msg"].removeprefix("Value error, ")
        if item["loc"]:
            name, *inner = map(str, item["loc"])
            where = f"{'.'.join(inner)}: " if inner else ""
            message = f"{names.get(name, name)}: {where}{message} (given: {item['input']!r})"
        lines.append(message)
    return "\n".join(lines)

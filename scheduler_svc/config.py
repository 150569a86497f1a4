"""Settings of the scheduler, the front end and `stepfence up`, read once at start and frozen.

A value comes from the flag, else from STEPFENCE_<NAME> in the environment, else from the TOML file, else it is the
default. `load` does the reading; the classes themselves touch neither environment nor files, so
`SchedulerSettings(max_num_seqs=4)` means exactly that. Whatever is not understood is an error that names what was
probably meant.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from scheduler_svc.retired_settings import REPLACEMENTS, WORKER_SETTINGS
from scheduler_svc.rpc import cluster_secret
from scheduler_svc.rpc.cluster_secret import ClusterSecret, SecretError
from scheduler_svc.rpc.tls import Tls, TlsError

ENV_PREFIX: Final = "STEPFENCE_"
_MAX_NUM_SEQS: Final = 128
# What a worker takes as a number of bytes.
_SIZE: Final = re.compile(r"^\d+(\.\d+)?\s*(|b|[kmgt]i?b)$")
# Orchestrators put STEPFENCE_..._SERVICE_HOST, ..._PORT, ..._PORT_50051_TCP_ADDR and the like into every container
# beside a service of that name.
_INJECTED: Final = re.compile(r"^STEPFENCE_(.*_)?(SERVICE_HOST|(SERVICE_)?PORT(_.*)?)$")
# Read by the commands themselves or by compose.yaml, not by a service: the settings file, the model cache, flags of
# `generate` and `health`; tag and memory limits of containers (their STEPFENCE_PORT is one of _INJECTED).
_COMMAND_VARIABLES: Final = frozenset(
    {
        "config",
        "cache_dir",
        "target",
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "ignore_eos",
        "chat",
        "priority",
        "cache_salt",
        "timeout",
        "token_file",
        "json",
        "tag",
        "scheduler_memory",
        "frontend_memory",
        "worker_memory",
    }
)
# Models that a worker fetches by name. A test holds this equal to the worker's own.
KNOWN_MODELS: Final = ("smollm2",)
_SECTIONS: Final = ("scheduler", "frontend", "worker", "up")

# Bounds that keep numbers within what timers, messages and memory can hold; far beyond what makes sense.
MAX_SECONDS: Final = 31_536_000.0
_MAX_LEN: Final = 1 << 30
_MAX_STEP_TOKENS: Final = 1 << 20
_MAX_SEQS: Final = 1 << 16
_MAX_BLOCK_SIZE: Final = 1 << 16
_MAX_NUM_BLOCKS: Final = (1 << 31) - 1
_MAX_THREADS: Final = 1024
# Of one request and step. Guesses from repeated text are rarely right for longer.
_MAX_DRAFTS: Final = 64
# What one message holds.
_MAX_PROMPT_BYTES: Final = 16 << 20
_MAX_CALLS: Final = 1_000_000

Network = IPv4Network | IPv6Network
LogFormat = Literal["auto", "json", "text"]


class SettingsError(Exception):
    """The settings cannot be used. The text names each setting at fault, where it came from and what to do."""


def _address(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError("must be HOST:PORT, for example 127.0.0.1:50051 (port 0: any free one)")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError("write an IPv6 host in brackets, for example [::1]:50051")
    return value


def _worker_address(value: str) -> str:
    _address(value.removeprefix("dns:///"))
    return value


def _none(value: object) -> object:
    return None if isinstance(value, str) and value.strip().lower() in ("", "none") else value


def _size(value: object) -> object:
    """A number of bytes or a text like 1GiB, as the text that a worker takes. Raises ValueError."""
    value = _none(value)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str) and not _SIZE.match(value.strip().lower()):
        raise ValueError("must be a number of bytes, or like 512MiB, 1GiB")
    return value


def _script(value: object) -> object:
    """JSON, or the table of a settings file, as JSON. What it may hold is the worker's business. Raises ValueError."""
    value = _none(value)
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, str):
        try:
            json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"must be JSON: {error}") from None
    return value


def _two_blocks(value: int | None) -> int | None:
    if value is not None and value < 2:
        raise ValueError("must be at least 2: block 0 (the null block) holds nothing")
    return value


def _network(value: object) -> object:
    try:
        return ip_network(value, strict=False) if isinstance(value, str) else value
    except ValueError:
        raise ValueError("must be an IP address or a network, for example 10.0.0.1 or 10.0.0.0/8") from None


def _split(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


Address = Annotated[str, AfterValidator(_address)]
WorkerAddresses = Annotated[
    tuple[Annotated[str, AfterValidator(_worker_address)], ...], NoDecode, BeforeValidator(_split)
]
Gateways = Annotated[tuple[Annotated[Network, BeforeValidator(_network)], ...], NoDecode, BeforeValidator(_split)]
Seconds = Annotated[float, Field(le=MAX_SECONDS, allow_inf_nan=False)]
OptionalLength = Annotated[int | None, Field(ge=1, le=_MAX_LEN), BeforeValidator(_none)]
OptionalThreads = Annotated[int | None, Field(ge=1, le=_MAX_THREADS), BeforeValidator(_none)]
OptionalCalls = Annotated[int | None, Field(ge=1, le=_MAX_CALLS), BeforeValidator(_none)]
OptionalLimit = Annotated[int | None, Field(ge=0), BeforeValidator(_none)]
OptionalAddress = Annotated[Address | None, BeforeValidator(_none)]
OptionalPath = Annotated[Path | None, BeforeValidator(_none)]
OptionalNumBlocks = Annotated[
    int | None, Field(le=_MAX_NUM_BLOCKS), AfterValidator(_two_blocks), BeforeValidator(_none)
]
OptionalShare = Annotated[Annotated[float, Field(gt=0, le=1)] | None, BeforeValidator(_none)]
OptionalSize = Annotated[str | None, BeforeValidator(_size)]
OptionalScript = Annotated[str | None, BeforeValidator(_script)]
OptionalDevice = Annotated[Literal["cpu", "cuda"] | None, BeforeValidator(_none)]
OptionalDtype = Annotated[Literal["float32", "bfloat16", "auto"] | None, BeforeValidator(_none)]


class _Settings(BaseSettings):
    """Frozen, nothing unknown; sources are combined by `load` only."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENV_PREFIX, env_ignore_empty=True, protected_namespaces=()
    )

    @field_validator("*", mode="before", check_fields=False)
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        """In Python true is 1, in a settings file it is a mistake."""
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise ValueError("must not be true or false")
        return value

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
    def sections(cls) -> tuple[tuple[str, Mapping[str, str]], ...]:
        """Sections of the TOML file it reads, later ones over earlier ones, each with keys that have another name here
        ("" = does not apply here)."""
        raise NotImplementedError

    @classmethod
    def load(cls, flags: Mapping[str, object] | None = None, config_file: Path | None = None) -> Self:
        """Combine flags (by field name; None = not given), environment and TOML file.

        config_file None: the one STEPFENCE_CONFIG names, if any. Raises SettingsError.
        """
        refuse_unknown_environment(os.environ)
        given = {name: value for name, value in (flags or {}).items() if value is not None}
        path = config_file or _path_or_none(os.environ.get(ENV_PREFIX + "CONFIG"))
        from_file = {} if path is None else _read_sections(path, cls)
        from_environment = EnvSettingsSource(cls)()
        origins = {
            **{name: f"{name} (in {path})" for name in from_file},
            **{name: f"{ENV_PREFIX}{name.upper()} (in the environment)" for name in from_environment},
            **{name: f"{name} (on the command line)" for name in given},
        }
        try:
            return cls(**{**from_file, **from_environment, **given})
        except ValidationError as error:
            raise SettingsError(_explain(error, origins)) from None


class _Scheduling(_Settings):
    """What the scheduler may be told about scheduling; shared by `scheduler` and `up`."""

    block_size: int = Field(
        16, ge=1, le=_MAX_BLOCK_SIZE, description="Tokens per KV block; a multiple of every worker's unit."
    )
    max_num_seqs: int = Field(
        _MAX_NUM_SEQS,
        ge=1,
        le=_MAX_SEQS,
        description="Requests running at once, per worker. Unset: at most max_num_batched_tokens.",
    )
    max_num_batched_tokens: int = Field(2048, ge=1, le=_MAX_STEP_TOKENS, description="Most tokens of one step.")
    max_model_len: OptionalLength = Field(
        None, description="Longest sequence in tokens, prompt and output; none = the model's."
    )
    max_inflight_steps: int = Field(2, ge=1, le=64, description="Steps sent and not yet acknowledged, per worker.")
    policy: Literal["fcfs", "priority"] = Field("fcfs", description="Order of the queue: fcfs or priority.")
    enable_prefix_caching: bool = Field(True, description="Share KV blocks between requests with equal prefixes.")
    enable_chunked_prefill: bool = Field(True, description="Let a prompt be computed over several steps.")
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="Most tokens of one prompt in one step; 0 = up to the step's budget."
    )
    watermark: float = Field(0.02, ge=0.0, lt=1.0, description="Share of all KV blocks kept free at admission.")
    prefill_schedule_interval: int = Field(
        1, ge=1, description="Prompts start only every so many steps while others decode; 1 = every step."
    )
    num_speculative_tokens: int = Field(
        0, ge=0, le=_MAX_DRAFTS, description=f"Draft tokens per request and step, at most {_MAX_DRAFTS}; 0 = none."
    )
    max_preemptions: OptionalLimit = Field(
        3, description="Spare a request preempted this often while there is another victim; none = never spare."
    )
    max_queued_requests: int = Field(1024, ge=1, description="Waiting requests before new ones are refused.")
    max_queued_tokens: int = Field(4_000_000, ge=1, description="Waiting prompt tokens before new ones are refused.")
    max_fruitless_epochs: int = Field(
        3, ge=0, description="Worker failures in a row a request may be part of before it fails; 0 = no limit."
    )
    tenant_limits_file: OptionalPath = Field(
        None, description="TOML with limits of tenants (docs/security.md); none = no limits."
    )
    no_worker_grace_s: Seconds = Field(
        30.0, ge=0, description="Seconds new requests still queue after the last worker was lost."
    )
    step_watchdog_s: Seconds = Field(
        10.0, gt=0, description="Seconds a step may take before its worker counts as lost."
    )
    first_steps_watchdog_s: Seconds = Field(
        120.0, gt=0, description="The same for the first three steps of a session, in seconds."
    )
    drain_deadline_s: Seconds = Field(
        30.0, ge=0, description="Seconds accepted requests may still take after a stop signal."
    )
    metrics_listen: OptionalAddress = Field(
        "127.0.0.1:9400", description="HOST:PORT of the Prometheus metrics; none = no metrics."
    )
    record: OptionalPath = Field(None, description="File that receives events and decisions, for replay.")
    log_requests: bool = Field(False, description="A line of the log for each request that ends, with what it cost.")
    log_format: LogFormat = Field("auto", description="auto (readable on a terminal, else JSON), json or text.")

    @model_validator(mode="before")
    @classmethod
    def _fit_sequences_into_a_step(cls, values: Any) -> Any:
        # Every running request needs one token of each step: whoever lowers only the step means fewer sequences, too.
        if isinstance(values, dict) and "max_num_batched_tokens" in values and "max_num_seqs" not in values:
            budget = str(values["max_num_batched_tokens"])
            if budget.isdigit() and 0 < int(budget) < _MAX_NUM_SEQS:
                return {**values, "max_num_seqs": int(budget)}
        return values

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request needs one token of each step"
            )
        return self


class _BetweenParts(_Settings):
    """How the parts of a deployment know each other, when each is started by itself."""

    tls_dir: OptionalPath = Field(
        None, description="Directory with tls.crt, tls.key and ca.crt for TLS between the parts; none = plain text."
    )
    tls_server_name: str = Field(
        "", description="Name that the certificates of all parts are made out for; unset = the host that is called."
    )


class SchedulerSettings(_Scheduling, _BetweenParts):
    """Settings of `stepfence scheduler`. Times in seconds, lengths in tokens."""

    listen: Address = Field("127.0.0.1:50052", description="HOST:PORT to listen on.")
    worker: WorkerAddresses = Field(
        (), description="Worker HOST:PORT, or dns:///HOST:PORT for every address of a name; repeatable."
    )
    cluster_secret_file: OptionalPath = Field(
        None, description="File with the secret that all parts of a deployment share; none = no secret."
    )

    @classmethod
    def sections(cls) -> tuple[tuple[str, Mapping[str, str]], ...]:
        return (("scheduler", {}),)


class _Calls(_Settings):
    """What the front end takes from clients; shared by `frontend` and `up`."""

    client_tokens_file: OptionalPath = Field(
        None, description="File with the tokens of clients and their tenants (docs/security.md); none = all may call."
    )
    client_tls_dir: OptionalPath = Field(
        None,
        description="Directory with tls.crt and tls.key for TLS towards clients; with ca.crt, too, clients must show "
        "certificates. none = plain text.",
    )
    usage_log: OptionalPath = Field(
        None, description="File that gets a line of JSON for each request, with its tokens; - = standard output."
    )
    max_prompt_bytes: int = Field(
        1_048_576, ge=1, le=_MAX_PROMPT_BYTES, description="Longest prompt text in bytes of UTF-8, at most 16 MiB."
    )
    max_calls: int = Field(
        4096, ge=1, le=_MAX_CALLS, description="Generate and Complete calls open at once; more are refused QUEUE_FULL."
    )
    max_calls_per_peer: OptionalCalls = Field(
        512,
        description="The same of one client address (of IPv6: of one /64); more are refused TOO_MANY_CALLS. none = as "
        "many as max_calls.",
    )
    gateway: Gateways = Field(
        (),
        description="Address or network of clients that stand for many others, such as proxies and NAT: "
        "max_calls_per_peer does not hold for them; repeatable.",
    )


class FrontendSettings(_Calls, _BetweenParts):
    """Settings of `stepfence frontend`."""

    listen: Address = Field("127.0.0.1:50051", description="HOST:PORT to listen on for clients.")
    openai_listen: OptionalAddress = Field(
        None, description="HOST:PORT to listen on for OpenAI's clients (HTTP); none = off."
    )
    scheduler: Address = Field("127.0.0.1:50052", description="HOST:PORT of the scheduler.")
    scheduler_grace_s: Seconds = Field(
        30.0, ge=0, description="Seconds live requests wait for a scheduler to come back before they end."
    )
    cluster_secret_file: OptionalPath = Field(
        None, description="File with the secret that all parts of a deployment share; none = no secret."
    )
    drain_deadline_s: Seconds = Field(
        30.0, ge=0, description="Seconds accepted requests may still take after a stop signal."
    )
    log_format: LogFormat = Field("auto", description="auto (readable on a terminal, else JSON), json or text.")

    @classmethod
    def sections(cls) -> tuple[tuple[str, Mapping[str, str]], ...]:
        return (("frontend", {}),)


class UpSettings(_Scheduling, _Calls):
    """Settings of `stepfence up`: all of the scheduler's, and of the front end and the workers what a person would set.

    Worker settings that are None are left to the worker's own defaults.
    """

    listen: Address = Field("127.0.0.1:50051", description="HOST:PORT for clients (front end).")
    openai: bool = Field(True, description="Serve OpenAI's clients, too, at openai_listen.")
    openai_listen: Address = Field("127.0.0.1:8000", description="HOST:PORT for OpenAI's clients (HTTP).")
    scheduler_listen: Address = Field("127.0.0.1:50052", description="HOST:PORT of the scheduler.")
    worker_listen: Address = Field(
        "127.0.0.1:50061", description="HOST:PORT of the first worker; the others take the next ports."
    )
    workers: int = Field(1, ge=0, le=64, description="Worker processes to start.")
    cluster_secret_file: OptionalPath = Field(
        None,
        description="File with the secret of scheduler, front end and workers, made when missing; none = this user's, "
        "where `stepfence status` looks, too.",
    )
    # Short by default, so that all parts have ended within 5 s of a Ctrl-C at a terminal.
    drain_deadline_s: Seconds = Field(2.5, ge=0, description="Seconds running requests may still take after Ctrl-C.")
    model: str = Field("smollm2", description="Path of a model, or a known name; fetched when not there.")
    served_model_name: str = Field(
        "", description="Names under which clients ask for the model, with commas between them. Unset: the model's own."
    )
    runner: Literal["model", "scripted"] = Field("model", description="model, or scripted (no torch, made-up text).")
    device: OptionalDevice = Field(None, description="cpu or cuda; none = the worker's default.")
    dtype: OptionalDtype = Field(None, description="float32, bfloat16 or auto; none = the worker's default.")
    num_blocks: OptionalNumBlocks = Field(
        None, description="KV blocks per worker, the null block included (at least 2); none = from kv_memory."
    )
    kv_memory: OptionalSize = Field(
        None, description="KV memory per worker, in bytes or as 1GiB; none = the worker's default."
    )
    gpu_memory_utilization: OptionalShare = Field(None, description="Share of GPU memory a worker may use (cuda).")
    threads: OptionalThreads = Field(None, description="Threads per worker; none = the worker's default.")
    log_format: LogFormat = Field(
        "auto", description="auto and text: lines for people, marked with their part; json: JSON with the field part."
    )
    script: OptionalScript = Field(
        None, description="JSON with delays and faults of scripted workers (docs/worker.md); none = no faults."
    )

    @model_validator(mode="after")
    def _script_needs_its_runner(self) -> Self:
        if self.script is not None and self.runner != "scripted":
            raise ValueError("script goes with runner = scripted only")
        return self

    @classmethod
    def sections(cls) -> tuple[tuple[str, Mapping[str, str]], ...]:
        # drain_deadline_s has a default of its own here, so only [up] sets it. The parts call each other on this
        # machine, in plain text.
        own = {"drain_deadline_s": "", "tls_dir": "", "tls_server_name": ""}
        return (
            ("scheduler", {"listen": "scheduler_listen", "worker": "", **own}),
            ("frontend", {"scheduler": "", **own}),
            ("worker", {"listen": "worker_listen", **own}),
            ("up", {}),
        )

    def scheduler_settings(self, listen: str, workers: tuple[str, ...]) -> SchedulerSettings:
        """The scheduler's part."""
        shared = {name: getattr(self, name) for name in (*_Scheduling.model_fields, "cluster_secret_file")}
        return SchedulerSettings(listen=listen, worker=workers, **shared)

    def frontend_settings(self, listen: str, scheduler: str, openai_listen: str | None) -> FrontendSettings:
        """The front end's part."""
        return FrontendSettings(
            listen=listen,
            openai_listen=openai_listen,
            scheduler=scheduler,
            cluster_secret_file=self.cluster_secret_file,
            drain_deadline_s=self.drain_deadline_s,
            **{name: getattr(self, name) for name in _Calls.model_fields},
            log_format=self.log_format,
        )


SERVICES: Final[dict[str, frozenset[str]]] = {
    "scheduler": frozenset(SchedulerSettings.model_fields),
    "frontend": frozenset(FrontendSettings.model_fields),
    "worker": WORKER_SETTINGS,
    "up": frozenset(UpSettings.model_fields),
}


def read_secret(path: Path | None) -> ClusterSecret | None:
    """The cluster secret in the file; None without a file. Raises SettingsError."""
    try:
        return None if path is None else cluster_secret.read(path)
    except SecretError as error:
        raise SettingsError(f"cluster_secret_file: {error}") from None


def read_tls(name: str, path: Path | None, needs: tuple[str, ...], *, server_name: str = "") -> Tls | None:
    """The TLS files of the setting `name`; None without a directory. Raises SettingsError."""
    try:
        return None if path is None else Tls(path, server_name=server_name, needs=needs)
    except TlsError as error:
        raise SettingsError(f"{name}: {error}") from None


def flag(name: str) -> str:
    """The command line's spelling of a setting."""
    return "--" + name.replace("_", "-")


def command_variables() -> frozenset[str]:
    """Names, without the prefix, of the STEPFENCE_ variables that commands read and no service does."""
    return _COMMAND_VARIABLES


def refuse_unknown_environment(environ: Mapping[str, str]) -> None:
    """Raise SettingsError when a STEPFENCE_* variable belongs to no part of Stepfence.

    One environment often serves several parts, so a variable that another part knows is fine.
    """
    known = frozenset().union(*SERVICES.values()) | _COMMAND_VARIABLES
    problems = [
        f"{variable}: {advice(name, known, lambda other: ENV_PREFIX + other.upper())}"
        for variable in sorted(environ)
        if variable.startswith(ENV_PREFIX) and not _INJECTED.match(variable)
        for name in [variable.removeprefix(ENV_PREFIX).lower()]
        if name not in known
    ]
    if problems:
        raise SettingsError("\n".join(problems))


def advice(name: str, known: Iterable[str], spell: Any = str, command: str = "stepfence up") -> str:
    """What to say about a setting nobody knows: its replacement, the part that has it, the nearest known names, or the
    command whose help lists what there is."""
    if name in REPLACEMENTS:
        return f"not a setting of Stepfence: {REPLACEMENTS[name]}"
    owners = [service for service, names in SERVICES.items() if name in names and service != "up"]
    if owners:
        return f"a setting of the {' and the '.join(owners)}, not of this part"
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)
    if near:
        return f"unknown setting; did you mean {' or '.join(spell(other) for other in near)}?"
    return f"unknown setting; see `{command} --help`"


def _path_or_none(value: str | None) -> Path | None:
    return Path(value) if value else None


def read_section(path: Path, section: str) -> dict[str, Any]:
    """One section of a settings file, all of which is checked for unknown names. Raises SettingsError."""
    section_values: dict[str, Any] = _read_tables(path).get(section, {})
    return section_values


def _read_sections(path: Path, settings: type[_Settings]) -> dict[str, Any]:
    tables = _read_tables(path)
    values: dict[str, Any] = {}
    for section, renamed in settings.sections():
        for key, value in tables.get(section, {}).items():
            name = renamed.get(key, key)
            if name:
                values[name] = value
    return values


def read_toml(path: Path) -> dict[str, Any]:
    """Raises SettingsError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not a TOML file: {error}") from None


def _read_tables(path: Path) -> dict[str, dict[str, Any]]:
    tables = read_toml(path)
    problems = _unknown_in_file(path, tables)
    if problems:
        raise SettingsError("\n".join(problems))
    return tables


def _unknown_in_file(path: Path, tables: Mapping[str, Any]) -> list[str]:
    problems = []
    for section, table in tables.items():
        if section not in _SECTIONS or not isinstance(table, dict):
            names = ", ".join(f"[{name}]" for name in _SECTIONS)
            problems.append(f"{path}: {section}: settings stand in one of the sections {names}")
            continue
        problems += [
            f"{path}: [{section}] {key}: {advice(key, SERVICES[section], command=f'stepfence {section}')}"
            for key in table
            if key not in SERVICES[section]
        ]
    return problems


def _explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    lines = []
    for item in error.errors(include_url=False):
        name = str(item["loc"][0]) if item["loc"] else ""
        message = item["msg"].removeprefix("Value error, ")
        if not name:
            lines.append(message)
        else:
            lines.append(f"{origins.get(name, f'{name} (default)')}: {message} (given: {item['input']!r})")
    return "\n".join(lines)

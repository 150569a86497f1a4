"""`stepfence up`: a scheduler, a front end and workers on this machine, as children of one process, until Ctrl-C.

Start: ports are chosen (the next free one when one is taken), the model is fetched when it is a known name, the parts
start all at once, and `up` waits until each says it is ready. Run: a part that ends is started again with the same
command, later each time it ends soon; a part that ends too often ends everything (restarts.py). A scheduler that was
drained ends everything in order. End: SIGINT or SIGTERM ends the front end first (it finishes what it has accepted, up
to the drain deadline), then the scheduler, then the workers; what is still there after its time is killed. A second
signal kills at once.

Exit codes: 0 ended as asked, 1 a part could not start or ended too often, 2 settings that cannot work, 3 drain deadline
passed with work cut off, 130 / 143 ended at once by a second SIGINT / SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from scheduler_svc.cli.delegates import worker_command
from scheduler_svc.cli.merged_log import Level, MergedLog
from scheduler_svc.cli.options import as_flags
from scheduler_svc.cli.part import Part
from scheduler_svc.cli.ports import free_address
from scheduler_svc.cli.restarts import RESTARTS_IN_WINDOW, WINDOW_S, Restarts, ending
from scheduler_svc.config import ENV_PREFIX, KNOWN_MODELS, SERVICES, SettingsError, UpSettings, flag, read_secret
from scheduler_svc.rpc import channels, cluster_secret
from scheduler_svc.rpc.cluster_secret import SecretError

# Beyond the drain deadline: for exchanging last messages and leaving the process. The sum over the three kinds of parts
# keeps the default end below five seconds.
_LEAVE_S: Final = 0.5
# How a scheduler ends that was drained: nothing was cut off, or something was.
_DRAINED: Final = (0, 3)
# Stands for the exit code of a part of which the system made no process.
_NOT_STARTED: Final = 1
_POLL_S: Final = 0.1
_REPORT_S: Final = 5.0
_WORKER_SETTINGS: Final = (
    *("model", "runner", "script", "device", "dtype", "threads", "served_model_name"),
    *("num_blocks", "kv_memory", "gpu_memory_utilization", "cluster_secret_file"),
)
_DEFAULT_ADDRESSES: Final = tuple(
    str(UpSettings.model_fields[name].default)
    for name in ("listen", "scheduler_listen", "worker_listen", "metrics_listen", "openai_listen")
)


@dataclass(frozen=True, slots=True)
class Addresses:
    """HOST:PORT of every part."""

    frontend: str
    scheduler: str
    workers: tuple[str, ...]
    metrics: str | None
    openai: str | None


def run(settings: UpSettings) -> int:
    """Start everything and stay until it ends; the value is the exit code. Raises SettingsError for what cannot work,
    before anything is started."""
    import uvloop

    refuse_unusable(settings)
    with _secret_file(settings, os.environ) as path:
        return uvloop.run(_Up(settings.model_copy(update={"cluster_secret_file": path})).run())


@contextlib.contextmanager
def _secret_file(settings: UpSettings, environ: Mapping[str, str]) -> Iterator[Path]:
    """The file with the cluster secret, made when it is missing: the configured one, else the one of this user, else a
    temporary one. Raises SettingsError."""
    path = settings.cluster_secret_file or cluster_secret.default_path(environ)
    with contextlib.ExitStack() as stack:
        try:
            if path is None:
                raise SecretError("there is no home folder to keep the cluster secret in")
            cluster_secret.make(path)
        except SecretError as error:
            if settings.cluster_secret_file is not None:
                raise SettingsError(f"cluster_secret_file: {error}") from None
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stepfence-"))) / "cluster-secret"
            cluster_secret.make(path)
        read_secret(path)
        yield path


def refuse_unusable(settings: UpSettings) -> None:
    """Raise SettingsError for settings that would only make a part end at its start."""
    from scheduler_svc.server import core_config

    try:
        core_config(settings.scheduler_settings(settings.scheduler_listen, ()))
    except ValueError as error:
        raise SettingsError(str(error)) from None
    model = settings.model
    if settings.runner == "scripted" or not settings.workers or Path(model).exists() or model in KNOWN_MODELS:
        return
    known = f"the known names are {', '.join(KNOWN_MODELS)}"
    raise SettingsError(f"model: {model!r} is neither the path of a model nor a known name ({known})")


def choose_addresses(settings: UpSettings, log: MergedLog) -> Addresses:
    """An address for every part; says in the log which are not the ones asked for. Raises SettingsError."""
    taken = set[str]()
    host, _, first = settings.worker_listen.rpartition(":")
    wanted_ports = [int(first) + (index if int(first) else 0) for index in range(settings.workers)]
    metrics = settings.metrics_listen
    openai = settings.openai_listen if settings.openai else None
    others = [address for address in (metrics, openai) if address]
    asked_for = [settings.listen, settings.scheduler_listen, *others, *_DEFAULT_ADDRESSES]
    # Whoever must move does not take what another part asks for (that one would have to move, too), nor where commands
    # look for another part.
    asked = frozenset({*(int(address.rpartition(":")[2]) for address in asked_for), *wanted_ports} - {0})
    chosen = Addresses(
        frontend=free_address(settings.listen, taken, asked),
        scheduler=free_address(settings.scheduler_listen, taken, asked),
        workers=tuple(free_address(f"{host}:{port}", taken, asked) for port in wanted_ports),
        metrics=free_address(metrics, taken, asked) if metrics else None,
        openai=free_address(openai, taken, asked) if openai else None,
    )
    for name, wanted, got in (
        ("listen", settings.listen, chosen.frontend),
        ("scheduler_listen", settings.scheduler_listen, chosen.scheduler),
        ("metrics_listen", metrics, chosen.metrics),
        ("openai_listen", openai, chosen.openai),
        *(("worker_listen", f"{host}:{port}", got) for port, got in zip(wanted_ports, chosen.workers, strict=True)),
    ):
        if wanted and got and wanted != got and not wanted.endswith(":0"):
            log.show("up", f"{wanted} is taken: using {got} instead ({flag(name)})", "warning")
    return chosen


class _Up:
    def __init__(self, settings: UpSettings) -> None:
        self._settings = settings
        self._started = time.monotonic()
        self._log = MergedLog("json" if settings.log_format == "json" else "text")
        self._addresses = choose_addresses(settings, self._log)
        self._environment = _clean_environment()
        self._stop = asyncio.Event()
        self._signals: list[signal.Signals] = []
        self._exit_code = 0
        self._ready_once = False
        self._scheduler, self._frontend, self._workers = self._parts()
        self._readiness = self._what_is_ready()
        # Names of the parts that were ready once.
        self._was_ready: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        if await self._fetch_model():
            self._tasks = [
                *(asyncio.create_task(self._keep(part)) for part in (self._scheduler, self._frontend, *self._workers)),
                asyncio.create_task(self._announce_when_ready()),
            ]
            await self._stop.wait()
        await self._end()
        return self._exit_code

    # --- start --------------------------------------------------------------------------------------------------------

    def _parts(self) -> tuple[Part, Part, list[Part]]:
        at = self._addresses
        update = {"log_format": self._log.log_format, "metrics_listen": at.metrics}
        settings = self._settings.model_copy(update=update)
        program = [sys.executable, "-m", "scheduler_svc"]
        scheduler = [*program, "scheduler", *as_flags(settings.scheduler_settings(at.scheduler, at.workers))]
        frontend = [*program, "frontend", *as_flags(settings.frontend_settings(at.frontend, at.scheduler, at.openai))]
        workers = [
            Part(
                "worker" if len(at.workers) == 1 else f"worker-{index}",
                worker_command("serve", "--listen", address, *_worker_flags(settings)),
                self._environment,
                self._log.show,
            )
            for index, address in enumerate(at.workers)
        ]
        return (
            Part("scheduler", scheduler, self._environment, self._log.show),
            Part("frontend", frontend, self._environment, self._log.show),
            workers,
        )

    async def _fetch_model(self) -> bool:
        """Fetch a known model in the foreground, so that its progress shows. False: do not go on."""
        model = self._settings.model
        if self._settings.runner == "scripted" or not self._workers or os.sep in model or Path(model).exists():
            return True
        show = self._log.show if self._log.log_format == "json" else None
        fetching = Part("fetch-model", worker_command("fetch-model", model), self._environment, show)
        await fetching.start()
        ended = asyncio.create_task(fetching.wait())
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not ended.done():
            await fetching.end(_LEAVE_S)
            return False
        if code := ended.result():
            self._say(f"the model {model} could not be fetched (exit code {code})", "error")
            self._exit_code = 2 if code == 2 else 1
        return code == 0

    def _what_is_ready(self) -> dict[str, tuple[str, str]]:
        """For each part's name: the address and the health service that say that it is ready."""
        at = self._addresses
        return {
            "scheduler": (at.scheduler, ""),
            **{
                worker.name: (address, "stepfence.v1.WorkerService")
                for worker, address in zip(self._workers, at.workers, strict=True)
            },
            "frontend": (at.frontend, "stepfence.v1.GenerationService" if self._workers else ""),
        }

    async def _announce_when_ready(self) -> None:
        """Wait for every part; say what is being waited for, and in the end how to call it."""
        pending = dict(self._readiness)
        reported = time.monotonic()
        while pending:
            for name, (address, service) in list(pending.items()):
                if await _is_serving(address, service):
                    self._was_ready.add(name)
                    del pending[name]
            if pending and time.monotonic() - reported > _REPORT_S:
                reported = time.monotonic()
                self._say(f"waiting for {', '.join(pending)} ({reported - self._started:.0f} s)")
            await asyncio.sleep(_POLL_S)
        self._ready_once = True
        for line in self._how_to_call():
            self._say(line)

    def _how_to_call(self) -> list[str]:
        address = self._addresses.frontend
        seconds = time.monotonic() - self._started
        if not self._workers:
            told = f"up after {seconds:.1f} s, without workers (--workers 0); the front end listens on {address}"
            return [told, *self._how_to_ask(), "Ctrl-C ends it."]
        command = _own_name()
        target = "" if address == "127.0.0.1:50051" else f" --target {address}"
        body = '{"request": {"text": "The capital of France is", "sampling": {"max_tokens": 16, "temperature": 0}}}'
        method = "stepfence.v1.GenerationService/Complete"
        buf = shutil.which("buf") or shutil.which("buf", path=str(Path(sys.executable).parent))
        if buf:
            protocol = "--protocol grpc --http2-prior-knowledge"
            call = f"{_shorten(buf)} curl {protocol} -d '{body}' http://{address}/{method}"
        else:
            call = f"grpcurl -plaintext -d '{body}' {address} {method}"
        return [
            f"ready after {seconds:.1f} s: clients call {address} (no encryption, no authentication)",
            f'  {command} generate "The capital of France is" --max-tokens 16 --temperature 0{target}',
            f"  {call}",
            *self._how_to_chat(),
            *self._how_to_ask(),
            "Ctrl-C ends it.",
        ]

    def _how_to_chat(self) -> list[str]:
        """How OpenAI's clients call it."""
        if self._addresses.openai is None:
            return []
        url = f"http://{self._addresses.openai}/v1"
        body = '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}'
        return [
            f"OpenAI's clients: base_url {url}, any api_key",
            f"  curl {url}/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        ]

    def _how_to_ask(self) -> list[str]:
        """How to call the scheduler, when it is not where `stepfence status` looks by itself."""
        address, secret = self._addresses.scheduler, self._settings.cluster_secret_file
        target = "" if address == "127.0.0.1:50052" else f" --target {address}"
        is_found = secret == cluster_secret.default_path(os.environ)
        file = "" if is_found else f" --cluster-secret-file {shlex.quote(str(secret))}"
        return [f"  {_own_name()} status{target}{file}"] if target or file else []

    # --- run ----------------------------------------------------------------------------------------------------------

    async def _keep(self, part: Part) -> None:
        """Start the part, and again when it has ended, until `up` ends; or end `up`, when that cannot help."""
        restarts = Restarts()
        while not self._stop.is_set():
            born = time.monotonic()
            end = await self._life_of(part, is_restart=restarts.count > 0)
            if end is None:
                return
            code, how = end
            if part is self._scheduler and code in _DRAINED:
                self._say(f"the scheduler was drained (exit code {code}): ending everything")
                self._exit_code = code
                self._stop.set()
                return
            if not self._ready_once and code in (1, 2):
                self._say(f"the {part.name} could not start ({how})", "error")
                self._fail(code)
                return
            now = time.monotonic()
            pause = restarts.after_end(now, now - born)
            if pause is None:
                often = f"{RESTARTS_IN_WINDOW + 1} times within {WINDOW_S:g} s"
                self._say(f"the {part.name} ended {often} ({how}): ending everything", "error")
                self._fail(code)
                return
            self._say(f"the {part.name} ended ({how}): starting it again in {pause:g} s", "warning")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause)

    async def _life_of(self, part: Part, *, is_restart: bool) -> tuple[int, str] | None:
        """Start the part and wait for its end: its exit code, and in words how it ended. None: `up` is ending. Of a
        part that was started again, say when it is ready."""
        try:
            if not await part.start():
                return None
        except OSError as error:
            return _NOT_STARTED, f"no process could be made for it: {error.strerror or error}"
        back = asyncio.create_task(self._say_when_back(part)) if is_restart and self._ready_once else None
        try:
            code = await part.wait()
        finally:
            if back is not None:
                back.cancel()
                await asyncio.gather(back, return_exceptions=True)
        return None if self._stop.is_set() else (code, ending(code))

    async def _say_when_back(self, part: Part) -> None:
        address, service = self._readiness[part.name]
        while not await _is_serving(address, service):
            await asyncio.sleep(_POLL_S)
        self._say(f"the {part.name} is ready again")

    def _fail(self, code: int) -> None:
        self._exit_code = 2 if code == 2 and not self._ready_once else 1
        self._stop.set()

    def _say(self, line: str, level: Level = "info") -> None:
        self._log.show("up", line, level)

    # --- end ----------------------------------------------------------------------------------------------------------

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals.append(number)
        if len(self._signals) == 1:
            self._stop.set()
            self._say(f"{number.name}: ending; once more ends at once")
            return
        self._exit_code = 128 + number
        for part in (self._frontend, self._scheduler, *self._workers):
            part.signal(signal.SIGKILL)

    async def _end(self) -> None:
        frontend = await self._frontend.end(self._settings.drain_deadline_s + _LEAVE_S)
        scheduler = await self._scheduler.end(2 * _LEAVE_S)
        await asyncio.gather(*(worker.end(_LEAVE_S) for worker in self._workers))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # A front end that had to be killed could not say whether it cut something off. One that was never ready had
        # accepted nothing, and one that ended at once at its SIGTERM had not begun to listen.
        was_killed = frontend == -signal.SIGKILL and self._frontend.name in self._was_ready
        if self._exit_code == 0 and (was_killed or 3 in (frontend, scheduler)):
            self._say("the drain deadline passed: some requests were cut off", "warning")
            self._exit_code = 3


def _worker_flags(settings: UpSettings) -> list[str]:
    arguments: list[str] = []
    for name in _WORKER_SETTINGS:
        value = getattr(settings, name)
        if value is not None:
            arguments += [flag(name), str(value)]
    for name in ("drain_deadline_s", "log_format"):
        arguments += [flag(name), str(getattr(settings, name))]
    return arguments


def _clean_environment() -> dict[str, str]:
    """The environment without settings: `up` has read them, and its parts get all of theirs as flags."""
    settings = {ENV_PREFIX + name.upper() for names in SERVICES.values() for name in names} | {ENV_PREFIX + "CONFIG"}
    return {name: value for name, value in os.environ.items() if name not in settings}


async def _is_serving(address: str, service: str) -> bool:
    async with channels.channel(address) as channel:
        try:
            answer = await HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=2.0)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _own_name() -> str:
    found = shutil.which("stepfence")
    if found and Path(found).parent == Path(sys.executable).parent:
        return "stepfence"
    installed = Path(sys.executable).parent / "stepfence"
    return _shorten(str(installed)) if installed.exists() else f"{shlex.quote(sys.executable)} -m scheduler_svc"


def _shorten(path: str) -> str:
    with contextlib.suppress(ValueError):
        return str(Path(path).relative_to(Path.cwd()))
    return path

"""Real processes of a Stepfence, on loopback and free ports, for tests: start, wait until ready, break, look, clean up.

    with Deployment(tmp_path) as stepfence:
        stepfence.start_worker(runner="scripted", num_blocks="65")
        stepfence.start_scheduler(max_num_seqs="8")
        stepfence.start_frontend()
        stepfence.wait_ready()
        ... stepfence.frontend_address ...

Every process gets flags only, its output goes to a file, and none outlives the test, whatever happens: the kernel ends
them when the test process ends, and leaving the `with` kills what is still there. On failure the ends of all logs are
part of the error.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

import grpc

from scheduler_svc.cli.health import check
from scheduler_svc.cli.part import tethered
from scheduler_svc.cli.ports import free_address
from stepfence.v1 import admin_service_pb2, admin_service_pb2_grpc

# How long a condition may take before the test fails: generous, since machines are busy. Nothing sleeps that long.
PATIENCE_S: Final = 90.0
_LOG_TAIL_LINES: Final = 40


class ConditionNotMet(AssertionError):
    """A condition did not become true in time."""


def wait_until(condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until `condition()` is true. Raises ConditionNotMet naming `what`, and what it returned last."""
    deadline = time.monotonic() + patience_s
    pause = 0.01
    while not (last := condition()):
        if time.monotonic() > deadline:
            raise ConditionNotMet(f"not within {patience_s:g} s: {what} (last: {last!r})")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.25)


@dataclass
class Process:
    """One child process. `log` is the file with all it printed."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path
    address: str = ""

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def is_running(self) -> bool:
        return self.popen.poll() is None

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        """Exit code, -N for signal N. Raises ConditionNotMet."""
        try:
            return self.popen.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise ConditionNotMet(f"{self.name} has not ended within {patience_s:g} s\n{self.tail()}") from None

    def stop(self, patience_s: float = PATIENCE_S) -> int:
        """SIGTERM, then wait for its end."""
        if self.is_running:
            self.signal(signal.SIGTERM)
        return self.wait(patience_s)

    def kill(self) -> int:
        """SIGKILL (a stopped process, too), then wait for its end."""
        if self.is_running:
            self.signal(signal.SIGKILL)
        return self.wait()

    def tail(self) -> str:
        lines = self.output().splitlines()[-_LOG_TAIL_LINES:]
        code = self.popen.poll()
        state = "running" if code is None else f"exit code {code}"
        return "\n".join([f"--- {self.name} ({state}), end of its log ---", *lines])


def start_process(name: str, command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> Process:
    """Start a command that ends when this process ends; its output goes to the end of `log`."""
    stream: IO[bytes]
    with log.open("ab") as stream:
        popen = subprocess.Popen(
            tethered(command),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    return Process(name, popen, log)


def flags(settings: dict[str, str]) -> list[str]:
    """max_num_seqs="8" as --max-num-seqs 8; "" stands for a flag without a value."""
    return [
        part
        for name, value in settings.items()
        for part in ([f"--{name.replace('_', '-')}"] + ([value] if value else []))
    ]


@dataclass
class Deployment:
    """One scheduler, its workers and front ends. Addresses are chosen when it is made and kept over restarts."""

    folder: Path
    num_workers: int = 1
    # Descriptors that each process may have; None: as this one.
    max_open_files: int | None = None
    processes: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        taken: set[str] = set()
        self.scheduler_address = free_address("127.0.0.1:0", taken)
        self.frontend_address = free_address("127.0.0.1:0", taken)
        self.worker_addresses = [free_address("127.0.0.1:0", taken) for _ in range(self.num_workers)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self.processes:
            if process.is_running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if error is not None:
            for process in self.processes:
                error.add_note(process.tail())

    # --- start ------------------------------------------------------------------------------------------------------

    def start_scheduler(self, workers: Sequence[str] | None = None, **settings: str) -> Process:
        """Start (or start again) the scheduler; `workers`: their addresses, by default all of this deployment."""
        given = {"listen": self.scheduler_address, "metrics_listen": "none", "log_format": "json", **settings}
        named = self.worker_addresses if workers is None else workers
        addresses = [part for address in named for part in ("--worker", address)]
        command = [sys.executable, "-m", "scheduler_svc", "scheduler", *addresses, *flags(given)]
        return self._start("scheduler", command, given["listen"])

    def start_frontend(self, **settings: str) -> Process:
        """Start (or start again) the front end."""
        given = {"listen": self.frontend_address, "scheduler": self.scheduler_address, "log_format": "json", **settings}
        command = [sys.executable, "-m", "scheduler_svc", "frontend", *flags(given)]
        return self._start("frontend", command, given["listen"])

    def start_worker(self, index: int = 0, **settings: str) -> Process:
        """Start (or start again) worker `index`; scripted unless told otherwise."""
        given = {"listen": self.worker_addresses[index], "runner": "scripted", "log_format": "json", **settings}
        command = [sys.executable, "-m", "worker_svc", "serve", *flags(given)]
        return self._start(f"worker-{index}", command, given["listen"])

    def _start(self, name: str, command: list[str], address: str) -> Process:
        if self.max_open_files is not None:
            command = ["sh", "-c", f'ulimit -n {self.max_open_files}; exec "$@"', "sh", *command]
        process = start_process(name, command, self.folder / f"{name}.log")
        process.address = address
        self.processes = [other for other in self.processes if other.name != name or other.is_running] + [process]
        return process

    # --- look -------------------------------------------------------------------------------------------------------

    def wait_ready(self, patience_s: float = PATIENCE_S) -> None:
        """Wait until every process started is ready; fails at once when one ends meanwhile."""
        for process in self.processes:
            self._wait_ready(process, patience_s)

    def _wait_ready(self, process: Process, patience_s: float) -> None:
        wait_until(
            lambda: not process.is_running or check(process.address, None, 5.0).serving,
            f"{process.name} is ready",
            patience_s,
        )
        assert process.is_running, f"{process.name} ended instead of getting ready"

    @contextlib.contextmanager
    def admin(self) -> Iterator[admin_service_pb2_grpc.AdminServiceStub]:
        """The scheduler's AdminService."""
        with grpc.insecure_channel(self.scheduler_address) as channel:
            yield admin_service_pb2_grpc.AdminServiceStub(channel)

    def status(self) -> admin_service_pb2.GetStatusResponse:
        with self.admin() as admin:
            return admin.GetStatus(admin_service_pb2.GetStatusRequest(), timeout=30)

    def audit(self) -> admin_service_pb2.AuditKvResponse:
        with self.admin() as admin:
            return admin.AuditKv(admin_service_pb2.AuditKvRequest(), timeout=30)

    def wait_idle(self, patience_s: float = PATIENCE_S) -> None:
        """Wait until nothing is left anywhere: no request, stream or row, and every usable block free and
        consistent."""
        left: list[str] = []

        def is_idle() -> bool:
            left[:] = self.leftovers()
            return not left

        try:
            wait_until(is_idle, "nothing is left anywhere", patience_s)
        except ConditionNotMet as error:
            raise ConditionNotMet(f"{error}: {left}") from None

    def leftovers(self) -> list[str]:
        """What is still held somewhere; empty when the deployment is at rest."""
        status, audit = self.status(), self.audit()
        left = [
            f"{name} {count}"
            for name, count in (
                ("live requests", audit.num_live_requests),
                ("waiting", status.num_waiting),
                ("skipped", status.num_skipped),
                ("running", status.num_running),
            )
            if count
        ]
        for rank in status.ranks:
            if rank.num_running or rank.num_rows_held or rank.num_parked_blocks:
                left.append(f"rank {rank.rank}: {rank.num_running} running, {rank.num_rows_held} rows held")
        for front_end in status.front_ends:
            if front_end.num_live_streams or front_end.num_live_requests:
                left.append(f"front end {front_end.front_end_id}: {front_end.num_live_streams} streams")
        for counted in audit.ranks:
            if not counted.consistent or counted.free != counted.usable:
                left.append(f"rank {counted.rank}: {counted.free} of {counted.usable} free, {list(counted.violations)}")
        return left

"""The scheduler as a process: sockets, health, signals, exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import signal
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import grpc.aio
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.metrics_core import Metric

from scheduler_svc import journal, logs
from scheduler_svc.admin import AdminServicer
from scheduler_svc.config import SchedulerSettings, SettingsError, read_secret, read_tls
from scheduler_svc.core.config import Policy, SchedulerConfig
from scheduler_svc.facts import MetricsSink, Recorder
from scheduler_svc.metrics import PrometheusMetrics, collect
from scheduler_svc.metrics_server import PATH, MetricsServer
from scheduler_svc.rpc import channels, descriptors, reflection
from scheduler_svc.rpc.cluster_secret import ClusterSecret
from scheduler_svc.rpc.health import HealthServicer
from scheduler_svc.rpc.message_budget import MessageBudget
from scheduler_svc.rpc.tls import FOR_PARTS, Tls
from scheduler_svc.service import SchedulerService, ServiceOptions
from scheduler_svc.session import SessionServicer
from scheduler_svc.tenant_limits import read_tenant_limits
from scheduler_svc.workers.grpc_transport import GrpcTransport
from scheduler_svc.workers.resolver import SystemResolver
from scheduler_svc.workers.session import Timeouts
from stepfence.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    session_service_pb2,
    session_service_pb2_grpc,
)

log = logging.getLogger(__name__)

EXIT_OK: Final = 0
EXIT_FATAL: Final = 1
EXIT_CUT_OFF: Final = 3

# "As long as the model": larger than any model's length.
_UNLIMITED_LEN: Final = 1 << 30
# Of a packed list of numbers: the longest are 128 ids of five bytes. Prompts and outputs travel as bytes.
_MAX_LIST_BYTES: Final = 4096
# What calls may still take when everything has ended. Seconds.
_STOP_GRACE_S: Final = 0.5

_READY_SERVICES: Final = (
    session_service_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name,
    admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
)


def run(settings: SchedulerSettings) -> int:
    """Serve until drained or told to stop. Returns the exit code: 0 ended as asked, 1 fatal error, 3 work was cut off,
    130 / 143 ended at once by a second SIGINT / SIGTERM. Raises SettingsError for settings that exclude each other."""
    logs.configure(settings.log_format)
    recorder = None
    try:
        config = core_config(settings)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    secret = read_secret(settings.cluster_secret_file)
    tls = read_tls("tls_dir", settings.tls_dir, FOR_PARTS, server_name=settings.tls_server_name)
    descriptors.raise_limit()
    try:
        if settings.record is not None:
            recorder = journal.Recorder(settings.record, config)
    except OSError as error:
        log.error("cannot write %s: choose another file with --record", settings.record, extra={"cause": str(error)})
        return EXIT_FATAL
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(SchedulerProcess(settings, secret=secret, tls=tls, recorder=recorder).serve())
    except Exception:
        log.critical("fatal error", exc_info=True)
        return EXIT_FATAL
    finally:
        if recorder is not None:
            recorder.close()


def core_config(settings: SchedulerSettings) -> SchedulerConfig:
    """The core's part of the settings. Raises ValueError."""
    unlimited = _UNLIMITED_LEN if settings.enable_chunked_prefill else settings.max_num_batched_tokens
    return SchedulerConfig(
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len or unlimited,
        policy=Policy(settings.policy),
        enable_prefix_caching=settings.enable_prefix_caching,
        enable_chunked_prefill=settings.enable_chunked_prefill,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        watermark=settings.watermark,
        max_inflight_steps=settings.max_inflight_steps,
        num_speculative_tokens=settings.num_speculative_tokens,
        prefill_schedule_interval=settings.prefill_schedule_interval,
        max_preemptions=settings.max_preemptions,
        max_fruitless_epochs=settings.max_fruitless_epochs,
        max_queued_requests=settings.max_queued_requests,
        max_queued_tokens=settings.max_queued_tokens,
        no_worker_grace_s=settings.no_worker_grace_s,
        tenants=read_tenant_limits(settings.tenant_limits_file),
    )


class SchedulerProcess:
    """One scheduler behind gRPC servers. `port` is known, and `service` serves, once `started` is set."""

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        secret: ClusterSecret | None = None,
        tls: Tls | None = None,
        metrics: MetricsSink | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._recorder = recorder
        self._secret = secret
        self._tls = tls
        self._signals = 0
        self._stop_now: asyncio.Future[int] | None = None
        self._health = HealthServicer()
        self.started = asyncio.Event()
        self.port = 0
        # HOST:PORT of the metrics, when served.
        self.metrics_address: str | None = None
        self.service: SchedulerService | None = None

    async def serve(self, *, owns_process: bool = True) -> int:
        """Run to the end; returns the exit code. owns_process: take signals and tune the garbage collector."""
        counts = PrometheusMetrics(asyncio.get_running_loop().time)
        service = self.service = self._make_service(counts)
        server = self._make_server(service)
        try:
            self.port = channels.listen(server, self._settings.listen, self._tls)
        except OSError as error:
            told = "cannot listen on %s: choose another address with --listen"
            log.error(told, self._settings.listen, extra={"cause": str(error)})
            return EXIT_FATAL
        try:
            exporter = await self._export_metrics(service, counts)
        except OSError as error:
            told = "cannot listen on %s: choose another address with --metrics-listen, or none"
            log.error(told, self._settings.metrics_listen, extra={"cause": error.strerror or str(error)})
            return EXIT_FATAL
        self._readiness_changed(False, "starting")
        await server.start()
        host = self._settings.listen.rpartition(":")[0]
        address = f"{host}:{self.port}"
        log.info("listening on %s", address, extra={"address": address, "workers": list(self._settings.worker)})
        danger = channels.parts_danger(has_secret=self._secret is not None, has_tls=self._tls is not None)
        channels.warn_when_exposed(address, danger)
        self._stop_now = asyncio.get_running_loop().create_future()
        if owns_process:
            self._take_signals(service)
            _tame_garbage_collector()
        self.started.set()
        try:
            return await self._until_done(service)
        finally:
            await server.stop(_STOP_GRACE_S)
            if exporter is not None:
                await exporter.close()

    async def _until_done(self, service: SchedulerService) -> int:
        assert self._stop_now is not None
        serving = asyncio.create_task(service.run(), name="scheduler")
        try:
            ends: list[asyncio.Future[Any]] = [serving, self._stop_now]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._stop_now.done():
                return self._stop_now.result()
            serving.result()
            return EXIT_CUT_OFF if service.num_cut_off else EXIT_OK
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    # --- parts ---

    async def _export_metrics(self, service: SchedulerService, counts: PrometheusMetrics) -> MetricsServer | None:
        """Raises OSError when the port is taken."""
        if self._settings.metrics_listen is None:
            return None

        def read() -> list[Metric]:
            facts = service.model.facts
            counts.keep_ranks(client.rank for client in service.pool.clients)
            return collect(service.core, counts, "" if facts is None else facts.name)

        exporter = MetricsServer(read)
        await exporter.start(self._settings.metrics_listen)
        self.metrics_address = exporter.address
        log.info("metrics at http://%s%s", exporter.address, PATH)
        channels.warn_when_exposed(exporter.address, "the metrics are readable without authentication")
        return exporter

    def _make_service(self, counts: PrometheusMetrics) -> SchedulerService:
        settings = self._settings
        return SchedulerService(
            core_config(settings),
            ServiceOptions(
                workers=settings.worker,
                timeouts=Timeouts(
                    step_watchdog_s=settings.step_watchdog_s,
                    first_steps_watchdog_s=max(settings.first_steps_watchdog_s, settings.step_watchdog_s),
                ),
                drain_deadline_s=settings.drain_deadline_s,
                log_requests=settings.log_requests,
            ),
            transport=GrpcTransport(self._secret, self._tls),
            resolver=SystemResolver(),
            rng=random.Random(),
            metrics=counts if self._metrics is None else self._metrics,
            recorder=self._recorder,
            on_readiness=self._readiness_changed,
            on_idle=_collect_garbage,
        )

    def _make_server(self, service: SchedulerService) -> grpc.aio.Server:
        server = channels.server(
            self._settings.listen,
            secret=self._secret,
            guarded=_READY_SERVICES,
            budget=MessageBudget(max_list_bytes=_MAX_LIST_BYTES),
        )
        session_service_pb2_grpc.add_SessionServiceServicer_to_server(SessionServicer(service.hub), server)
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(service, _version()), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (*_READY_SERVICES, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.serve(server, names)
        return server

    # --- health: "" is this process, the services' names are readiness ---

    def _readiness_changed(self, is_ready: bool, cause: str) -> None:
        for name in _READY_SERVICES:
            self._health.set(name, is_serving=is_ready)

    # --- signals ---

    def _take_signals(self, service: SchedulerService) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, service, number)

    def _signalled(self, service: SchedulerService, number: signal.Signals) -> None:
        self._signals += 1
        if self._signals == 1:
            log.info("%s: finishing accepted requests; again: end at once", number.name)
            service.drain()
        elif self._stop_now is not None and not self._stop_now.done():
            log.warning("%s again: ending at once", number.name)
            self._stop_now.set_result(128 + number)


def _tame_garbage_collector() -> None:
    # What exists now lives as long as the process: never look at it again. Collections over the living requests wait
    # for idle moments; the core makes no cycles.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _collect_garbage() -> None:
    gc.collect()


def _version() -> str:
    try:
        return version("stepfence")
    except PackageNotFoundError:
        return "unknown"

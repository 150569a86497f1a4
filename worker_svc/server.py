"""The worker as a process: listens, loads, tells its health, drains on a signal.

listen ──► load the model (executor thread) ──► ready ──► signal: drain ──► exit 0, or 3 at the deadline
                 └► cannot load: exit 1                └► device failure: exit 1
a second signal, at any time: exit 130 or 143 at once
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import signal
import socket
import sys
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stepfence.v1 import worker_service_pb2_grpc
from worker_svc import descriptors, reflection
from worker_svc.cluster_secret import Guard
from worker_svc.config import WorkerSettings, parse_address
from worker_svc.faulty_service import FaultyWorkerService
from worker_svc.health import HealthServicer
from worker_svc.limits import MAX_MESSAGE_BYTES
from worker_svc.requests import RequestReader
from worker_svc.runner.base import Runner
from worker_svc.runner.script import Script
from worker_svc.runner.scripted import DEFAULT_MAX_MODEL_LEN, DEFAULT_NUM_BLOCKS, ScriptedRunner
from worker_svc.service import SERVICE_NAME, WorkerService
from worker_svc.tls import Tls

log = logging.getLogger(__name__)

EXIT_OK: Final = 0
EXIT_FATAL: Final = 1
EXIT_USAGE: Final = 2
EXIT_CUT_OFF: Final = 3

# gRPC ignores names it does not know, without a word; this list is what `server_options` may use.
_KNOWN_OPTIONS: Final = frozenset(
    {
        "grpc.so_reuseport",
        "grpc.max_receive_message_length",
        "grpc.max_send_message_length",
        "grpc.http2.min_ping_interval_without_data_ms",
        "grpc.http2.max_ping_strikes",
        "grpc.keepalive_time_ms",
        "grpc.keepalive_timeout_ms",
        "grpc.max_concurrent_streams",
        "grpc.max_allowed_incoming_connections",
        "grpc.server_handshake_timeout_ms",
        "grpc.server.max_pending_requests",
        "grpc.server.max_pending_requests_hard_limit",
        "grpc.server_max_unrequested_time_in_server",
    }
)
_MAX_PENDING: Final = 16_384
# For calls that are about to end by themselves, such as a stream with its last answer.
_STOP_GRACE_S: Final = 0.5
_EXECUTOR_STOP_S: Final = 1.0
# What it means that other machines can reach the port.
_GUARDED: Final = (
    "calls must carry the cluster secret, which travels unencrypted: set --tls-dir for all parts, or keep the port "
    "inside a trusted network"
)
_UNGUARDED: Final = (
    "anyone who reaches the port can take the service over: set --cluster-secret-file and --tls-dir for all parts, and "
    "keep the port inside a trusted network"
)


class ListenError(Exception):
    """The address cannot be listened on; the text is the system's reason."""


def server_options(listen: str = "127.0.0.1:0") -> tuple[tuple[str, int], ...]:
    """Options of a server for HOST:PORT: one process per port, patient with pings, bounded. Raises ValueError for an
    option that gRPC would silently ignore."""
    return checked_options(
        (
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.http2.min_ping_interval_without_data_ms", 10),
            ("grpc.http2.max_ping_strikes", 0),
            # Connections whose other end is gone without a word: without this, a stream that waits to be read from
            # there would wait for ever.
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.max_concurrent_streams", 256),
            # Connections beyond what descriptors allow are closed; so are those that do not begin to speak HTTP/2.
            ("grpc.max_allowed_incoming_connections", descriptors.max_connections(listen)),
            ("grpc.server_handshake_timeout_ms", 20_000),
            # Calls that no handler has taken up yet: gRPC would cancel some of them, without a reason, beyond 1,000.
            ("grpc.server.max_pending_requests", _MAX_PENDING),
            ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
            ("grpc.server_max_unrequested_time_in_server", 3_600),
        )
    )


def checked_options(options: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """The same options. Raises ValueError for names that are not known to be understood by gRPC."""
    unknown = [name for name, _ in options if name not in _KNOWN_OPTIONS]
    if unknown:
        raise ValueError(f"not a gRPC channel option: {', '.join(unknown)}")
    return options


class WorkerServer:
    """A listening worker: servicer, health and reflection on one port. Used by the process and, in one process, by
    tests."""

    def __init__(self, service: WorkerService, secret: str | None = None, *, listen: str = "127.0.0.1:0") -> None:
        """secret: the cluster secret that calls of the WorkerService must carry; None: they need none. listen: the
        HOST:PORT that it will listen on."""
        self.service: Final = service
        self._health: Final = HealthServicer()
        guards = () if secret is None else (Guard(secret, SERVICE_NAME),)
        self._server: Final = grpc.aio.server(interceptors=(*guards, RequestReader()), options=server_options(listen))
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.serve(self._server, (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name))

    async def listen(self, address: str, tls: Tls | None = None) -> str:
        """Bind and serve: alive, not ready. In plain text without `tls`. Returns HOST:PORT with the real port. Raises
        ListenError."""
        host, _ = parse_address(address)
        # Asked first: gRPC tells the reason only in a line of its own on stderr.
        if (cause := _bind_error(address)) is not None:
            raise ListenError(cause)
        try:
            if tls is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, tls.credentials())
        except RuntimeError as error:
            raise ListenError(str(error)) from None
        if not bound:
            raise ListenError("taken, or not of this machine")
        self._set_ready(False)
        await self._server.start()
        return f"{host}:{bound}"

    async def load(self) -> None:
        """Load the model and become ready. Raises what loading raises."""
        await self.service.start()
        if not self.service.is_draining:
            self._set_ready(True)

    async def drain(self, deadline_s: float) -> bool:
        """Not ready any more; see WorkerService.drain."""
        self._set_ready(False)
        return await self.service.drain(deadline_s)

    async def stop(self) -> bool:
        """Stop serving; False when the runner is still busy and the process must be left all the same."""
        self._set_ready(False)
        has_ended = self.service.stop(0)
        await self._server.stop(_STOP_GRACE_S)
        return has_ended or self.service.stop(_EXECUTOR_STOP_S)

    def _set_ready(self, is_ready: bool) -> None:
        self._health.set(SERVICE_NAME, is_serving=is_ready)


def make_service(settings: WorkerSettings) -> WorkerService:
    """The service with the runner that the settings name. Imports torch only when the runner needs it."""
    host, names = socket.gethostname(), settings.served_names
    if settings.runner == "scripted":
        script = settings.script or Script()
        num_blocks = settings.num_blocks or DEFAULT_NUM_BLOCKS
        max_model_len = settings.max_model_len or DEFAULT_MAX_MODEL_LEN
        runner = ScriptedRunner(script, num_blocks=num_blocks, max_model_len=max_model_len)
        if script.faults:
            return FaultyWorkerService(runner.load, distort=runner.distort, host=host, served_names=names)
        return WorkerService(runner.load, host=host, served_names=names)
    return WorkerService(lambda: _load_model(settings), host=host, served_names=names)


def _load_model(settings: WorkerSettings) -> Runner:
    try:
        from worker_svc.runner.model_runner import ModelRunner
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"the model runner needs {error.name}, which is not installed: install stepfence[worker], or use "
            "--runner scripted"
        ) from error
    return ModelRunner.load(settings)


async def serve(settings: WorkerSettings, secret: str | None = None, tls: Tls | None = None) -> int:
    """Run a worker until it is told to stop or cannot go on; returns the exit code. Handles SIGINT and SIGTERM."""
    descriptors.raise_limit()
    server = WorkerServer(make_service(settings), secret, listen=settings.listen)
    stop = _Signals()
    try:
        address = await server.listen(settings.listen, tls)
    except ListenError as error:
        told = "cannot listen on %s: choose another address with --listen"
        log.error(told, settings.listen, extra={"cause": str(error)})
        return EXIT_FATAL
    log.info(f"listening on {address}", extra={"address": address, "runner": settings.runner})
    # With TLS, only programs with a certificate of the deployment's authority get in.
    if tls is None and not _is_loopback(parse_address(address)[0]):
        log.warning(
            "reachable from other machines: %s",
            _UNGUARDED if secret is None else _GUARDED,
            extra={"address": address},
        )
    code = await _run(server, settings, stop)
    if not await server.stop():
        log.warning("the runner is still busy; leaving without it")
        _leave(code)
    return code


def _bind_error(address: str) -> str | None:
    """Why HOST:PORT cannot be listened on, in the system's words; None when it can."""
    host, port = parse_address(address)
    host = host.strip("[]")
    cause = "no address"
    try:
        # A machine without IPv6 listens on 0.0.0.0 instead.
        hosts = (host, "0.0.0.0") if host == "::" else (host,)
        found = [info for name in hosts for info in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]
    except OSError as error:
        return error.strerror or str(error)
    for family, kind, _, _, where in found:
        try:
            with socket.socket(family, kind) as probe:
                # As servers do: a port whose last connections linger may be used again.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
                return None
        except OSError as error:
            cause = error.strerror or str(error)
    return cause


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


async def _run(server: WorkerServer, settings: WorkerSettings, stop: _Signals) -> int:
    loading = asyncio.create_task(server.load())
    stopping = asyncio.create_task(stop.first())
    await _first_of(loading, stopping)
    if not loading.done():
        # Nobody has been served yet.
        loading.cancel()
        return EXIT_OK
    if (error := loading.exception()) is not None:
        stopping.cancel()
        is_expected = isinstance(error, (RuntimeError, ValueError, OSError))
        log.error(
            "the model could not be loaded",
            extra={"cause": str(error) or type(error).__name__},
            exc_info=None if is_expected else error,
        )
        return EXIT_FATAL
    log.info("ready", extra={"model": settings.model if settings.runner == "model" else "scripted"})
    await _first_of(stopping, server.service.failed)
    if not server.service.failed.done():
        log.info("draining", extra={"deadline_s": settings.drain_deadline_s})
        draining = asyncio.create_task(server.drain(settings.drain_deadline_s))
        await _first_of(draining, server.service.failed)
        if draining.done():
            has_finished = draining.result()
            log.info("drained" if has_finished else "drain deadline passed, work was cut off")
            return EXIT_OK if has_finished else EXIT_CUT_OFF
        draining.cancel()
    stopping.cancel()
    log.error("the device failed, leaving", extra={"cause": server.service.failed.result()})
    return EXIT_FATAL


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


class _Signals:
    """The first SIGINT or SIGTERM is a request, the second an order. Handlers are those of the running loop."""

    def __init__(self) -> None:
        self._first: Final = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)

    async def first(self) -> None:
        await self._first.wait()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._first.is_set():
            log.warning("second signal, leaving at once", extra={"signal": number.name})
            _leave(128 + number)
        log.info("asked to stop", extra={"signal": number.name})
        self._first.set()


def _leave(code: int) -> None:
    """End the process without waiting for threads that may never come back."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)

"""The front end process: server, health, signals, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import grpc.aio
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_svc import logs
from scheduler_svc.config import FrontendSettings, SettingsError, read_secret, read_tls
from scheduler_svc.frontend.api import GenerationServicer
from scheduler_svc.frontend.callers import Callers, TokensError
from scheduler_svc.frontend.engine import FrontEnd
from scheduler_svc.frontend.gate import CallGate
from scheduler_svc.frontend.limits import Limits
from scheduler_svc.frontend.openai.app import application
from scheduler_svc.frontend.openai.server import DoorServer
from scheduler_svc.frontend.prompt_lanes import Lane, PromptLanes
from scheduler_svc.frontend.session_client import SessionClient, SessionTiming
from scheduler_svc.frontend.session_transport import GrpcTransport
from scheduler_svc.frontend.text import load_tokenizer
from scheduler_svc.frontend.usage_log import UsageLog
from scheduler_svc.rpc import channels, descriptors, reflection
from scheduler_svc.rpc.cluster_secret import ClusterSecret
from scheduler_svc.rpc.health import HealthServicer
from scheduler_svc.rpc.message_budget import MessageBudget
from scheduler_svc.rpc.tls import FOR_CLIENTS, FOR_PARTS, Tls
from stepfence.v1 import generation_service_pb2, generation_service_pb2_grpc

EXIT_OK: Final = 0
EXIT_FATAL: Final = 1
EXIT_CUT_OFF: Final = 3

_HEALTH_SERVICE: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
SERVICE: Final = generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name

# Streams of one connection: what it may call at once (at least the usual number), and more, so that what is too much is
# refused with a reason. gRPC resets streams beyond these, and then its clients may see UNAVAILABLE without one.
_USUAL_CALLS: Final = 4096
_SPARE_STREAMS: Final = 512
# Seconds for calls that were cut off to take their last message.
_FAREWELL_S: Final = 1.0
# Seconds in which a client that reads takes something of what waits for it.
_UNREAD_S: Final = 1.0

log = logging.getLogger(__name__)


def run(settings: FrontendSettings) -> int:
    """Serve until a signal; the exit code. Logs to stderr. Raises SettingsError for files that cannot be used."""
    logs.configure(settings.log_format)
    secret = read_secret(settings.cluster_secret_file)
    tls = read_tls("tls_dir", settings.tls_dir, FOR_PARTS, server_name=settings.tls_server_name)
    client_tls = read_tls("client_tls_dir", settings.client_tls_dir, FOR_CLIENTS)
    try:
        process = FrontEndProcess(settings, secret=secret, tls=tls, client_tls=client_tls)
    except TokensError as error:
        raise SettingsError(f"client_tokens_file: {error}") from None
    descriptors.raise_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(process.serve(signals=True))


class FrontEndProcess:
    """Everything one front end consists of. `serve` runs it; tests run it on a loop of their own.

    port: the one really listened on, once `listening` is set. openai_address: the same of the OpenAI port, "" without
    one.
    """

    def __init__(
        self,
        settings: FrontendSettings,
        *,
        secret: ClusterSecret | None = None,
        tls: Tls | None = None,
        client_tls: Tls | None = None,
        rng: random.Random | None = None,
        limits: Limits | None = None,
    ) -> None:
        """tls: towards the scheduler; client_tls: of the ports for clients. Raises TokensError."""
        self._settings = settings
        self._secret = secret
        self._tls = tls
        self._client_tls = client_tls
        self._callers = Callers(settings.client_tokens_file, secret)
        self._limits = replace(limits or Limits(), max_prompt_bytes=settings.max_prompt_bytes)
        self._rng = rng or random.SystemRandom()
        self.port = 0
        self.openai_address = ""
        self.listening = asyncio.Event()
        self._first_signal = asyncio.Event()
        self._second_signal = asyncio.Event()
        self._exit_at_once = 0
        self._readiness_changed = asyncio.Event()

    async def serve(self, *, signals: bool = False) -> int:
        """Until `stop` and the drain that follows; the exit code. signals: SIGINT and SIGTERM call `stop`."""
        try:
            usage_log = None if self._settings.usage_log is None else UsageLog(self._settings.usage_log)
        except OSError as error:
            message = "cannot write %s: choose another file with --usage-log"
            log.error(message, self._settings.usage_log, extra={"cause": error.strerror or str(error)})
            return EXIT_FATAL
        try:
            return await self._serve(usage_log, signals=signals)
        finally:
            if usage_log is not None:
                await asyncio.to_thread(usage_log.close)

    async def _serve(self, usage_log: UsageLog | None, *, signals: bool) -> int:
        lanes = PromptLanes(self._limits)
        transport = GrpcTransport(self._settings.scheduler, self._secret, self._tls)
        session = SessionClient(
            transport,
            lambda files: lanes.run(Lane.LONG, 0, lambda: load_tokenizer(files)),
            front_end_id=f"{socket.gethostname()}-{os.getpid()}-{self._rng.getrandbits(16):04x}",
            rng=self._rng,
            limits=self._limits,
            timing=SessionTiming(scheduler_grace_s=self._settings.scheduler_grace_s),
            needs_tenants=self._settings.client_tokens_file is not None,
        )
        session.on_change = self._readiness_changed.set
        record = None if usage_log is None else usage_log.add
        self.front_end = FrontEnd(session, limits=self._limits, rng=self._rng, lanes=lanes, record=record)
        self._gate = CallGate(
            max_calls=self._settings.max_calls,
            max_calls_per_peer=self._settings.max_calls_per_peer,
            gateways=self._settings.gateway,
        )
        try:
            server, checks = self._build_server()
            door = await self._open_door(lanes)
        except _CannotListen as error:
            log.error("cannot listen on %s: choose another address with %s", *error.args, extra={"cause": error.cause})
            await transport.close()
            lanes.close()
            return EXIT_FATAL
        await server.start()
        tasks = [asyncio.create_task(session.run()), asyncio.create_task(self._keep_health(checks))]
        self._announce(door)
        try:
            with self._signals() if signals else contextlib.nullcontext():
                return await self._until_stopped(server, door)
        finally:
            await _stop(server, door, 0)
            self.front_end.settle_all()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await transport.close()
            lanes.close()

    def stop(self, exit_at_once: int = 128 + signal.SIGTERM) -> None:
        """As a signal: drain; called again, end at once with the given exit code."""
        if self._first_signal.is_set():
            self._exit_at_once = exit_at_once
            self._second_signal.set()
        self._first_signal.set()

    # --- start ---

    def _build_server(self) -> tuple[grpc.aio.Server, HealthServicer]:
        """Raises _CannotListen."""
        server = channels.server(
            self._settings.listen,
            max_message_bytes=self._limits.max_message_bytes,
            max_streams=max(self._settings.max_calls, _USUAL_CALLS) + _SPARE_STREAMS,
            # Complete has its GenerateRequest in the field `request`.
            budget=MessageBudget(envelopes=frozenset({"request"})),
        )
        self._servicer = GenerationServicer(self.front_end, self._callers, self._gate)
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(self._servicer, server)
        checks = HealthServicer()
        checks.set(SERVICE, is_serving=False)
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        reflection.serve(server, (SERVICE, _HEALTH_SERVICE))
        with _listening(self._settings.listen, "--listen"):
            self.port = channels.listen(server, self._settings.listen, self._client_tls)
        return server, checks

    async def _open_door(self, lanes: PromptLanes) -> DoorServer | None:
        """The OpenAI port; None without one. Raises _CannotListen."""
        listen = self._settings.openai_listen
        if listen is None:
            return None
        door = DoorServer(
            application(self.front_end, self._callers, self._gate, lanes), max_calls=self._settings.max_calls
        )
        with _listening(listen, "--openai-listen"):
            await door.start(listen, self._client_tls)
        self.openai_address = door.address
        return door

    def _announce(self, door: DoorServer | None) -> None:
        host = self._settings.listen.rpartition(":")[0]
        address = f"{host}:{self.port}"
        facts = {"address": address, "service": SERVICE, "scheduler": self._settings.scheduler}
        log.info("listening on %s", address, extra=facts)
        has_tls = self._client_tls is not None
        exposure = channels.clients_danger(has_tokens=self._callers.are_known, has_tls=has_tls)
        channels.warn_when_exposed(address, exposure)
        if door is not None:
            log.info("OpenAI's clients are served", extra={"address": door.address})
            channels.warn_when_exposed(door.address, exposure)
        self.listening.set()

    # --- health ---

    async def _keep_health(self, checks: HealthServicer) -> None:
        """ "" is this process; the service's name is whether requests are taken, with the cause in the log."""
        told: str | None = ""
        while True:
            cause = self.front_end.not_ready_cause
            serving = cause is None
            checks.set(SERVICE, is_serving=serving)
            if cause != told:
                # News only after it had been ready, and unless it is asked to stop.
                level = logging.WARNING if told is None and not self._first_signal.is_set() else logging.INFO
                log.log(level, "ready" if serving else "not ready", extra={} if serving else {"cause": cause})
                told = cause
            await self._readiness_changed.wait()
            self._readiness_changed.clear()

    # --- stop ---

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop, 128 + number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _until_stopped(self, server: grpc.aio.Server, door: DoorServer | None) -> int:
        await self._first_signal.wait()
        self.front_end.begin_drain()
        log.info(
            "draining",
            extra={"requests": self.front_end.num_live, "deadline_s": self._settings.drain_deadline_s},
        )
        is_done = await self._idle_within(self._settings.drain_deadline_s)
        if is_done or not (self.front_end.num_live or self._second_signal.is_set()):
            unread = self.front_end.num_streams
            # What was refused meanwhile gets its answer.
            await _stop(server, door, _FAREWELL_S)
            log.info("stopped", extra={"calls_not_read_to_the_end": unread} if unread else {})
            return EXIT_OK
        if self._second_signal.is_set():
            log.warning("stopped at once", extra={"requests": self.front_end.num_live})
            return self._exit_at_once
        num_cut = self.front_end.cut_all()
        await self._idle_within(_FAREWELL_S)
        self.front_end.give_up_all()
        await self._idle_within(_FAREWELL_S)
        await _stop(server, door, _FAREWELL_S / 10)
        log.warning("stopped with work cut off", extra={"requests": num_cut})
        return self._exit_at_once or EXIT_CUT_OFF

    async def _idle_within(self, seconds: float) -> bool:
        """Wait until no call is open, or only calls that nothing is done for any more. False when the time ran out
        first, or a second signal came."""
        idle = asyncio.create_task(self.front_end.wait_idle())
        unread = asyncio.create_task(self._only_unread_calls_left())
        hurried = asyncio.create_task(self._second_signal.wait())
        tasks = (idle, unread, hurried)
        try:
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return idle.done() or unread.done()
        finally:
            for task in tasks:
                task.cancel()

    async def _only_unread_calls_left(self) -> None:
        """Wait until every request has ended and the clients of the open calls have taken nothing for a while."""
        num_taken = -1
        while self.front_end.num_live or num_taken != self.front_end.num_events_taken:
            num_taken = -1 if self.front_end.num_live else self.front_end.num_events_taken
            await asyncio.sleep(_UNREAD_S)


async def _stop(server: grpc.aio.Server, door: DoorServer | None, grace_s: float) -> None:
    """Give open calls this many seconds for their last message."""
    await asyncio.gather(server.stop(grace_s), *([] if door is None else [door.close(grace_s)]))


class _CannotListen(Exception):
    """args: the address, and the setting it came from."""

    def __init__(self, address: str, setting: str, cause: str) -> None:
        super().__init__(address, setting)
        self.cause = cause


@contextlib.contextmanager
def _listening(address: str, setting: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _CannotListen(address, setting, str(error)) from None

"""uvicorn in the front end's own event loop, with bounds on what a connection may hold and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any, ClassVar, Final

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from scheduler_svc.rpc.tls import Tls

# Connections at once, beside the calls that are allowed. One more takes the place of the one that has waited longest
# for the head of a request.
_SPARE_CONNECTIONS: Final = 1024
# Seconds from connecting, or from the end of an answer, to the head of the next request.
HEAD_TIMEOUT_S: Final = 20.0
_MAX_HEAD_BYTES: Final = 32 << 10
_BACKLOG: Final = 512
# What is parsed before others get their turn.
_PARSED_BYTES: Final = 4096
# What is read of a body after its answer, so that a client which sends first and reads then hears the answer.
_MAX_UNUSED_BYTES: Final = 1 << 20


class DoorServer:
    """Serves the application from `start` to `close`. Connections that are idle, or slow to send the head of a request,
    are closed."""

    def __init__(self, app: ASGIApp, *, max_calls: int) -> None:
        config = uvicorn.Config(
            app,
            http=type(
                "_Bounded", (_Protocol,), {"max_connections": max_calls + _SPARE_CONNECTIONS, "without_head": {}}
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            # Warnings are about what clients send.
            log_level="error",
            access_log=False,
            # Any client may write headers of a proxy.
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=round(HEAD_TIMEOUT_S),
            h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None
        # HOST:PORT, once started.
        self.address = ""

    @property
    def num_connections(self) -> int:
        """Connections now open."""
        return len(self._server.server_state.connections)

    async def start(self, listen: str, tls: Tls | None = None) -> None:
        """Listen on HOST:PORT; port 0: any. In plain text without `tls`. Raises OSError when that cannot be."""
        host, _, port = listen.rpartition(":")
        listener = _listener(host.strip("[]") or "127.0.0.1", int(port))
        self.address = f"{host}:{listener.getsockname()[1]}"
        if tls is not None:
            self._server.config.load()
            self._server.config.ssl = tls.server_context()
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def close(self, grace_s: float) -> None:
        """Stop listening, give the open calls this many seconds for their last words, and cut off the others."""
        if self._task is None:
            return
        self._server.should_exit = True
        await asyncio.wait({self._task}, timeout=grace_s)
        for connection in list(self._server.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()
        self._server.force_exit = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the front end's."""
        yield


class _Protocol(H11Protocol):
    """What uvicorn does not bound: how many connections there are, how long the head of a request takes, and how
    much is parsed in one turn of the event loop. Chunks of one byte take 15 microseconds each."""

    max_connections: ClassVar[int] = 0
    # Connections without a request, the one that has waited longest first.
    without_head: ClassVar[dict[_Protocol, None]] = {}

    _parsing: asyncio.Handle | None = None
    _holds_back = False
    _head_timer: asyncio.TimerHandle | None = None
    # The last request whose head has come, and how much of its body has come after the answer.
    _begun: Any = None
    _num_unused_bytes = 0

    def connection_made(self, transport: Any) -> None:
        self._received = bytearray()
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            if not self.without_head:
                transport.abort()
                return
            longest = next(iter(self.without_head))
            del self.without_head[longest]
            longest.transport.abort()
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.without_head.pop(self, None)
        for waiting in (self._head_timer, self._parsing):
            if waiting is not None:
                waiting.cancel()
        self._received.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._parsing is None:
            self._parse()

    def on_response_complete(self) -> None:
        self._wait_for_head()
        super().on_response_complete()
        self._note_head()

    def _parse(self) -> None:
        self._parsing = None
        piece = bytes(self._received[:_PARSED_BYTES])
        del self._received[:_PARSED_BYTES]
        if self._is_too_much(piece):
            self.transport.abort()
            return
        super().data_received(piece)
        self._note_head()
        if self.transport.is_closing():
            return
        if self._received:
            # Nothing more is read meanwhile: what waits here must not grow.
            self._holds_back = True
            self.transport.pause_reading()
            self._parsing = self.loop.call_soon(self._parse)
        elif self._holds_back and not self.flow.read_paused:
            self._holds_back = False
            self.transport.resume_reading()

    def _is_too_much(self, piece: bytes) -> bool:
        """Whether the client goes on with a body whose answer it has."""
        if self._begun is None or not self._begun.response_complete or self.conn.their_state is not h11.SEND_BODY:
            self._num_unused_bytes = 0
            return False
        self._num_unused_bytes += len(piece)
        return self._num_unused_bytes > _MAX_UNUSED_BYTES

    def _wait_for_head(self) -> None:
        self.without_head[self] = None
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def _note_head(self) -> None:
        if self.cycle is not self._begun:
            self._begun = self.cycle
            self.without_head.pop(self, None)
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None


def _listener(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, os.strerror(error.errno or 0)) from None
    return listener

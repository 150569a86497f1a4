"""HTTP for scrapers: `/metrics` and nothing else, on the event loop, with bounds on everything a client can hold.

h11 reads and writes the protocol; connections, their number and their time are kept here (docs/decisions/0009).
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import os
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import h11
from prometheus_client.exposition import choose_encoder, gzip_accepted
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

PATH: Final = "/metrics"
# Connections at once. One more takes the place of the one that has waited longest for its client.
MAX_CONNECTIONS: Final = 64
# Seconds from connecting to the whole request, and for taking the whole answer.
REQUEST_TIMEOUT_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 10.0
_MAX_REQUEST_BYTES: Final = 16 << 10
_READ_BYTES: Final = 4096

_Headers = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    headers: _Headers
    body: bytes


class MetricsServer:
    """Serves what `read` returns, from `start` to `close`. Each connection carries one request.

    read: called on the event loop for each scrape, so that a scrape shows one moment. The text is made in a thread.
    """

    def __init__(
        self,
        read: Callable[[], list[Metric]],
        *,
        max_connections: int = MAX_CONNECTIONS,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self._read = read
        self._max_connections = max_connections
        self._request_timeout_s = request_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._connections: set[asyncio.Task[None]] = set()
        # Those of them that wait for their client, without a request or with the answer out, in that order.
        self._waiting: dict[asyncio.Task[None], None] = {}
        self._server: asyncio.Server | None = None
        # HOST:PORT, once started.
        self.address = ""

    @property
    def num_connections(self) -> int:
        """Connections now open."""
        return len(self._connections)

    async def start(self, listen: str) -> None:
        """Listen on HOST:PORT; port 0: any. Raises OSError when that cannot be."""
        host, _, port = listen.rpartition(":")
        found = socket.getaddrinfo(host.strip("[]") or "127.0.0.1", int(port), type=socket.SOCK_STREAM)
        family, _, _, _, where = found[0]
        try:
            self._server = await asyncio.start_server(self._connected, str(where[0]), int(port), family=family)
        except OSError as error:
            # The system's own words, which asyncio puts into a sentence of its own.
            raise OSError(error.errno, os.strerror(error.errno or 0)) from None
        # The thread is started now: later there may be none to have.
        self._encoder.submit(int)
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop listening and cut off who is connected. Waits for nothing else."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._encoder.shutdown(wait=False, cancel_futures=True)

    # --- connections ---

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= self._max_connections:
            if not self._waiting:
                writer.transport.abort()
                return
            oldest = next(iter(self._waiting))
            self._forget(oldest)
            oldest.cancel()
        self._connections.add(task)
        self._waiting[task] = None
        try:
            # Cut off, by `close` or by one that came later.
            with contextlib.suppress(asyncio.CancelledError, OSError, TimeoutError):
                await self._serve(task, reader, writer)
        except Exception:
            log.exception("a scrape failed")
        finally:
            self._forget(task)
            # What the client has not taken by now is dropped.
            writer.transport.abort()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        self._waiting.pop(task, None)

    async def _serve(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        # drain() waits until all is out.
        writer.transport.set_write_buffer_limits(0)
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_REQUEST_BYTES)
        with_body = True
        try:
            async with asyncio.timeout(self._request_timeout_s):
                request = await _request(http, reader)
        except h11.RemoteProtocolError as error:
            answer = _text(error.error_status_hint, "not a request that is understood here")
        else:
            if request is None:
                return
            self._waiting.pop(task, None)
            with_body = request.method != b"HEAD"
            answer = await self._answer(request)
        async with asyncio.timeout(self._answer_timeout_s):
            writer.write(_encoded(http, answer, with_body=with_body))
            await writer.drain()
            # From here on another connection may take its place.
            self._waiting[task] = None
            writer.write_eof()
            # The client closes first, so that it has all of the answer.
            while await reader.read(_READ_BYTES):
                pass

    # --- answers ---

    async def _answer(self, request: h11.Request) -> _Answer:
        if request.target.split(b"?", 1)[0] != PATH.encode():
            return _text(404, f"there is {PATH} here, and nothing else")
        if request.method not in (b"GET", b"HEAD"):
            return _text(405, "use GET or HEAD", [("Allow", "GET, HEAD")])
        accept, accept_encoding = _header(request, b"accept"), _header(request, b"accept-encoding")
        try:
            metrics = self._read()
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._encoder, _scrape, metrics, accept, accept_encoding)
        except Exception:
            log.exception("a scrape failed")
            return _text(500, "the scrape failed; the scheduler's log has the cause")


class _Moment(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _scrape(metrics: list[Metric], accept: str, accept_encoding: str) -> _Answer:
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):
        # A version that is no number, say: as if nothing was asked for.
        encode, content_type = choose_encoder("")
    body = encode(_Moment(metrics))
    headers = [("Content-Type", content_type)]
    if gzip_accepted(accept_encoding):
        body = gzip.compress(body)
        headers.append(("Content-Encoding", "gzip"))
    return _Answer(200, headers, body)


def _text(status: int, text: str, headers: _Headers | None = None) -> _Answer:
    return _Answer(status, [("Content-Type", "text/plain; charset=utf-8"), *(headers or [])], f"{text}\n".encode())


async def _request(http: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | None:
    """The head of the request; None when the client leaves without one. Raises h11.RemoteProtocolError."""
    while (event := http.next_event()) is h11.NEED_DATA:
        http.receive_data(await reader.read(_READ_BYTES))
    return event if isinstance(event, h11.Request) else None


def _header(request: h11.Request, name: bytes) -> str:
    return ",".join(value.decode("latin-1") for key, value in request.headers if key == name)


def _encoded(http: h11.Connection, answer: _Answer, *, with_body: bool) -> bytes:
    headers = [*answer.headers, ("Content-Length", str(len(answer.body))), ("Connection", "close")]
    events: list[h11.Event] = [h11.Response(status_code=answer.status, headers=headers)]
    if with_body:
        events.append(h11.Data(data=answer.body))
    events.append(h11.EndOfMessage())
    return b"".join(http.send(event) or b"" for event in events)

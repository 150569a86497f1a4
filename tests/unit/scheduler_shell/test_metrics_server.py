"""The HTTP of the metrics: what scrapers get, and what those get who only connect."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from scheduler_svc.metrics_server import MetricsServer


def _metrics() -> list[Metric]:
    return [GaugeMetricFamily("things", "How many.", 3)]


@asynccontextmanager
async def _server(read: Callable[[], list[Metric]] = _metrics, **bounds: Any) -> AsyncIterator[MetricsServer]:
    server = MetricsServer(read, **bounds)
    await server.start("127.0.0.1:0")
    try:
        yield server
    finally:
        await server.close()


async def _connect(server: MetricsServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = server.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def _ask(server: MetricsServer, request: bytes) -> tuple[int, dict[str, str], bytes]:
    reader, writer = await _connect(server)
    writer.write(request)
    async with asyncio.timeout(30):
        data = await reader.read()
    writer.close()
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, body


def _get(path: str = "/metrics", method: str = "GET", **headers: str) -> bytes:
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join((f"{method} {path} HTTP/1.1", "Host: here", *lines, "", "")).encode()


async def test_f120_a_scrape_is_text_openmetrics_or_compressed_as_asked() -> None:
    async with _server() as server:
        status, headers, body = await _ask(server, _get())
        assert (status, headers["connection"]) == (200, "close")
        assert headers["content-type"].startswith("text/plain; version=")
        assert b"things 3.0\n" in body
        assert int(headers["content-length"]) == len(body)
        status, headers, body = await _ask(server, _get(Accept="application/openmetrics-text; version=1.0.0"))
        assert headers["content-type"].startswith("application/openmetrics-text")
        assert body.endswith(b"# EOF\n")
        status, headers, body = await _ask(server, _get("/metrics?of=anything", Accept_Encoding="br, gzip"))
        assert headers["content-encoding"] == "gzip"
        assert b"things 3.0\n" in gzip.decompress(body)


async def test_f120_head_has_the_headers_of_get_and_no_body() -> None:
    async with _server() as server:
        _, whole, body = await _ask(server, _get())
        status, headers, nothing = await _ask(server, _get(method="HEAD"))
        assert (status, nothing) == (200, b"")
        assert headers["content-length"] == whole["content-length"] == str(len(body))


@pytest.mark.parametrize(
    "request_bytes, status",
    [
        (_get("/"), 404),
        (_get("/metrics/more"), 404),
        (_get(method="POST", Content_Length="3") + b"abc", 405),
        (b"\x16\x03\x01 this is TLS\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /" + b"a" * 40_000, 431),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 404),
    ],
)
async def test_f120_anything_else_is_refused_with_a_status(request_bytes: bytes, status: int) -> None:
    async with _server() as server:
        got, _, body = await _ask(server, request_bytes)
        assert got == status
        assert body
        assert (await _ask(server, _get()))[0] == 200


async def _closed(reader: asyncio.StreamReader) -> bool:
    """Whether the server has closed it; waits for that."""
    async with asyncio.timeout(30):
        try:
            return await reader.read() == b""
        except ConnectionResetError:
            return True


@pytest.mark.parametrize("beginning", [b"", b"G", b"GET /metrics HTTP/1.1\r\nHost: here\r\n"])
async def test_f120_a_connection_without_a_whole_request_is_closed(beginning: bytes) -> None:
    async with _server(request_timeout_s=0.05) as server:
        reader, writer = await _connect(server)
        writer.write(beginning)
        assert await _closed(reader)
        writer.close()
        assert (await _ask(server, _get()))[0] == 200


async def test_f120_one_connection_more_takes_the_place_of_the_one_that_waited_longest() -> None:
    async with _server(max_connections=3, request_timeout_s=60) as server:
        idle = [await _connect(server) for _ in range(3)]
        async with asyncio.timeout(30):
            while server.num_connections < 3:
                await asyncio.sleep(0.01)
        assert (await _ask(server, _get()))[0] == 200
        assert await _closed(idle[0][0])
        assert server.num_connections <= 3
        for _, writer in idle[1:]:
            writer.write(_get())
        for reader, writer in idle[1:]:
            async with asyncio.timeout(30):
                assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()


async def test_f120_those_who_do_not_leave_after_their_answer_make_room_too() -> None:
    async with _server(max_connections=2, answer_timeout_s=60) as server:
        staying = []
        for _ in range(6):
            reader, writer = await _connect(server)
            writer.write(_get())
            assert (await reader.read(100)).startswith(b"HTTP/1.1 200")
            staying.append((reader, writer))
        assert server.num_connections <= 2
        assert (await _ask(server, _get()))[0] == 200
        for _, writer in staying:
            writer.close()


async def test_f120_a_client_that_does_not_take_its_answer_is_cut_off() -> None:
    def much() -> list[Metric]:
        family = GaugeMetricFamily("things", "How many.", labels=["name"])
        for index in range(60_000):
            family.add_metric([f"{index:0200}"], index)
        return [family]

    async with _server(much, answer_timeout_s=0.2) as server:
        _, writer = await _connect(server)
        writer.write(_get())
        async with asyncio.timeout(30):
            while not server.num_connections:
                await asyncio.sleep(0.01)
            while server.num_connections:
                await asyncio.sleep(0.01)
        writer.close()


async def test_f120_a_scrape_that_fails_gets_500_and_the_next_one_is_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = True

    def read() -> list[Metric]:
        if broken:
            raise RuntimeError("broken")
        return _metrics()

    async with _server(read) as server:
        status, _, body = await _ask(server, _get())
        assert (status, b"log" in body) == (500, True)
        assert "a scrape failed" in caplog.text
        broken = False

        def no_thread(*arguments: object) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(server._encoder, "submit", no_thread)
            assert (await _ask(server, _get()))[0] == 500
        assert (await _ask(server, _get()))[0] == 200


async def test_f120_connections_take_no_threads() -> None:
    async with _server(max_connections=100) as server:
        before = threading.active_count()
        idle = [await _connect(server) for _ in range(50)]
        assert (await _ask(server, _get()))[0] == 200
        assert threading.active_count() <= before + 1
        for _, writer in idle:
            writer.close()


async def test_a_taken_port_is_an_error() -> None:
    async with _server() as server:
        with pytest.raises(OSError, match="in use"):
            await MetricsServer(list).start(server.address)


@pytest.mark.parametrize("version", ["x", "1..0", "1e400", "", "-1", "99999999999999999999.1"])
async def test_a_scraper_that_asks_for_a_strange_version_gets_text_and_no_line_in_the_log(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with _server() as server:
        for kind in ("text/plain", "application/openmetrics-text"):
            status, _, body = await _ask(server, _get(Accept=f"{kind};version={version};escaping=\t;q=1e400"))
            assert status == 200 and b"things 3.0\n" in body
    assert not caplog.records

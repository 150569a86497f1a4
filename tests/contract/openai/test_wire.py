"""What no client library sends over the wire to the OpenAI port: it is refused or served, and holds nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any
from urllib.parse import unquote

import pytest

from scheduler_svc.frontend.openai import server
from tests.contract.frontend.harness import until
from tests.contract.openai.harness import COMPLETIONS, answering, door, head

_BODY = json.dumps({"prompt": "x", "max_tokens": 3}).encode()
_CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(_BODY), _BODY)
_NEXT = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def _post(body: bytes, *lines: str, version: str = "1.1") -> bytes:
    fields = "\r\n".join((f"POST {COMPLETIONS} HTTP/{version}", "Host: x", "Content-Type: application/json", *lines))
    return f"{fields}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    "data",
    [
        _post(_CHUNKED, f"Content-Length: {len(_CHUNKED)}", "Transfer-Encoding: chunked"),
        _post(_CHUNKED, "Transfer-Encoding: chunked", "Content-Length: 4"),
        _post(_CHUNKED, "Transfer-Encoding: chunked", version="1.0"),
        _post(_CHUNKED, "Transfer-Encoding: chunked", "Connection: keep-alive", version="1.0"),
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
    ids=["both", "both, of another length", "HTTP/1.0", "HTTP/1.0, kept alive", "both, for a GET"],
)
async def test_a_body_that_a_proxy_may_see_end_elsewhere_is_refused_and_nothing_after_it_is_read(data: bytes) -> None:
    async with answering() as opened:
        answer = await opened.send(data + _NEXT)
        assert answer.status == 400 and answer.headers["connection"] == "close"
        assert b"HTTP/1.1 " not in answer.body
        assert answer.error["reason"] == "AMBIGUOUS_LENGTH"
        assert not opened.submits


@pytest.mark.parametrize(
    "request_id", ["a\r\nX-Evil: 1", "a\0", " a ", "a b", "日本é", "\u202eabc", "\x1b[2J", "a\x7f"]
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_any_request_id_comes_back(request_id: str, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with answering() as opened:
        answer = await opened.post(COMPLETIONS, {"prompt": "x", "request_id": request_id, "stream": stream})
        assert answer.status == 200
        assert (answer.events[0] if stream else answer.json)["id"] == request_id
        assert unquote(answer.headers["x-request-id"]) == request_id
        assert "x-evil" not in answer.headers
        await opened.under_test.until_nothing_is_left()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_new_connection_takes_the_place_of_the_oldest_idle_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_SPARE_CONNECTIONS", 2)
    async with door(max_calls=3) as opened:
        idle = [await opened.connect() for _ in range(5)]
        # One that has a call is not idle, however old it is.
        idle[0][1].write(_post(_BODY, f"Content-Length: {len(_BODY)}"))
        request = await opened.double.next_request()
        for _ in range(8):
            assert (await opened.get("/health")).status == 200
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(idle[1][0].read(), 30) == b""
        request.accept()
        request.end_length()
        assert b"200" in await asyncio.wait_for(idle[0][0].readline(), 30)
        for _, writer in idle:
            writer.close()


@pytest.mark.parametrize(
    "piece", [b"10000\r\n" + b"x" * 65536 + b"\r\n", b"1\r\nx\r\n" * 10_000], ids=["large", "small"]
)
async def test_a_body_that_goes_on_after_its_answer_is_cut_off(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    most = _watch_what_waits(monkeypatch)
    async with door() as opened:
        _, writer = await opened.connect()
        # Without a content type it is refused at once, and the connection is kept for the next request.
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 64 << 20:
                writer.write(piece)
                await writer.drain()
                sent += len(piece)
        # Beside the part that is read, some lies in the buffers of the system.
        assert sent < 32 << 20
        assert max(most) < 1 << 20
        await until(lambda: opened.under_test.process.front_end.num_streams == 0)


async def test_a_body_of_small_chunks_is_not_read_faster_than_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    most = _watch_what_waits(monkeypatch)
    async with answering() as opened:
        body = json.dumps({"prompt": [7] * 90_000}).encode()
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        answer = await opened.send(
            head("POST", COMPLETIONS, {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}) + chunks
        )
        assert answer.status == 200
        assert max(most) < 600_000 < len(chunks)


def _watch_what_waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what a connection has received and not parsed."""
    sizes = [0]
    received = server._Protocol.data_received

    def data_received(self: Any, data: bytes) -> None:
        received(self, data)
        sizes.append(len(self._received))

    monkeypatch.setattr(server._Protocol, "data_received", data_received)
    return sizes

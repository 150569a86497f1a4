"""A front end with its OpenAI port on the test's loop, and the clients that call it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import openai

from tests.contract.frontend.harness import FrontEndUnderTest, front_end
from tests.support.session_double import SessionDouble, byte_model

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@dataclass
class Answered:
    """A whole HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """Of a stream: the values of its events; the last one, [DONE], as it is."""
        lines = [line for line in self.body.decode().split("\n\n") if line and not line.startswith(":")]
        return [line.removeprefix("data: ") if "[DONE]" in line else json.loads(line[6:]) for line in lines]


class Port:
    """Calls to the OpenAI port at HOST:PORT."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.host, self.port = host, int(port)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port)

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answered:
        """body: JSON, or the bytes of one."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", path, data, {"Content-Type": "application/json", **(headers or {})})

    async def get(self, path: str) -> Answered:
        return await self.request("GET", path, b"", {})

    async def request(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answered:
        """On a connection of its own, until the server closes it."""
        return await self.send(head(method, path, {"Content-Length": str(len(body)), **headers}) + body)

    async def send(self, data: bytes) -> Answered:
        """What the server answers to these bytes, until it closes the connection."""
        reader, writer = await self.connect()
        try:
            writer.write(data)
            async with asyncio.timeout(120):
                return answered(await reader.read())
        finally:
            writer.close()


class Door(Port):
    """The OpenAI port of a front end."""

    def __init__(self, under_test: FrontEndUnderTest) -> None:
        super().__init__(under_test.process.openai_address)
        self.under_test = under_test
        self.double = under_test.double
        # What was submitted to a scheduler that answers by itself.
        self.submits: list[Any] = []
        self.client = openai.AsyncOpenAI(
            base_url=f"http://{self.host}:{self.port}/v1", api_key="-", max_retries=0, timeout=60
        )


def head(method: str, path: str, headers: dict[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: door", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def answered(data: bytes) -> Answered:
    top, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = top.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        rest = b"".join(_chunks(rest))
    return Answered(int(first.split()[1]), headers, rest)


def _chunks(data: bytes) -> Iterable[bytes]:
    while data:
        size, _, data = data.partition(b"\r\n")
        yield data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]


@contextlib.asynccontextmanager
async def door(double: SessionDouble | None = None, **settings: Any) -> AsyncIterator[Door]:
    """Open and ready; closed afterwards."""
    async with (
        double or SessionDouble(byte_model(max_model_len=100_000)) as scheduler,
        front_end(scheduler, openai_listen="127.0.0.1:0", **settings) as under_test,
    ):
        opened = Door(under_test)
        try:
            yield opened
        finally:
            await opened.client.close()


@contextlib.asynccontextmanager
async def answering(frames: Sequence[bytes] = (b"Hi", b" there"), **settings: Any) -> AsyncIterator[Door]:
    """A door whose scheduler answers every request with these tokens."""
    async with door(**settings) as opened:

        def play(submit: Any) -> Sequence[bytes]:
            opened.submits.append(submit)
            return frames

        opened.double.play = play
        yield opened

"""A peer that speaks HTTP/2 frame by frame: what no gRPC client would send."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from hpack import Decoder, Encoder

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM, END_HEADERS = 1, 4
MAX_CONCURRENT_STREAMS = 3

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_ACK = 1
_HEAD_BYTES = 9
_PATIENCE_S = 30.0


@dataclass(frozen=True)
class Frame:
    """What the server sent. fields: of HEADERS, decoded."""

    kind: int
    flags: int
    stream: int
    payload: bytes
    fields: dict[str, str]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame as it travels."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def message(payload: bytes) -> bytes:
    """A gRPC message, not compressed."""
    return b"\0" + struct.pack(">I", len(payload)) + payload


class Http2Peer:
    """One connection to HOST:PORT, for the length of the `async with`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._encoder, self._decoder = Encoder(), Decoder()
        self._received = b""
        # By number, of the first SETTINGS of the server.
        self.settings: dict[int, int] = {}

    async def __aenter__(self) -> Self:
        host, _, port = self._address.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port))
        await self.send(_PREFACE + frame(SETTINGS, 0, 0))
        first = await self.next_frame()
        pairs = [first.payload[at : at + 6] for at in range(0, len(first.payload), 6)]
        self.settings = {number: value for number, value in (struct.unpack(">HI", pair) for pair in pairs)}
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._writer.transport.abort()

    async def send(self, data: bytes) -> None:
        """Any bytes. Raises ConnectionError when the server has closed."""
        self._writer.write(data)
        await self._writer.drain()

    def head(self, stream: int, path: str, flags: int = END_HEADERS) -> bytes:
        """HEADERS of a call of "/package.Service/Method"."""
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")]
        fields += [("te", "trailers"), ("content-type", "application/grpc")]
        return frame(HEADERS, flags, stream, self._encoder.encode(fields))

    async def next_frame(self) -> Frame:
        """The next frame of the server; its pings and settings are answered. Raises EOFError at the end."""
        async with asyncio.timeout(_PATIENCE_S):
            while len(self._received) < _HEAD_BYTES + int.from_bytes(self._received[:3], "big"):
                data = await self._reader.read(1 << 16)
                if not data:
                    raise EOFError
                self._received += data
        end = _HEAD_BYTES + int.from_bytes(self._received[:3], "big")
        head, payload = self._received[:_HEAD_BYTES], self._received[_HEAD_BYTES:end]
        self._received = self._received[end:]
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:9], "big")
        if kind in (SETTINGS, PING) and not flags & _ACK:
            await self.send(frame(kind, _ACK, 0, payload if kind == PING else b""))
        fields = {str(name): str(value) for name, value in self._decoder.decode(payload)} if kind == HEADERS else {}
        return Frame(kind, flags, stream, payload, fields)

    async def status(self, stream: int) -> tuple[int, str]:
        """grpc-status and grpc-message of the call on this stream; other frames are skipped."""
        while True:
            got = await self.next_frame()
            if got.stream == stream and "grpc-status" in got.fields:
                return int(got.fields["grpc-status"]), got.fields.get("grpc-message", "")

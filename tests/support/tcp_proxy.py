"""A TCP proxy on loopback that a test can turn against the connections through it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal


@dataclass
class _Connection:
    near: asyncio.StreamWriter
    far: asyncio.StreamWriter | None = None
    # One end is gone, and the other is not told.
    is_half_open: bool = False

    def abort(self) -> None:
        for writer in (self.near, self.far):
            if writer is not None:
                writer.transport.abort()


class TcpProxy:
    """Forwards to one address. Use as an async context manager. *Near* is whoever connects, *far* the target."""

    def __init__(self, target: str, source: str | None = None) -> None:
        """source: the address that its connections to the target come from; None: the system's choice."""
        self._source = None if source is None else (source, 0)
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], _Connection] = {}
        # Cleared, nothing passes in either direction and nobody is told.
        self.passing = asyncio.Event()
        self.passing.set()
        # Seconds each piece waits.
        self.delay_s = 0.0
        self.num_connections = 0
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection; new ones are possible at once."""
        for task, connection in self._connections.items():
            connection.abort()
            task.cancel()

    def half_open(self, side: Literal["near", "far", "both"]) -> None:
        """Until `heal`: that side loses its connections, and the other is not told; new ones pass. both: nobody is
        told, and nothing passes on old or new connections."""
        if side == "both":
            self.passing.clear()
            return
        for connection in self._connections.values():
            connection.is_half_open = True
            gone = connection.near if side == "near" else connection.far
            if gone is not None:
                gone.transport.abort()

    def heal(self) -> None:
        """Let everything pass again; ends that were not told are reset now."""
        self.passing.set()
        for task, connection in self._connections.items():
            if connection.is_half_open:
                connection.abort()
                task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        connection = self._connections[task] = _Connection(writer)
        try:
            with suppress(OSError, asyncio.CancelledError):
                far_reader, connection.far = await asyncio.open_connection(*self._target, local_addr=self._source)
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._forward(connection, reader, connection.far))
                    both.create_task(self._forward(connection, far_reader, writer))
        finally:
            del self._connections[task]
            connection.abort()

    async def _forward(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await self.passing.wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if not connection.is_half_open:
                    writer.write(data)
                    await writer.drain()
        if connection.is_half_open:
            # Until it is healed or cut.
            await asyncio.get_running_loop().create_future()
        writer.close()

"""A TCP proxy on loopback that a test can turn against the connections through it."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class TcpProxy:
    """Forwards to one address. Use as an async context manager."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], tuple[asyncio.StreamWriter, ...]] = {}
        # Cleared, nothing passes in either direction and nobody is told (half-open).
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
        for task, writers in self._connections.items():
            for writer in writers:
                writer.transport.abort()
            task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = (writer,)
        try:
            with suppress(OSError, asyncio.CancelledError):
                far_reader, far_writer = await asyncio.open_connection(*self._target)
                self._connections[task] = (writer, far_writer)
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._forward(reader, far_writer))
                    both.create_task(self._forward(far_reader, writer))
        finally:
            for each in self._connections.pop(task):
                each.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await self.passing.wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(data)
                await writer.drain()
        writer.close()

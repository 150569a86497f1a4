"""Names of workers to addresses, asked anew every time: gRPC's own resolver asks too rarely to follow scaling."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

_NO_SUCH_NAME = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})


class SystemResolver:
    """AddressResolver over getaddrinfo.

    Every question gets a daemon thread of its own: a name server that does not answer holds up neither the event loop
    nor the end of the process, as a pool of threads would.
    """

    async def resolve(self, host: str, port: int) -> tuple[str, ...]:
        """See AddressResolver. IPv6 addresses come in brackets."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[str, ...]] = loop.create_future()

        def finish(result: tuple[str, ...] | Exception) -> None:
            if answer.done():
                return
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        def ask() -> None:
            result = _look_up(host, port)
            # The loop may have been closed meanwhile; then nobody waits for the answer.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(finish, result)

        threading.Thread(target=ask, name=f"resolve {host}", daemon=True).start()
        return await answer


def _look_up(host: str, port: int) -> tuple[str, ...] | Exception:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return () if error.errno in _NO_SUCH_NAME else error
    except Exception as error:
        # Among them UnicodeError, for a name that DNS cannot have.
        return error
    # Name servers turn the order with every answer; sorted, ranks keep theirs.
    addresses = {
        f"[{sockaddr[0]}]:{port}" if family == socket.AF_INET6 else f"{sockaddr[0]}:{port}"
        for family, _, _, _, sockaddr in found
    }
    return tuple(sorted(addresses))

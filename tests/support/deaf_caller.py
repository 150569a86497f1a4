"""A client that never takes a byte of an answer: its HTTP/2 window is 0 and stays 0."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

from tests.support.wire import bytes_field


class DeafCaller:
    """Calls a method ("/package.Service/Method") at HOST:PORT with one encoded message, and does not read for the
    length of the `with`; the connection itself stays alive."""

    def __init__(self, address: str, method: str, message: bytes) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=30)
        self._connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self._connection.local_settings = h2.settings.Settings(
            client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0}
        )
        self._connection.initiate_connection()
        self._request(method, message)
        # The server has taken the settings, and then the request, which it may answer from now on.
        self._settings_taken = threading.Event()
        self.num_answer_bytes = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._settings_taken.wait(30), "the server does not speak HTTP/2"

    def _request(self, method: str, message: bytes) -> None:
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            (":authority", "localhost"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ]
        self._connection.send_headers(1, headers)
        self._connection.send_data(1, b"\0" + len(message).to_bytes(4, "big") + message, end_stream=True)
        self._socket.sendall(self._connection.data_to_send())

    def _read(self) -> None:
        with contextlib.suppress(OSError, h2.exceptions.ProtocolError):
            self._socket.settimeout(None)
            is_going = False
            while data := self._socket.recv(65536):
                if is_going:
                    # The server said goodbye; this client stays, without a word.
                    continue
                for event in self._connection.receive_data(data):
                    if isinstance(event, h2.events.SettingsAcknowledged):
                        self._settings_taken.set()
                    if isinstance(event, h2.events.DataReceived):
                        self.num_answer_bytes += len(event.data)
                    is_going |= isinstance(event, h2.events.ConnectionTerminated)
                # Answers to settings and pings.
                self._socket.sendall(self._connection.data_to_send())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join(10)
        self._socket.close()


class DeafWatcher(DeafCaller):
    """Watches the health of a service."""

    def __init__(self, address: str, service: str) -> None:
        super().__init__(address, "/grpc.health.v1.Health/Watch", bytes_field(1, service.encode()))

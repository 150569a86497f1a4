"""TLS between the parts, and towards clients.

A directory holds what one side needs, under the names that Kubernetes and cert-manager use: `tls.crt` (the certificate,
and those between it and its authority), `tls.key` (its key) and `ca.crt` (the authorities that the other side's
certificates come from). All in PEM. Files that are replaced are used for connections made from then on.

`worker_svc/tls.py` is the worker's half: the services share no code.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
AUTHORITIES: Final = "ca.crt"

# Seconds between two looks at the files, and between two complaints about them.
_LOOK_S: Final = 1.0
_QUIET_S: Final = 60.0

log = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int, int] | None, ...]


class TlsError(Exception):
    """A directory cannot be used; the text names the file and says what is wrong."""


@dataclass(frozen=True, slots=True)
class _Files:
    """PEM; None: the file is not there."""

    certificate: bytes | None
    key: bytes | None
    authorities: bytes | None


class Tls:
    """One directory. server_name: what the certificates of servers that are called must be made out for; "": the host
    that is called."""

    def __init__(self, directory: Path, *, server_name: str = "", needs: tuple[str, ...] = ()) -> None:
        """needs: the files that must be there. Raises TlsError."""
        self.directory = directory
        self._server_name = server_name
        self._needs = needs
        self._files = self._read()
        self._stamp = self.stamp()
        self._looked_at = time.monotonic()
        self._told_at = -_QUIET_S
        self._lock = threading.Lock()
        # Of the files in use; grows.
        self.version = 1

    @property
    def asks_clients(self) -> bool:
        """Whether a server with it takes only clients that show a certificate."""
        return self._files.authorities is not None

    # --- for clients ---

    def channel_credentials(self) -> tuple[grpc.ChannelCredentials, tuple[tuple[str, str], ...]]:
        """Credentials of a channel, with what the files hold now, and options for it."""
        self.look_again()
        files = self._files
        credentials = grpc.ssl_channel_credentials(files.authorities, files.key, files.certificate)
        options = (("grpc.ssl_target_name_override", self._server_name),) if self._server_name else ()
        return credentials, options

    # --- for servers ---

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials of a gRPC server. Clients must show a certificate where there are authorities."""

        def configuration() -> Any:
            files = self._files
            pairs = [(files.key, files.certificate)]
            return grpc.ssl_server_certificate_configuration(pairs, files.authorities)  # type: ignore[arg-type]

        version = self.version

        def fetch() -> Any:
            # Called for each connection, by a thread of gRPC.
            nonlocal version
            if self.look_again() == version:
                return None
            version = self.version
            return configuration()

        return grpc.dynamic_ssl_server_credentials(configuration(), fetch, self.asks_clients)

    def server_context(self) -> ssl.SSLContext:
        """The same for an HTTP server; `refresh` keeps it up to date."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        self.refresh(context)
        if self.asks_clients:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def refresh(self, context: ssl.SSLContext) -> None:
        """Have new connections of the context use what the files hold."""
        context.load_cert_chain(self.directory / CERTIFICATE, self.directory / KEY)
        if self.asks_clients:
            context.load_verify_locations(self.directory / AUTHORITIES)

    # --- the files ---

    def stamp(self) -> Stamp:
        """What changes with the files."""
        return tuple(_stamp(self.directory / name) for name in (CERTIFICATE, KEY, AUTHORITIES))

    def look_again(self) -> int:
        """Read the files again if they have changed; the number of the version that is in use then. Files that cannot
        be used are reported, and those read last stay in use."""
        with self._lock:
            self._look_again()
            return self.version

    def _look_again(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        stamp = self.stamp()
        if stamp == self._stamp:
            return
        try:
            files = self._read()
        except TlsError as error:
            if now - self._told_at >= _QUIET_S:
                self._told_at = now
                log.error("TLS files cannot be read again: those read last stay in use", extra={"cause": str(error)})
            return
        self._files, self._stamp = files, stamp
        self.version += 1
        log.info("TLS files were read again", extra={"directory": str(self.directory)})

    def _read(self) -> _Files:
        missing = [name for name in self._needs if not (self.directory / name).exists()]
        if missing:
            raise TlsError(
                f"{self.directory / missing[0]} is not there; the directory must hold {', '.join(self._needs)}"
            )
        files = _Files(*(_content(self.directory / name) for name in (CERTIFICATE, KEY, AUTHORITIES)))
        if (files.certificate is None) != (files.key is None):
            raise TlsError(f"{self.directory} must hold both {CERTIFICATE} and {KEY}, or none of them")
        _check(self.directory, files)
        return files


def _check(directory: Path, files: _Files) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if files.certificate is not None:
        try:
            context.load_cert_chain(directory / CERTIFICATE, directory / KEY, password=_no_password)
        except (ssl.SSLError, OSError, ValueError) as error:
            raise TlsError(f"{directory / CERTIFICATE} and {KEY} cannot be used together: {_said(error)}") from None
    if files.authorities is not None:
        try:
            context.load_verify_locations(directory / AUTHORITIES)
        except (ssl.SSLError, OSError, ValueError) as error:
            raise TlsError(f"{directory / AUTHORITIES} holds no certificates in PEM: {_said(error)}") from None


def _no_password() -> str:
    raise ValueError("the key is encrypted; write it without a password")


def _said(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not PEM").lower().replace("_", " ")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TlsError(f"{path} cannot be read: {error.strerror or error}") from None


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


# What the directories of the parts must hold.
FOR_PARTS: Final = (CERTIFICATE, KEY, AUTHORITIES)
FOR_CLIENTS: Final = (CERTIFICATE, KEY)
FOR_CALLERS: Final = (AUTHORITIES,)

"""TLS of the worker's port: only the parts of the deployment, which show certificates of its authority, get in.

The directory holds `tls.crt`, `tls.key` and `ca.crt` in PEM. Files that are replaced are used for connections made from
then on. `scheduler_svc/rpc/tls.py` is the other half: the services share no code.
"""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path
from typing import Any, Final

import grpc

NAMES: Final = ("tls.crt", "tls.key", "ca.crt")

log = logging.getLogger(__name__)


class TlsError(Exception):
    """The directory cannot be used; the text names the file and says what is wrong."""


class Tls:
    """One directory."""

    def __init__(self, directory: Path) -> None:
        """Raises TlsError."""
        self._directory = directory
        self._content = self._read()
        self._stamp = self._stamps()

    def credentials(self) -> grpc.ServerCredentials:
        """Of the server, with the files of each moment."""
        return grpc.dynamic_ssl_server_credentials(self._configuration(), self._fetch, True)

    def _fetch(self) -> Any:
        stamp = self._stamps()
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            self._content = self._read()
        except TlsError as error:
            log.error("TLS files cannot be read again: those read last stay in use", extra={"cause": str(error)})
            return None
        log.info("TLS files were read again", extra={"directory": str(self._directory)})
        return self._configuration()

    def _configuration(self) -> Any:
        certificate, key, authorities = self._content
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authorities)

    def _read(self) -> tuple[bytes, bytes, bytes]:
        paths = [self._directory / name for name in NAMES]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            certificate, key, authorities = (path.read_bytes() for path in paths)
        except OSError as error:
            raise TlsError(
                f"{error.filename} cannot be read ({error.strerror}); the directory must hold {', '.join(NAMES)}"
            ) from None
        try:
            context.load_cert_chain(paths[0], paths[1], password=_no_password)
        except (OSError, ValueError) as error:
            raise TlsError(f"{paths[0]} and {NAMES[1]} cannot be used together: {_said(error)}") from None
        try:
            context.load_verify_locations(paths[2])
        except (OSError, ValueError) as error:
            raise TlsError(f"{paths[2]} holds no certificates in PEM: {_said(error)}") from None
        return certificate, key, authorities

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(self._directory / name) for name in NAMES)


def _no_password() -> str:
    raise ValueError("the key is encrypted; write it without a password")


def _said(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not PEM").lower().replace("_", " ")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino

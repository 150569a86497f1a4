"""TLS between the parts, and towards clients.

A directory holds what one side needs, under the names that Kubernetes and cert-manager use: `tls.crt` (the certificate,
and those between it and its authority), `tls.key` (its key) and `ca.crt` (the authorities that the other side's
certificates come from). All in PEM. Files that are replaced are used for connections made from then on.

`worker_svc/tls.py` is the worker's half: the services share no code.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from scheduler_svc.rpc.reread import Reread

CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
AUTHORITIES: Final = "ca.crt"
# What the directories of the parts must hold.
FOR_PARTS: Final = (CERTIFICATE, KEY, AUTHORITIES)
FOR_CLIENTS: Final = (CERTIFICATE, KEY)
FOR_CALLERS: Final = (AUTHORITIES,)


class TlsError(Exception):
    """A directory cannot be used; the text names the file and says what is wrong."""


@dataclass(frozen=True, slots=True)
class _Files:
    """PEM; None: the file is not there. context: of an HTTP server that uses them."""

    certificate: bytes | None
    key: bytes | None
    authorities: bytes | None
    context: ssl.SSLContext


class Tls:
    """One directory. server_name: what the certificates of servers that are called must be made out for; "": the host
    that is called."""

    def __init__(self, directory: Path, *, server_name: str = "", needs: tuple[str, ...] = ()) -> None:
        """needs: the files that must be there. Raises TlsError."""
        self.directory = directory
        self._server_name = server_name
        self._needs = needs
        paths = [directory / name for name in (CERTIFICATE, KEY, AUTHORITIES)]
        self._files = Reread(paths, self._read, name="TLS files", unusable=TlsError)

    @property
    def asks_clients(self) -> bool:
        """Whether a server with it takes only clients that show a certificate."""
        return self._files.value.authorities is not None

    # --- for clients ---

    def channel_credentials(self) -> tuple[grpc.ChannelCredentials, tuple[tuple[str, str], ...]]:
        """Credentials of a channel, with what the files hold now, and options for it."""
        self.look_again()
        files = self._files.value
        credentials = grpc.ssl_channel_credentials(files.authorities, files.key, files.certificate)
        options = (("grpc.ssl_target_name_override", self._server_name),) if self._server_name else ()
        return credentials, options

    # --- for servers ---

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials of a gRPC server. Clients must show a certificate where there are authorities."""

        def configuration() -> Any:
            files = self._files.value
            pairs = [(files.key, files.certificate)]
            return grpc.ssl_server_certificate_configuration(pairs, files.authorities)  # type: ignore[arg-type]

        version = self._files.version

        def fetch() -> Any:
            # Called for each connection, by a thread of gRPC.
            nonlocal version
            if self.look_again() == version:
                return None
            version = self._files.version
            return configuration()

        return grpc.dynamic_ssl_server_credentials(configuration(), fetch, self.asks_clients)

    def server_context(self) -> ssl.SSLContext:
        """The same for an HTTP server."""
        context = _context(self.directory, is_asking=self.asks_clients)

        def choose(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
            # Called for each connection.
            self.look_again()
            connection.context = self._files.value.context

        context.sni_callback = choose
        return context

    # --- the files ---

    def look_again(self) -> int:
        """See Reread."""
        return self._files.look_again()

    def _read(self) -> _Files:
        missing = [name for name in self._needs if not (self.directory / name).exists()]
        if missing:
            raise TlsError(
                f"{self.directory / missing[0]} is not there; the directory must hold {', '.join(self._needs)}"
            )
        certificate, key, authorities = (_content(self.directory / name) for name in (CERTIFICATE, KEY, AUTHORITIES))
        if (certificate is None) != (key is None):
            raise TlsError(f"{self.directory} must hold both {CERTIFICATE} and {KEY}, or none of them")
        context = _context(self.directory, has_certificate=certificate is not None, is_asking=authorities is not None)
        return _Files(certificate, key, authorities, context)


def _context(directory: Path, *, has_certificate: bool = True, is_asking: bool) -> ssl.SSLContext:
    """Of an HTTP server. is_asking: clients must show a certificate. Raises TlsError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    if has_certificate:
        try:
            context.load_cert_chain(directory / CERTIFICATE, directory / KEY, password=_no_password)
        except (OSError, ValueError) as error:
            raise TlsError(f"{directory / CERTIFICATE} and {KEY} cannot be used together: {_said(error)}") from None
    if is_asking:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(directory / AUTHORITIES)
        except (OSError, ValueError) as error:
            raise TlsError(f"{directory / AUTHORITIES} holds no certificates in PEM: {_said(error)}") from None
    return context


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

"""Who calls: tokens of clients and the tenants they belong to.

The file has a line for each token: the name of a tenant, spaces, and the token, or `sha256:` and the SHA-256 of the
token as 64 hexadecimal digits. Empty lines and lines that begin with # are skipped. A tenant may have several tokens.
The file is looked at again once a second while calls come, so tokens can be added and taken away while the front end
runs. A file that cannot be used any more is reported once, and the tokens read last stay valid."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scheduler_svc.frontend.errors import Code, Failure, RequestError
from scheduler_svc.rpc import tenants
from scheduler_svc.rpc.cluster_secret import ClusterSecret

_KEY: Final = "authorization"
_SCHEME: Final = "bearer "
_TOKEN: Final = re.compile(r"[\x21-\x7e]{16,512}")
_HASHED: Final = re.compile(r"sha256:([0-9a-f]{64})")
_MAX_FILE_BYTES: Final = 4 << 20
# Seconds between two looks at the file.
_LOOK_S: Final = 1.0

UNAUTHENTICATED: Final = Failure(
    Code.UNAUTHENTICATED,
    "UNAUTHENTICATED",
    "show a token of this deployment: `authorization: Bearer TOKEN` in the metadata of the call, or as an HTTP header",
)

log = logging.getLogger(__name__)


class TokensError(Exception):
    """The file of tokens cannot be used. The text names it, and the line, and never a token."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who made a call. tenant "": callers without a token. is_operator: it has shown the cluster secret."""

    tenant: str = ""
    is_operator: bool = False


ANYONE: Final = Caller()


class Callers:
    """Tells callers by their credentials.

    tokens: the file with the tokens of clients; None: everyone may call, as the tenant without a name. secret: whoever
    shows it is an operator."""

    def __init__(
        self,
        tokens: Path | None,
        secret: ClusterSecret | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises TokensError."""
        self._path = tokens
        self._secret = secret
        self._clock = clock
        # Tokens are found by this and not by themselves, so that the time of a look-up says nothing about them.
        self._key = secrets.token_bytes(32)
        self._tenants: Mapping[bytes, str] = {}
        self._stamp: tuple[int, ...] | None = None
        self._looked_at = 0.0
        self._told = ""
        if tokens is not None:
            self._stamp = _stamp(tokens)
            self._tenants = self._read(tokens)
            self._looked_at = clock()

    @property
    def are_known(self) -> bool:
        """Whether callers need a token."""
        return self._path is not None

    def caller(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Caller:
        """Who carries these metadata, or headers. Raises RequestError UNAUTHENTICATED."""
        given = [_text(value) for key, value in metadata or () if key.lower() == _KEY]
        if self._secret is not None and self._secret.is_in((_KEY, value) for value in given):
            return Caller(is_operator=True)
        if self._path is None:
            return ANYONE
        self._look_again(self._path)
        for value in given:
            if value[: len(_SCHEME)].lower() == _SCHEME:
                token = value[len(_SCHEME) :].strip()
                tenant = self._tenants.get(self._digest(hashlib.sha256(token.encode()).digest()))
                if tenant is not None:
                    return Caller(tenant)
        raise RequestError(UNAUTHENTICATED)

    def _digest(self, hashed: bytes) -> bytes:
        return hmac.digest(self._key, hashed, "sha256")

    def _look_again(self, path: Path) -> None:
        now = self._clock()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        try:
            stamp = _stamp(path)
            if stamp == self._stamp:
                return
            self._tenants = self._read(path)
            self._stamp = stamp
        except TokensError as error:
            if str(error) != self._told:
                self._told = str(error)
                log.error(
                    "the file of tokens cannot be read again: those read last stay valid", extra={"cause": str(error)}
                )
            return
        self._told = ""
        log.info("the file of tokens was read again", extra={"num_tokens": len(self._tenants)})

    def _read(self, path: Path) -> Mapping[bytes, str]:
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise TokensError(f"{path} cannot be read: {error.strerror or error}") from None
        if len(data) > _MAX_FILE_BYTES:
            raise TokensError(f"{path} has more than {_MAX_FILE_BYTES} bytes")
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise TokensError(f"{path} is not a text in UTF-8") from None
        found: dict[bytes, str] = {}
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            digest, tenant = self._digest(_hashed(path, number, words)), words[0]
            if found.setdefault(digest, tenant) != tenant:
                raise TokensError(f"{path}, line {number}: the same token belongs to another tenant already")
        return found


def _hashed(path: Path, number: int, words: list[str]) -> bytes:
    """The SHA-256 of the token of a line. Raises TokensError."""
    if len(words) != 2:
        raise TokensError(f"{path}, line {number}: write the name of a tenant and a token, with spaces between them")
    tenant, token = words
    if not tenants.is_name(tenant):
        raise TokensError(f"{path}, line {number}: the name of a tenant has {tenants.RULE}")
    if hashed := _HASHED.fullmatch(token):
        return bytes.fromhex(hashed[1])
    if token.startswith("sha256:") or not _TOKEN.fullmatch(token):
        raise TokensError(
            f"{path}, line {number}: a token has 16 to 512 printable ASCII characters, or is sha256: and 64 "
            "hexadecimal digits in small letters"
        )
    return hashlib.sha256(token.encode()).digest()


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes with the file. Raises TokensError."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise TokensError(f"{path} cannot be read: {error.strerror or error}") from None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value

"""Who calls: tokens of clients and the tenants they belong to.

The file has a line for each token: the name of a tenant, spaces, and the token, or `sha256:` and the SHA-256 of the
token as 64 hexadecimal digits. Empty lines and lines that begin with # are skipped. A tenant may have several tokens.
The file is looked at again once a second while calls come, so tokens can be added and taken away while the front end
runs. A file that cannot be used any more is reported once, and the tokens read last stay valid."""

from __future__ import annotations

import hashlib
import hmac
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
from scheduler_svc.rpc.reread import Reread

_KEY: Final = "authorization"
_SCHEME: Final = "bearer "
_TOKEN: Final = re.compile(r"[\x21-\x7e]{16,512}")
_HASHED: Final = re.compile(r"sha256:([0-9a-f]{64})")
_MAX_FILE_BYTES: Final = 4 << 20

UNAUTHENTICATED: Final = Failure(
    Code.UNAUTHENTICATED,
    "UNAUTHENTICATED",
    "show a token of this deployment: `authorization: Bearer TOKEN` in the metadata of the call, or as an HTTP header",
)


class TokensError(Exception):
    """The file of tokens cannot be used. The text names it, and the line, and never a token."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who made a call. tenant "": callers without a token. is_operator: it has shown the cluster secret."""

    tenant: str = ""
    is_operator: bool = False


ANYONE: Final = Caller()


class Callers:
    """Knows callers by their credentials.

    tokens: the file with the tokens of clients; None: everyone may call, as the tenant without a name. secret: a caller
    that shows it is an operator."""

    def __init__(
        self,
        tokens: Path | None,
        secret: ClusterSecret | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises TokensError."""
        self._secret = secret
        # Tokens are found by this and not by themselves, so that the time of a look-up says nothing about them.
        self._key = secrets.token_bytes(32)
        # None: everyone may call.
        self._tenants: Reread[Mapping[bytes, str]] | None = None
        if tokens is not None:
            self._tenants = Reread(
                (tokens,), lambda: self._read(tokens), name="tokens of clients", unusable=TokensError, clock=clock
            )

    @property
    def are_known(self) -> bool:
        """Whether callers need a token."""
        return self._tenants is not None

    def caller(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Caller:
        """Who carries these metadata, or headers. Raises RequestError UNAUTHENTICATED."""
        given = [_text(value) for key, value in metadata or () if key.lower() == _KEY]
        if self._secret is not None and self._secret.is_in((_KEY, value) for value in given):
            return Caller(is_operator=True)
        if self._tenants is None:
            return ANYONE
        self._tenants.look_again()
        for value in given:
            if value[: len(_SCHEME)].lower() == _SCHEME:
                token = value[len(_SCHEME) :].strip()
                tenant = self._tenants.value.get(self._digest(hashlib.sha256(token.encode()).digest()))
                if tenant is not None:
                    return Caller(tenant)
        raise RequestError(UNAUTHENTICATED)

    def _digest(self, hashed: bytes) -> bytes:
        return hmac.digest(self._key, hashed, "sha256")

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


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value

"""The cluster secret: what the parts of one deployment show each other (docs/decisions/0008).

A process that holds it may open workers, attach front ends and use the AdminService. It travels as a bearer token in
the metadata of a call, in plain text without TLS, and only to addresses that were configured as peers.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

_KEY: Final = "authorization"
_SCHEME: Final = "Bearer "
_NUM_DRAWN_BYTES: Final = 32
_MAX_FILE_BYTES: Final = 4096
_FORM: Final = re.compile(r"[\x21-\x7e]{16,512}")

Metadata = tuple[tuple[str, str], ...]


class SecretError(Exception):
    """The file cannot be used; the text names it and says what to do."""


class ClusterSecret:
    """One secret. Neither `repr` nor an error shows it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        """Raises ValueError for what is not 16 to 512 printable ASCII characters without spaces."""
        if not _FORM.fullmatch(value):
            raise ValueError("a cluster secret has 16 to 512 printable ASCII characters and no spaces")
        self._value = value

    @property
    def metadata(self) -> Metadata:
        """What a call to a peer carries."""
        return ((_KEY, _SCHEME + self._value),)

    def is_in(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
        """Whether the metadata of a call carry this secret. Takes the same time wherever a wrong one differs."""
        wanted = (_SCHEME + self._value).encode()
        found = False
        for key, value in metadata or ():
            if key == _KEY:
                given = value.encode(errors="replace") if isinstance(value, str) else value
                found |= hmac.compare_digest(given, wanted)
        return found


def carries_any(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Whether the metadata of a call carry some credential, right or wrong."""
    return any(key == _KEY for key, _ in metadata or ())


def metadata_of(secret: ClusterSecret | None) -> Metadata:
    """What a call to a peer carries; nothing without a secret."""
    return () if secret is None else secret.metadata


def read(path: Path) -> ClusterSecret:
    """The secret in a file: one line of 16 to 512 printable ASCII characters without spaces. Raises SecretError."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise SecretError(
            f"the cluster secret {path} cannot be read ({error.strerror or error}): name the file that all parts "
            f"share; `stepfence make-secret {path}` makes one"
        ) from None
    try:
        return ClusterSecret(data.decode("ascii").strip())
    except ValueError:
        raise SecretError(
            f"the cluster secret {path} must hold one line of 16 to 512 printable ASCII characters without spaces; "
            "`stepfence make-secret FILE` makes such a file"
        ) from None


def make(path: Path) -> bool:
    """Write a drawn secret to `path`, readable by its owner only, unless the file is there already; the value says
    whether it was made. Safe against another process that does the same. Raises SecretError."""
    if path.exists():
        return False
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # mkstemp gives mode 0600; the link makes the file appear under its name with its content, or not at all.
        descriptor, temporary = tempfile.mkstemp(prefix=".secret-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(_NUM_DRAWN_BYTES) + "\n")
            os.link(temporary, path)
        finally:
            os.unlink(temporary)
    except OSError as error:
        if path.exists():
            # Another process has made it meanwhile.
            return False
        raise SecretError(f"the cluster secret {path} cannot be written: {error.strerror or error}") from None
    return True


def default_path(environ: Mapping[str, str]) -> Path | None:
    """Where `stepfence up` keeps the secret of this user, and the commands of this user look for it:
    $XDG_STATE_HOME/stepfence/cluster-secret, by default below ~/.local/state. None when there is no home folder."""
    if state := environ.get("XDG_STATE_HOME"):
        return Path(state) / "stepfence" / "cluster-secret"
    home = environ.get("HOME")
    return Path(home) / ".local" / "state" / "stepfence" / "cluster-secret" if home else None

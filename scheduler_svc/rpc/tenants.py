"""Names of tenants, and what the ids of their requests are called inside a deployment."""

from __future__ import annotations

import re
from typing import Final

MAX_NAME_CHARS: Final = 64
RULE: Final = "1 to 64 letters, digits, dots, hyphens and underscores"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SEPARATOR: Final = "/"


def is_name(text: str) -> bool:
    """Whether a tenant may have this name."""
    return _NAME.fullmatch(text) is not None


def qualified(tenant: str, request_id: str) -> str:
    """The id of a request beside those of other tenants: TENANT/ID. Of the tenant without a name it is the id itself,
    with a slash before it when there is one in it. No two requests of different tenants have the same one."""
    if tenant or _SEPARATOR in request_id:
        return f"{tenant}{_SEPARATOR}{request_id}"
    return request_id

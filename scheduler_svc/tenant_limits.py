"""The file with the limits of tenants (docs/security.md)."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from scheduler_svc.config import SettingsError, read_toml
from scheduler_svc.core.config import EVERYONE, TenantLimits
from scheduler_svc.rpc import tenants


def read_tenant_limits(path: Path | None) -> tuple[TenantLimits, ...]:
    """The limits in a TOML file with one table for each tenant; none without a file. Raises SettingsError."""
    if path is None:
        return ()
    where = f"tenant_limits_file: {path}"
    try:
        tables = read_toml(path)
    except SettingsError as error:
        raise SettingsError(f"tenant_limits_file: {error}") from None
    known = {field.name for field in fields(TenantLimits)} - {"tenant"}
    found = []
    for tenant, table in tables.items():
        if tenant != EVERYONE and tenant and not tenants.is_name(tenant):
            raise SettingsError(f'{where}: the name of a tenant has {tenants.RULE}, or is "*" or empty, not {tenant!r}')
        if not isinstance(table, dict) or not table.keys() <= known:
            wrong = sorted(table.keys() - known) if isinstance(table, dict) else [tenant]
            raise SettingsError(f"{where}: {', '.join(wrong)} is unknown; a tenant has {', '.join(sorted(known))}")
        for name, value in table.items():
            if type(value) is not int:
                raise SettingsError(f"{where}: {name} of tenant {tenant!r} must be a whole number, not {value!r}")
        try:
            found.append(TenantLimits(tenant, **table))
        except ValueError as error:
            raise SettingsError(f"{where}: {error}") from None
    return tuple(found)

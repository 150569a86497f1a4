"""Names of converted models in the cache. Apart from the converter, so that looking for one needs no torch."""

from __future__ import annotations

from pathlib import Path

# Raised when the converted form changes, so that older conversions are not used.
CONVERTER_VERSION = 1


def converted_directory(models: Path, name: str, key: str) -> Path:
    """Where the conversion of a file lives; it is complete when it exists."""
    return models / f"{name}-{key}-v{CONVERTER_VERSION}"

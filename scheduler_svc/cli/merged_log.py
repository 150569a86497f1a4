"""The log of `stepfence up`: its own lines and those of its parts, in one stream on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from datetime import UTC, datetime
from typing import Final, Literal

Level = Literal["info", "warning", "error"]

_COLORS: Final = {"scheduler": "36", "frontend": "35", "worker": "32", "up": "1"}


class MergedLog:
    """Every line is marked with the part it comes from: by its first column as text, by the field `part` as JSON."""

    def __init__(self, log_format: Literal["text", "json"]) -> None:
        self.log_format = log_format

    def show(self, part: str, line: str, level: Level = "info") -> None:
        """One line, as a part wrote it; where JSON is wanted, other lines (a traceback, say) become its message, with
        this level."""
        text = _as_json(part, line, level) if self.log_format == "json" else _as_text(part, line)
        try:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            _give_up_the_log()


def _as_json(part: str, line: str, level: Level) -> str:
    fields: object = None
    if line.startswith("{"):
        with contextlib.suppress(ValueError):
            fields = json.loads(line)
    if not isinstance(fields, dict):
        moment = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        fields = {"time": moment, "level": level, "logger": f"stepfence.{part}", "message": line}
    return json.dumps({**fields, "part": part})


def _as_text(part: str, line: str) -> str:
    if sys.stderr.isatty():
        color = _COLORS.get(part.split("-", 1)[0], "0")
        return f"\x1b[{color}m{part:>9}\x1b[0m {line}"
    return f"{part:>9} {line}"


def _give_up_the_log() -> None:
    """Nobody reads the log any more (`2>&1 | head`, a closed terminal): go on without one. What is written from now on,
    by this process or by a child that inherits its stderr, goes nowhere instead of failing."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)

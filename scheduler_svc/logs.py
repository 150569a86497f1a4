"""One form of log for every process of this side: JSON lines for machines, a readable line for a terminal.

Facts travel as `extra`: `log.info("preempted", extra={"victim": "r1", "blocks": 3})`. They become fields of the JSON
object and `key=value` on a terminal.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from datetime import UTC, datetime
from typing import Final, TextIO

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


# Lines that one place in the code may write within a period; a peer may cause many of them. What was left out is
# counted in a line of its own, with the next line after the period.
_MAX_LINES: Final = 6_000
_PERIOD_S: Final = 60.0


def configure(log_format: str = "auto", *, stream: TextIO | None = None) -> None:
    """Send all logs to stderr (or `stream`) as "json", as "text", or "auto": text on a terminal, else JSON.

    Replaces handlers set before; may be called again.
    """
    target = sys.stderr if stream is None else stream
    readable = log_format == "text" or (log_format == "auto" and target.isatty())
    handler = _BoundedHandler(target)
    handler.setFormatter(_ReadableFormatter() if readable else _JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)


def _facts(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def printable(text: str) -> str:
    """The text on one line, with every character escaped that a terminal would not show: a value that a client chose
    can neither begin a line nor move the cursor."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class _BoundedHandler(logging.StreamHandler[TextIO]):
    """Writes records, of each place in the code at most _MAX_LINES within _PERIOD_S."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._ends_at = 0.0
        self._num_lines: Counter[tuple[str, int]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        if record.created >= self._ends_at:
            num_left_out = sum(max(0, num - _MAX_LINES) for num in self._num_lines.values())
            self._num_lines.clear()
            self._ends_at = record.created + _PERIOD_S
            if num_left_out:
                self._note(num_left_out)
        place = (record.pathname, record.lineno)
        self._num_lines[place] += 1
        if self._num_lines[place] <= _MAX_LINES:
            super().emit(record)

    def _note(self, num_left_out: int) -> None:
        note = logging.makeLogRecord(
            {
                "name": __name__,
                "levelno": logging.WARNING,
                "levelname": "WARNING",
                "msg": "lines of the log were left out: one place in the code wrote too many",
                "num_lines": num_left_out,
            }
        )
        super().emit(note)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        # A fact may not pass for one of the four above.
        line.update({f"{name}_" if name in line else name: value for name, value in _facts(record).items()})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _ReadableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        facts = "".join(f"  {name}={printable(str(value))}" for name, value in _facts(record).items())
        lines = [f"{moment} {record.levelname:<7} {printable(record.getMessage())}{facts}"]
        if record.exc_info:
            # Indented, so that no line of an error's text looks like one of the log.
            lines += [f"  {printable(line)}" for line in self.formatException(record.exc_info).splitlines()]
        return "\n".join(lines)

"""Recordings: everything that went into the core and every step that came out, enough to replay a run byte for byte.

A recording is a text file of JSON lines (docs/recording.md): a header with format version and configuration, then the
events in the order the core took them, and in between every call of `schedule` with its answer. The last line says why
the recording ended; without one the process died, or still runs, and the file is good up to its last complete line.

    {"recording":"stepfence","version":2,"stepfence":"0.1.0","config":{...}}
    {"event":"Tick","now":12.5}
    {"event":"RequestArrived","request_id":"a","handle":1,"prompt":"AQAAAA==",...}
    {"schedule":"worker-0","step":{...}}
    {"schedule":"worker-0","step":null}
    {"end":"closed"}

Columns of integers are base64 of little-endian int32. A step holds only the fields that differ from the step of the
same rank before it: decoding rows are mostly the same rows.

How a value is written follows from the type of its field, so an event or a field that is new needs nothing here; a
field of a type that is not known fails when this module is imported."""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import os
import types
import typing
import zlib
from array import array
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO, Final

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import Event, Tick
from scheduler_svc.core.output import SchedulerOutput

log = logging.getLogger(__name__)

FORMAT_VERSION: Final = 2
DEFAULT_MAX_BYTES: Final = 1 << 30

# Lines gathered before they are written although nobody asked for it. Characters.
_WRITE_SIZE: Final = 1 << 16
# Kept free for the line that says why the recording ended. Bytes.
_END_ROOM: Final = 128

_Json = dict[str, Any]
_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class RecordingError(Exception):
    """A file that is no recording, or a damaged one; the text says where and what."""


# --- values -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Form:
    """How values of one type stand in JSON. None: as they are."""

    encode: Callable[[Any], Any] | None
    decode: Callable[[Any], Any]


class _Column:
    """Stands for `array[int]` in annotations, which Python 3.11 cannot evaluate."""

    def __class_getitem__(cls, item: type) -> type[_Column]:
        if item is not int:
            raise TypeError(f"recordings cannot hold an array of {item}")
        return cls


class _Shape:
    """A dataclass as a JSON object, field by field."""

    def __init__(self, cls: type[Any]) -> None:
        self.cls = cls
        hints = typing.get_type_hints(cls, localns={"array": _Column})
        self.forms = {field.name: _form(hints[field.name]) for field in fields(cls)}
        self._required = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
        self._encoders = [(name, form.encode) for name, form in self.forms.items()]

    def encode(self, value: Any) -> _Json:
        return {
            name: getattr(value, name) if encode is None else encode(getattr(value, name))
            for name, encode in self._encoders
        }

    def decode(self, data: _Json) -> Any:
        return self.cls(**self.decode_fields(data, self._required))

    def decode_fields(self, data: _Json, required: set[str]) -> _Json:
        """Values by field. Raises RecordingError for fields that are unknown or missing."""
        if not isinstance(data, dict):
            raise RecordingError(f"{self.cls.__name__} is not an object")
        if not data.keys() <= self.forms.keys():
            raise RecordingError(f"{self.cls.__name__} has no field {min(data.keys() - self.forms.keys())!r}")
        if not required <= data.keys():
            raise RecordingError(f"{self.cls.__name__} lacks its field {min(required - data.keys())!r}")
        return {name: self.forms[name].decode(value) for name, value in data.items()}


def _plain(*allowed: type) -> _Form:
    def decode(value: Any) -> Any:
        if type(value) not in allowed:
            raise RecordingError(f"{value!r} is not {' or '.join(t.__name__ for t in allowed)}")
        return value

    return _Form(None, decode)


def _to_base64(data: bytes) -> str:
    return b2a_base64(data, newline=False).decode("ascii")


def _from_base64(text: Any) -> bytes:
    if not isinstance(text, str):
        raise RecordingError(f"{text!r} is not base64")
    try:
        return a2b_base64(text, strict_mode=True)
    except (Base64Error, ValueError) as error:
        raise RecordingError(f"base64 is damaged: {error}") from None


def _column_to_json(column: array[int]) -> str:
    return _to_base64(column.tobytes())


def _column_from_json(value: Any) -> array[int]:
    data = _from_base64(value)
    if len(data) % 4:
        raise RecordingError(f"a column of int32 has {len(data)} bytes")
    return array("i", data)


def _ints_to_json(ids: list[int]) -> str | list[int]:
    """A column when they fit one; a faulty worker may send anything."""
    try:
        return _column_to_json(array("i", ids))
    except OverflowError:
        return ids


def _ints_from_json(value: Any) -> list[int]:
    return list(value) if isinstance(value, list) else _column_from_json(value).tolist()


def _enum_form(cls: type[Enum]) -> _Form:
    def decode(value: Any) -> Any:
        try:
            return cls(value)
        except ValueError:
            raise RecordingError(f"{value!r} is no {cls.__name__}") from None

    return _Form(lambda member: member.value, decode)


def _optional(form: _Form) -> _Form:
    encode, decode = form.encode, form.decode
    return _Form(
        None if encode is None else lambda value: None if value is None else encode(value),
        lambda value: None if value is None else decode(value),
    )


def _items(form: _Form) -> _Form:
    """A tuple of any length."""
    encode, decode = form.encode, form.decode

    def decode_all(value: Any) -> Any:
        if not isinstance(value, list):
            raise RecordingError(f"{value!r} is not a list")
        return tuple(map(decode, value))

    return _Form(list if encode is None else lambda items: [encode(item) for item in items], decode_all)


def _table(form: _Form) -> _Form:
    """A dictionary by string."""
    encode, decode = form.encode, form.decode

    def decode_all(value: Any) -> Any:
        if not isinstance(value, dict):
            raise RecordingError(f"{value!r} is not an object")
        return {key: decode(item) for key, item in value.items()}

    return _Form(None if encode is None else lambda table: {k: encode(v) for k, v in table.items()}, decode_all)


_SIMPLE_FORMS: Final[dict[Any, _Form]] = {
    bool: _plain(bool),
    int: _plain(int),
    float: _plain(float, int),
    str: _plain(str),
    bytes: _Form(_to_base64, _from_base64),
    _Column: _Form(_column_to_json, _column_from_json),
    list[int]: _Form(_ints_to_json, _ints_from_json),
}


def _form(hint: Any) -> _Form:
    """The form of a field's type. Raises TypeError for one that recordings cannot hold."""
    if hint in _SIMPLE_FORMS:
        return _SIMPLE_FORMS[hint]
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        if issubclass(hint, Enum):
            return _enum_form(hint)
        shape = _Shape(hint)
        return _Form(shape.encode, shape.decode)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union) and len(arguments) == 2 and arguments[1] is type(None):
        return _optional(_form(arguments[0]))
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _items(_form(arguments[0]))
    if origin is dict and arguments[0] is str:
        return _table(_form(arguments[1]))
    raise TypeError(f"recordings cannot hold values of type {hint}")


_CONFIG: Final = _Shape(SchedulerConfig)
_STEP: Final = _Shape(SchedulerOutput)
_EVENTS: Final = {cls: _Shape(cls) for cls in typing.get_args(Event)}
_EVENTS_BY_NAME: Final = {cls.__name__: shape for cls, shape in _EVENTS.items()}


class StepChanges:
    """Steps written as what differs from the step of the same rank before; one object for each direction."""

    def __init__(self) -> None:
        self._before: dict[str, SchedulerOutput] = {}

    def encode(self, output: SchedulerOutput) -> _Json:
        """Only the fields that differ."""
        before = self._before.get(output.rank)
        self._before[output.rank] = output
        if before is None:
            return _STEP.encode(output)
        changes: _Json = {}
        for name, form in _STEP.forms.items():
            value = getattr(output, name)
            if value != getattr(before, name):
                changes[name] = value if form.encode is None else form.encode(value)
        return changes

    def decode(self, rank: str, changes: _Json) -> SchedulerOutput:
        """The whole step. Raises RecordingError."""
        before = self._before.get(rank)
        known = {} if before is None else {name: getattr(before, name) for name in _STEP.forms}
        values = known | _STEP.decode_fields(changes, _STEP.forms.keys() - known.keys())
        output = SchedulerOutput(**values)
        self._before[rank] = output
        return output


def header_line(config: SchedulerConfig) -> str:
    """The first line of a recording."""
    header = {
        "recording": "stepfence",
        "version": FORMAT_VERSION,
        "stepfence": stepfence_version(),
        "config": _CONFIG.encode(config),
    }
    return _to_json(header) + "\n"


def event_line(event: Event) -> str:
    """The line of an event."""
    cls = type(event)
    return _to_json({"event": cls.__name__, **_EVENTS[cls].encode(event)}) + "\n"


def schedule_line(rank: str, output: SchedulerOutput | None, changes: StepChanges) -> str:
    """The line of a call of `schedule` and its answer."""
    return _to_json({"schedule": rank, "step": None if output is None else changes.encode(output)}) + "\n"


def stepfence_version() -> str:
    """The installed version; empty when it is not installed."""
    try:
        return version("stepfence")
    except PackageNotFoundError:
        return ""


# --- writing ------------------------------------------------------------------------------------------------------


class Recorder:
    """Writes a recording of at most `max_bytes`; see `facts.Recorder` for who calls it. A file already there is kept
    as NAME.1, or the next number that is free, and the log says so. Raises OSError when the file cannot be made; later
    failures end the recording, not the service.

    Lines reach the system whenever a rank has nothing more to do and before every Tick; a killed process loses at most
    what happened since."""

    def __init__(self, path: Path, config: SchedulerConfig, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        header = header_line(config)
        if max_bytes < len(header) + _END_ROOM:
            raise ValueError(f"a recording needs at least {len(header) + _END_ROOM} bytes, not {max_bytes}")
        self.path = path
        self._max_bytes = max_bytes
        self._file: BinaryIO | None = _create(path)
        self._changes = StepChanges()
        self._lines: list[str] = []
        self._num_unwritten = 0
        self._size = 0
        self._add(header)
        self._write()

    @property
    def is_recording(self) -> bool:
        """False once closed, full or failed."""
        return self._file is not None

    def event(self, event: Event) -> None:
        """The core is about to handle this event."""
        if self._file is None:
            return
        if type(event) is Tick:
            self._write()
        self._add(event_line(event))

    def scheduled(self, rank: str, output: SchedulerOutput | None) -> None:
        """The core was asked for a rank's next step and gave this one."""
        if self._file is None:
            return
        self._add(schedule_line(rank, output, self._changes))
        if output is None:
            self._write()

    def close(self) -> None:
        """End the recording; more calls do nothing."""
        self._end({"end": "closed"})

    def _add(self, line: str) -> None:
        # Lines are ASCII: characters are bytes.
        if self._size + len(line) + _END_ROOM > self._max_bytes:
            log.warning("recording stopped at its size limit", extra={"path": str(self.path), "bytes": self._size})
            self._end({"end": "size", "num_bytes": self._size})
            return
        self._size += len(line)
        self._num_unwritten += len(line)
        self._lines.append(line)
        if self._num_unwritten > _WRITE_SIZE:
            self._write()

    def _write(self) -> None:
        if self._file is None or not self._lines:
            return
        data = "".join(self._lines).encode("ascii")
        self._lines.clear()
        self._num_unwritten = 0
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            log.error("recording failed and ends here", extra={"path": str(self.path), "error": str(error)})
            self._close()

    def _end(self, marker: _Json) -> None:
        if self._file is not None:
            self._lines.append(_to_json(marker) + "\n")
            self._write()
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            # What a failed write left behind would fail again.
            with suppress(OSError):
                file.close()


def _create(path: Path) -> BinaryIO:
    """A new file for this user only: prompts are in it."""
    if path.is_file():
        kept = next(name for number in itertools.count(1) if not (name := Path(f"{path}.{number}")).exists())
        path.rename(kept)
        log.info("an earlier recording is kept as %s", kept, extra={"path": str(kept)})
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")


# --- reading ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A call of `schedule` for `rank`, and its answer."""

    rank: str
    output: SchedulerOutput | None


@dataclass(frozen=True, slots=True)
class RecordedLine:
    """One line after the header; `number` counts from 1, the header included."""

    number: int
    what: Event | Scheduled


class Recording:
    """A recording opened for reading, once, front to back. `end` is known when `lines` is exhausted."""

    def __init__(self, path: Path) -> None:
        """Raises RecordingError when the file is not there, no recording, or of a format this version does not
        know."""
        self.path = path
        self._raw_lines = _raw_lines(path)
        header = _parse_header(path, next(self._raw_lines, b""))
        self.stepfence = str(header.get("stepfence", ""))
        try:
            self.config: SchedulerConfig = _CONFIG.decode(header.get("config", {}))
        except (RecordingError, ValueError) as error:
            raise RecordingError(f"{path}: the configuration cannot be used: {error}") from None
        self.end = "no end is marked: the process was killed, or still runs"

    def lines(self) -> Iterator[RecordedLine]:
        """What follows the header. Raises RecordingError at a line that is damaged; a last line that is cut off is
        not one of the recording."""
        changes = StepChanges()
        for number, raw in enumerate(self._raw_lines, start=2):
            if not raw.endswith(b"\n"):
                self.end = "its last line is cut off: the process was killed, or still runs"
                return
            try:
                data = json.loads(raw)
                if "end" in data:
                    self.end = _END_TEXTS.get(data["end"], str(data["end"])).format_map(data)
                    return
                what = _parse(data, changes)
            except (RecordingError, ValueError, TypeError, KeyError) as error:
                raise RecordingError(f"{self.path}, line {number}: {error}") from None
            yield RecordedLine(number, what)


_END_TEXTS: Final = {"closed": "it was closed", "size": "it reached its size limit after {num_bytes} bytes"}


def _parse(data: _Json, changes: StepChanges) -> Event | Scheduled:
    if "schedule" in data:
        rank, step = data["schedule"], data["step"]
        return Scheduled(rank, None if step is None else changes.decode(rank, step))
    shape = _EVENTS_BY_NAME.get(data.pop("event"))
    if shape is None:
        raise RecordingError("an event of a kind that is not known")
    event: Event = shape.decode(data)
    return event


def _parse_header(path: Path, raw: bytes) -> _Json:
    try:
        header = json.loads(raw)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("recording") != "stepfence":
        raise RecordingError(f"{path} is not a recording of Stepfence")
    if header.get("version") != FORMAT_VERSION:
        raise RecordingError(
            f"{path} has recording format {header.get('version')}, made by Stepfence {header.get('stepfence')}; "
            f"this version reads format {FORMAT_VERSION}"
        )
    return header


def _raw_lines(path: Path) -> Iterator[bytes]:
    """Lines of a file that may be gzip. A compressed file that is cut off ends like a plain one."""
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if compressed else path.open("rb") as lines:
            yield from lines
    except EOFError:
        return
    except (OSError, zlib.error) as error:
        raise RecordingError(f"{path} cannot be read: {error}") from None

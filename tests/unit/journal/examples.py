"""Values of every field type, so that every event and output can be made with nothing left at its default."""

from __future__ import annotations

import types
import typing
from array import array
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any


class ArrayOf:
    """`array[int]`, which Python 3.11 cannot evaluate."""

    def __class_getitem__(cls, item: type) -> type[ArrayOf]:
        return cls


_VALUES: dict[Any, Any] = {
    bool: True,
    int: -(1 << 40),
    float: 0.1,
    str: 'a "quoted" nämé\n\udce9\x00',
    bytes: bytes(range(256)),
    ArrayOf: array("i", [0, -1, 2**31 - 1, -(2**31)]),
    list[int]: [5, 0, 2**31 - 1],
}


def example(hint: Any) -> Any:
    """A value of the type, with something in it. Raises KeyError for a type nobody thought of."""
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        if issubclass(hint, Enum):
            return list(hint)[-1]
        if is_dataclass(hint):
            return filled(hint)
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        return example(arguments[0])
    if origin is tuple:
        return (example(arguments[0]), example(arguments[0]))
    if origin is dict:
        return {"key": example(arguments[1]), "": example(arguments[1])}
    return _VALUES[hint]


def filled(cls: type[Any]) -> Any:
    """An instance of a dataclass with every field given."""
    hints = typing.get_type_hints(cls, localns={"array": ArrayOf})
    return cls(**{field.name: example(hints[field.name]) for field in fields(cls)})


def optional_fields(cls: type[Any]) -> list[str]:
    """Names of the fields that may be None."""
    hints = typing.get_type_hints(cls, localns={"array": ArrayOf})
    return [field.name for field in fields(cls) if type(None) in typing.get_args(hints[field.name])]

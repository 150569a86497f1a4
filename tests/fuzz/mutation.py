"""Frames that are wrong in every way: valid messages with fields changed, swapped, repeated or left out, columns of the
wrong size, bytes cut off, turned over or put together from two messages, and plain noise."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_INTS: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_FLOATS: Final = (0.0, 1.0, -1.0, 0.5, 1e-30, 3e38, float("inf"), float("-inf"), float("nan"))
_TEXTS: Final = ("", "a", "b", "id-1", "\0", "é\n🙂", "x" * 300, "{{ 7 * 7 }}", "<|eos|>", "user")


class Mutator:
    """Frames in the neighbourhood of a corpus of valid ones."""

    def __init__(self, rng: random.Random, corpus: Sequence[Message]) -> None:
        self._rng = rng
        self._corpus = corpus

    def next(self) -> bytes:
        """Another frame; now and then a valid one."""
        rng = self._rng
        kind = rng.random()
        if kind < 0.04:
            return rng.randbytes(rng.randrange(80))
        data = self.message().SerializeToString()
        if kind < 0.62 or not data:
            return data
        if kind < 0.74:
            return data[: rng.randrange(len(data))]
        if kind < 0.84:
            other = self.message().SerializeToString()
            return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]
        return self._damaged(data)

    def message(self) -> Message:
        """A message that can be encoded: a valid one in which some things are changed."""
        original = self._rng.choice(self._corpus)
        message = type(original)()
        message.CopyFrom(original)
        for _ in range(self._rng.choice((0, 1, 1, 1, 2, 3, 8))):
            self.change(message)
        return message

    def change(self, message: Message) -> None:
        """Change one thing somewhere in it."""
        fields: Any = message.DESCRIPTOR.fields
        if not fields:
            return
        field = self._rng.choice(fields)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[self._rng.choice(_TEXTS)] = self._rng.choice(_TEXTS)
        elif field.is_repeated:
            self._change_repeated(getattr(message, field.name), field)
        elif field.message_type is not None:
            self._change_part(message, field)
        elif self._rng.random() < 0.15:
            message.ClearField(field.name)
        else:
            setattr(message, field.name, self._value(field, getattr(message, field.name)))

    def _change_part(self, message: Message, field: FieldDescriptor) -> None:
        if self._rng.random() < 0.1:
            message.ClearField(field.name)
            return
        part = getattr(message, field.name)
        part.SetInParent()
        self.change(part)

    def _change_repeated(self, values: Any, field: FieldDescriptor) -> None:
        rng = self._rng
        kind = rng.random()
        if kind < 0.2 and len(values):
            del values[rng.randrange(len(values)) :]
        elif field.message_type is None:
            values.extend(self._value(field, 0) for _ in range(rng.choice((1, 1, 2, 200))))
        elif kind < 0.5 and len(values):
            self.change(rng.choice(values))
        elif kind < 0.75 and len(values):
            # Once more what is there already.
            values.add().CopyFrom(rng.choice(values))
        else:
            self.change(values.add())

    def _value(self, field: FieldDescriptor, old: Any) -> Any:
        rng = self._rng
        kind = field.cpp_type
        if kind in _INTS:
            least, most = _INTS[kind]
            near = int(old) + rng.choice((-1, 1, 2)) if isinstance(old, int) else 0
            value = rng.choice((0, 1, 2, 3, 7, 255, 260, 4096, near, most, least, most // 2))
            return min(max(value, least), most)
        return self._other_value(field, old)

    def _other_value(self, field: FieldDescriptor, old: Any) -> Any:
        rng = self._rng
        makers: dict[int, Callable[[], Any]] = {
            FieldDescriptor.CPPTYPE_DOUBLE: lambda: rng.choice(_FLOATS),
            FieldDescriptor.CPPTYPE_FLOAT: lambda: rng.choice(_FLOATS),
            FieldDescriptor.CPPTYPE_BOOL: lambda: rng.random() < 0.5,
            FieldDescriptor.CPPTYPE_ENUM: lambda: rng.choice((0, 1, 2, 3, 99, -1)),
        }
        if field.cpp_type in makers:
            return makers[field.cpp_type]()
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._column(old if isinstance(old, bytes) else b"")
        return rng.choice(_TEXTS)

    def _column(self, old: bytes) -> bytes:
        """Bytes that are a column, or nearly so."""
        rng = self._rng
        kind = rng.random()
        if kind < 0.25:
            return old + rng.randbytes(rng.randrange(1, 4))
        if kind < 0.4:
            return old[: rng.randrange(len(old) + 1)]
        if kind < 0.55:
            return old + old
        values = [rng.choice((0, 1, 2, 3, 5, 8, 259, 260, -1, 2**31 - 1, -(2**31))) for _ in range(rng.randrange(6))]
        return b"".join(value.to_bytes(4, "little", signed=True) for value in values)

    def _damaged(self, data: bytes) -> bytes:
        rng = self._rng
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 6))):
            at = rng.randrange(len(damaged) + 1)
            kind = rng.random()
            if kind < 0.5 and at < len(damaged):
                damaged[at] = rng.randrange(256)
            elif kind < 0.75:
                damaged[at:at] = rng.randbytes(rng.randrange(1, 6))
            else:
                del damaged[at : at + rng.randrange(1, 6)]
        return bytes(damaged)

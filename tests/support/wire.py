"""Messages as bytes, written by hand: what no protobuf library would send, or only slowly."""

from __future__ import annotations


def varint(value: int) -> bytes:
    """An unsigned number as protobuf writes it."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def number_field(field: int, value: int) -> bytes:
    """A field with a number."""
    return varint(field << 3) + varint(value)


def bytes_field(field: int, payload: bytes) -> bytes:
    """A text, a packed list or a message in a field."""
    return varint(field << 3 | 2) + varint(len(payload)) + payload


def repeated(piece: bytes, num_bytes: int) -> bytes:
    """As many whole pieces as fit into num_bytes."""
    return piece * (num_bytes // len(piece))

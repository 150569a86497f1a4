"""What every message between the parts has in common: the revision of the protos, and columns of int32.

Columns are `array('i')` here and little-endian int32 bytes on the wire.
"""

from __future__ import annotations

import sys
from array import array
from typing import Final

# Revision of the protos that is spoken here, and the first that was released. Peers whose revisions differ by one work
# together.
PROTOCOL_REVISION: Final = 2
_FIRST_PROTOCOL_REVISION: Final = 2
_BIG_ENDIAN: Final = sys.byteorder == "big"


def works_with(revision: int) -> bool:
    """Whether a peer that speaks this revision of the protos can be worked with."""
    return max(_FIRST_PROTOCOL_REVISION, PROTOCOL_REVISION - 1) <= revision <= PROTOCOL_REVISION + 1


def pack(column: array[int]) -> bytes:
    """A column of int32 as it travels."""
    if _BIG_ENDIAN:
        column = array("i", column)
        column.byteswap()
    return column.tobytes()


def unpack(data: bytes) -> array[int]:
    """The opposite of `pack`. Raises ValueError when the bytes are no whole number of elements."""
    column = array("i")
    column.frombytes(data)
    if _BIG_ENDIAN:
        column.byteswap()
    return column

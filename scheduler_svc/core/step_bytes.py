"""How large the message of a step can become: upper bounds, which the encoding must keep (`workers/codec.py`)."""

from __future__ import annotations

MAX_ID_BYTES = 256
MAX_STOP_TOKEN_IDS = 128
# Larger than anything a row adds to a message besides its columns, id and sampling parameters: tags, lengths, numbers.
_ROW_OVERHEAD = 96


def columns_bytes(num_rows: int, max_num_batched_tokens: int) -> int:
    """A step without new requests and deferred frees: its columns (of each token at most a new block, its row, and a
    draft), and ids of as many dropped requests as it has rows."""
    return num_rows * (MAX_ID_BYTES + 8) + 12 * max_num_batched_tokens + 16 * num_rows + 1024


def row_bytes(num_tokens: int, num_blocks: int, request_id: str, sampling: bytes) -> int:
    """What a request's entry into the batch takes: all its tokens, its table, its parameters."""
    return 4 * (num_tokens + num_blocks) + len(request_id.encode()) + len(sampling) + _ROW_OVERHEAD


def largest_row_bytes(max_model_len: int, block_size: int) -> int:
    """The largest entry that any request may have."""
    columns = 4 * max_model_len + 4 * -(-max_model_len // block_size)
    # Every EOS and stop id takes up to five bytes; the EOS list has no limit of its own in the contract, so double.
    return columns + MAX_ID_BYTES + 2 * 5 * MAX_STOP_TOKEN_IDS + _ROW_OVERHEAD

"""Limits of the worker's side of the contract, declared in GetCapabilities where it has a field for them (rule 10)."""

from __future__ import annotations

from typing import Final

# Revision of the rules in worker_service.proto that is spoken here, and the first that was released.
PROTOCOL_REVISION: Final = 2
FIRST_PROTOCOL_REVISION: Final = 2
# Largest message received.
MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
# Largest values accepted in open.
MAX_NUM_ROWS: Final = 16_384
MAX_NUM_BATCHED_TOKENS: Final = 262_144
MAX_INFLIGHT_STEPS: Final = 64
# Steps without tokens may be sent beside the window of steps with tokens; so many of them.
MAX_EMPTY_STEPS_UNPROCESSED: Final = 64
# Requests that one step preempts or finishes: each row may be given up twice, by both lists.
MAX_DROPPED_IDS: Final = 2 * MAX_NUM_ROWS
# End-of-sequence and stop ids of one request. The scheduler sends 256 at most.
MAX_MASKED_IDS: Final = 4096
MAX_REQUEST_ID_BYTES: Final = 1024
# As long as a name in DNS can be.
MAX_HOST_CHARS: Final = 253
MAX_TOKENIZER_CHUNK_BYTES: Final = 1024 * 1024
# Staged steps and other commands between the event loop and the executor thread.
MAX_STAGED_COMMANDS: Final = 2 * (MAX_INFLIGHT_STEPS + MAX_EMPTY_STEPS_UNPROCESSED)

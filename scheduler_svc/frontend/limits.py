"""Every bound of the front end in one place, with its unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Largest message of a client while max_prompt_bytes does not need more ...
_USUAL_MESSAGE_BYTES: Final = 4 << 20
# ... and what a message may hold beside the text of its prompt: 4,096 roles and lengths of contents, stop strings, ids.
_BESIDE_PROMPT_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client, or a slow part of the system, can make the front end hold. Sizes in bytes of UTF-8 where not said
    otherwise."""

    # Text, or all roles and contents of a chat together.
    max_prompt_bytes: int = 1 << 20
    # What fits into one message to the scheduler, of 16 MiB, at four bytes a token.
    max_prompt_tokens: int = 4_000_000
    max_chat_messages: int = 4096
    # Prompts of one call of the OpenAI port, each of which becomes a request of its own.
    max_prompts_at_once: int = 128
    # A body of the OpenAI port up to this size is parsed on the spot; it takes a millisecond.
    max_inline_body_bytes: int = 16 << 10
    max_request_id_bytes: int = 256
    max_salt_bytes: int = 256
    max_stop_strings: int = 16
    max_stop_string_bytes: int = 1024
    max_stop_ids: int = 128
    max_temperature: float = 100.0
    # Deltas a client has not taken yet: this many coalesce into one ...
    max_undelivered_deltas: int = 256
    # ... and a client with more text and ids (4 bytes each) than this waiting is given up.
    max_undelivered_bytes: int = 1 << 20
    # Frames waiting to be sent to the scheduler, and the part of it that goes into one frame.
    max_outbox_bytes: int = 64 << 20
    max_frame_bytes: int = 1 << 20
    # New requests that wait for a scheduler to come back.
    max_held_requests: int = 1024
    # Of each kind (submits, cancels, ends of text) in one frame.
    max_frame_items: int = 512
    # A request ends so much before its client's deadline (but at most a tenth of the time left). gRPC rounds
    # deadlines up by as much as one in a hundred on the way.
    deadline_margin_s: float = 0.05
    deadline_margin_part: float = 0.01
    # Texts up to this length are tokenized on the spot, longer ones in a thread ...
    max_inline_text_bytes: int = 2048
    # ... one for those up to this length, which takes a tenth of a second, and one for longer ones ...
    max_short_prompt_bytes: int = 64 << 10
    # ... and in front of each thread, so many wait at most, and so much of them together. The same for chats.
    max_waiting_prompts: int = 1024
    max_waiting_prompt_bytes: int = 8 << 20
    # Output tokens that become text before others get their turn. With the most and longest stop strings, one of 128
    # characters takes half a millisecond.
    max_tokens_at_once: int = 64
    # Token ids copied from a message before others get their turn.
    max_ids_at_once: int = 32_768

    @property
    def max_message_bytes(self) -> int:
        """Largest message that is received from a client, after decompression."""
        return max(_USUAL_MESSAGE_BYTES, self.max_prompt_bytes + _BESIDE_PROMPT_BYTES)

    @property
    def max_http_body_bytes(self) -> int:
        """Largest body that is read at the OpenAI port. JSON may write a character of two bytes as six."""
        return max(_USUAL_MESSAGE_BYTES, 3 * self.max_prompt_bytes + _BESIDE_PROMPT_BYTES)

"""Between text and token ids.

A Tokenizer belongs to one model and is shared by all requests; encoding is thread-safe and may take long, so callers
run it beside the event loop for long text. A TokenDecoder belongs to one output.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import tokenizers
from tokenizers.processors import TemplateProcessing

from scheduler_svc.frontend.calls import ChatMessage
from scheduler_svc.frontend.chat import chat_renderer, check_roles
from scheduler_svc.frontend.containment import contained
from scheduler_svc.frontend.errors import TokenizerError
from scheduler_svc.frontend.output_text import TokenDecoder
from scheduler_svc.frontend.template_process import Piece
from scheduler_svc.frontend.token_bounds import max_token_bytes

TOKENIZER_FILE: Final = "tokenizer.json"
CONFIG_FILE: Final = "tokenizer_config.json"
TEMPLATE_FILE: Final = "chat_template.jinja"
BYTE_TOKENIZER_FILE: Final = "byte_tokenizer.json"

_REPLACEMENT: Final = "\ufffd"
# Tokens with text at the end of the prompt that a decoder reads along, so that a character and white space at the joint
# are kept. Eight single bytes hold at least one whole character, wherever they begin.
_NUM_CONTEXT_TOKENS: Final = 8
# How far back it looks for them among special tokens.
_NUM_SEARCHED_TOKENS: Final = 1024
# A UTF-8 character has at most four bytes: so many tokens ending in U+FFFD are no character on its way.
_MAX_INCOMPLETE_TOKENS: Final = 4
_BYTE_TOKEN: Final = re.compile("<0x([0-9A-Fa-f]{2})>")


class Tokenizer(Protocol):
    """Text to ids as the model prescribes, and back."""

    def encode_text(self, text: str) -> list[int]:
        """Ids of a plain prompt, beginning-of-sequence included where the model wants it. Special tokens written in the
        text are text."""
        ...

    def render_chat(self, messages: Sequence[ChatMessage]) -> list[Piece]:
        """The prompt of a conversation up to where the assistant answers, in pieces. Waits for another process. Raises
        ChatError."""
        ...

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        """Ids of a rendered conversation. Special tokens written in a message are text."""
        ...

    def fewest_tokens(self, num_bytes: int, *, is_chat: bool) -> int:
        """No text, or rendered chat, of so many bytes of UTF-8 has fewer tokens. 0 when that is not known."""
        ...

    def decoder(self, prompt_token_ids: Sequence[int]) -> TokenDecoder:
        """For the output that follows this prompt."""
        ...


def load_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    """A tokenizer from the model's files by name, tried out. Takes up to seconds. Raises TokenizerError, whatever is
    wrong with the files; but a chat template that cannot be used is logged, and chats are refused."""
    tokenizer = contained(lambda: _load(files), kept=(TokenizerError,))
    try:
        contained(lambda: _try_out(tokenizer))
    except TokenizerError as error:
        raise TokenizerError(f"the letter a cannot be encoded and decoded: {error}") from error
    return tokenizer


def _try_out(tokenizer: Tokenizer) -> None:
    # Some files are taken and then fail at every text.
    token_ids = tokenizer.encode_text("a")
    decoder = tokenizer.decoder(token_ids)
    for token_id in token_ids:
        decoder.push(token_id)


def _load(files: Mapping[str, bytes]) -> Tokenizer:
    try:
        if BYTE_TOKENIZER_FILE in files:
            return ByteTokenizer(_object(files[BYTE_TOKENIZER_FILE], BYTE_TOKENIZER_FILE))
        if TOKENIZER_FILE in files:
            config = _object(files.get(CONFIG_FILE, b"{}"), CONFIG_FILE)
            return HuggingFaceTokenizer(files[TOKENIZER_FILE], config, files.get(TEMPLATE_FILE))
    except UnicodeDecodeError as error:
        raise TokenizerError(f"not UTF-8: {error}") from error
    raise TokenizerError(f"no {TOKENIZER_FILE} and no {BYTE_TOKENIZER_FILE} among: {', '.join(files) or 'no files'}")


def _object(data: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{name}: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{name}: not a JSON object")
    return value


class _Utf8:
    """Bytes to characters, whatever the split. Bytes that are no UTF-8 become U+FFFD exactly as if all bytes were
    decoded at once."""

    __slots__ = ("_prompts_rest", "_utf8")

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._prompts_rest = False

    @property
    def pending(self) -> bool:
        """Whether the bytes so far end within a character."""
        return bool(self._utf8.getstate()[0])

    def end_prompt(self) -> None:
        """What was pushed so far is the prompt. When it ends within a character, the output may complete that; when it
        does not, the U+FFFD for it belongs to the prompt's text."""
        self._prompts_rest = self.pending

    def push(self, data: bytes, *, final: bool = False) -> str:
        """The characters that are complete with these bytes. final: no byte follows directly."""
        text = self._utf8.decode(data, final)
        if text and self._prompts_rest:
            self._prompts_rest = False
            return text.removeprefix(_REPLACEMENT)
        return text


class ByteDecoder:
    """For vocabularies whose tokens are bytes: exact, whatever the split."""

    __slots__ = ("_bytes_of", "_utf8")

    def __init__(self, bytes_of: Callable[[int], bytes], context: Sequence[int] = ()) -> None:
        """bytes_of: the bytes of a token, none for special and unknown ones. context: ids before the output."""
        self._bytes_of = bytes_of
        self._utf8 = _Utf8()
        for token_id in context:
            self.push(token_id)
        self._utf8.end_prompt()

    def push(self, token_id: int) -> str:
        return self._utf8.push(self._bytes_of(token_id))

    @property
    def pending(self) -> bool:
        return self._utf8.pending


class _Window:
    """The last units of a text (tokens that end with a whole character), and what one more adds to it: decodes a few
    tokens twice, without and with the new ones."""

    __slots__ = ("_decode", "_units")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._units: list[list[int]] = []

    def text_after(self, unit: list[int]) -> str:
        """What the unit would add."""
        known = [token_id for each in self._units for token_id in each]
        return self._decode(known + unit)[len(self._decode(known)) :]

    def append(self, unit: list[int], text: str) -> None:
        """Add a unit that has this text here. One without text (white space that is stripped at the start) is context
        for the next, together with those before it."""
        self._units = [*([] if text else self._units[1 - _NUM_CONTEXT_TOKENS :]), unit]


class ByteFallbackDecoder:
    """For vocabularies whose tokens have text, with a token for every byte for what these do not cover. Characters made
    of bytes are exact; what other tokens add depends on what is before them, and is found with a window."""

    __slots__ = ("_byte_ids", "_byte_of", "_skipped", "_utf8", "_window")

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        byte_ids: Sequence[int],
        byte_of: Mapping[int, int],
        skipped: frozenset[int],
        context: Sequence[int],
    ) -> None:
        """byte_ids: the id of every byte's token. byte_of: the byte of every such id. skipped: ids without text
        (special tokens). context: ids before the output."""
        self._byte_ids = byte_ids
        self._byte_of = byte_of
        self._skipped = skipped
        self._utf8 = _Utf8()
        self._window = _Window(decode)
        for token_id in context:
            self.push(token_id)
        self._utf8.end_prompt()

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        byte = self._byte_of.get(token_id)
        if byte is not None:
            return self._add_characters(self._utf8.push(bytes((byte,))))
        return self._add_characters(self._utf8.push(b"", final=True)) + self._add([token_id])

    @property
    def pending(self) -> bool:
        return self._utf8.pending

    def _add_characters(self, text: str) -> str:
        """Also U+FFFD has tokens, so the window always holds what stands before the next token."""
        return self._add([self._byte_ids[byte] for byte in text.encode()]) if text else ""

    def _add(self, unit: list[int]) -> str:
        text = self._window.text_after(unit)
        self._window.append(unit, text)
        return text


class WindowDecoder:
    """For any other vocabulary. A text that ends in U+FFFD is taken for one that ends within a character."""

    __slots__ = ("_skipped", "_unit", "_window")

    def __init__(self, decode: Callable[[list[int]], str], skipped: frozenset[int], context: Sequence[int]) -> None:
        """skipped: ids without text (special tokens). context: ids before the output."""
        self._skipped = skipped
        self._window = _Window(decode)
        # Tokens whose text is not complete yet.
        self._unit: list[int] = []
        for token_id in context:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._unit.append(token_id)
        text = self._window.text_after(self._unit)
        if text.endswith(_REPLACEMENT) and len(self._unit) < _MAX_INCOMPLETE_TOKENS:
            return ""
        self._window.append(self._unit, text)
        self._unit = []
        return text

    @property
    def pending(self) -> bool:
        return bool(self._unit)


class HuggingFaceTokenizer:
    """`tokenizer.json`, with what `tokenizer_config.json` says about bos, eos and the chat template; equal to
    transformers' fast tokenizers, except that special tokens in a client's text are text."""

    def __init__(self, tokenizer_json: bytes, config: Mapping[str, Any], template: bytes | None) -> None:
        """template: chat_template.jinja, which comes before the one of the configuration. One that cannot be used is
        logged, and chats are refused. Raises TokenizerError."""
        self._plain = _parse(tokenizer_json)
        self._plain.encode_special_tokens = True
        self._with_special = _parse(tokenizer_json)
        named = _named_tokens(config)
        if "add_bos_token" in config or "add_eos_token" in config:
            self._plain.post_processor = _bos_eos_processor(self._plain, config, named)
        added = self._plain.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        special = [token.content for token in added.values() if token.special and token.content]
        if template is not None:
            self._chat = chat_renderer(TEMPLATE_FILE, template, named, special)
        else:
            self._chat = chat_renderer(f"in {CONFIG_FILE}", config.get("chat_template"), named, special)
        description = json.loads(tokenizer_json)
        self._max_token_bytes = {
            is_chat: max_token_bytes(description, _ALPHABET, special=is_chat) for is_chat in (False, True)
        }
        self._added = {token_id: token.content for token_id, token in added.items() if not token.special}
        decoder_types = _decoder_types(description.get("decoder") or {})
        # The bytes of the tokens so far asked for.
        self._bytes: dict[int, bytes] | None = {} if decoder_types == ["ByteLevel"] else None
        self._byte_ids = self._byte_tokens() if "ByteFallback" in decoder_types else []
        self._byte_of = {token_id: byte for byte, token_id in enumerate(self._byte_ids)}

    def encode_text(self, text: str) -> list[int]:
        return _encode(self._plain, text, add_special_tokens=True)

    def render_chat(self, messages: Sequence[ChatMessage]) -> list[Piece]:
        check_roles(messages)
        return self._chat.render_pieces(messages)

    def fewest_tokens(self, num_bytes: int, *, is_chat: bool) -> int:
        most = self._max_token_bytes[is_chat]
        return 0 if most is None else -(-num_bytes // most)

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        token_ids: list[int] = []
        for piece in pieces:
            tokenizer = self._plain if piece.plain else self._with_special
            token_ids += _encode(tokenizer, piece.text, add_special_tokens=False)
        return token_ids

    def decoder(self, prompt_token_ids: Sequence[int]) -> TokenDecoder:
        context = _end_of_prompt(prompt_token_ids, self._special_ids)
        if self._bytes is not None:
            return ByteDecoder(self._bytes_of, context)
        if self._byte_ids:
            return ByteFallbackDecoder(self._decode, self._byte_ids, self._byte_of, self._special_ids, context)
        return WindowDecoder(self._decode, self._special_ids, context)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._plain.decode(token_ids, skip_special_tokens=True))

    def _bytes_of(self, token_id: int) -> bytes:
        assert self._bytes is not None
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._looked_up_bytes(token_id)
        return known

    def _looked_up_bytes(self, token_id: int) -> bytes:
        if token_id in self._special_ids:
            return b""
        added = self._added.get(token_id)
        if added is not None:
            # What was matched was the text itself, whatever its letters mean in the alphabet of bytes.
            return added.encode()
        token = self._plain.id_to_token(token_id)
        return b"" if token is None else _byte_level_bytes(token)

    def _byte_tokens(self) -> list[int]:
        """The ids of the 256 byte tokens, in order; none when one is missing."""
        found: dict[int, int] = {}
        for token, token_id in self._plain.get_vocab(with_added_tokens=True).items():
            match = _BYTE_TOKEN.fullmatch(token)
            if match is not None and token_id not in self._special_ids:
                found.setdefault(int(match[1], 16), token_id)
        return [found[byte] for byte in range(256)] if len(found) == 256 else []


class ByteTokenizer:
    """256 bytes, then special ids: the vocabulary of the scripted worker. The description is JSON: `chat_template`, and
    optionally `special_tokens`, an object of texts and ids that its template may contain."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        """Raises TokenizerError."""
        special = description.get("special_tokens") or {}
        if not isinstance(special, dict) or not all(isinstance(value, int) for value in special.values()):
            raise TokenizerError(f"{BYTE_TOKENIZER_FILE}: special_tokens must be an object of texts and ids")
        self._special: dict[str, int] = {text: token_id for text, token_id in special.items() if text}
        # Alternatives are tried in order: the longest wins. Without special tokens nothing matches.
        longest_first = sorted(self._special, key=len, reverse=True)
        self._special_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        named, source = _named_tokens(description), description.get("chat_template")
        self._chat = chat_renderer(f"in {BYTE_TOKENIZER_FILE}", source, named, tuple(self._special))

    def encode_text(self, text: str) -> list[int]:
        return list(text.encode())

    def render_chat(self, messages: Sequence[ChatMessage]) -> list[Piece]:
        check_roles(messages)
        return self._chat.render_pieces(messages)

    def fewest_tokens(self, num_bytes: int, *, is_chat: bool) -> int:
        return -(-num_bytes // (max(map(len, map(str.encode, self._special)), default=1) if is_chat else 1))

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        token_ids: list[int] = []
        for piece in pieces:
            token_ids += list(piece.text.encode()) if piece.plain else self._encode_with_special(piece.text)
        return token_ids

    def decoder(self, prompt_token_ids: Sequence[int]) -> TokenDecoder:
        return ByteDecoder(_single_byte, _end_of_prompt(prompt_token_ids, frozenset(self._special.values())))

    def _encode_with_special(self, text: str) -> list[int]:
        token_ids: list[int] = []
        for index, part in enumerate(self._special_pattern.split(text)):
            # Texts and special tokens in turn.
            token_ids += [self._special[part]] if index % 2 else part.encode()
        return token_ids


def _single_byte(token_id: int) -> bytes:
    return bytes((token_id,)) if 0 <= token_id < 256 else b""


def _end_of_prompt(token_ids: Sequence[int], special_ids: frozenset[int]) -> list[int]:
    """The last ids that have text, as many as a decoder needs."""
    found: list[int] = []
    for token_id in reversed(token_ids[-_NUM_SEARCHED_TOKENS:]):
        if token_id not in special_ids:
            found.append(token_id)
            if len(found) == _NUM_CONTEXT_TOKENS:
                break
    return found[::-1]


def _parse(tokenizer_json: bytes) -> tokenizers.Tokenizer:
    try:
        tokenizer = contained(lambda: tokenizers.Tokenizer.from_buffer(tokenizer_json))
    except TokenizerError as error:
        raise TokenizerError(f"{TOKENIZER_FILE}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _encode(tokenizer: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    # The batch call lets other threads run meanwhile; the plain one does not.
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and the like, which a configuration gives as text or as an object with the text as content."""
    named = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                named[name] = text
    return named


def _bos_eos_processor(
    tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]
) -> TemplateProcessing:
    """A configuration that speaks of bos or eos overrules tokenizer.json, as in transformers."""
    bos = named.get("bos_token") if config.get("add_bos_token") else None
    eos = named.get("eos_token") if config.get("add_eos_token") else None
    special = []
    # The template has names of its own for them: a token may be anything, such as "a:b" or "$A", which mean something
    # there.
    for name, text in (("bos", bos), ("eos", eos)):
        if text is not None:
            token_id = tokenizer.token_to_id(text)
            if token_id is None:
                raise TokenizerError(f"{CONFIG_FILE}: {text!r} is not in the vocabulary")
            special.append({"id": name, "ids": [token_id], "tokens": [text]})
    single = [*(["bos"] if bos is not None else []), "$A", *(["eos"] if eos is not None else [])]
    return TemplateProcessing(single=single, pair=[*single, "$B"], special_tokens=special)


def _decoder_types(description: Mapping[str, Any]) -> list[str]:
    """The types of the decoders, in the order in which they act."""

    def flattened(decoder: Any) -> Iterator[str]:
        if decoder.get("type") == "Sequence":
            for each in decoder.get("decoders", ()):
                yield from flattened(each)
        else:
            yield str(decoder.get("type"))

    return list(flattened(description))


def _printable_bytes() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    alphabet = {}
    shifted = 0x100
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            alphabet[chr(byte)] = byte
        else:
            alphabet[chr(shifted)] = byte
            shifted += 1
    return alphabet


_ALPHABET: Final = _printable_bytes()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:
        # Not written in that alphabet.
        return token.encode()

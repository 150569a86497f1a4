"""Chat templates: from messages to the prompt's text, as the model's authors wrote it.

Templates come with the model and are treated as hostile: sandboxed, nothing of ours is mutable from inside. What they
may use (blocks trimmed, loop controls, `raise_exception`, `strftime_now`, `tojson`, the `generation` block) is what
templates written for transformers expect.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from scheduler_svc.frontend.calls import ChatMessage
from scheduler_svc.frontend.containment import contained
from scheduler_svc.frontend.errors import ChatError, TokenizerError

ROLES: Final = ("system", "user", "assistant")
# Private-use characters, from which the marks for control strings in contents are drawn.
_PRIVATE_USE: Final = range(0xE000, 0xF8FF)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a rendered prompt. Plain: written by a client, so control strings in it are text."""

    text: str
    plain: bool


class ChatTemplate:
    """One compiled template. variables: what it may refer to besides the messages, e.g. bos_token."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Raises TokenizerError when the template is not valid."""
        try:
            self._template = contained(lambda: _environment().from_string(source))
        except TokenizerError as error:
            raise TokenizerError(f"chat template: {error}") from error
        self._variables = dict(variables)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The whole prompt, ending where the assistant's answer begins. Raises ChatError."""
        try:
            return self._template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._variables,
            )
        except _Refused as error:
            raise ChatError(str(error)) from error
        except Exception as error:
            # Whatever a template does wrong is wrong for this conversation only.
            log.warning("chat template failed", exc_info=error)
            raise ChatError("the model's chat template cannot render this conversation") from error

    def render_pieces(self, messages: Sequence[ChatMessage], control: Sequence[str]) -> list[Piece]:
        """The prompt cut where that is needed to keep control strings (special tokens) written in contents from acting
        as such. One piece, not plain, when none is. Raises ChatError."""
        marks = _Marks(messages, control)
        if not marks.any:
            return [Piece(self.render(messages), plain=False)]
        marked = self.render(marks.messages)
        whole = marks.restore(marked)
        if len(marks.find_control(whole)) == len(marks.find_control(marked)):
            return [Piece(whole, plain=False)]
        return _cut(marked, marks)


def check_roles(messages: Sequence[ChatMessage]) -> None:
    """Raises ChatError for an empty conversation or an unknown role."""
    if not messages:
        raise ChatError("a chat needs at least one message")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise ChatError(f"message {index} has the role {message.role[:40]!r}; known roles: {', '.join(ROLES)}")


def _cut(marked: str, marks: _Marks) -> list[Piece]:
    """In the marked rendering every control string is the template's own; all the rest is text."""
    pieces = []
    position = 0
    for start, end in marks.find_control(marked):
        pieces.append(Piece(marks.restore(marked[position:start]), plain=True))
        pieces.append(Piece(marked[start:end], plain=False))
        position = end
    pieces.append(Piece(marks.restore(marked[position:]), plain=True))
    return [piece for piece in pieces if piece.text]


class _Marks:
    """The contents with stand-ins for everything in them that is a control string, or could become one together with
    what the template puts beside it. A stand-in is two private-use characters around a number."""

    def __init__(self, messages: Sequence[ChatMessage], control: Sequence[str]) -> None:
        self._originals: list[str] = []
        self._beginnings = {text[:size] for text in control for size in range(1, len(text))}
        self._endings = {text[size:] for text in control for size in range(1, len(text))}
        self._longest = max(map(len, control), default=0)
        # Alternatives are tried in order: the longest wins. Without control strings nothing matches.
        self._control = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)")
        used: set[str] = set().union(*(message.content for message in messages))
        free = [char for char in map(chr, _PRIVATE_USE) if char not in used]
        if len(free) < 2:
            raise ChatError("the messages use every private-use character")
        self._opening, self._closing = free[:2]
        self._stand_ins = re.compile(f"{self._opening}([0-9]+){self._closing}")
        self.messages = [ChatMessage(message.role, self._marked(message.content)) for message in messages]

    @property
    def any(self) -> bool:
        return bool(self._originals)

    def restore(self, text: str) -> str:
        return self._stand_ins.sub(lambda found: self._originals[int(found.group(1))], text)

    def find_control(self, text: str) -> list[tuple[int, int]]:
        return [found.span() for found in self._control.finditer(text)]

    def _marked(self, content: str) -> str:
        # Templates may strip white space, so the edges that count are those of the words.
        body = content.strip()
        first = content.index(body)
        head = self._longest_edge(body, self._endings, at_end=False)
        tail = self._longest_edge(body[head:], self._beginnings, at_end=True)
        middle = body[head : len(body) - tail]
        return "".join(
            (
                content[:first],
                self._stand_in(body[:head]),
                self._control.sub(lambda found: self._stand_in(found.group()), middle),
                self._stand_in(body[len(body) - tail :]),
                content[first + len(body) :],
            )
        )

    def _longest_edge(self, text: str, edges: set[str], *, at_end: bool) -> int:
        for size in range(min(self._longest, len(text)), 0, -1):
            if (text[-size:] if at_end else text[:size]) in edges:
                return size
        return 0

    def _stand_in(self, text: str) -> str:
        if not text:
            return ""
        self._originals.append(text)
        return f"{self._opening}{len(self._originals) - 1}{self._closing}"


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message)[:300])


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models have not seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it is just its
    content."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment

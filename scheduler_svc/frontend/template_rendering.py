"""Chat templates: from messages to the prompt's text, as the model's authors wrote it. Runs in a process of its own
(template_child), since a template may loop for ever or make any amount of text.

Templates come with the model and are treated as hostile: sandboxed, nothing of ours is mutable from inside. What they
may use (blocks trimmed, loop controls, `raise_exception`, `strftime_now`, `tojson`, the `generation` block) is what
templates written for transformers expect.

A piece of a rendered prompt is a text and whether it is plain: written by a client, so control strings (special tokens)
in it are text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Private-use characters, from which the marks for control strings in contents are drawn.
_PRIVATE_USE: Final = range(0xE000, 0xF8FF)


class Refused(jinja2.TemplateError):
    """The template, or what is done around it, refuses the conversation. The text may be shown to the client."""


class TooMuchOutput(Exception):
    """The rendered text is longer than allowed."""


class CompiledTemplate:
    """variables: what the template may refer to besides the messages, e.g. bos_token. control: texts that act in a
    prompt and must not when a client wrote them."""

    def __init__(self, source: str, variables: Mapping[str, str], control: Sequence[str]) -> None:
        """Raises whatever jinja2 and Python raise for a template that is not valid."""
        self._template = _environment().from_string(source)
        self._variables = dict(variables)
        self._control = _Control(control)

    def render(self, messages: Sequence[tuple[str, str]], max_bytes: int) -> list[tuple[str, bool]]:
        """The prompt of a conversation of (role, content), ending where the assistant's answer begins, in pieces. It is
        cut where that is needed to keep control strings in contents from acting; one piece, not plain, when none is.
        Raises Refused, TooMuchOutput, and whatever a template raises."""
        marks = _Marks(messages, self._control)
        marked = self._render(marks.messages, max_bytes)
        if not marks.any:
            return [(marked, False)]
        if marks.restored_size(marked) > max_bytes:
            raise TooMuchOutput
        whole = marks.restore(marked)
        if len(self._control.find(whole)) == len(self._control.find(marked)):
            return [(whole, False)]
        return self._cut(marked, marks)

    def _render(self, messages: Sequence[tuple[str, str]], max_bytes: int) -> str:
        parts = []
        size = 0
        for part in self._template.generate(
            messages=[{"role": role, "content": content} for role, content in messages],
            add_generation_prompt=True,
            tools=None,
            documents=None,
            **self._variables,
        ):
            size += len(part.encode())
            if size > max_bytes:
                raise TooMuchOutput
            parts.append(part)
        return "".join(parts)

    def _cut(self, marked: str, marks: _Marks) -> list[tuple[str, bool]]:
        """In the marked rendering every control string is the template's own; all the rest is text."""
        pieces = []
        position = 0
        for start, end in self._control.find(marked):
            pieces.append((marks.restore(marked[position:start]), True))
            pieces.append((marked[start:end], False))
            position = end
        pieces.append((marks.restore(marked[position:]), True))
        return [(text, plain) for text, plain in pieces if text]


class _Control:
    """The control strings of a model."""

    def __init__(self, control: Sequence[str]) -> None:
        self.beginnings = {text[:size] for text in control for size in range(1, len(text))}
        self.endings = {text[size:] for text in control for size in range(1, len(text))}
        self.longest = max(map(len, control), default=0)
        # Alternatives are tried in order: the longest wins. Without control strings nothing matches.
        self.pattern = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)")

    def find(self, text: str) -> list[tuple[int, int]]:
        return [found.span() for found in self.pattern.finditer(text)]


class _Marks:
    """The contents with stand-ins for everything in them that is a control string, or could become one together with
    what the template puts beside it. A stand-in is two private-use characters around a number."""

    def __init__(self, messages: Sequence[tuple[str, str]], control: _Control) -> None:
        self._originals: list[str] = []
        self._control = control
        used: set[str] = set().union(*(content for _, content in messages))
        free = [char for char in map(chr, _PRIVATE_USE) if char not in used]
        if len(free) < 2:
            raise Refused("the messages use every private-use character")
        self._opening, self._closing = free[:2]
        self._stand_ins = re.compile(f"{self._opening}([0-9]+){self._closing}")
        self.messages = [(role, self._marked(content)) for role, content in messages]

    @property
    def any(self) -> bool:
        return bool(self._originals)

    def restore(self, text: str) -> str:
        return self._stand_ins.sub(lambda found: self._originals[int(found.group(1))], text)

    def restored_size(self, text: str) -> int:
        """Bytes of the restored text, at most; before it is made, since a stand-in may be shorter than what it stands
        for."""
        originals = (self._originals[int(found.group(1))] for found in self._stand_ins.finditer(text))
        return len(text.encode()) + sum(map(len, map(str.encode, originals)))

    def _marked(self, content: str) -> str:
        # Templates may strip white space, so the edges that count are those of the words.
        body = content.strip()
        first = content.index(body)
        head = self._longest_edge(body, self._control.endings, at_end=False)
        tail = self._longest_edge(body[head:], self._control.beginnings, at_end=True)
        middle = body[head : len(body) - tail]
        return "".join(
            (
                content[:first],
                self._stand_in(body[:head]),
                self._control.pattern.sub(lambda found: self._stand_in(found.group()), middle),
                self._stand_in(body[len(body) - tail :]),
                content[first + len(body) :],
            )
        )

    def _longest_edge(self, text: str, edges: set[str], *, at_end: bool) -> int:
        for size in range(min(self._control.longest, len(text)), 0, -1):
            if (text[-size:] if at_end else text[:size]) in edges:
                return size
        return 0

    def _stand_in(self, text: str) -> str:
        if not text:
            return ""
        self._originals.append(text)
        return f"{self._opening}{len(self._originals) - 1}{self._closing}"


def _raise_exception(message: object) -> NoReturn:
    raise Refused(str(message)[:300])


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

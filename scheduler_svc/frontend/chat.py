"""The chat template of a model, or what stands in its place when there is none that can be used.

Templates run in a process of their own: see template_process. A call that renders one waits for that process, so it is
made from a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from scheduler_svc.frontend import template_process
from scheduler_svc.frontend.calls import ChatMessage
from scheduler_svc.frontend.errors import ChatError
from scheduler_svc.frontend.template_process import (
    Piece,
    Template,
    TemplateFailed,
    TemplateProcessError,
    TemplateRefused,
)

ROLES: Final = ("system", "user", "assistant")
# No template is nearly as long.
_MAX_SOURCE_BYTES: Final = 1 << 20

log = logging.getLogger(__name__)


class ChatRenderer(Protocol):
    """Conversations to prompts."""

    def render_pieces(self, messages: Sequence[ChatMessage]) -> list[Piece]:
        """The prompt, ending where the assistant's answer begins, cut where that is needed to keep control strings
        (special tokens) written in contents from acting as such. One piece, not plain, when none is. Raises ChatError.
        """
        ...


class ChatTemplate:
    """A template that can be compiled."""

    def __init__(self, name: str, template: Template) -> None:
        """name: where it comes from, for messages."""
        self._name = name
        self._template = template

    def render_pieces(self, messages: Sequence[ChatMessage]) -> list[Piece]:
        """See ChatRenderer. Also raises TemplateProcessError, when there is nowhere to render it."""
        try:
            return template_process.SHARED.render(self._template, messages)
        except TemplateRefused as error:
            raise ChatError(str(error)) from error
        except TemplateFailed as error:
            # Whatever a template does wrong is wrong for this conversation only.
            log.warning("chat template failed", extra={"template": self._name, "cause": error.detail or str(error)})
            raise ChatError(f"the model's chat template ({self._name}) {error}") from error


class NoChat:
    """A model whose conversations cannot be rendered; text and token ids can be used."""

    def __init__(self, because: str) -> None:
        """because: a sentence for clients, without its end."""
        self._because = because

    def render_pieces(self, messages: Sequence[ChatMessage]) -> list[Piece]:
        """Raises ChatError."""
        raise ChatError(f"{self._because}; send text or token ids")


def chat_renderer(name: str, source: object, variables: Mapping[str, str], control: Sequence[str]) -> ChatRenderer:
    """For a template that was found under this name, as bytes or as a value of JSON; None: the model has none. One that
    cannot be used is logged, and refuses every conversation with the reason. variables: what it may refer to besides
    the messages, e.g. bos_token. control: the special tokens."""
    if source is None:
        return NoChat("the model has no chat template")
    try:
        template = Template(_text_of(source), tuple(variables.items()), tuple(control))
        template_process.SHARED.check(template)
    except (TemplateFailed, UnicodeError) as error:
        cause = (error.detail if isinstance(error, TemplateFailed) else "") or str(error)
        log.warning(
            "the model's chat template cannot be used, so chats are refused: repair it, then start the model's workers "
            "and the front ends anew",
            extra={"template": name, "cause": cause},
        )
        return NoChat(f"the model's chat template ({name}) cannot be used: {cause}")
    except TemplateProcessError as error:
        # It may be had later: the template is compiled then.
        log.warning("the model's chat template could not be tried", extra={"template": name, "cause": str(error)})
    return ChatTemplate(name, template)


def _text_of(source: object) -> str:
    """Raises TemplateFailed, UnicodeError."""
    if isinstance(source, list):
        entries = [entry for entry in source if isinstance(entry, dict) and isinstance(entry.get("name"), str)]
        named = {entry["name"]: entry.get("template") for entry in entries}
        if "default" not in named:
            raise TemplateFailed(f"there is no template named default; named: {', '.join(named) or 'none'}")
        source = named["default"]
    text = source.decode() if isinstance(source, bytes) else source
    if not isinstance(text, str):
        raise TemplateFailed("it is no text")
    if len(text.encode()) > _MAX_SOURCE_BYTES:
        raise TemplateFailed(f"it has more than {_MAX_SOURCE_BYTES} bytes")
    return text


def check_roles(messages: Sequence[ChatMessage]) -> None:
    """Raises ChatError for an empty conversation or an unknown role."""
    if not messages:
        raise ChatError("a chat needs at least one message")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise ChatError(f"message {index} has the role {message.role[:40]!r}; known roles: {', '.join(ROLES)}")

"""How a download shows itself: a bar on a terminal, lines elsewhere, the log of a worker that serves, or nothing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

log = logging.getLogger(__name__)


class Advance(Protocol):
    """Called with the number of bytes there are now."""

    def __call__(self, done: int) -> None: ...


class Report:
    """Says nothing; the others inherit."""

    def say(self, text: str) -> None:
        """One line for people."""

    @contextmanager
    def download(self, title: str, total: int | None) -> Iterator[Advance]:
        """A download of `total` bytes, when that is known."""
        yield lambda done: None


class _Bar(Report):
    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    @contextmanager
    def download(self, title: str, total: int | None) -> Iterator[Advance]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(title, total=total)
            yield lambda done: progress.update(task, completed=done)


class _Lines(Report):
    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    @contextmanager
    def download(self, title: str, total: int | None) -> Iterator[Advance]:
        size = f"{total / 1e6:.1f} MB" if total else "of unknown size"
        self.say(f"downloading {title}, {size}")
        said = 0

        def advance(done: int) -> None:
            nonlocal said
            tenth = 10 * done // total if total else 0
            if tenth > said:
                said = tenth
                self.say(f"downloading {title}: {tenth * 10} %")

        yield advance


class LogReport(_Lines):
    """Lines of the log, in whatever form that has."""

    def say(self, text: str) -> None:
        log.info(text)


def reporter() -> Report:
    """The fitting one for stderr."""
    console = Console(stderr=True)
    return _Bar(console) if console.is_terminal else _Lines()

"""`stepfence replay`: a recording again, step for step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from scheduler_svc.cli.options import StrictCommand


def _replay(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Recording made with --record; may be gzip.",
            show_default=False,
        ),
    ],
    explain: Annotated[
        str | None, typer.Option(metavar="ID", help="Tell the story of this request.", show_default=False)
    ] = None,
    verify: Annotated[bool, typer.Option(help="Compare every step with the recorded one.")] = True,
) -> None:
    """Replay a recording: the same events must give the same steps, byte for byte.

    Exit code 0: all the same. 1: a step differs (the first is told), or the request to explain is not in the file.
    2: the file cannot be read."""
    from scheduler_svc.simulation import replay

    raise typer.Exit(replay.main(file, out=sys.stdout, verify=verify, explain=explain))


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("replay", cls=StrictCommand, short_help="Replay a recording and compare every step.")(_replay)

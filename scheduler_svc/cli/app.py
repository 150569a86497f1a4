"""The `stepfence` command: which subcommands there are, and what becomes of errors and exit codes.

Heavy modules are imported where a command needs them: a probe that runs every ten seconds must not load the scheduler.

Exit codes: 0 ended as asked, 1 failed, 2 wrong usage or configuration, 3 drain deadline passed with work cut off,
130 and 143 ended at once by a second SIGINT or SIGTERM.
"""

from __future__ import annotations

import io
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Final, cast

import typer

from scheduler_svc.cli import client_commands, delegates, replay
from scheduler_svc.cli.options import EPILOG, StrictCommand, settings_command, usage_error_line
from scheduler_svc.config import FrontendSettings, SchedulerSettings, SettingsError, UpSettings

USAGE_ERROR = 2
# The parser's base of all its usage errors, which typer does not name.
_UsageError: Final = cast(type[Exception], typer.BadParameter.__mro__[1])


def _run_scheduler(settings: SchedulerSettings) -> int:
    from scheduler_svc import server

    return server.run(settings)


def _run_frontend(settings: FrontendSettings) -> int:
    from scheduler_svc.frontend import server

    return server.run(settings)


def _run_up(settings: UpSettings) -> int:
    from scheduler_svc.cli import up

    return up.run(settings)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        typer.echo(f"stepfence {version('stepfence')}")
    except PackageNotFoundError:
        typer.echo("stepfence (not installed)")
    raise typer.Exit


app = typer.Typer(
    name="stepfence",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Plain help: the boxed form cuts long flags off on a terminal of 80 columns.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """LLM inference with a CPU-only scheduler that drives its workers by numbered, fenced steps."""


app.command("up", cls=StrictCommand, epilog=EPILOG, help="Start scheduler, front end and workers here, until Ctrl-C.")(
    settings_command(UpSettings, _run_up)
)
app.command("scheduler", cls=StrictCommand, epilog=EPILOG, help="Run the scheduler (no GPU, no torch).")(
    settings_command(SchedulerSettings, _run_scheduler)
)
app.command("frontend", cls=StrictCommand, epilog=EPILOG, help="Run a front end: text in, text out, for clients.")(
    settings_command(FrontendSettings, _run_frontend)
)
delegates.register(app)
replay.register(app)
client_commands.register(app)


def main() -> int:
    """Run the command line in sys.argv; the value is the exit code."""
    _escape_what_cannot_be_shown()
    try:
        return int(app(standalone_mode=False) or 0)
    except SettingsError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return USAGE_ERROR
    except _UsageError as error:
        _tell(error)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return 130
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1


def _escape_what_cannot_be_shown() -> None:
    """Text of a model may have any character; one that the encoding of the terminal lacks is no error in mid-text."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _tell(error: Any) -> None:
    is_help = type(error).__name__ == "NoArgsIsHelpError"
    print(error.format_message() if is_help else f"error: {usage_error_line(error)}", file=sys.stderr)

"""Commands whose work is done elsewhere: by the worker's program (another service, another process) or the
simulation."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from scheduler_svc.cli.options import StrictCommand
from scheduler_svc.config import SettingsError

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def worker_command(*arguments: str) -> list[str]:
    """The command line of the worker's own program, in this Python. Raises SettingsError when it is not installed."""
    if importlib.util.find_spec("worker_svc") is None:
        raise SettingsError('the worker is not installed here: pip install "stepfence[worker]"')
    return [sys.executable, "-m", "worker_svc", *arguments]


def _become(command: list[str]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def _worker(ctx: typer.Context) -> None:
    """Run a worker: executes steps on its device. All flags are the worker's own (see `stepfence worker --help`)."""
    _become(worker_command("serve", *ctx.args))


def _fetch_model(ctx: typer.Context) -> None:
    """Fetch a known model (smollm2) and convert it once, so that workers load it in a second."""
    _become(worker_command("fetch-model", *ctx.args))


scenario = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Scheduling scenarios: recorded truths and experiments."
)


@scenario.command("run", cls=StrictCommand)
def _scenario_run(
    files: Annotated[list[Path], typer.Argument(help="Scenario files (JSON, or JSON lines).", show_default=False)],
) -> None:
    """Run scenarios through the scheduler and print one JSON record per step."""
    from scheduler_svc.simulation.scenario import main as run_scenarios

    raise typer.Exit(run_scenarios([str(file) for file in files]) or 0)


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("worker", context_settings=_PASS_ON)(_worker)
    app.command("fetch-model", context_settings=_PASS_ON)(_fetch_model)
    app.add_typer(scenario, name="scenario")

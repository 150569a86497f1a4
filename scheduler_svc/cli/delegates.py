"""Commands whose work is done elsewhere: by the worker's program (another service, another process) or the
simulation."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from scheduler_svc.cli.options import StrictCommand
from scheduler_svc.config import ENV_PREFIX, SettingsError, flag, read_section

# Understood by the worker's program only.
_FROM_FILE = "--from-file"
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def worker_command(*arguments: str) -> list[str]:
    """The command line of the worker's own program, in this Python. Raises SettingsError when it is not installed."""
    if importlib.util.find_spec("worker_svc") is None:
        raise SettingsError('the worker is not installed here: pip install "stepfence[worker]"')
    return [sys.executable, "-m", "worker_svc", *arguments]


def with_file_settings(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The worker's flags, completed from the [worker] section of the settings file: the one of `--config FILE` (taken
    out of the flags) or of STEPFENCE_CONFIG. Flags and environment win. What is from the file stands behind
    `--from-file FILE`, so that the worker can say where a wrong value is. Raises SettingsError."""
    flags, path = _without_config(arguments, environ)
    if path is None:
        return flags
    given = {argument.split("=", 1)[0] for argument in flags}
    added: list[str] = []
    for name, value in read_section(path, "worker").items():
        if flag(name) not in given and ENV_PREFIX + name.upper() not in environ:
            added += [flag(name), value if isinstance(value, str) else json.dumps(value)]
    return [*flags, _FROM_FILE, str(path), *added] if added else flags


def _without_config(arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], Path | None]:
    flags, path = list(arguments), environ.get(ENV_PREFIX + "CONFIG", "")
    for index, argument in enumerate(flags):
        if argument.startswith("--config="):
            path = argument.removeprefix("--config=")
            del flags[index]
            break
        if argument == "--config":
            if index + 1 == len(flags):
                raise SettingsError("--config: needs the name of a file")
            path = flags[index + 1]
            del flags[index : index + 2]
            break
    return flags, Path(path) if path else None


def _become(command: list[str]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def _worker(ctx: typer.Context) -> None:
    """Run a worker: executes steps on its device. All flags but --config FILE are the worker's own (see
    `stepfence worker --help`)."""
    _become(worker_command("serve", *with_file_settings(ctx.args, os.environ)))


def _fetch_model(ctx: typer.Context) -> None:
    """Fetch a known model (smollm2) and convert it once, so that workers load it in a second."""
    _become(worker_command("fetch-model", *ctx.args))


scenario = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Scheduling scenarios: recorded truths and experiments."
)


@scenario.command("run", cls=StrictCommand, short_help="Run files of scenarios; one JSON result a scenario.")
def _scenario_run(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILES",
            exists=True,
            dir_okay=False,
            help="Scenario files (JSON, or JSON lines).",
            show_default=False,
        ),
    ],
) -> None:
    """Run scenarios through the scheduler and print one JSON result a scenario, with a record for each of its steps.

    Exit codes: 0 all were run, 1 some could not be (the reasons are on standard error), 2 a file holds no scenarios.
    """
    from scheduler_svc.simulation.scenario import main as run_scenarios

    raise typer.Exit(run_scenarios(files))


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("worker", context_settings=_PASS_ON)(_worker)
    app.command(
        "fetch-model", context_settings=_PASS_ON, short_help="Fetch a known model (smollm2) and convert it once."
    )(_fetch_model)
    app.add_typer(scenario, name="scenario")

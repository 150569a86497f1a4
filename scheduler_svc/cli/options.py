"""From a settings class to command line flags: one flag a field, so that flags, environment and file cannot differ."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings
from typer.core import TyperCommand

from scheduler_svc.config import FrontendSettings, SchedulerSettings, SettingsError, UpSettings, advice, flag

SettingsT = TypeVar("SettingsT", SchedulerSettings, FrontendSettings, UpSettings)

EPILOG = (
    "Every setting can also be given in the environment (STEPFENCE_MAX_NUM_SEQS=64) or in a TOML file named by "
    "--config or STEPFENCE_CONFIG, in a section called after the command ([scheduler] max_num_seqs = 64). Flags win "
    "over the environment, the environment over the file."
)


class StrictCommand(TyperCommand):
    """Says what an unknown flag was probably meant to be, or what replaced it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {option for parameter in self.params for option in (*parameter.opts, *parameter.secondary_opts)}
        refuse_unknown_flags(args, known | {"--help"}, command_name(ctx))
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                # Typer adds its Python type: <list[Path]>.
                sections["Arguments"].append((record[0].split(" <", 1)[0], record[1]))
            else:
                sections["Options"].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def usage_error_line(error: Any) -> str:
    """One line for a usage error of the parser: the flag, or the variable that gave its value, and what is wrong."""
    context, parameter, hint = error.ctx, getattr(error, "param", None), getattr(error, "param_hint", None)
    if isinstance(hint, str):
        return f"{hint}: {error.message}"
    if parameter is None or not error.message:
        told = error.format_message().rstrip(".")
        return f"{told[:1].lower()}{told[1:]}" + (f"; see `{command_name(context)} --help`" if context else "")
    name = parameter.metavar or parameter.name
    if parameter.param_type_name == "option":
        name = max(parameter.opts, key=len)
    source = context.get_parameter_source(parameter.name) if context is not None else None
    if source is not None and source.name == "ENVIRONMENT":
        name = f"{parameter.envvar} (in the environment)"
    return f"{name}: {error.message}"


def command_name(ctx: Any) -> str:
    """The command as a person types it, however this program was started: `stepfence scenario run`."""
    names = []
    while ctx is not None and ctx.parent is not None:
        names.append(str(ctx.info_name))
        ctx = ctx.parent
    return " ".join(["stepfence", *reversed(names)])


def refuse_unknown_flags(args: Sequence[str], known: set[str], command: str) -> None:
    """Raise SettingsError for the first unknown `--flag` before a lone `--`."""
    names = {option.removeprefix("--").replace("-", "_") for option in known if option.startswith("--")}
    for argument in args:
        if argument == "--":
            return
        option = argument.split("=", 1)[0]
        if option.startswith("--") and option not in known:
            name = option.removeprefix("--").replace("-", "_")
            raise SettingsError(f"{option}: {advice(name, names, flag, command)}")


def settings_command(settings: type[SettingsT], run: Callable[[SettingsT], int]) -> Callable[..., None]:
    """A function for `typer.Typer.command` with one keyword parameter per setting.

    It loads the settings, calls `run` and exits with what that returns.
    """

    def command(config: Path | None = None, **flags: Any) -> None:
        given = {name: value for name, value in flags.items() if value is not None and value != []}
        raise typer.Exit(run(settings.load(given, config)))

    # What only this command has first, what it shares with others after it.
    own = frozenset(settings.__annotations__)
    fields: list[tuple[str, FieldInfo]] = sorted(_fields(settings).items(), key=lambda item: item[0] not in own)
    parameters = [_config_parameter(), *(_parameter(name, info) for name, info in fields)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _fields(settings: type[BaseSettings]) -> dict[str, FieldInfo]:
    return settings.model_fields


def as_flags(settings: SchedulerSettings | FrontendSettings) -> list[str]:
    """The command line that gives exactly these settings."""
    arguments: list[str] = []
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, bool):
            arguments.append(flag(name) if value else flag(f"no_{name}"))
        elif isinstance(value, tuple):
            arguments += [part for item in value for part in (flag(name), str(item))]
        else:
            arguments += [flag(name), "none" if value is None else str(value)]
    return arguments


def _config_parameter() -> inspect.Parameter:
    option = typer.Option("--config", metavar="FILE", help="TOML file with settings.", show_default=False)
    return inspect.Parameter(
        "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, option]
    )


def _parameter(name: str, info: FieldInfo) -> inspect.Parameter:
    annotation: Any
    text = f"{info.description} [default: {_shown_default(info.default)}]"
    if info.annotation is bool:
        option = typer.Option(f"{flag(name)}/{flag('no_' + name)}", help=text, show_default=False)
        annotation = Annotated[bool | None, option]
    else:
        option = typer.Option(flag(name), metavar=_metavar(name, info), help=text, show_default=False)
        repeatable = get_origin(info.annotation) is tuple
        annotation = Annotated[list[str] | None, option] if repeatable else Annotated[str | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _shown_default(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


def _metavar(name: str, info: FieldInfo) -> str:
    types = _leaves(info.annotation)
    if name in ("worker", "scheduler") or name.endswith("listen"):
        return "HOST:PORT"
    if name.endswith("_s"):
        return "SECONDS"
    if name.endswith("_bytes") or name == "kv_memory":
        return "BYTES"
    if name == "gateway":
        return "ADDRESS"
    if name.endswith("_dir"):
        return "DIR"
    if name == "script":
        return "JSON"
    if Path in types:
        return "FILE"
    if float in types:
        return "SHARE"
    return "N" if int in types else "NAME"


def _leaves(annotation: Any) -> set[Any]:
    """What an annotation is made of at its ends: the types of a union, the words of a Literal."""
    inner = get_args(annotation)
    return set().union(*map(_leaves, inner)) if inner else {annotation}

"""`python -m worker_svc serve [flags]` runs a worker, `python -m worker_svc fetch-model NAME` fetches a known model."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import NoReturn

from worker_svc import logs
from worker_svc.config import ENV_PREFIX, SettingsError, WorkerSettings, advice, flag
from worker_svc.server import EXIT_FATAL, EXIT_OK, EXIT_USAGE, serve


class _Parser(argparse.ArgumentParser):
    """Says what replaced an unknown flag, and never guesses abbreviations."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            name = unknown.split()[0].split("=")[0].removeprefix("--").replace("-", "_")
            message = f"{unknown}: {advice(name, flag)}"
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (docs/worker.md lists them). Exits 2 by itself on wrong usage."""
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    command = options.pop("command")
    if command == "fetch-model":
        return _fetch_model(options["name"])
    try:
        settings = WorkerSettings.load(options)
    except SettingsError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return EXIT_USAGE
    logs.configure(settings.log_format)
    return _run(settings)


def _run(settings: WorkerSettings) -> int:
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run(serve(settings))
    return uvloop.run(serve(settings))


def _fetch_model(name: str) -> int:
    logs.configure()
    from worker_svc.fetch_model import FetchFailed, fetch_model

    try:
        path = fetch_model(name, progress=True)
    except FetchFailed as error:
        print(f"fetch-model: {error}", file=sys.stderr)
        return EXIT_FATAL
    print(path)
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="worker_svc", description="A Stepfence worker.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser, metavar="COMMAND")
    server = commands.add_parser(
        "serve",
        help="run a worker",
        allow_abbrev=False,
        description=f"Run a worker. Each flag may also be set as {ENV_PREFIX}<NAME> in the environment.",
    )
    for name, field in WorkerSettings.model_fields.items():
        default = "none" if field.default is None else field.default
        help_text = f"{field.description} Default: {default}".replace("%", "%%")
        server.add_argument(flag(name), dest=name, default=None, metavar=name.upper(), help=help_text)
    fetch = commands.add_parser("fetch-model", help="fetch a known model", allow_abbrev=False)
    fetch.add_argument("name", metavar="NAME", help="for example smollm2")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""`python -m worker_svc serve [flags]` runs a worker, `python -m worker_svc fetch-model NAME` fetches a known model."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from worker_svc import logs
from worker_svc.config import ENV_PREFIX, SettingsError, WorkerSettings, advice, flag
from worker_svc.server import EXIT_FATAL, EXIT_OK, EXIT_USAGE, serve

# As a person calls it; `python -m worker_svc` is what these commands become.
_WORKER: Final = "stepfence worker"
_FETCH: Final = "stepfence fetch-model"
EXIT_INTERRUPTED: Final = 130


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
    parsed, unknown = parser.parse_known_args(arguments)
    options = vars(parsed)
    command = options.pop("command")
    if unknown:
        # The outer parser finds out, and the inner one's name is what was called.
        parser.prog = _FETCH if command == "fetch-model" else _WORKER
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if command == "fetch-model":
        return _fetch_model(options["name"])
    try:
        settings = WorkerSettings.load(options)
    except SettingsError as error:
        for line in str(error).splitlines():
            print(f"{_WORKER}: {line}", file=sys.stderr)
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
    try:
        from worker_svc.fetch_model import KNOWN_MODELS, FetchFailed, fetch_model
        from worker_svc.models.progress import reporter

        if name not in KNOWN_MODELS:
            print(f"{_FETCH}: unknown model {name!r}; known: {', '.join(sorted(KNOWN_MODELS))}", file=sys.stderr)
            return EXIT_USAGE
        try:
            path = fetch_model(name, reporter())
        except FetchFailed as error:
            print(f"{_FETCH}: {error}", file=sys.stderr)
            return EXIT_FATAL
    except KeyboardInterrupt:
        # A progress bar may stand on the line; what was downloaded is kept.
        print(f"\r{_FETCH}: interrupted; the next call goes on from here", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(path)
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="worker_svc", description="A Stepfence worker.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser, metavar="COMMAND")
    server = commands.add_parser(
        "serve",
        prog=_WORKER,
        help="run a worker",
        allow_abbrev=False,
        description=f"Run a worker. Each flag may also be set as {ENV_PREFIX}<NAME> in the environment.",
        epilog=f"`{_WORKER}` also takes --config FILE (or {ENV_PREFIX}CONFIG): a TOML file whose [worker] section "
        "gives what flags and environment leave open.",
    )
    for name, field in WorkerSettings.model_fields.items():
        default = "none" if field.default is None else field.default
        help_text = f"{field.description} Default: {default}".replace("%", "%%")
        server.add_argument(flag(name), dest=name, default=None, metavar=name.upper(), help=help_text)
    fetch = commands.add_parser("fetch-model", prog=_FETCH, help="fetch a known model", allow_abbrev=False)
    fetch.add_argument("name", metavar="NAME", help="for example smollm2")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""`python -m worker_svc serve [flags]` runs a worker, `python -m worker_svc fetch-model NAME` fetches a known model."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from worker_svc import cluster_secret, logs, memory, openmp
from worker_svc.config import ENV_PREFIX, FileSettings, SettingsError, WorkerSettings, advice, flag
from worker_svc.server import EXIT_FATAL, EXIT_OK, EXIT_USAGE, serve
from worker_svc.tls import Tls, TlsError

# As a person calls it; `python -m worker_svc` is what these commands become.
_WORKER: Final = "stepfence worker"
_FETCH: Final = "stepfence fetch-model"
_DEFAULT_MODEL: Final = str(WorkerSettings.model_fields["model"].default)
EXIT_INTERRUPTED: Final = 130
# Before it stand the flags of whoever calls, behind it those that `stepfence worker` has read from a settings file.
_FROM_FILE: Final = "--from-file"

log = logging.getLogger("worker_svc")


class _Parser(argparse.ArgumentParser):
    """Says what replaced an unknown flag, and never guesses abbreviations."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            name = unknown.split()[0].split("=")[0].removeprefix("--").replace("-", "_")
            message = f"{unknown}: {advice(name, flag, self.prog)}"
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


class _HelpFormatter(argparse.HelpFormatter):
    """Descriptions in a column of their own, as other commands of `stepfence` have them."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


# Flags that may be given several times.
_SEVERAL: Final = ("served_model_name",)
# What stands behind a flag in the help.
_METAVARS: Final = {
    **dict.fromkeys(("runner", "device", "dtype", "log_format"), "NAME"),
    **dict.fromkeys(("num_blocks", "max_model_len", "threads"), "N"),
    "listen": "HOST:PORT",
    "served_model_name": "NAME",
    "cluster_secret_file": "FILE",
    "tls_dir": "DIR",
    "model": "PATH|NAME",
    "kv_memory": "BYTES",
    "gpu_memory_utilization": "SHARE",
    "drain_deadline_s": "SECONDS",
    "script": "JSON",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (docs/worker.md lists them). Exits 2 by itself on wrong usage."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    from_file: list[str] = []
    if _FROM_FILE in given:
        at = given.index(_FROM_FILE)
        given, from_file = given[:at], given[at + 1 :]
    parser = _parser()
    options = _parse(parser, given)
    if options.pop("command") == "fetch-model":
        return _fetch_model(options["name"] or os.environ.get(ENV_PREFIX + "MODEL") or _DEFAULT_MODEL)
    try:
        settings = WorkerSettings.load(options, _file_settings(parser, from_file))
        secret = None if settings.cluster_secret_file is None else cluster_secret.read(settings.cluster_secret_file)
        tls = None if settings.tls_dir is None else Tls(settings.tls_dir)
    except (SettingsError, cluster_secret.SecretError, TlsError) as error:
        for line in str(error).splitlines():
            print(f"{_WORKER}: {line}", file=sys.stderr)
        return EXIT_USAGE
    logs.configure(settings.log_format)
    return _run(settings, secret, tls)


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> dict[str, Any]:
    parsed, unknown = parser.parse_known_args(arguments)
    options = vars(parsed)
    for name in _SEVERAL:
        if options.get(name):
            options[name] = ",".join(options[name])
    if unknown:
        # The outer parser finds out, and the inner one's name is what was called.
        parser.prog = _FETCH if options["command"] == "fetch-model" else _WORKER
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


def _file_settings(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> FileSettings | None:
    """FILE --flag value ..., as `stepfence worker` gives them."""
    if not arguments:
        return None
    options = _parse(parser, ["serve", *arguments[1:]])
    del options["command"]
    return FileSettings(arguments[0], {name: value for name, value in options.items() if value is not None})


def _run(settings: WorkerSettings, secret: str | None, tls: Tls | None) -> int:
    if settings.runner == "model" and settings.device == "cpu":
        # Both before torch: the one for its OpenMP library, the other because loading it takes memory, too.
        openmp.limit_spinning(os.environ)
        try:
            memory.check_start(kv_memory=settings.kv_memory, num_blocks=settings.num_blocks)
        except memory.NotEnoughMemory as error:
            log.error("the model could not be loaded", extra={"cause": str(error)})
            return EXIT_FATAL
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run(serve(settings, secret, tls))
    return uvloop.run(serve(settings, secret, tls))


def _fetch_model(name: str) -> int:
    """For people, lines and a bar; with log_format json in the environment, lines of a log."""
    is_json = os.environ.get(ENV_PREFIX + "LOG_FORMAT") == "json"
    logs.configure("json" if is_json else "text")
    if Path(name).exists():
        print(name)
        return EXIT_OK
    try:
        from worker_svc.fetch_model import KNOWN_MODELS, FetchFailed, fetch_model
        from worker_svc.models.progress import LogReport, reporter

        if name not in KNOWN_MODELS:
            known = ", ".join(sorted(KNOWN_MODELS))
            return _not_fetched(f"unknown model {name!r}, and no such path; known: {known}", EXIT_USAGE, is_json)
        try:
            path = fetch_model(name, LogReport() if is_json else reporter())
        except (FetchFailed, memory.NotEnoughMemory) as error:
            return _not_fetched(str(error), EXIT_FATAL, is_json)
    except KeyboardInterrupt:
        # A progress bar may stand on the line; what was downloaded is kept.
        print(f"\r{_FETCH}: interrupted; the next call goes on from here", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(path)
    return EXIT_OK


def _not_fetched(why: str, code: int, is_json: bool) -> int:
    """Say why; the exit code."""
    if is_json:
        log.error("the model could not be fetched", extra={"cause": why})
    else:
        print(f"{_FETCH}: {why}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="worker_svc", description="A Stepfence worker.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser, metavar="COMMAND")
    server = commands.add_parser(
        "serve",
        prog=_WORKER,
        help="run a worker",
        allow_abbrev=False,
        usage=f"{_WORKER} [OPTIONS]",
        formatter_class=_HelpFormatter,
        description=f"Run a worker. Each flag may also be set as {ENV_PREFIX}<NAME> in the environment.",
        epilog=f"`{_WORKER}` also takes --config FILE (or {ENV_PREFIX}CONFIG): a TOML file whose [worker] section "
        "gives what flags and environment leave open.",
    )
    for name, field in WorkerSettings.model_fields.items():
        default = "none" if field.default is None else field.default
        help_text = f"{field.description} [default: {default}]".replace("%", "%%")
        # Given again, a flag with several values adds one; each other one is replaced.
        adds = "append" if name in _SEVERAL else "store"
        server.add_argument(flag(name), dest=name, default=None, metavar=_METAVARS[name], help=help_text, action=adds)
    fetch = commands.add_parser("fetch-model", prog=_FETCH, help="fetch a known model", allow_abbrev=False)
    fetch.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help=f"for example smollm2; a path with something there needs no fetching [default: {ENV_PREFIX}MODEL, else "
        f"{_DEFAULT_MODEL}]",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

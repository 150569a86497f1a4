"""Flags of the commands that call a running Stepfence: generate, health, and those of the scheduler's operators."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scheduler_svc.cli.options import StrictCommand
from scheduler_svc.config import MAX_SECONDS, SettingsError, read_secret, read_tls
from scheduler_svc.rpc import cluster_secret
from scheduler_svc.rpc.tls import FOR_CALLERS, Tls

if TYPE_CHECKING:
    from scheduler_svc.cli.status import SchedulerCall

_TLS_NAME_VARIABLE = "STEPFENCE_TLS_SERVER_NAME"

FRONT_END = "127.0.0.1:50051"
SCHEDULER = "127.0.0.1:50052"

_INT32_MIN = -(2**31)
_INT32_MAX = 2**31 - 1
_UINT32_MAX = 2**32 - 1
_UINT64_MAX = 2**64 - 1


def _target(value: str) -> str:
    """A gRPC target: HOST:PORT, or a name with its scheme (dns:///HOST:PORT, unix:PATH)."""
    if ":" not in value or value.startswith(":") or value.endswith(":") or value != value.strip():
        raise typer.BadParameter(f"must be HOST:PORT, for example {FRONT_END} (given: {value!r})")
    return value


_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
_UseProxy = Annotated[
    bool, typer.Option("--proxy", help="Call through the proxy that http_proxy in the environment names.")
]
_Scheduler = Annotated[
    str,
    typer.Option(
        "--target", metavar="HOST:PORT", envvar="STEPFENCE_SCHEDULER", callback=_target, help="The scheduler."
    ),
]
_TlsDir = Annotated[
    Path | None,
    typer.Option(
        "--tls-dir",
        metavar="DIR",
        envvar="STEPFENCE_TLS_DIR",
        show_default="plain text",
        help="Directory with ca.crt for TLS, and tls.crt and tls.key, the certificate to show.",
    ),
]
_ClientTlsDir = Annotated[
    Path | None,
    typer.Option(
        "--tls-dir",
        metavar="DIR",
        show_default="plain text",
        help="Directory with ca.crt for TLS; with tls.crt and tls.key when the server asks for a certificate.",
    ),
]
_TlsName = Annotated[
    str,
    typer.Option(
        "--tls-server-name",
        metavar="NAME",
        show_default="the host that is called",
        help="Name that the server's certificate is made out for.",
    ),
]
_SecretFile = Annotated[
    Path | None,
    typer.Option(
        "--cluster-secret-file",
        metavar="FILE",
        envvar="STEPFENCE_CLUSTER_SECRET_FILE",
        show_default="for a scheduler on this machine the one that `stepfence up` made, else none",
        help="File with the cluster secret, which the call carries.",
    ),
]


def _tls(directory: Path | None, server_name: str) -> Tls | None:
    """Raises SettingsError."""
    return read_tls("tls_dir", directory, FOR_CALLERS, server_name=server_name)


def _call(target: str, secret_file: Path | None, use_proxy: bool, tls_dir: Path | None, tls_name: str) -> SchedulerCall:
    """How to call the scheduler. The secret of `stepfence up` goes to this machine only. Raises SettingsError."""
    from scheduler_svc.cli.status import SchedulerCall
    from scheduler_svc.rpc.channels import is_loopback

    if secret_file is None and is_loopback(target.rpartition(":")[0].rpartition("/")[2]):
        secret_file = cluster_secret.default_path(os.environ)
        if secret_file is not None and not secret_file.exists():
            secret_file = None
    tls = _tls(tls_dir, tls_name or os.environ.get(_TLS_NAME_VARIABLE, ""))
    return SchedulerCall(target, cluster_secret.metadata_of(read_secret(secret_file)), use_proxy, tls)


def _generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from standard input.", show_default=False)
    ],
    target: Annotated[
        str,
        typer.Option(
            "--target", metavar="HOST:PORT", envvar="STEPFENCE_TARGET", callback=_target, help="The front end."
        ),
    ] = FRONT_END,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=_UINT32_MAX,
            metavar="N",
            envvar="STEPFENCE_MAX_TOKENS",
            show_default="as many as fit",
            help="Most tokens to generate.",
        ),
    ] = None,
    min_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=_UINT32_MAX,
            metavar="N",
            envvar="STEPFENCE_MIN_TOKENS",
            show_default="0",
            help="Do not stop before this many tokens.",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            envvar="STEPFENCE_TEMPERATURE",
            show_default="the model's, else 1",
            help="0 takes the likeliest token.",
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", envvar="STEPFENCE_TOP_P", show_default="the model's, else 1", help="Nucleus sampling."
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            min=_INT32_MIN,
            max=_INT32_MAX,
            metavar="N",
            envvar="STEPFENCE_TOP_K",
            show_default="the model's, else off",
            help="Keep the k likeliest tokens.",
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            envvar="STEPFENCE_MIN_P",
            show_default="the model's, else off",
            help="Drop tokens less likely than this share of the likeliest.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=_UINT64_MAX,
            metavar="N",
            envvar="STEPFENCE_SEED",
            show_default="drawn",
            help="Same seed, same request: same tokens.",
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", show_default="none", help="End before this text appears; repeatable."),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", envvar="STEPFENCE_IGNORE_EOS", help="Do not stop where the model would.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", envvar="STEPFENCE_CHAT", help="Send the prompt as a user's message of a chat.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", show_default="none", help="With --chat: a system message before it.")
    ] = None,
    priority: Annotated[
        int,
        typer.Option(
            min=_INT32_MIN,
            max=_INT32_MAX,
            metavar="N",
            envvar="STEPFENCE_PRIORITY",
            help="Lower is served first; needs the scheduler's policy priority.",
        ),
    ] = 0,
    cache_salt: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            envvar="STEPFENCE_CACHE_SALT",
            show_default="none",
            help="Share cached prefixes only with requests of the same salt.",
        ),
    ] = "",
    model: Annotated[
        str, typer.Option(metavar="NAME", show_default="the served one", help="Refuse any other model than this.")
    ] = "",
    request_id: Annotated[
        str, typer.Option(metavar="ID", show_default="drawn", help="Name of the request, for logs and Abort.")
    ] = "",
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=MAX_SECONDS,
            metavar="SECONDS",
            envvar="STEPFENCE_TIMEOUT",
            show_default="none",
            help="Deadline of the request.",
        ),
    ] = None,
    json_lines: Annotated[
        bool, typer.Option("--json", envvar="STEPFENCE_JSON", help="Print every event as a line of JSON.")
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="STEPFENCE_TOKEN_FILE",
            show_default="none",
            help="File with your token, where the front end wants one.",
        ),
    ] = None,
    tls_dir: _ClientTlsDir = None,
    tls_name: _TlsName = "",
    use_proxy: _UseProxy = False,
) -> None:
    """Generate text: it streams to standard output, its cost follows on standard error.

    Exit codes: 0 ended by itself, 1 failed, 2 the request is wrong, 130 ended by Ctrl-C.
    """
    from scheduler_svc.cli import generate

    if system is not None and not chat:
        raise typer.BadParameter("goes with --chat only", param_hint="--system")
    options = generate.GenerateOptions(
        prompt=_standard_input() if prompt == "-" else prompt,
        target=target,
        chat=chat,
        system=system,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        priority=priority,
        cache_salt=cache_salt,
        model=model,
        request_id=request_id,
        timeout_s=timeout,
        json_lines=json_lines,
        use_proxy=use_proxy,
        token_file=token_file,
        tls=_tls(tls_dir, tls_name),
    )
    raise typer.Exit(generate.run(options))


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is not UTF-8 text: {error}", param_hint="PROMPT") from None


def _health(
    target: Annotated[
        str,
        typer.Option(
            "--target", metavar="HOST:PORT", envvar="STEPFENCE_TARGET", callback=_target, help="Any Stepfence process."
        ),
    ] = FRONT_END,
    ready: Annotated[
        bool, typer.Option("--ready", help="Ask whether it can serve, not only whether it lives.")
    ] = False,
    service: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default="the process itself",
            help="Full name of one service, for example stepfence.v1.WorkerService.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.001, max=MAX_SECONDS, metavar="SECONDS", help="How long to wait for the answer.")
    ] = 3.0,
    tls_dir: _ClientTlsDir = None,
    tls_name: _TlsName = "",
) -> None:
    """Check the health of a Stepfence process. Exit codes: 0 serving, 1 not serving or no answer, 2 wrong usage."""
    from scheduler_svc.cli import health

    tls = _tls(tls_dir, tls_name)
    answer = health.check(target, service if service is not None else None if ready else "", timeout, tls)
    typer.echo(answer.text, err=not answer.serving)
    raise typer.Exit(0 if answer.serving else 1)


def _status(
    target: _Scheduler = SCHEDULER,
    as_json: _AsJson = False,
    secret_file: _SecretFile = None,
    tls_dir: _TlsDir = None,
    tls_name: _TlsName = "",
    use_proxy: _UseProxy = False,
) -> None:
    """Show what the scheduler runs where, now. Exit codes: 0 it has answered, 1 it has not, 2 wrong usage."""
    from scheduler_svc.cli import status

    raise typer.Exit(status.show_status(_call(target, secret_file, use_proxy, tls_dir, tls_name), as_json))


def _audit(
    target: _Scheduler = SCHEDULER,
    as_json: _AsJson = False,
    secret_file: _SecretFile = None,
    tls_dir: _TlsDir = None,
    tls_name: _TlsName = "",
    use_proxy: _UseProxy = False,
) -> None:
    """Count every KV block of the scheduler. Exit codes: 0 consistent, 1 not, or no answer, 2 wrong usage."""
    from scheduler_svc.cli import status

    raise typer.Exit(status.show_audit(_call(target, secret_file, use_proxy, tls_dir, tls_name), as_json))


def _drain(
    target: _Scheduler = SCHEDULER,
    deadline_s: Annotated[
        float | None,
        typer.Option(
            "--deadline-s",
            min=0,
            max=MAX_SECONDS,
            metavar="SECONDS",
            show_default="the scheduler's --drain-deadline-s",
            help="How long accepted requests may still take; a later drain can only shorten it.",
        ),
    ] = None,
    secret_file: _SecretFile = None,
    tls_dir: _TlsDir = None,
    tls_name: _TlsName = "",
    use_proxy: _UseProxy = False,
) -> None:
    """Let the scheduler end: new requests are refused, accepted ones finish. Returns at once.

    The scheduler exits with 0, or 3 when the deadline cut something off.

    Exit codes: 0 it drains, 1 no answer, 2 wrong usage.
    """
    from scheduler_svc.cli import status

    raise typer.Exit(status.drain(_call(target, secret_file, use_proxy, tls_dir, tls_name), deadline_s))


def _reset_cache(
    target: _Scheduler = SCHEDULER,
    preempt_running: Annotated[
        bool,
        typer.Option(
            "--preempt-running", help="Also preempt all that runs, which is computed again, so that no block is in use."
        ),
    ] = False,
    secret_file: _SecretFile = None,
    tls_dir: _TlsDir = None,
    tls_name: _TlsName = "",
    use_proxy: _UseProxy = False,
) -> None:
    """Let the scheduler forget all cached prefixes: of all workers, or of none while blocks are in use.

    Exit codes: 0 all are forgotten, 1 none (standard error says why), or no answer, 2 wrong usage.
    """
    from scheduler_svc.cli import status

    raise typer.Exit(status.reset_cache(_call(target, secret_file, use_proxy, tls_dir, tls_name), preempt_running))


def _make_secret(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it.", show_default=False)],
) -> None:
    """Write a drawn cluster secret to FILE, readable by its owner only; a file that is there stays as it is.

    Give the same file to the scheduler, every front end and every worker: --cluster-secret-file FILE.

    Exit codes: 0 the file is there, 2 it cannot be written.
    """
    try:
        made = cluster_secret.make(path)
        cluster_secret.read(path)
    except cluster_secret.SecretError as error:
        raise SettingsError(str(error)) from None
    typer.echo(f"{path}: {'made' if made else 'was there already'}")


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("generate", cls=StrictCommand, short_help="Generate text from one prompt.")(_generate)
    app.command("health", cls=StrictCommand, short_help="Check the health of a Stepfence process.")(_health)
    app.command("status", cls=StrictCommand, short_help="Show what the scheduler runs where, now.")(_status)
    app.command("audit", cls=StrictCommand, short_help="Count every KV block of the scheduler.")(_audit)
    app.command("drain", cls=StrictCommand, short_help="Let the scheduler finish what it has accepted and end.")(_drain)
    app.command("make-secret", cls=StrictCommand, short_help="Make the secret that the parts of a deployment share.")(
        _make_secret
    )
    app.command("reset-cache", cls=StrictCommand, short_help="Let the scheduler forget all cached prefixes.")(
        _reset_cache
    )

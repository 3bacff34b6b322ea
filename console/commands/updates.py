"""``everstep update`` and ``everstep rollback``: change the code of a running job."""

from __future__ import annotations

import getpass
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from console.commands.shared import ClusterOption, JsonOption, finish
from controlplane import text
from controlplane.shown import clean
from everstep.errors import ConfigError
from everstep.model.version import Urgency, VersionStatus, read_update

if TYPE_CHECKING:
    from everstep.model.version import JobVersion, UpdateRequest

Job = Annotated[str, typer.Argument(help="Name of the job.")]
Reason = Annotated[str, typer.Option("--reason", help="The reason for the update; it is kept with the version.")]
By = Annotated[str, typer.Option("--by", metavar="NAME", help="Who requests the version. Default: your user name.")]
Urgent = Annotated[
    bool, typer.Option("--urgent", help="Apply the version now, at the end of a step.", rich_help_panel="When")
]
Lazy = Annotated[bool, typer.Option("--lazy", help="Apply the version with the next recovery.", rich_help_panel="When")]
Window = Annotated[
    str,
    typer.Option(
        metavar="24h",
        help="A lazy version is applied after this time even without a recovery: 90s, 30m, 24h.",
        rich_help_panel="When",
    ),
]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Do not wait until the version was tried or applied.")]

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def update(  # noqa: PLR0917 - options of a command
    job: Job,
    code: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder, as it is now.", rich_help_panel="Which code")
    ] = None,
    git: Annotated[
        str | None,
        typer.Option(
            metavar="REV",
            help="A revision in the git repository of --code, or else of the folder that runs now.",
            rich_help_panel="Which code",
        ),
    ] = None,
    version: Annotated[
        int | None,
        typer.Option(metavar="N", help="An earlier version of this job.", rich_help_panel="Which code"),
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Another script, relative to the folder.", rich_help_panel="Which code"),
    ] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARG",
            help="An argument of the script; they replace all its arguments. Repeat the option for each argument.",
            rich_help_panel="With",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A variable, in addition to those of the job.", rich_help_panel="With"),
    ] = None,
    urgent: Urgent = False,
    lazy: Lazy = False,
    window: Window = "24h",
    reason: Reason = "",
    by: By = "",
    cancel: Annotated[int | None, typer.Option(metavar="N", help="Withdraw version N, which waits.")] = None,
    detach: Detach = False,
    cluster: ClusterOption = "default",
    as_json: JsonOption = False,
) -> None:
    """Give a running job other code, other arguments or other variables, without a new submission.

    This command takes a snapshot of the folder if it knows the store of versions: from EVERSTEP_VERSIONS, or because
    the cluster is local. Otherwise a worker takes the snapshot, of the folder as the worker sees it. The new version is
    copied to all machines and tried there, up to the point where the script joins the job. If the trial fails, the
    version is refused, and the job is not affected. After the trial the version waits for the next recovery, whatever
    causes that (--lazy, the default), or is applied at the end of a step (--urgent). A version that fails in its first
    steps is rolled back automatically. docs/guides/update-code.md has the details.

    In Temporal's Web UI the signal or the update `update` of the job does the same:
    {"code": "/home/ada/gpt", "urgency": "lazy", "operator": "ada", "reason": "why"}.

    Examples:

        everstep update gpt --code ~/gpt --reason "a fused loss"

        everstep update gpt --git 1f3870b --urgent

        everstep update gpt --arg=--steps --arg=2000 --env LR=0.01 --window 2h

        everstep update gpt --cancel 3

    Exit codes: 0 the version waits, or was applied; 1 it was refused or rolled back; 2 no such job, or wrong usage;
    3 no cluster or no Temporal.
    """
    if urgent and lazy:
        raise ConfigError("--urgent and --lazy exclude each other: give only one of them")
    changes: dict[str, object] = {
        "code": str(code.expanduser().absolute()) if code else "",
        "git": git or "",
        "version": version or 0,
        "script": script or "",
        "args": arg,
        "env": dict(map(_variable, env)) if env else None,
        "cancel": cancel or 0,
    }
    if not any(changes.values()):
        raise ConfigError("nothing to change: give --code, --git, --version, --script, --arg, --env, or --cancel")
    when = {"urgency": "urgent" if urgent else "lazy", "window_h": _hours(window)}
    finish(_ask(job, changes | when, reason, by, cluster, detach=detach, as_json=as_json))


def rollback(  # noqa: PLR0917 - options of a command
    job: Job,
    to: Annotated[
        int | None,
        typer.Option("--to", metavar="N", help="Return to this version. Default: the last steady version before."),
    ] = None,
    lazy: Lazy = False,
    window: Window = "24h",
    reason: Reason = "",
    by: By = "",
    detach: Detach = False,
    cluster: ClusterOption = "default",
    as_json: JsonOption = False,
) -> None:
    """Return a job to an earlier version of its code. The present version becomes suspect, and is not chosen again.

    This happens at the end of a step, or with the next recovery (--lazy). A suspect version runs again only if an
    operator requests it.

    Examples:

        everstep rollback gpt --reason "the loss is worse"

        everstep rollback gpt --to 1 --lazy

    Exit codes: those of `everstep update`.
    """
    fields: dict[str, object] = {
        "rollback": True,
        "version": to or 0,
        "urgency": "lazy" if lazy else "urgent",
        "window_h": _hours(window),
    }
    finish(_ask(job, fields, reason, by, cluster, detach=detach, as_json=as_json))


async def _ask(
    job: str, fields: dict[str, object], reason: str, by: str, cluster: str, *, detach: bool, as_json: bool
) -> int:
    """Request another version, and show its status until it waits, runs, or is given up."""
    from controlplane.client import Control
    from controlplane.versions import ask_update, follow, made_here

    async with await Control.connect(cluster) as control:
        request = _request(fields | {"operator": by or getpass.getuser(), "reason": reason})
        request, note = await made_here(control, job, request, _note)
        if note:
            _note(note)
        answer, version = await ask_update(control, job, request)
        if not as_json:
            print(answer)
        if detach or request.cancel or version is None:
            return 0
        shown = ""
        last: JobVersion = version
        async for last in follow(control, job, version.number, urgent=request.urgency == "urgent"):
            line = outcome_line(last)
            if line != shown and not as_json:
                print(line)
                shown = line
        if as_json:
            patterns = (await control.state(job)).spec.redact
            print(json.dumps(last.without_secrets(patterns).model_dump(mode="json")))
        return 0 if last.status in {"pending", "running", "replaced", "superseded"} else 1


def outcome_line(version: JobVersion) -> str:
    """The status of a version, for the operator who requested it."""
    why = f" ({clean(version.why)})" if version.why else ""
    match version.status:
        case VersionStatus.CHECKING:
            status = version.why or "is being prepared"
        case VersionStatus.PENDING if version.wanted.urgency is Urgency.URGENT:
            status = f"passed its trial, and is about to be applied{why}"
        case VersionStatus.PENDING:
            until = text.moment_ns(version.due_ns)
            status = f"passed its trial, and waits for the next recovery, until {until} at the latest{why}"
        case VersionStatus.RUNNING:
            begin = version.ranges[-1][1] if version.ranges else -1
            status = f"runs from step {begin} on" if begin >= 0 else "runs"
        case _:
            status = f"{version.status}: {clean(version.why)}" if version.why else str(version.status)
    return f"{version.name}: {status}"


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _request(fields: dict[str, object]) -> UpdateRequest:
    try:
        return read_update(fields)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _variable(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise ConfigError(f"--env {text}: give NAME=VALUE, as in --env LR=0.01")
    return name, value


def _hours(text: str) -> float:
    """Parse a duration such as ``24h``, ``30m``, ``90s`` or ``2d``; returns hours."""
    try:
        value = float(text[:-1]) * UNITS[text[-1:]]
    except (ValueError, KeyError):
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"--window {text}: give a time such as 90s, 30m, 24h or 2d")
    return timedelta(seconds=value) / timedelta(hours=1)

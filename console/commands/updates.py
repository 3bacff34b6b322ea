"""``everstep update``, ``rollback`` and ``versions``: change a running job's code, and list which code ran when."""

from __future__ import annotations

import getpass
import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from console.commands.ledgers import LedgerOption, check_known, known_cluster, open_ledger
from everstep.errors import ClusterError, ConfigError, NoSuchJob

if TYPE_CHECKING:
    from activities.ledger.records import CodeVersionRecord
    from everstep.model.version import JobVersion, UpdateRequest

Job = Annotated[str, typer.Argument(help="Name of the job.")]
Cluster = Annotated[str, typer.Option("--cluster", metavar="NAME", help="Local cluster.", rich_help_panel="Where")]
Reason = Annotated[str, typer.Option("--reason", help="Why, for all who read it later.")]
By = Annotated[str, typer.Option("--by", metavar="NAME", help="Who asks; default: you.")]
Urgent = Annotated[bool, typer.Option("--urgent", help="Now, at the end of a step.", rich_help_panel="When")]
Lazy = Annotated[bool, typer.Option("--lazy", help="With the next recovery.", rich_help_panel="When")]
Window = Annotated[
    str,
    typer.Option(metavar="24h", help="A lazy one is forced after so long: 90s, 30m, 24h.", rich_help_panel="When"),
]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Do not wait until it was tried, or applied.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def update(  # noqa: PLR0917 - options of a command
    job: Job,
    code: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder as it is now.", rich_help_panel="Which code")
    ] = None,
    git: Annotated[
        str | None,
        typer.Option(
            metavar="REV",
            help="A revision in the repository of --code, or of the folder that runs.",
            rich_help_panel="Which code",
        ),
    ] = None,
    version: Annotated[
        int | None,
        typer.Option(metavar="N", help="A version that the job has had.", rich_help_panel="Which code"),
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Another script, relative to the folder.", rich_help_panel="Which code"),
    ] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(metavar="ARG", help="All arguments of the script anew, once for each.", rich_help_panel="With"),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A variable, beside those there are.", rich_help_panel="With"),
    ] = None,
    urgent: Urgent = False,
    lazy: Lazy = False,
    window: Window = "24h",
    reason: Reason = "",
    by: By = "",
    cancel: Annotated[int | None, typer.Option(metavar="N", help="Withdraw a version that waits.")] = None,
    detach: Detach = False,
    cluster: Cluster = "default",
    as_json: AsJson = False,
) -> None:
    """Give a running job other code, other arguments or other variables, without a new submission.

    A snapshot of the folder is taken here, where the store of versions is known (EVERSTEP_VERSIONS; of a local
    cluster it is), else by a worker, of the folder as it sees it. The new version is brought to all machines and
    tried there, up to where it joins the job; what fails there is refused, and costs the job nothing. Then it waits
    for the next recovery, whatever causes it (--lazy, the default), or is applied at the end of a step (--urgent).
    A version that fails in its first steps is taken back by itself. docs/guides/update-code.md says all of it.

    In Temporal's Web UI the same is the signal, or the update, `update` of the job:
    {"code": "/home/ada/gpt", "urgency": "lazy", "operator": "ada", "reason": "why"}.

    Examples:

        everstep update gpt --code ~/gpt --reason "a fused loss"

        everstep update gpt --git 1f3870b --urgent

        everstep update gpt --arg=--steps --arg=2000 --env LR=0.01 --window 2h

        everstep update gpt --cancel 3

    Exit codes: 0 it waits, or was applied; 1 it was refused or taken back; 2 no such job, or wrong usage;
    3 no cluster or no Temporal.
    """
    from console.commands.exit_codes import finish

    if urgent and lazy:
        raise ConfigError("--urgent and --lazy exclude each other: give one of them")
    fields: dict[str, object] = {
        "code": str(code.expanduser().absolute()) if code else "",
        "git": git or "",
        "version": version or 0,
        "script": script or "",
        "args": arg,
        "env": dict(map(_variable, env)) if env else None,
        "urgency": "urgent" if urgent else "lazy",
        "window_h": _hours(window),
        "cancel": cancel or 0,
    }
    if not any(fields[name] for name in ("code", "git", "version", "script", "args", "env", "cancel")):
        raise ConfigError("what shall change? Give --code, --git, --version, --script, --arg, --env, or --cancel")
    finish(_ask(job, fields, reason, by, cluster, detach=detach, as_json=as_json))


def rollback(  # noqa: PLR0917 - options of a command
    job: Job,
    to: Annotated[
        int | None, typer.Option("--to", metavar="N", help="Which version; default: the last steady one before.")
    ] = None,
    lazy: Lazy = False,
    window: Window = "24h",
    reason: Reason = "",
    by: By = "",
    detach: Detach = False,
    cluster: Cluster = "default",
    as_json: AsJson = False,
) -> None:
    """Take back the code that a job runs; it is suspect then, and not run again unless somebody asks for it.

    At the end of a step, or with the next recovery (--lazy).

    Examples:

        everstep rollback gpt --reason "the loss is worse"

        everstep rollback gpt --to 1 --lazy

    Exit codes: as of `everstep update`.
    """
    from console.commands.exit_codes import finish

    fields: dict[str, object] = {
        "rollback": True,
        "version": to or 0,
        "urgency": "lazy" if lazy else "urgent",
        "window_h": _hours(window),
    }
    finish(_ask(job, fields, reason, by, cluster, detach=detach, as_json=as_json))


def versions(  # noqa: PLR0917 - options of a command
    job: Job,
    number: Annotated[int | None, typer.Argument(help="One of them, in full.", show_default=False)] = None,
    all_runs: Annotated[bool, typer.Option("--all", help="Of all runs of its name, from the ledger.")] = False,
    ledger: LedgerOption = "",
    cluster: Cluster = "default",
    as_json: AsJson = False,
) -> None:
    """Which versions of its code a job has had: who, when, why, what changed, which steps, and how it ended.

    Where Temporal does not know the job any more, or does not answer, the ledger is read.

    Examples:

        everstep versions gpt

        everstep versions gpt 3

        everstep versions gpt --all

        everstep versions gpt --json | jq '.[] | select(.status == "suspect")'

    Exit codes: 0; 1 no such job, or the ledger cannot be read; 2 no such version; 3 neither cluster nor ledger.
    """
    from console.commands.exit_codes import finish

    if all_runs and number is not None:
        raise ConfigError("--all and a number exclude each other: every run numbers its versions anew")
    where = _Where(cluster, ledger)
    finish(_all_versions(job, where, as_json) if all_runs else _versions(job, number, where, as_json=as_json))


async def _ask(
    job: str, fields: dict[str, object], reason: str, by: str, cluster: str, *, detach: bool, as_json: bool
) -> int:
    from console.views.versions import outcome_line
    from controlplane.client import Control
    from controlplane.versions import ask_update, follow, made_here

    async with await Control.connect(cluster) as control:
        request = _request(fields | {"operator": by or getpass.getuser(), "reason": reason})
        request, note = await made_here(control, job, request, _tell)
        if note:
            _tell(note)
        said, version = await ask_update(control, job, request)
        if not as_json:
            print(said)
        if detach or request.cancel or version is None:
            return 0
        told = ""
        last: JobVersion = version
        async for last in follow(control, job, version.number, urgent=request.urgency == "urgent"):
            line = outcome_line(last)
            if line != told and not as_json:
                print(line)
                told = line
        if as_json:
            patterns = (await control.state(job)).spec.redact
            print(json.dumps(last.without_secrets(patterns).model_dump(mode="json")))
        return 0 if last.status in {"pending", "running", "replaced", "superseded"} else 1


@dataclass(frozen=True, slots=True)
class _Where:
    """The sources of a job's versions: the job itself, then the ledger."""

    cluster: str
    ledger: str
    """URL; empty: the cluster's."""

    async def versions(self, job: str) -> list[JobVersion]:
        """The versions of the newest run: from the job itself, else from the ledger."""
        from controlplane.client import Control

        with suppress(ClusterError, NoSuchJob):
            async with await Control.connect(self.cluster) as control:
                state = await control.state(job)
                return [one.without_secrets(state.spec.redact) for one in state.versions]
        return [version for _, version in self.recorded(job, all_runs=False)]

    def recorded(self, job: str, *, all_runs: bool) -> list[tuple[CodeVersionRecord, JobVersion]]:
        """The versions that the ledger has.

        Raises:
            LedgerError: the ledger cannot be read, or does not have the job.
        """
        with open_ledger(self.ledger, self.cluster, known_cluster(self.cluster)) as opened:
            records = opened.versions(job, all_runs=all_runs)
            if not records:
                check_known(opened, job)
        return [(record, version) for record in records if (version := record.parsed()) is not None]


async def _versions(job: str, number: int | None, where: _Where, *, as_json: bool) -> int:
    from console.views.versions import detail_lines, versions_table

    found = await where.versions(job)
    if number is not None:
        found = [one for one in found if one.number == number]
        if not found:
            raise ConfigError(f"job {job} has no v{number}: see 'everstep versions {job}'")
    if as_json:
        print(json.dumps([one.model_dump(mode="json") for one in found]))
    elif number is not None:
        print("\n".join(detail_lines(found[0])))
    elif not found:
        print(f"job {job} was started before versions were known: an update makes the first ones")
    else:
        from console.terminal import PlainConsole

        PlainConsole().print(versions_table(found))
    return 0


async def _all_versions(job: str, where: _Where, as_json: bool) -> int:
    from console.views.versions import run_line, versions_table

    found = where.recorded(job, all_runs=True)
    runs = {record.run: record for record, _ in found}
    if as_json:
        print(json.dumps([one.model_dump(mode="json") | {"run_started_ns": of.started_ns} for of, one in found]))
        return 0
    from console.terminal import PlainConsole

    for run, record in runs.items():
        print(run_line(record.started_ns, record.outcome or ""))
        PlainConsole().print(versions_table([one for of, one in found if of.run == run]))
    return 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _request(fields: dict[str, object]) -> UpdateRequest:
    from everstep.model.version import read_update

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

"""``everstep versions``: show which code a job ran at which time, who changed it, and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from console.commands.shared import (
    ClusterOption,
    JsonOption,
    LedgerOption,
    check_known,
    finish,
    known_cluster,
    open_ledger,
)
from console.terminal import PlainConsole
from controlplane import text
from controlplane.shown import clean
from everstep.base.text import error_line
from everstep.errors import ClusterError, ConfigError, NoSuchJob
from everstep.model.version import NAME_CHARACTERS, JobVersion, VersionStatus

if TYPE_CHECKING:
    from activities.ledger.records import CodeVersionRecord

RANGES_SHOWN = 3
FAILED = frozenset({VersionStatus.REFUSED, VersionStatus.SUSPECT})


def versions(  # noqa: PLR0917 - options of a command
    job: Annotated[str, typer.Argument(help="Name of the job.")],
    number: Annotated[int | None, typer.Argument(help="Show all details of this version.", show_default=False)] = None,
    all_runs: Annotated[
        bool, typer.Option("--all", help="Show the versions of all runs with this name, from the ledger.")
    ] = False,
    ledger: LedgerOption = "",
    cluster: ClusterOption = "default",
    as_json: JsonOption = False,
) -> None:
    """Show the versions of a job's code: who requested each, when, why, what changed, its steps, and its outcome.

    If Temporal does not have the job any more, or does not answer, the ledger is read.

    Examples:

        everstep versions gpt

        everstep versions gpt 3

        everstep versions gpt --all

        everstep versions gpt --json | jq '.[] | select(.status == "suspect")'

    Exit codes: 0 shown; 1 no such job, or the ledger cannot be read; 2 no such version; 3 neither cluster nor ledger.
    """
    if all_runs and number is not None:
        raise ConfigError("--all and a number exclude each other, since every run numbers its versions anew")
    if all_runs:
        finish(_all_versions(job, ledger, cluster, as_json=as_json))
    finish(_versions(job, number, ledger, cluster, as_json=as_json))


async def _versions(job: str, number: int | None, ledger: str, cluster: str, *, as_json: bool) -> int:
    shown = await _newest_run(job, ledger, cluster)
    if number is not None:
        shown = [version for version in shown if version.number == number]
        if not shown:
            raise ConfigError(f"job {job} has no version v{number}: see 'everstep versions {job}'")
    if as_json:
        print(json.dumps([version.model_dump(mode="json") for version in shown]))
    elif number is not None:
        print("\n".join(detail_lines(shown[0])))
    elif not shown:
        print(f"job {job} has no recorded versions, since an older release started it: its first update records them")
    else:
        PlainConsole().print(versions_table(shown))
    return 0


async def _newest_run(job: str, ledger: str, cluster: str) -> list[JobVersion]:
    """The versions of the newest run, from the job itself or else from the ledger."""
    from controlplane.client import Control

    with suppress(ClusterError, NoSuchJob):
        async with await Control.connect(cluster) as control:
            state = await control.state(job)
            return [version.without_secrets(state.spec.redact) for version in state.versions]
    return [version for _, version in _recorded(job, ledger, cluster, all_runs=False)]


def _recorded(job: str, ledger: str, cluster: str, *, all_runs: bool) -> list[tuple[CodeVersionRecord, JobVersion]]:
    """The versions in the ledger, with their records.

    Raises:
        LedgerError: the ledger cannot be read, or does not have the job.
    """
    with open_ledger(ledger, cluster, known_cluster(cluster)) as opened:
        records = opened.versions(job, all_runs=all_runs)
        if not records:
            check_known(opened, job)
    return [(record, version) for record in records if (version := record.parsed()) is not None]


async def _all_versions(job: str, ledger: str, cluster: str, *, as_json: bool) -> int:
    recorded = _recorded(job, ledger, cluster, all_runs=True)
    if as_json:
        rows = [version.model_dump(mode="json") | {"run_started_ns": run.started_ns} for run, version in recorded]
        print(json.dumps(rows))
        return 0
    for number, record in {record.run: record for record, _ in recorded}.items():
        outcome = f", {clean(record.outcome)}" if record.outcome else ""
        print(f"run of {text.moment_ns(record.started_ns)}{outcome}")
        PlainConsole().print(versions_table([version for run, version in recorded if run.run == number]))
    return 0


def versions_table(versions: Sequence[JobVersion]) -> Table:
    """A table with one line for each version."""
    table = Table(box=None, pad_edge=False)
    for column in ("Version", "Status", "Steps", "Requested", "By", "Why", "What changed"):
        table.add_column(column, no_wrap=column in {"Version", "Status", "Requested"})
    for version in versions:
        why = version.wanted.reason or (error_line(version.why) if version.status in FAILED else "")
        table.add_row(
            version.name,
            status_word(version),
            steps_text(version),
            text.moment_ns(version.asked_ns),
            version.wanted.operator if version.number > 1 else "",
            why,
            version.changed.strip().partition("\n")[0],
        )
    return table


def status_word(version: JobVersion) -> str:
    """The status in one word; after its job has ended, no version counts as running."""
    return "ended" if version.status is VersionStatus.RUNNING and version.ended else str(version.status)


def detail_lines(version: JobVersion) -> list[str]:
    """All details of one version."""
    runs, origin = version.runs, version.runs.origin if version.runs else None
    commit = f"{origin.commit[:NAME_CHARACTERS]} of {origin.author}: {origin.subject}" if origin else ""
    facts = [
        ("status", f"{status_word(version)}{': ' if version.why else ''}{version.why}"),
        ("request", f"{text.moment_ns(version.asked_ns)} by {version.wanted.operator}"),
        ("why", version.wanted.reason),
        ("steps", steps_text(version)),
        ("ended", version.ended),
        ("code", (runs.code[:NAME_CHARACTERS] or f"in place: {runs.script}") if runs else ""),
        ("folder", origin.folder if origin else ""),
        ("commit", commit + (", with changes" if origin and origin.dirty else "") if origin and origin.commit else ""),
        ("script", " ".join([runs.script, *runs.args]) if runs else ""),
        ("changed", version.changed),
    ]
    shown = [(name, clean(value)) for name, value in facts if value]
    return [version.name, *(f"    {name:8}  {value.replace(chr(10), chr(10) + ' ' * 14)}" for name, value in shown)]


def steps_text(version: JobVersion) -> str:
    """The steps that ran under a version, such as ``0 to 120, from 180``."""
    texts = []
    for _, begin, end in version.ranges[-RANGES_SHOWN:]:
        if begin < 0:
            return "not numbered"
        runs = version.status is VersionStatus.RUNNING  # otherwise its last step is not known
        texts.append(f"{begin} to {end}" if end >= 0 else f"from {begin}" if runs else f"{begin} to ?")
    more = len(version.ranges) - RANGES_SHOWN
    return ", ".join(texts) + (f" (+{more} more)" if more > 0 else "")

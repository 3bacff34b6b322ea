"""``everstep status``, ``logs``, ``stop``, ``resume``, ``approve`` and ``abandon``: commands for existing jobs."""

from __future__ import annotations

import asyncio
import getpass
import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from console.commands.shared import ClusterOption, JsonOption, finish
from console.terminal import PlainConsole
from everstep.errors import AgentError, ClusterError, ConfigError

if TYPE_CHECKING:
    from controlplane.client import Control
    from controlplane.queries.rank_logs import RankLogs, Source
    from controlplane.queries.status import JobReport
    from everstep.model.job_state import JobState

Note = Annotated[
    str, typer.Option("--note", help="The reason for the command; it is kept with the incident or the job.")
]
Reference = Annotated[
    str,
    typer.Argument(
        metavar="JOB|INCIDENT",
        help="gpt means the open incident of job gpt; gpt/2 and incident/gpt/0002 mean its second incident.",
    ),
]

TAIL_OF_ALL = 10
"""Number of lines for each rank when the logs of all ranks are shown."""
PATIENCE_S = 30.0
"""The commands stop, resume and abandon wait this long for their effect, seconds. The command stop waits for the
policy's ``stop.grace_s`` in addition."""
POLL_S = 0.2


def status(
    job: Annotated[
        str, typer.Argument(help="Show all details of this job. Default: a table of all jobs.", show_default=False)
    ] = "",
    cluster: ClusterOption = "default",
    as_json: JsonOption = False,
) -> None:
    """Show the status of jobs: state, step, loss, ranks with their pids, ETTR, and incidents.

    Machines whose agent does not answer are named. Their ranks may still be running.

    Examples:

        everstep status

        everstep status gpt

        everstep status gpt --json | jq .step

    Exit codes: 0 shown; 2 no such job; 3 no cluster or no Temporal.
    """
    finish(_status(job, cluster, as_json=as_json))


def logs(  # noqa: PLR0917 - options of a command
    job: Annotated[str, typer.Argument(help="Name of the job; it may have ended.")],
    rank: Annotated[
        int | None,
        typer.Option("--rank", "-r", help="Show only this rank. Default: all ranks, with a prefix such as r0|."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Also show new output as it is written, until the job ends.")
    ] = False,
    stream: Annotated[str, typer.Option(metavar="both|stdout|stderr", help="Which output to show.")] = "both",
    tail: Annotated[
        int | None,
        typer.Option(
            "--tail",
            "-n",
            min=0,
            help="Number of last lines of each rank and stream. Default: 10 for all ranks; all lines for one rank.",
        ),
    ] = None,
    cluster: ClusterOption = "default",
) -> None:
    """Show the output of a job's ranks, over all generations. Logs stay after the job has ended.

    For each rank the standard output is shown first, then the error output, in which a line
    `--- everstep: rank 3, generation 2, …` marks the beginning of a generation. With -f, lines are shown as they
    arrive.

    Examples:

        everstep logs gpt

        everstep logs gpt --rank 5 --stream stderr --tail 50

        everstep logs gpt -f

    Exit codes: 0 shown; 1 a machine does not answer, or a rank has no log; 2 no such job or rank;
    3 no cluster or no Temporal.
    """
    from controlplane.queries.rank_logs import STREAMS

    if stream not in STREAMS:
        raise ConfigError(f"--stream {stream}: use one of {', '.join(STREAMS)}")
    finish(_logs(job, cluster, rank=rank, follow=follow, stream=stream, tail=tail))


def stop(
    job: Annotated[str, typer.Argument(help="Name of a running job.")],
    note: Note = "",
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Send the request, and do not wait for the end.")] = False,
    cluster: ClusterOption = "default",
) -> None:
    """End a job for good: its ranks get SIGTERM, and SIGKILL after the policy's stop.grace_s. Its logs stay.

    If the job is recovering or parked, its incident is closed as abandoned.

    Examples:

        everstep stop gpt

        everstep stop gpt --note "wrong data"

    Exit codes: 0 stopped; 1 it has not ended yet; 2 no such job, or it does not run; 3 no cluster or no Temporal.
    """
    finish(_stop(job, note, cluster, wait=not no_wait))


def resume(
    reference: Reference,
    note: Note = "",
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="Continue from the newest step that is known, although a newer step may exist. This is recorded.",
        ),
    ] = False,
    cluster: ClusterOption = "default",
) -> None:
    """Let a parked job try again, with a new budget of attempts.

    If a newer step may lie on storage that does not answer, the storage is queried again. With --accept-loss the job
    continues from the step that 'everstep status' names, or from a later step. Copies of steps after the step from
    which it continues are set aside, or lost.

    Examples:

        everstep resume gpt

        everstep resume gpt/2 --note "disk is free again"

        everstep resume gpt --accept-loss --note "the share is gone for good"

    Exit codes: 0 it tries again; 1 not yet; 2 no such job, or it is not parked; 3 no cluster or no Temporal.
    """
    finish(_answer("resume", reference, note, cluster, accept_loss=accept_loss))


def approve(
    reference: Reference,
    by: Annotated[str, typer.Option("--by", metavar="NAME", help="Who approves. Default: your user name.")] = "",
    note: Note = "",
    cluster: ClusterOption = "default",
) -> None:
    """Approve the evictions for which a parked job waits: the breaker tripped, or a rule has the mode 'approve'.

    The machines that 'everstep status JOB' names leave the job, and other machines replace them. If you do not approve,
    'everstep resume' lets the job continue with these machines, and 'everstep abandon' gives the job up.

    In Temporal's Web UI the update or the signal `approve` of the incident does the same:
    {"operator": "you", "note": "why"}.

    Examples:

        everstep approve gpt

        everstep approve gpt/2 --by ada --note "their switch is dead"

    Exit codes: 0 approved; 2 no such job, it is not parked, or no eviction waits for approval; 3 no cluster or no
    Temporal.
    """
    finish(_approve(reference, by, note, cluster))


def abandon(reference: Reference, note: Note = "", cluster: ClusterOption = "default") -> None:
    """Give up a job whose incident is open: the incident and the job end, and no rank continues.

    Examples:

        everstep abandon gpt

        everstep abandon incident/gpt/0002 --note "script is broken"

    Exit codes: 0 given up; 1 not yet; 2 no such job, or no open incident; 3 no cluster or no Temporal.
    """
    finish(_answer("abandon", reference, note, cluster))


async def _status(job: str, cluster: str, *, as_json: bool) -> int:
    from console.views.status_text import jobs_table, problem_lines
    from controlplane.client import Control
    from controlplane.queries.status import job_lines, job_report
    from controlplane.references import option_of

    console = PlainConsole()
    async with await Control.connect(cluster) as control:
        if job:
            report = await job_report(control, job)
            if as_json:
                print(report.model_dump_json(indent=2))
            else:
                await _show_report(console, control, report)
            return 0
        lines = await job_lines(control)
    if as_json:
        print(json.dumps([line.model_dump(mode="json") for line in lines], indent=2))
    elif lines:
        console.print(jobs_table(lines))
        for problem in problem_lines(lines):
            console.print(problem, style="red", soft_wrap=True)
    else:
        print(f"no job has run yet: 'everstep run{option_of(cluster)} --help' shows how to run one")
    return 0


async def _show_report(console: PlainConsole, control: Control, report: JobReport) -> None:
    from console.views.parked import parked_lines
    from console.views.status_text import incidents_table, job_facts, machine_rows

    console.print(report.name, style="bold")
    for key, value in [*job_facts(report), *machine_rows(report.machines, ended=report.ended is not None)]:
        console.print(f"  {key:<10}{value}", soft_wrap=True)
    if report.open_incident and report.status == "parked":
        console.print("parked: it needs an operator", style="bold red")
        for line in await parked_lines(control, report.name, report.open_incident):
            console.print(f"  {line}", soft_wrap=True)
    if report.incidents:
        console.print()
        console.print(incidents_table(report))


async def _logs(job: str, cluster: str, *, rank: int | None, follow: bool, stream: str, tail: int | None) -> int:
    from controlplane.client import Control
    from controlplane.queries.rank_logs import RankLogs, sources_of

    async with await Control.connect(cluster) as control:
        run = await control.run_of(job)
        state = await control.state(job)
        sources = sources_of(state.spec, state.machines, rank)
        if tail is None and rank is None:
            tail = TAIL_OF_ALL
        reader = RankLogs(control.agents, job, stream)
        if follow and run.running:
            await _follow_logs(control, reader, sources, tail, state)
            return 0
        return await _print_logs(reader, sources, tail, prefix=rank is None)


async def _print_logs(reader: RankLogs, sources: list[Source], tail: int | None, *, prefix: bool) -> int:
    outputs = await asyncio.gather(*(reader.read(source, tail) for source in sources), return_exceptions=True)
    code = 0
    for source, lines in zip(sources, outputs, strict=True):
        if isinstance(lines, AgentError):
            print(f"error: {lines}", file=sys.stderr)
            code = 1
        elif isinstance(lines, BaseException):
            raise lines
        else:
            for line in lines:
                print(f"{_prefix(source.rank)}{line}" if prefix else line)
    return code


async def _follow_logs(
    control: Control, reader: RankLogs, sources: list[Source], tail: int | None, state: JobState
) -> None:
    from temporalio.client import WorkflowFailureError

    over = asyncio.Event()

    async def wait() -> None:
        with suppress(WorkflowFailureError):
            await control.result(state.spec.name)

    watching = asyncio.create_task(wait())
    watching.add_done_callback(lambda _: over.set())
    try:
        async for rank, line in reader.follow(sources, tail, over):
            print(f"{_prefix(rank)}{line}" if len(sources) > 1 else line, flush=True)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def _prefix(rank: int) -> str:
    return f"r{rank}| "


async def _stop(job: str, note: str, cluster: str, *, wait: bool) -> int:
    from controlplane.client import Control

    async with await Control.connect(cluster) as control:
        await control.stop(job, note)
        if not wait:
            print(f"job {job} was asked to stop: 'everstep status {job}{control.option}' shows when it has ended")
            return 0
        grace_s = 0.0
        with suppress(ClusterError):  # the job has the signal, even if it does not answer this query
            grace_s = (await control.state(job)).spec.policy.stop.grace_s
        deadline = asyncio.get_running_loop().time() + PATIENCE_S + grace_s
        while asyncio.get_running_loop().time() < deadline:
            if not (await control.run_of(job)).running:
                print(f"job {job} is stopped; its logs stay: everstep logs {job}{control.option}")
                return 0
            await asyncio.sleep(POLL_S)
    print(
        f"error: job {job} was asked to stop and has not ended yet: see 'everstep status {job}{control.option}'",
        file=sys.stderr,
    )
    return 1


async def _answer(
    answer: Literal["resume", "abandon"], reference: str, note: str, cluster: str, *, accept_loss: bool = False
) -> int:
    """Send an operator's answer to an open incident, and wait until it takes effect."""
    from controlplane.client import Control
    from controlplane.references import parse_incident

    job, _ = parse_incident(reference)
    async with await Control.connect(cluster) as control:
        incident = await control.open_incident(reference)
        if answer == "resume":
            stage = await control.stage(incident.id)
            if stage.name != "parked":
                raise ConfigError(
                    f"incident {incident.id} is not parked: it is at stage {stage.name} and continues by itself; "
                    f"see 'everstep status {job}{control.option}'"
                )
        await control.answer(incident.id, answer, note, accept_loss=accept_loss)
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while asyncio.get_running_loop().time() < deadline:
            if await _took_effect(control, job, incident.id, answer):
                if answer == "resume":
                    print(f"job {job} tries again: follow it with 'everstep attach {job}{control.option}'")
                else:
                    print(f"job {job} is given up: see 'everstep status {job}{control.option}'")
                return 0
            await asyncio.sleep(POLL_S)
    print(
        f"error: the answer '{answer}' has no effect on {incident.id} yet: see 'everstep status {job}{control.option}'",
        file=sys.stderr,
    )
    return 1


async def _approve(reference: str, by: str, note: str, cluster: str) -> int:
    from controlplane.client import Control
    from controlplane.operator_updates import approve as ask_approval
    from controlplane.references import parse_incident

    job, _ = parse_incident(reference)
    async with await Control.connect(cluster) as control:
        incident = await control.open_incident(reference)
        approved = await ask_approval(control, incident.id, by or getpass.getuser(), note)
        print(f"{approved}: follow the job with 'everstep attach {job}{control.option}'")
    return 0


async def _took_effect(control: Control, job: str, incident_id: str, answer: str) -> bool:
    """Whether the operator's answer took effect."""
    if answer == "abandon":
        return not (await control.run_of(job)).running
    try:
        state = await control.state(job)
    except ClusterError:
        return False
    incident = next((incident for incident in state.incidents if incident.id == incident_id), None)
    return incident is None or bool(incident.resolution) or incident.stage != "parked"

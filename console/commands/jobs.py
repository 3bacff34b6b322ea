"""``everstep status``, ``logs``, ``stop``, ``resume``, ``approve``, ``abandon``: commands for jobs that exist."""

from __future__ import annotations

import asyncio
import getpass
import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from everstep.errors import AgentError, ClusterError, ConfigError

if TYPE_CHECKING:
    from console.terminal import PlainConsole
    from controlplane.client import Control
    from controlplane.queries.rank_logs import RankLogs, Source
    from controlplane.queries.status import JobReport
    from everstep.model.job_state import JobState

Cluster = Annotated[str, typer.Option("--cluster", metavar="NAME", help="Local cluster.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Note = Annotated[str, typer.Option("--note", help="Why; kept with the incident or the job.")]
Reference = Annotated[
    str,
    typer.Argument(metavar="JOB|INCIDENT", help="gpt means its open incident; gpt/2 or incident/gpt/0002 that one."),
]

TAIL_OF_ALL = 10
"""Number of lines for each rank when the logs of all ranks are shown."""
PATIENCE_S = 30.0
"""stop, resume and abandon wait this long for their effect, beyond the time in the job's policy, seconds."""
POLL_S = 0.2


def status(
    job: Annotated[str, typer.Argument(help="One job in full; default: a table of all.", show_default=False)] = "",
    cluster: Cluster = "default",
    as_json: AsJson = False,
) -> None:
    """Show where jobs stand: state, step, loss, ranks with their pids, ETTR, the open incident, the last ones.

    Machines whose agent does not answer are named. That does not mean that their ranks do not run.

    Examples:

        everstep status

        everstep status gpt

        everstep status gpt --json | jq .step

    Exit codes: 0 shown; 2 no such job; 3 no cluster or no Temporal.
    """
    from console.commands.exit_codes import finish

    finish(_status(job, cluster, as_json=as_json))


def logs(  # noqa: PLR0917 - options of a command
    job: Annotated[str, typer.Argument(help="Name of the job; it may have ended.")],
    rank: Annotated[int | None, typer.Option("--rank", "-r", help="One rank; default: all, with r0| before.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written, until the end.")] = False,
    stream: Annotated[str, typer.Option(metavar="both|stdout|stderr", help="Which output.")] = "both",
    tail: Annotated[
        int | None,
        typer.Option("--tail", "-n", min=0, help="Last lines per rank and stream; default: 10 of all, all of one."),
    ] = None,
    cluster: Cluster = "default",
) -> None:
    """Show what the ranks of a job wrote, over all generations. Logs stay after the job has ended.

    Of each rank first the output, then the error output, which has a line
    `--- everstep: rank 3, generation 2, …` where a generation begins; with -f as it comes.

    Examples:

        everstep logs gpt

        everstep logs gpt --rank 5 --stream stderr --tail 50

        everstep logs gpt -f

    Exit codes: 0 shown; 1 a machine does not answer, or a rank has no log; 2 no such job or rank;
    3 no cluster or no Temporal.
    """
    from console.commands.exit_codes import finish
    from controlplane.queries.rank_logs import STREAMS

    if stream not in STREAMS:
        raise ConfigError(f"--stream {stream}: use one of {', '.join(STREAMS)}")
    finish(_logs(job, cluster, rank=rank, follow=follow, stream=stream, tail=tail))


def stop(
    job: Annotated[str, typer.Argument(help="Name of a running job.")],
    note: Note = "",
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return when the job was asked.")] = False,
    cluster: Cluster = "default",
) -> None:
    """End a job for good: SIGTERM to its ranks, SIGKILL after the policy's stop.grace_s; its logs stay.

    A job that is recovering or parked is stopped as well: its incident is closed as abandoned.

    Examples:

        everstep stop gpt

        everstep stop gpt --note "wrong data"

    Exit codes: 0 stopped; 1 not yet; 2 no such job, or it does not run; 3 no cluster or no Temporal.
    """
    from console.commands.exit_codes import finish

    finish(_stop(job, note, cluster, wait=not no_wait))


def resume(
    reference: Reference,
    note: Note = "",
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss", help="Go on from the step that is certain, though a newer one may exist; it is recorded."
        ),
    ] = False,
    cluster: Cluster = "default",
) -> None:
    """Let a parked job try again, with a fresh budget of attempts.

    Where a newer step may lie on storage that does not answer, it is asked again. With --accept-loss the job goes on
    from the step that status names as certain, or a later one; what may be newer is then set aside, or gone.

    Examples:

        everstep resume gpt

        everstep resume gpt/2 --note "disk is free again"

        everstep resume gpt --accept-loss --note "the share is gone for good"

    Exit codes: 0 it tries again; 1 not yet; 2 no such job, or it is not parked; 3 no cluster or no Temporal.
    """
    from console.commands.exit_codes import finish

    finish(_answer("resume", reference, note, cluster, accept_loss=accept_loss))


def approve(
    reference: Reference,
    by: Annotated[str, typer.Option("--by", metavar="NAME", help="Who approves; default: you.")] = "",
    note: Note = "",
    cluster: Cluster = "default",
) -> None:
    """Let machines leave a parked job that wait for an operator: the breaker tripped, or a rule's mode is 'approve'.

    Those leave that 'everstep status JOB' names, and others take their places.
    'everstep resume' goes on with them instead, 'everstep abandon' gives the job up.

    In Temporal's Web UI the same is the update, or the signal, `approve` of the
    incident: {"operator": "you", "note": "why"}.

    Examples:

        everstep approve gpt

        everstep approve gpt/2 --by ada --note "their switch is dead"

    Exit codes: 0 approved; 2 no such job, it is not parked, or nothing is to approve; 3 no cluster or no Temporal.
    """
    from console.commands.exit_codes import finish

    finish(_approve(reference, by, note, cluster))


def abandon(reference: Reference, note: Note = "", cluster: Cluster = "default") -> None:
    """Give a job up whose incident is open: the incident and the job end, no rank runs on.

    Examples:

        everstep abandon gpt

        everstep abandon incident/gpt/0002 --note "script is broken"

    Exit codes: 0 given up; 1 not yet; 2 no such job, or no open incident; 3 no cluster or no Temporal.
    """
    from console.commands.exit_codes import finish

    finish(_answer("abandon", reference, note, cluster))


async def _status(job: str, cluster: str, *, as_json: bool) -> int:
    from console.terminal import PlainConsole
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
        print(f"no jobs yet: everstep run{option_of(cluster)} --help")
    return 0


async def _show_report(console: PlainConsole, control: Control, report: JobReport) -> None:
    from console.views.parked import parked_lines
    from console.views.status_text import incidents_table, job_facts, machine_rows

    console.print(report.name, style="bold")
    for key, value in [*job_facts(report), *machine_rows(report.machines, ended=report.ended is not None)]:
        console.print(f"  {key:<10}{value}", soft_wrap=True)
    if report.open_incident and report.status == "parked":
        console.print("parked: it needs you", style="bold red")
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
            print(f"{job} was asked to stop: everstep status {job}{control.option}")
            return 0
        grace_s = 0.0
        with suppress(ClusterError):  # the job has the signal, even if it does not answer
            grace_s = (await control.state(job)).spec.policy.stop.grace_s
        deadline = asyncio.get_running_loop().time() + PATIENCE_S + grace_s
        while asyncio.get_running_loop().time() < deadline:
            if not (await control.run_of(job)).running:
                print(f"{job} is stopped; its logs stay: everstep logs {job}{control.option}")
                return 0
            await asyncio.sleep(POLL_S)
    print(
        f"error: {job} was asked to stop and has not ended yet: see 'everstep status {job}{control.option}'",
        file=sys.stderr,
    )
    return 1


async def _answer(answer: str, reference: str, note: str, cluster: str, *, accept_loss: bool = False) -> int:
    from controlplane.client import Control
    from controlplane.references import parse_incident

    job, _ = parse_incident(reference)
    async with await Control.connect(cluster) as control:
        incident = await control.open_incident(reference)
        if answer == "resume":
            stage = await control.stage(incident.id)
            if stage.name != "parked":
                raise ConfigError(
                    f"incident {incident.id} is not parked, it is at stage {stage.name}: "
                    f"it goes on by itself, see 'everstep status {job}{control.option}'"
                )
        await control.tell(incident.id, answer, note, accept_loss=accept_loss)
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while asyncio.get_running_loop().time() < deadline:
            if await _heeded(control, job, incident.id, answer):
                word = "tries again" if answer == "resume" else "is given up"
                print(f"{job} {word}: everstep {'attach' if answer == 'resume' else 'status'} {job}{control.option}")
                return 0
            await asyncio.sleep(POLL_S)
    print(
        f"error: {incident.id} did not take the {answer} yet: see 'everstep status {job}{control.option}'",
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
        who = by or getpass.getuser()
        print(f"{await ask_approval(control, incident.id, who, note)}: everstep attach {job}{control.option}")
    return 0


async def _heeded(control: Control, job: str, incident_id: str, answer: str) -> bool:
    """Whether the operator's command took effect."""
    if answer == "abandon":
        return not (await control.run_of(job)).running
    try:
        state = await control.state(job)
    except ClusterError:
        return False
    known = next((known for known in state.incidents if known.id == incident_id), None)
    return known is None or bool(known.resolution) or known.stage != "parked"

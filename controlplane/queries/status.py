"""The status of jobs, from Temporal, the agents and the ledger."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from datetime import datetime

from pydantic import BaseModel, Field

from agent.v1 import agent_pb2 as pb
from controlplane.client import Control
from controlplane.progress import JobProgress, RankView, merge, views_of
from controlplane.queries.checkpoints import ask_for_copies, report_of
from controlplane.queries.last_step import last_step
from controlplane.queries.metrics import MetricsReport, metrics_report
from controlplane.queries.saved import SavedReport, saved_report, unsteady
from controlplane.queries.time_lost import TimeLost, lost_of
from controlplane.references import JobRun
from everstep.base.text import error_line
from everstep.decisions.keep.starts import left_by_earlier_run
from everstep.decisions.training_time.ettr import Ettr
from everstep.errors import AgentError, ClusterError, EverstepError
from everstep.model.job_state import IncidentSummary, JobState
from everstep.model.machine import Machine
from everstep.model.version import VersionStatus
from workflows.web_ui import pending_text

DESCRIBE_S = 1.5
"""An agent that needs longer counts as silent, seconds."""
LAST_INCIDENTS = 5

DISKS_S = 3.0
"""Time limit for a listing of disks, seconds; remote storage takes longer and is not listed."""


class RankStatus(BaseModel):
    """The status of one rank."""

    rank: int
    pid: int
    alive: bool
    finished: bool
    completed_steps: int | None
    loss: float | None


Described = dict[str, pb.DescribeReply | AgentError]
"""Machine → the answer of its agent, or the error."""


class MachineStatus(BaseModel):
    """The status of one machine of a job."""

    name: str
    address: str
    answers: bool
    ranks: list[RankStatus]
    problem: str = ""
    """Why its agent does not answer; empty: it answers."""


class JobReport(BaseModel):
    """The status of one job; the JSON of ``everstep status JOB``."""

    name: str
    status: str
    """Status of the job, or of its workflow if no worker answers."""
    outcome: str
    unconfirmed: str
    """Why a running job is not confirmed; empty: it is confirmed, or does not run."""
    launched: bool
    """Whether the job was launched; if not, it has no generation, step or loss (yet)."""
    started: datetime
    ended: datetime | None
    script: str
    args: list[str]
    world_size: int
    tp: int
    pp: int
    dp: int
    sizes: str = ""
    """The mesh as text: ``pp 2, dp 2, tp 2``."""
    mesh: dict[str, int] = Field(default_factory=dict, description="Size of each axis, in order.")
    generation: int
    step: int | None
    loss: float | None
    ettr: float | None
    ettr_last_hour: float | None
    metrics: MetricsReport | None = None
    """Training metrics; None: it does not run, or its ranks report none."""
    machines: list[MachineStatus]
    silent: list[str]
    """Machines whose agent does not answer."""
    ettr_unknown: list[str] = Field(default_factory=list)
    """Facts about lost time that are not known; because of them, the true ratio may be lower."""
    time_lost: TimeLost | None = None
    """Unproductive time by cause; None: the job was never launched, or the ledger does not have the job."""
    backups: str
    """Where the backups are, and which machines may be lost; empty: the job does not run."""
    saved: SavedReport | None
    """The saved steps; None: nothing is saved, or no agent reports it."""
    kept: str
    """The state that is left after its end; empty: it runs, or was never launched."""
    incident_count: int
    open_incident: IncidentSummary | None
    incidents: list[IncidentSummary]
    """The last incidents, oldest first."""
    rejected: list[str]
    """Signals that the workflow could not accept."""
    link: str
    code: str = ""
    """The version of its code that runs, and the version that waits; empty: it has had only one version."""


class JobLine(BaseModel):
    """One job in the table; the JSON of ``everstep status``."""

    name: str
    status: str
    outcome: str
    step: int | None
    loss: float | None
    saved: SavedReport | None
    generation: int | None
    machines: int | None
    ranks: int | None
    incidents: int | None
    ettr: float | None
    started: datetime
    ended: datetime | None
    problem: str = ""
    """Why some values are not known; empty: all are known."""


async def job_lines(control: Control) -> list[JobLine]:
    """All jobs, running jobs first; if values of a job are not known, its line has the problem."""
    runs = await control.jobs()
    results = await asyncio.gather(*(_line(control, run) for run in runs), return_exceptions=True)
    lines = []
    for run, result in zip(runs, results, strict=True):
        if isinstance(result, Exception):
            lines.append(_bare(run, f"this release cannot show job {run.name} ({type(result).__name__}: {result})"))
        elif isinstance(result, BaseException):
            raise result
        else:
            lines.append(result)
    return lines


def _bare(run: JobRun, problem: str) -> JobLine:
    """The line of a job with only the values in Temporal's list."""
    return JobLine(
        name=run.name,
        status=run.status,
        outcome="",
        step=None,
        loss=None,
        saved=None,
        generation=None,
        machines=None,
        ranks=None,
        incidents=None,
        ettr=None,
        started=run.started,
        ended=run.closed,
        problem=problem,
    )


async def _line(control: Control, run: JobRun) -> JobLine:
    try:
        state = await control.state(run.name)
    except ClusterError as error:
        line = _bare(run, str(error))
        return line.model_copy(update={"ettr": _ratio(await ettr_of(control, run.name))})
    described = await describe_all(control, state.machines)
    progress = _progress(run.name, described)
    return JobLine(
        name=run.name,
        status=state.status_text if run.status in ("running", "completed") else run.status,
        outcome=state.outcome,
        step=progress.step,
        loss=progress.loss,
        saved=await _saved(control, state, described),
        generation=state.generation if state.launched else None,
        machines=state.spec.machines,
        ranks=state.spec.topology().world_size,
        incidents=state.incidents_so_far,
        ettr=_ratio(await ettr_of(control, run.name, progress)) if state.launched else None,
        started=run.started,
        ended=run.closed,
    )


async def job_report(control: Control, job: str) -> JobReport:
    """The full report of one job.

    Raises:
        ConfigError: there is no such job.
        ClusterError: Temporal or its workers do not answer.
    """
    run = await control.run_of(job)
    state = await control.state(job)
    described = await describe_all(control, state.machines)
    progress = _progress(job, described)
    step, loss = progress.step, progress.loss
    if step is None and not run.running and state.launched:
        step, loss = await last_step(control.agents, job, state.machines)
    topology = state.spec.topology()
    spent = await lost_of(control, state, progress, running=run.running) if state.launched else None
    ettr = spent.ettr if spent else None
    still_open = [incident for incident in state.incidents if not incident.resolution] if run.running else []
    ended = run.status not in ("running", "completed")
    return JobReport(
        name=job,
        status=run.status if ended else state.status_text,
        outcome=state.outcome or (f"{run.status} from outside" if ended else ""),
        unconfirmed=state.unconfirmed if run.running else "",
        launched=state.launched,
        started=run.started,
        ended=run.closed,
        script=state.spec.script,
        args=state.spec.args,
        world_size=topology.world_size,
        tp=topology.tp,
        pp=topology.pp,
        dp=topology.dp,
        sizes=topology.text,
        mesh=dict(topology.mesh),
        generation=state.generation if state.launched else 0,
        step=step,
        loss=loss,
        ettr=_ratio(ettr),
        ettr_unknown=list(ettr.unknown) if ettr else [],
        ettr_last_hour=_ratio(spent.ettr_last_hour) if spent else None,
        time_lost=spent.lost if spent else None,
        metrics=_metrics(state, described) if run.running else None,
        machines=[_machine(job, machine, described[machine.name]) for machine in state.machines],
        silent=list(progress.silent),
        backups=state.backups if run.running else "",
        saved=await _saved(control, state, described),
        kept=await remaining_checkpoint(control, state) if state.launched and not run.running else "",
        incident_count=state.incidents_so_far,
        open_incident=still_open[-1] if still_open else None,
        incidents=state.incidents[-LAST_INCIDENTS:],
        rejected=state.rejected,
        link=control.link(f"job/{job}"),
        code=code_text(state),
    )


def code_text(state: JobState) -> str:
    """The versions of a job's code that run, wait, or were refused, as text; empty: the job has had only one
    version."""
    if len(state.versions) < 2:
        return ""
    running = next((one for one in state.versions if one.number == state.spec.version), None)
    newest = state.versions[-1]
    texts = [f"{running.name} runs" if running else "", pending_text(state.versions)]
    if newest.status in {VersionStatus.CHECKING, VersionStatus.REFUSED, VersionStatus.SUSPECT}:
        texts.append(f"v{newest.number} {newest.status}: {error_line(newest.why)}")
    return "; ".join(filter(None, texts))


async def describe_all(control: Control, machines: list[Machine]) -> Described:
    """The answer of every machine's agent, or the error."""

    async def describe(machine: Machine) -> pb.DescribeReply | AgentError:
        try:
            return await control.agents.get(machine.address).describe(timeout_s=DESCRIBE_S)
        except AgentError as error:
            return error

    replies = await asyncio.gather(*(describe(machine) for machine in machines))
    return {machine.name: reply for machine, reply in zip(machines, replies, strict=True)}


async def saved_of(control: Control, state: JobState) -> SavedReport | None:
    """The saved steps of a job; None: nothing is saved, or no agent reports it."""
    return await _saved(control, state, await describe_all(control, state.machines))


def _progress(job: str, described: Described) -> JobProgress:
    views = [view for name, reply in described.items() for view in _ranks(job, name, reply)]
    silent = [name for name, reply in described.items() if isinstance(reply, AgentError)]
    return merge(views, time_ns=time.time_ns(), silent=silent)


async def _saved(control: Control, state: JobState, described: Described) -> SavedReport | None:
    ranks = _ranks_by_machine(state.spec.name, described)
    if not unsteady(ranks):
        return saved_report(ranks)
    again = await describe_all(control, state.machines)
    return saved_report(_ranks_by_machine(state.spec.name, again), before=ranks)


def _metrics(state: JobState, described: Described) -> MetricsReport | None:
    ranks = [rank for here in _ranks_by_machine(state.spec.name, described).values() for rank in here]
    return metrics_report(ranks, state.spec.topology())


def _ranks_by_machine(job: str, described: Described) -> dict[str, list[pb.RankProgress]]:
    return {
        name: [rank for shown in reply.jobs if shown.job == job for rank in shown.ranks]
        for name, reply in described.items()
        if not isinstance(reply, AgentError)
    }


def _ranks(job: str, machine: str, reply: pb.DescribeReply | AgentError) -> list[RankView]:
    if isinstance(reply, AgentError):
        return []
    clock_ns = time.time_ns() - reply.time_ns if reply.time_ns else 0
    return [view for shown in reply.jobs if shown.job == job for view in views_of(machine, shown.ranks, clock_ns)]


def _machine(job: str, machine: Machine, reply: pb.DescribeReply | AgentError) -> MachineStatus:
    ranks = [
        RankStatus(
            rank=view.rank,
            pid=view.pid,
            alive=view.alive,
            finished=view.finished,
            completed_steps=view.completed_steps if view.completed_steps >= 0 else None,
            loss=view.loss if math.isfinite(view.loss) else None,
        )
        for view in sorted(_ranks(job, machine.name, reply), key=lambda view: view.rank)
    ]
    problem = str(reply) if isinstance(reply, AgentError) else ""
    return MachineStatus(name=machine.name, address=machine.address, answers=not problem, ranks=ranks, problem=problem)


def _ratio(ettr: Ettr | None) -> float | None:
    return ettr.ratio if ettr else None


async def ettr_of(
    control: Control, job: str, progress: JobProgress | None = None, window_s: float | None = None
) -> Ettr | None:
    """Effective training time ratio of a job, from ledger and agents; None: the ledger does not have the job.

    Args:
        control: Connection to the cluster.
        job: Name of the job.
        progress: Progress of its ranks, since time without steps is not productive; None: not known.
        window_s: Length of a sliding window, seconds; None: since the start.
    """
    ledger = await control.ledger()
    if ledger is None:
        return None
    quiet_ns, now_ns = progress.quiet_since_ns if progress else None, time.time_ns()
    with suppress(EverstepError):
        return await ledger.call(type(ledger).ettr, job, now_ns=now_ns, window_s=window_s, quiet_since_ns=quiet_ns)
    return None


async def remaining_checkpoint(control: Control, state: JobState) -> str:
    """The newest step on disk from which an ended job can resume, as text."""
    see = f"everstep checkpoints {state.spec.name}{control.option}"
    checkpoint = state.spec.checkpoint.model_copy(update={"remote_url": ""})
    disks = state.spec.model_copy(update={"checkpoint": checkpoint})
    try:
        async with asyncio.timeout(DISKS_S):
            held, silent = await ask_for_copies(control.agents, disks, state.machines)
    except (AgentError, TimeoutError):
        return f"not known: the machines did not answer ({see})"
    report = report_of(disks, state.machines, left_by_earlier_run(held, state.spec.topology()), silent)
    unknown = bool(silent or report.unlisted)
    if report.restorable:
        text = f"step {report.restorable[0]} on disk"
    else:
        text = "no common step on disk" + (", but not every disk could be listed" if unknown else "")
    remote = f", and any copies at {state.spec.checkpoint.remote_url}" if state.spec.checkpoint.remote_url else ""
    return f"{text}{remote}; its memory was freed ({see})"

"""What an agent tells Prometheus: what inspections say and measure, where ranks and copies of their state stand."""

from __future__ import annotations

from collections import Counter

import everstep
from agent.exposition import Samples, verdicts
from agent.jobs.job_runner import JobRunner
from agent.monitor.monitor import InspectionState, Monitor
from agent.server.job_registry import JobRegistry
from agent.server.progress import progress_of
from agent.v1 import agent_pb2 as pb
from everstep.model.finding import together


def samples_of(jobs: JobRegistry, monitor: Monitor) -> Samples:
    """All that an agent knows now. Called in its event loop; nothing is looked at for it, and no disk read."""
    host = jobs.host
    samples = Samples(machine=host.machine)
    samples.add("agent_info", 1, "The agent.", version=everstep.__version__)
    samples.add("agent_start_time_seconds", jobs.started_ns / 1e9, "When the agent started, seconds since 1970.")
    samples.add("observations_waiting", host.log.waiting, "Observations that no worker acknowledged yet.")
    _inspections(samples, monitor.states())
    samples.add("code_snapshots", host.code.snapshots, "Snapshots of jobs' code that the agent keeps.")
    samples.add("code_bytes", host.code.bytes, "Bytes of the files of all of them.")
    for job, runner in jobs.runners.items():
        if not runner.record.released:
            _job(samples, job, runner)
    return samples


def _inspections(samples: Samples, states: list[InspectionState]) -> None:
    whole = together(state.verdict for state in states)
    meaning = "1 for what all inspections of the machine say together."
    verdicts(samples, "machine_verdict", whole, meaning, {})
    for state in states:
        name = {"inspection": state.name}
        verdicts(samples, "inspection_verdict", state.verdict, "1 for what an inspection says now.", name)
        samples.add("inspection_looks_total", state.looks, "Looks since the agent started.", **name)
        samples.add("inspection_cpu_seconds_total", state.busy_s, "CPU time of all looks.", **name)
        if state.looked_ns:
            meaning = "When an inspection looked last, seconds since 1970."
            samples.add("inspection_last_look_timestamp_seconds", state.looked_ns / 1e9, meaning, **name)
        # By item there could be any number of them: `everstep machines` has these.
        for (reason, verdict), number in Counter((found.reason, found.verdict) for found in state.findings).items():
            meaning = "Findings of an inspection now, by reason."
            samples.add("findings", number, meaning, **name, reason=reason, verdict=verdict)
        for fact, value in state.facts.items():
            meaning = "What should be the same on all machines of a job."
            samples.add("machine_fact_info", 1, meaning, fact=fact, value=value)
        for text, measured in state.measures.items():
            samples.measure(text, measured, f"Measured by the inspection {state.name}.")


def _job(samples: Samples, job: str, runner: JobRunner) -> None:
    record = runner.record
    samples.add("job_generation", record.generation, "Newest generation of a job that was launched here.", job=job)
    samples.add("job_fenced_generation", record.fenced, "No generation up to this one is started here.", job=job)
    ranks = progress_of(runner)
    runner.checkpoints.place.saved.tell_ages(ranks)
    alive = sum(rank.alive for rank in ranks)
    for state, number in (("alive", alive), ("ended", len(ranks) - alive)):
        samples.add("ranks", number, "Ranks of a job's newest generation on the machine.", job=job, state=state)
    for rank in ranks:
        _rank(samples, rank, {"job": job, "rank": str(rank.rank)})


def _rank(samples: Samples, rank: pb.RankProgress, labels: dict[str, str]) -> None:
    if rank.completed_steps >= 0:
        meaning = "Steps that a rank completed; fewer after a restart from an earlier one."
        samples.add("rank_completed_steps", rank.completed_steps, meaning, **labels)
    if rank.stepped_ns:
        meaning = "When a rank completed a step last, seconds since 1970."
        samples.add("rank_last_step_timestamp_seconds", rank.stepped_ns / 1e9, meaning, **labels)
    if rank.reports:
        samples.add("rank_loss", rank.loss, "Loss of the newest step that a rank reported.", **labels)
        samples.add("rank_gradient_norm", rank.grad_norm, "Gradient norm of that step.", **labels)
        samples.add("rank_tokens_total", rank.tokens, "Tokens that a rank reported in this generation.", **labels)
    saved = rank.saved
    steps = {
        "memory": saved.own_step,
        "backup": saved.backup_step,
        "disk": saved.disk_step,
        "remote": saved.remote_step,
    }
    for tier, step in steps.items():
        if step >= 0:
            meaning = "Step of the newest copy of a rank's state, by where it is."
            samples.add("rank_checkpoint_step", step, meaning, **labels, tier=tier)
    for tier, age_s in (("memory", saved.own_age_s), ("disk", saved.disk_age_s)):
        if steps[tier] >= 0:
            samples.add("rank_checkpoint_age_seconds", age_s, "How old the state in that copy is.", **labels, tier=tier)
    problems = {"backup": saved.backup_problem, "disk": saved.disk_problem}
    for tier, problem in problems.items():
        meaning = "1 while copies of a rank's state fail."
        samples.add("rank_checkpoint_failing", float(bool(problem)), meaning, **labels, tier=tier)

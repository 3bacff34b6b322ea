"""This module has the metrics of an agent: results of inspections, progress of ranks, and copies of their state."""

from __future__ import annotations

from collections import Counter

import everstep
from agent.exposition import Samples, described, verdicts
from agent.jobs.job_runner import JobRunner
from agent.monitor.monitor import InspectionState, Monitor
from agent.server.job_registry import JobRegistry
from agent.v1 import agent_pb2 as pb
from everstep.model.finding import together

METRICS = described(
    ("agent_info", "version", "1"),
    ("agent_start_time_seconds", "", "when the agent started, seconds since 1970"),
    ("observations_waiting", "", "observations that no worker acknowledged yet"),
    ("code_snapshots", "", "snapshots of jobs' code that the agent keeps"),
    ("code_bytes", "", "size of these snapshots"),
    ("machine_verdict", "verdict", "1 for the verdict of all inspections together: healthy, faulty or unknown"),
    ("machine_fact_info", "fact value", "1; a fact that should be the same on all machines of a job"),
    ("inspection_verdict", "inspection verdict", "1 for the verdict of an inspection"),
    ("inspection_looks_total", "inspection", "inspections since the agent started"),
    ("inspection_cpu_seconds_total", "inspection", "CPU time of these inspections"),
    ("inspection_last_look_timestamp_seconds", "inspection", "when the last inspection was made, seconds since 1970"),
    ("findings", "inspection reason verdict", "active findings; absent if there are none"),
    ("job_generation", "job", "newest generation of a job that was launched on the machine"),
    ("job_fenced_generation", "job", "no generation up to this one is started on the machine"),
    ("ranks", "job state", "ranks of the newest generation on the machine: alive, ended"),
    ("rank_completed_steps", "job rank", "steps completed; fewer after a restart from an earlier one"),
    ("rank_last_step_timestamp_seconds", "job rank", "when the rank completed a step last, seconds since 1970"),
    ("rank_loss", "job rank", "loss of the newest step that the rank reported"),
    ("rank_gradient_norm", "job rank", "gradient norm of that step"),
    ("rank_tokens_total", "job rank", "tokens that the rank reported in this generation"),
    ("rank_checkpoint_step", "job rank tier", "step of the newest copy: memory, backup, disk, remote; absent: none"),
    ("rank_checkpoint_age_seconds", "job rank tier", "how old the state in that copy is: memory, disk"),
    ("rank_save_every_steps", "job rank", "the rank saves its state in memory after every n-th step"),
    ("rank_save_seconds", "job rank", "time of the rank's last save, from its begin to its commit"),
    ("rank_checkpoint_failing", "job rank tier", "1 while copies fail: backup, disk (remote storage too)"),
)
"""The metrics of an agent beside the measures of its inspections."""


def samples_of(jobs: JobRegistry, monitor: Monitor) -> Samples:
    """Return the current samples. Called in the event loop; starts no inspection and reads no disk."""
    host = jobs.host
    samples = Samples(METRICS, machine=host.machine)
    samples.add("agent_info", 1, version=everstep.__version__)
    samples.add("agent_start_time_seconds", jobs.started_ns / 1e9)
    samples.add("observations_waiting", host.log.waiting)
    _inspections(samples, monitor.states())
    samples.add("code_snapshots", host.code.snapshots)
    samples.add("code_bytes", host.code.bytes)
    for job, runner in jobs.runners.items():
        if not runner.record.released:
            _job(samples, job, runner)
    return samples


def _inspections(samples: Samples, states: list[InspectionState]) -> None:
    verdicts(samples, "machine_verdict", together(state.verdict for state in states), {})
    for state in states:
        name = {"inspection": state.inspection.name}
        verdicts(samples, "inspection_verdict", state.verdict, name)
        samples.add("inspection_looks_total", state.inspections, **name)
        samples.add("inspection_cpu_seconds_total", state.busy_s, **name)
        if state.inspected_ns:
            samples.add("inspection_last_look_timestamp_seconds", state.inspected_ns / 1e9, **name)
        # The item of a finding is not a label, because there may be many items. `everstep machines` shows the items.
        for (reason, verdict), number in Counter(
            (found.reason, found.verdict) for found in state.result.findings
        ).items():
            samples.add("findings", number, **name, reason=reason, verdict=verdict)
        for fact, value in state.result.facts.items():
            samples.add("machine_fact_info", 1, fact=fact, value=value)
        for text, measured in state.result.measures.items():
            samples.measure(text, measured, f"Measured by the inspection {state.inspection.name}.")


def _job(samples: Samples, job: str, runner: JobRunner) -> None:
    record = runner.record
    samples.add("job_generation", record.generation, job=job)
    samples.add("job_fenced_generation", record.fenced, job=job)
    ranks = runner.progress()
    runner.checkpoints.place.saved.set_ages(ranks)
    alive = sum(rank.alive for rank in ranks)
    for state, number in (("alive", alive), ("ended", len(ranks) - alive)):
        samples.add("ranks", number, job=job, state=state)
    for rank in ranks:
        _rank(samples, rank, {"job": job, "rank": str(rank.rank)})


def _rank(samples: Samples, rank: pb.RankProgress, labels: dict[str, str]) -> None:
    if rank.completed_steps >= 0:
        samples.add("rank_completed_steps", rank.completed_steps, **labels)
    if rank.stepped_ns:
        samples.add("rank_last_step_timestamp_seconds", rank.stepped_ns / 1e9, **labels)
    if rank.reports:
        samples.add("rank_loss", rank.loss, **labels)
        samples.add("rank_gradient_norm", rank.grad_norm, **labels)
        samples.add("rank_tokens_total", rank.tokens, **labels)
    saved = rank.saved
    steps = {
        "memory": saved.own_step,
        "backup": saved.backup_step,
        "disk": saved.disk_step,
        "remote": saved.remote_step,
    }
    for tier, step in steps.items():
        if step >= 0:
            samples.add("rank_checkpoint_step", step, **labels, tier=tier)
    for tier, age_s in (("memory", saved.own_age_s), ("disk", saved.disk_age_s)):
        if steps[tier] >= 0:
            samples.add("rank_checkpoint_age_seconds", age_s, **labels, tier=tier)
    if rank.saves.save_s:
        samples.add("rank_save_every_steps", rank.saves.pace.every, **labels)
        samples.add("rank_save_seconds", rank.saves.save_s, **labels)
    problems = {"backup": saved.backup_problem, "disk": saved.disk_problem}
    for tier, problem in problems.items():
        samples.add("rank_checkpoint_failing", float(bool(problem)), **labels, tier=tier)

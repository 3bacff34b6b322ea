"""What a watcher tells the workflow of a job, and learns from it."""

from __future__ import annotations

from activities.heartbeat import steady_ns
from activities.watching.job_view import Finished, JobView
from everstep.model.incident import GOES_ON, Anomaly
from everstep.model.job_state import JobState


def update_of(verdict: Anomaly | Finished) -> tuple[str, Anomaly | int, str]:
    """The update that tells it to the job's workflow: its name, argument, and an id that is the same for all
    watchers."""
    if isinstance(verdict, Finished):
        return "finished", verdict.generation, f"finished-{verdict.generation}"
    if verdict.symptom in GOES_ON:
        return "observe", verdict, f"observe-{verdict.id}"
    return "report", verdict, f"report-{verdict.generation}"


def learn_from(job: JobView, state: JobState) -> None:
    """Take what a job's workflow says of itself."""
    job.faults.known = state.observed_told
    if state.status == "running":
        job.runs(state.generation, max(state.resume_step, 1), steady_ns())

"""What a person sees in the Web UI: pages in markdown, and one-line summaries."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.incident import Anomaly, Stage
from everstep.job_state import JobState

SUMMARY_CHARACTERS = 110
PAGE_CHARACTERS = 2800
# The Web UI renders tables without padding: an em space keeps the columns apart.
PAD = "\u2003"
# … and breaks a line between a number and its unit, unless the space forbids it.
NO_BREAK = "\u00a0"


def summary(text: str) -> str:
    """One line, cut where the timeline would cut it without saying so."""
    line = " ".join(text.split())
    return line if len(line) <= SUMMARY_CHARACTERS else line[: SUMMARY_CHARACTERS - 2] + " …"


def count(number: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def seconds(value: float) -> str:
    """``0.73 s``, never broken over two lines."""
    return f"{value:.2f}{NO_BREAK}s"


def incident_title(number: int, anomaly: Anomaly) -> str:
    """Title of an incident, as the job's timeline shows it."""
    return summary(f"{number:04d} {anomaly.symptom}: {anomaly.headline}")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table that stays readable in the Web UI."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell if cell == "---" else cell + PAD for cell in line) + " |" for line in lines)


def incident_page(headline: str, stages: Sequence[Stage], namespace: str, job_workflow: str, help_text: str) -> str:
    """The living page of an incident."""
    rows = [[stage.name, seconds(stage.seconds), stage.found.replace("|", "/")] for stage in stages[-12:]]
    link = f"[Job](/namespaces/{namespace}/workflows/{job_workflow.replace('/', '%2F')})"
    parts = [f"## {headline}", table(["Stage", "Took", "What was found"], rows) if rows else "", help_text, link]
    return "\n\n".join(part for part in parts if part)[:PAGE_CHARACTERS]


def job_page(state: JobState, namespace: str) -> str:
    """The living page of a job."""
    topology = state.spec.topology()
    rows = [
        [
            f"[{one.number:04d}](/namespaces/{namespace}/workflows/{one.id.replace('/', '%2F')})",
            one.headline.replace("|", "/"),
            one.resolution or "open",
            "" if one.lost_steps is None else str(one.lost_steps),
            "" if one.seconds is None else seconds(one.seconds),
        ]
        for one in state.incidents[-10:]
    ]
    size = (
        f"{topology.world_size} ranks on {topology.machines} machines "
        f"(tp {topology.tp}, pp {topology.pp}, dp {topology.dp}), generation {state.generation}"
    )
    rejected = "\n".join(f"- REJECTED: {line}" for line in state.rejected[-5:])
    parts = [
        f"## {state.spec.name}: {state.outcome or state.status}",
        size,
        table(["Incident", "What", "Resolution", "Lost steps", "Took"], rows) if rows else "No incident so far.",
        rejected,
    ]
    return "\n\n".join(part for part in parts if part)[:PAGE_CHARACTERS]

"""Texts for the Web UI: pages in markdown, and one-line summaries."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from everstep.base.text import error_line, listed
from everstep.decisions.keep.copies_text import copies_text
from everstep.model.diagnosis import Diagnosis
from everstep.model.evidence import Evidence
from everstep.model.finding import Health
from everstep.model.incident import Anomaly
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState
from everstep.model.stage import NOT_CONFIRMED, StageRecord
from everstep.model.state_copy import Restored, StateCopies, count_of
from everstep.model.version import JobVersion, Urgency, VersionStatus

SUMMARY_CHARACTERS = 110
PAGE_CHARACTERS = 2800
PICTURE_CHARACTERS = 1200
VERSIONS_SHOWN = 6
# The Web UI renders tables without padding: an em space separates the columns.
PAD = "\u2003"
# The Web UI breaks a line between a number and its unit, unless this space forbids it.
NO_BREAK = "\u00a0"


def summary(text: str) -> str:
    """Return a text as one line, cut with a visible mark to the length that the timeline shows."""
    line = " ".join(text.split())
    return line if len(line) <= SUMMARY_CHARACTERS else line[: SUMMARY_CHARACTERS - 2] + " …"


def count(number: int, noun: str) -> str:
    """Return e.g. ``1 step`` or ``2 steps``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def seconds(value: float) -> str:
    """Return e.g. ``0.73 s``, never broken over two lines."""
    return f"{value:.2f}{NO_BREAK}s"


def size(count: float) -> str:
    """Return e.g. ``12.3 MB``, never broken over two lines."""
    return f"{count / 1e9:.2f}{NO_BREAK}GB" if count >= 1e9 else f"{count / 1e6:.1f}{NO_BREAK}MB"


def restored_text(restored: Restored) -> str:
    """Return the results of a restore as text, the worst first."""
    failed = [*restored.failed, *restored.unreached]
    moved, verified = count_of(restored.moved), count_of(restored.verified)
    noun = "copy" if moved == 1 else "copies"
    parts = [f"{listed(restored.unreachable)} does not answer"] if restored.unreachable else []
    parts += [f"{each.tier} of rank {listed([*each.ranks])} on {each.machine}: {each.reason}" for each in failed[:3]]
    parts += [f"{count_of(failed[3:])} more failed"] if len(failed) > 3 else []
    if restored.moved:
        took = f"{size(restored.bytes)} in {seconds(restored.seconds)}"
        parts.append(f"moved {moved} {noun}, {took}: {copies_text(restored.moved)}")
    if restored.verified:
        took = "" if restored.moved else f" in {seconds(restored.seconds)}"
        parts.append(f"{count(verified, 'own slot')} verified{took}")
    return "; ".join(parts) or "nothing was to be moved"


def dying_text(evidence: Evidence) -> str:
    """Return which killed ranks are not gone, as text."""
    return listed([f"{machine}: {ranks}" for machine, ranks in sorted(evidence.dying.items())], 3)


def stopped_text(evidence: Evidence, headline: str) -> str:
    """Return the result of a stop as text."""
    parts = [evidence.problem or dying_text(evidence)] if evidence.problem or evidence.dying else []
    parts += [f"{listed(evidence.unreachable)} does not answer"] if evidence.unreachable else []
    return "; ".join([*parts, headline or "no rank ended by itself"])


def found_text(held: Sequence[StateCopies]) -> str:
    """Return which copies exist, e.g. ``16 copies, of steps 120, 100``."""
    steps = sorted({copy.completed_steps for copy in held if copy.valid}, reverse=True)
    if not steps:
        return "no further copies"
    number = count_of(held)
    return f"{number} {'copy' if number == 1 else 'copies'}, of steps {listed(steps)}"


def searched_text(evidence: Evidence) -> str:
    """Return which copies are known after a search, and which disks and remote storage did not answer."""
    silent = [
        f"{f'disk of {listed(place.machines)}' if place.machines else 'remote storage'} unknown: {place.reason}"
        for place in evidence.unlisted
    ]
    return "; ".join([*silent, found_text([place for place in evidence.held if place.valid])])


def diagnosed_text(found: Diagnosis) -> str:
    """Return the results of machine tests, the worst first, e.g. ``m2 is at fault: other bits than …``."""
    parts = []
    for one in found.machines:
        if one.verdict is Health.FAULTY:
            parts.append(f"{one.machine} is at fault: {one.findings[0].headline} ({one.findings[0].reason})")
    parts += [f"between {' and '.join(link.machines)}: {link.text} ({link.test})" for link in found.links]
    unknown = [one for one in found.machines if one.verdict is not Health.FAULTY and one.verdict is not Health.HEALTHY]
    if unknown:
        first = next((machine.findings[0] for machine in unknown if machine.findings), None)
        example = f", e.g. {first.headline} ({first.reason})" if first else ""
        parts.append(f"{listed([machine.machine for machine in unknown], 4)} is not known{example}")
    healthy = len(found.machines) - len(unknown) - len(found.faulty)
    parts.append(f"{healthy} of {count(len(found.machines), 'machine')} passed all tests")
    return "; ".join(parts[:4] + ([f"and {len(parts) - 4} more"] if len(parts) > 4 else []))


def job_title(spec: JobSpec) -> str:
    """Return the title of a job in lists."""
    topology = spec.topology()
    line = " ".join([posixpath.basename(spec.script), *spec.args])
    return summary(f"{topology.world_size} ranks on {topology.machines} machines ({topology.text}): `{line}`")


def incident_title(number: int, anomaly: Anomaly) -> str:
    """Return the title of an incident in the job's timeline."""
    return summary(f"{number:04d} {anomaly.symptom}: {anomaly.headline}")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a markdown table that is readable in the Web UI."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell if cell == "---" else cell + PAD for cell in line) + " |" for line in lines)


def link(text: str, namespace: str, workflow_id: str) -> str:
    """Return a link to the page of a workflow, for the newest of its runs."""
    return f"[{text}](/namespaces/{namespace}/workflows/{workflow_id.replace('/', '%2F')})"


def incident_page(
    headline: str, stages: Sequence[StageRecord], namespace: str, linked: Mapping[str, str], help_text: str
) -> str:
    """Return the page of an incident; ``linked``: text of a link → id of the linked workflow."""
    rows = [[stage.name, seconds(stage.seconds), stage.found.replace("|", "/")] for stage in stages[-12:]]
    links = " · ".join(link(text, namespace, workflow_id) for text, workflow_id in linked.items())
    parts = [f"## {headline}", table(["Stage", "Took", "Result"], rows) if rows else "", help_text, links]
    return "\n\n".join(part for part in parts if part)[:PAGE_CHARACTERS]


def drawn(picture: str) -> str:
    """Return a picture made of characters, cut to the size of a page; empty: there is none."""
    if not picture:
        return ""
    kept: list[str] = []
    for line in picture.splitlines():
        if sum(len(row) + 1 for row in kept) + len(line) > PICTURE_CHARACTERS:
            kept.append("…")
            break
        kept.append(line)
    return "\n".join(["```", *kept, "```"])


def begun_text(state: JobState) -> str:
    """Return the checkpoint from which the job was started, as text; empty: it began at step 0."""
    if state.resume_path:
        return f"Started from {state.resume_path}."
    return f"Started from step {state.resume_from}." if state.resume_from is not None else ""


def job_page(state: JobState, namespace: str) -> str:
    """Return the page of a job."""
    topology = state.spec.topology()
    rows = [
        [
            link(f"{incident.number:04d}", namespace, incident.id),
            incident.headline.replace("|", "/"),
            incident.resolution or "open",
            "" if incident.lost_steps is None else str(incident.lost_steps),
            "" if incident.seconds is None else seconds(incident.seconds),
        ]
        for incident in state.incidents[-10:]
    ]
    ranks = (
        f"{topology.world_size} ranks on {topology.machines} machines ({topology.text}), generation {state.generation}"
    )
    rejected = "\n".join(f"- REJECTED: {line}" for line in state.rejected[-5:])
    why = f": {state.unconfirmed}" if state.status_text == NOT_CONFIRMED else ""
    status = f"{state.status_text}{why}"
    backups = f"Backups: {state.backups}." if state.backups else ""
    parts = [
        f"## {state.spec.name}: {state.outcome or status}",
        " ".join([ranks, begun_text(state)]).strip(),
        backups,
        table(["Version", "Status", "Steps", "Requested by"], version_rows(state)) if len(state.versions) > 1 else "",
        table(["Incident", "Fault", "Resolution", "Lost steps", "Took"], rows) if rows else "No incident so far.",
        rejected,
    ]
    return "\n\n".join(part for part in parts if part)[:PAGE_CHARACTERS]


def version_rows(state: JobState) -> list[list[str]]:
    """Return a row for each of the last versions: its number, its state, its steps, the author and the reason."""
    return [[f"v{one.number}", _status(one), _steps(one), _who(one)] for one in state.versions[-VERSIONS_SHOWN:]]


def pending_text(versions: Sequence[JobVersion]) -> str:
    """Return the pending versions, e.g. ``v3 lazy until 14:05, v4 urgent``; empty: there are none."""
    return ", ".join(f"v{one.number} {_until(one)}" for one in versions if one.status is VersionStatus.PENDING)


def _status(one: JobVersion) -> str:
    match one.status:
        case VersionStatus.PENDING:
            return f"waits, {_until(one)}"
        case VersionStatus.REFUSED | VersionStatus.SUSPECT | VersionStatus.CHECKING | VersionStatus.WITHDRAWN:
            return f"{one.status}: {_cell(one.why)}"
        case _:
            return str(one.status)


def _until(one: JobVersion) -> str:
    if one.wanted.urgency is Urgency.URGENT:
        return "urgent"
    return f"lazy until {datetime.fromtimestamp(one.due_ns / 1e9, UTC):%Y-%m-%d %H:%M} UTC"


def _steps(one: JobVersion) -> str:
    texts = []
    for _, begin, end in one.ranges[-3:]:
        if begin < 0:
            return "not numbered"
        runs = one.status is VersionStatus.RUNNING  # it is not known at which step another version ended
        texts.append(f"{begin} to {end}" if end >= 0 else f"from {begin}" if runs else f"{begin} to ?")
    return ", ".join(texts)


def _who(one: JobVersion) -> str:
    if one.number == 1 and not one.request.reason:
        return "as it was started"
    return _cell(": ".join(filter(None, [one.wanted.operator, one.wanted.reason])))


def _cell(text: str) -> str:
    return error_line(text).replace("|", "/")

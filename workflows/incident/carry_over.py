"""What an incident takes along when it continues as new.

Each resume at 10,240 ranks adds some megabytes of evidence to a history, and
Temporal ends a workflow whose history has 50 MB. What goes on is no more than what
the next decision needs; evidence is asked for anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from everstep.decisions.checkpoints.lineage import extended
    from everstep.model.incident import Failure, Stage
    from workflows.messages import Carried, IncidentInput

if TYPE_CHECKING:
    from workflows.incident.workflow import IncidentWorkflow

FAILURES_KEPT = 100
STAGES_KEPT = 200
PARKED_KEPT = 500
REJECTED_KEPT = 5


def carried(incident: IncidentWorkflow, *, resumed: bool, came_back: bool) -> IncidentInput:
    """The input of the next run.

    Args:
        incident: That continues.
        resumed: An operator has just said that it is to try again.
        came_back: The machines that it waited for have just answered.
    """
    case, story = incident.case, incident.story
    return incident.given.model_copy(
        update={
            "generation": case.generation,
            "resume_step": case.resume_step,
            "lineage": extended(case.lineage, []),
            "history": incident.history[-FAILURES_KEPT:],
            "showing": case.showing,
            "hold": incident.hold,
            "emptied": sorted(case.emptied),
            "carried": Carried(
                resumed=resumed,
                came_back=came_back,
                failures=_failures(incident.failures),
                attempts=incident.attempts,
                asked=incident.looking.asked,
                launched=incident.launched,
                resumed_by=incident.resumed_by,
                launches=extended(case.launches, []),
                bad=case.bad,
                unreached=case.unreached,
                farthest=case.farthest,
                lost_from=case.lost_from,
                lost_steps=case.lost_steps,
                nobody_knows=case.nobody_knows,
                accepted_from=case.accepted_from,
                accepted=case.accepted,
                headline=story.headline,
                stages=_stages(story.stages),
                rejected=story.rejected[-REJECTED_KEPT:],
                parked=story.parked[-PARKED_KEPT:],
                noted=story.noted,
            ),
        }
    )


def take_up(incident: IncidentWorkflow, given: Carried) -> None:
    """Go on with what an earlier run took along."""
    case, story = incident.case, incident.story
    incident.failures, incident.attempts = list(given.failures), given.attempts
    incident.launched, incident.resumed_by = given.launched, given.resumed_by
    incident.looking.asked = given.asked
    case.launches, case.bad, case.unreached = list(given.launches), list(given.bad), list(given.unreached)
    case.farthest, case.lost_from, case.lost_steps = given.farthest, given.lost_from, given.lost_steps
    case.nobody_knows, case.accepted_from, case.accepted = given.nobody_knows, given.accepted_from, given.accepted
    story.headline, story.stages, story.rejected = given.headline, list(given.stages), list(given.rejected)
    story.parked, story.noted_before = list(given.parked), given.noted


def _failures(failures: list[Failure]) -> list[Failure]:
    """The one that opened the incident, and the last ones."""
    return failures if len(failures) <= FAILURES_KEPT else [failures[0], *failures[1 - FAILURES_KEPT :]]


def _stages(stages: list[Stage]) -> list[Stage]:
    """The first ones and the last ones."""
    if len(stages) <= STAGES_KEPT:
        return stages
    half = STAGES_KEPT // 2
    first = stages[: half - 1]
    gap = Stage(name="…", seconds=0.0, found="further stages, see the ledger")
    return [*first, gap, *stages[-half:]]

"""What an incident takes along when it continues as new.

Each resume at 10,240 ranks adds some megabytes of evidence to a history, and
Temporal ends a workflow whose history has 50 MB. What goes on is no more than what
the next decision needs; evidence is asked for anew.
"""

from __future__ import annotations

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from everstep.decisions.act.recover.state import RecoveryState
    from everstep.decisions.keep.lineage import extended
    from everstep.model.incident import Failure
    from everstep.model.ladder import Rung
    from everstep.model.stage import StageRecord
    from workflows.incident.timeline import IncidentTimeline
    from workflows.messages import Carried, IncidentInput

FAILURES_KEPT = 100
STAGES_KEPT = 200
PARKED_KEPT = 500
REJECTED_KEPT = 5
TRIED_KEPT = 100


def carried(input: IncidentInput, state: RecoveryState, timeline: IncidentTimeline) -> IncidentInput:
    """The input of the next run."""
    return input.model_copy(
        update={
            "generation": state.generation,
            "resume_step": state.resume_step,
            "lineage": extended(state.lineage, []),
            "history": state.history[-FAILURES_KEPT:],
            "tried": state.ladder.remembered,  # none once an operator resumed
            "showing": state.showing,
            "hold": state.hold,
            "emptied": sorted(state.emptied),
            "spec": state.spec,
            "versions": state.book.all(),
            "carried": Carried(
                failures=_failures(state.failures),
                attempts=state.attempts,
                failed_restores=state.failed_restores,
                asked=state.asked,
                launches=extended(state.launches, []),
                bad=state.bad,
                unreached=state.unreached,
                farthest=state.farthest,
                lost_from=state.lost_from,
                lost_steps=state.lost_steps,
                nobody_knows=state.nobody_knows,
                accepted_from=state.accepted_from,
                accepted=state.accepted,
                trusted=state.trusted,
                versions_changed=sorted(state.book.touched),
                tried=state.ladder.tried,
                all_tried=state.ladder.all_tried[-TRIED_KEPT:],
                tested=state.ladder.tested,
                approved=sorted(state.ladder.approved),
                headline=timeline.headline,
                stages=_stages(timeline.stages),
                rejected=timeline.rejected[-REJECTED_KEPT:],
                parked=timeline.parked[-PARKED_KEPT:],
                noted=timeline.noted,
            ),
        }
    )


def take_up(carried_over: Carried, state: RecoveryState, timeline: IncidentTimeline) -> None:
    """Go on with what an earlier run took along."""
    state.failures, state.attempts, state.asked = list(carried_over.failures), carried_over.attempts, carried_over.asked
    state.failed_restores = carried_over.failed_restores
    state.launches, state.bad, state.unreached = (
        list(carried_over.launches),
        list(carried_over.bad),
        list(carried_over.unreached),
    )
    state.farthest, state.lost_from, state.lost_steps = (
        carried_over.farthest,
        carried_over.lost_from,
        carried_over.lost_steps,
    )
    state.nobody_knows, state.accepted_from, state.accepted = (
        carried_over.nobody_knows,
        carried_over.accepted_from,
        carried_over.accepted,
    )
    state.trusted, state.book.touched = carried_over.trusted, set(carried_over.versions_changed)
    ladder = state.ladder
    ladder.tried, ladder.all_tried = list(carried_over.tried), list(carried_over.all_tried)
    ladder.tested, ladder.approved = list(carried_over.tested), set(carried_over.approved)
    timeline.headline, timeline.stages, timeline.rejected = (
        carried_over.headline,
        list(carried_over.stages),
        list(carried_over.rejected),
    )
    timeline.replays = sum(one.rung is Rung.REPLAY for one in ladder.all_tried)
    timeline.parked, timeline.noted_before = list(carried_over.parked), carried_over.noted


def _failures(failures: list[Failure]) -> list[Failure]:
    """The one that opened the incident, and the last ones."""
    return failures if len(failures) <= FAILURES_KEPT else [failures[0], *failures[1 - FAILURES_KEPT :]]


def _stages(stages: list[StageRecord]) -> list[StageRecord]:
    """The first ones and the last ones."""
    if len(stages) <= STAGES_KEPT:
        return stages
    half = STAGES_KEPT // 2
    first = stages[: half - 1]
    gap = StageRecord(name="…", seconds=0.0, found="further stages, see the ledger")
    return [*first, gap, *stages[-half:]]

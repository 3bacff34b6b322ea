"""Diagnose: test the machines of the stopped job, all at once.

A machine at fault leaves by a rule of eviction. If all machines pass, or the results are unknown, the ladder continues.
A test that could not run is no fault.
"""

from __future__ import annotations

from collections.abc import Sequence

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.agents.diagnose_machines import DiagnoseMachines
    from everstep.decisions.act.recover.plan import RestartPlan, tests_of
    from everstep.decisions.blame.diagnose.diagnosis import confirmed, findings_of_tests, unsure_tests
    from everstep.model.diagnosis import Diagnosis
    from everstep.model.ladder import Rung
    from everstep.model.stage import Stage
    from workflows import web_ui
    from workflows.incident.incident import Incident
    from workflows.start_activity import start_activity

FINDINGS_KEPT = 200
"""The largest number of results of a diagnosis that are kept, faults first."""


async def diagnose(incident: Incident, plan: RestartPlan) -> None:
    """Test the machines, and keep the results in the state of the incident."""
    state, timeline = incident.state, incident.timeline
    choice = tests_of(state)
    tests = ", ".join(choice.tests)
    text = (
        f"{choice.why}: {tests} on {len(state.machines)} machines, {state.spec.policy.diagnose.timeout_s:g} s at most"
    )
    began = timeline.enter(Stage.DIAGNOSE, text)
    try:
        found = await _tested(incident, choice.tests)
        if again := unsure_tests(found):
            timeline.show_reason(f"repeating {', '.join(again)}: {web_ui.diagnosed_text(found)}")
            found = await _repeated(incident, found, again)
    except ActivityError as error:
        said, state.ladder.tested = f"not known: the tests could not be run: {error.cause or error}"[:300], []
    else:
        said = web_ui.diagnosed_text(found)
        state.ladder.tested = findings_of_tests(found)[:FINDINGS_KEPT]
    state.ladder.add(
        Rung.DIAGNOSE,
        state.failures[-1],
        plan.verdict.text,
        path=plan.rung.path if plan.rung else "",
        found=said,
        seconds=workflow.time() - began,
    )
    timeline.leave(began, Stage.DIAGNOSE, said)
    timeline.note(Stage.DIAGNOSE, said)


async def _repeated(incident: Incident, found: Diagnosis, tests: Sequence[str]) -> Diagnosis:
    """Repeat tests, and keep the faults that both runs show; if the tests cannot be repeated, only sure faults stay."""
    try:
        second = await _tested(incident, tests)
    except ActivityError as error:
        incident.timeline.note(Stage.DIAGNOSE, f"the tests could not be repeated: {error.cause or error}"[:300])
        return confirmed(found, None)
    return confirmed(found, second)


async def _tested(incident: Incident, tests: Sequence[str]) -> Diagnosis:
    return await incident.unless_abandoned(start_activity(DiagnoseMachines.of(incident.state.placed, tests)))

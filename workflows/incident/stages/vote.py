"""Vote: sample the ranks of a slow job, round by round, to see which machine slows it down.

The job continues meanwhile, and is not stopped for the vote. Any other event of the job is more urgent and ends the
vote. Each round is an activity, so a worker that dies costs only the current round. A round that failed is a vote for
no machine.
"""

from __future__ import annotations

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.agents.vote_round import VoteRound
    from everstep.decisions.blame.slow.by_samples import judge_rounds, line_of
    from everstep.model.slow import SlowRound
    from everstep.model.stage import Stage
    from workflows.incident.incident import Abandoned, Incident
    from workflows.start_activity import start_activity


async def vote(incident: Incident) -> None:
    """Sample the ranks; the result is kept in ``incident.state.slow``.

    Raises:
        Abandoned: an operator ended the incident, or something more urgent happened.
    """
    state, timeline = incident.state, incident.timeline
    began = timeline.enter(Stage.VOTE)
    rounds: list[SlowRound] = []
    count = state.spec.policy.slow.rounds
    for number in range(1, count + 1):
        if incident.overtaken:
            break
        timeline.show_reason(f"round {number} of {count}: {state.anomaly.headline}")
        vote = VoteRound(job=state.placed, generation=state.generation, incident=incident.id, number=number)
        asked = start_activity(vote)
        try:
            rounds.append(await incident.unless_abandoned(asked, or_overtaken=True))
        except ActivityError as error:
            rounds.append(SlowRound(number=number, problem=f"it failed: {error.cause or error}"[:200]))
        except Abandoned:
            break
        timeline.page.picture = "\n".join(map(line_of, rounds))
    if incident.overtaken or incident.abandoned_by:
        timeline.leave(began, Stage.VOTE, f"given up: {incident.overtaken or 'an operator ended the incident'}")
        raise Abandoned
    found = incident.state.slow = judge_rounds(rounds, state.generation)
    text = f"{found.conclusion}: {found.reason}"
    timeline.leave(began, Stage.VOTE, text)
    timeline.page.headline = f"{timeline.page.headline}; {text}"
    timeline.note(Stage.VOTE, text)

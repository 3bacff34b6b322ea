"""Looking for copies until it is certain that nothing newer can exist than what the job would go on from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from everstep.decisions.checkpoints.choose_restore import Restore
    from everstep.decisions.checkpoints.search import look_further, merged, unanswered
    from everstep.decisions.recover.doubt import Doubt, next_look
    from everstep.decisions.recover.state import RecoveryState
    from everstep.model.incident import Evidence
    from workflows import activity_calls, web_ui
    from workflows.incident.timeline import IncidentTimeline
    from workflows.messages import IncidentInput


@dataclass(frozen=True, slots=True)
class RestoreChoice:
    """Where the job would go on, and whether it may."""

    evidence: Evidence
    restore: Restore
    doubt: Doubt | None = None
    """What may be newer and was asked for in vain; None: nothing, or an operator accepted it."""
    why: str = ""
    """Why an operator has to decide; empty: nobody has to."""


class CopySearch:
    """Asks disks and remote storage, of one incident.

    Args:
        given: What the incident starts from.
        case: What is known of it.
        story: Told of every look.
        awaited: Waits for the answer to a look, but not longer than an operator wants.
        pause: Waits for some time, likewise, with a label for the timeline.
    """

    def __init__(
        self,
        given: IncidentInput,
        case: RecoveryState,
        story: IncidentTimeline,
        awaited: Callable[[workflow.ActivityHandle[Evidence]], Awaitable[Evidence]],
        pause: Callable[[timedelta, str], Awaitable[None]],
    ) -> None:
        self._given = given
        self._case = case
        self._story = story
        self._awaited = awaited
        self._pause = pause
        self.asked = 0
        """How often since the incident began, or was resumed."""
        self._searched: Evidence | None = None
        """What was known after all copies were asked for."""

    def begin_again(self) -> None:
        """An operator says so: places are asked as often as at first."""
        self.asked = 0

    async def choice(self, evidence: Evidence) -> RestoreChoice:
        """Where the job would go on, once nothing newer can exist or storage was asked often enough in vain."""
        if not workflow.patched("unknown is not empty"):
            evidence = await self._search(evidence)
            return RestoreChoice(evidence, self._case.choose(evidence))
        while True:
            restore = self._case.choose(evidence)
            # Of a machine that is silent as a whole an operator is told anyway.
            told = not (evidence.unreachable or evidence.problem)
            doubt = self._case.doubt(evidence, restore) if told else None
            policy, accepted = self._given.spec.policy, self._case.accepts(restore)
            look = next_look(restore.step, doubt, self.asked, policy, accepted=accepted)
            if doubt is None or look.action == "go":
                return RestoreChoice(evidence, restore)
            if look.action == "park":
                return RestoreChoice(evidence, restore, doubt, look.reason)
            if look.delay_s:
                self._story.note("find", look.reason)
                self._story.enter("find", look.reason)
                await self._pause(timedelta(seconds=look.delay_s), "ASK AGAIN")
            self.asked += 1
            self._case.try_unreached_again()
            if doubt.unlisted:
                evidence = await self._find(evidence)

    async def _find(self, evidence: Evidence) -> Evidence:
        began = self._story.enter("find")
        try:
            found = await self._awaited(activity_calls.find(self._given.spec, self._given.machines))
        except ActivityError as error:
            # Not knowing is not the same as having nothing.
            reason = f"could not be asked: {error.cause or error}"[:300]
            evidence = unanswered(evidence, [machine.name for machine in self._given.machines], reason)
        else:
            evidence = merged(evidence, found)
        self._story.leave(began, "find", web_ui.searched_text(evidence))
        return evidence

    async def _search(self, evidence: Evidence) -> Evidence:
        """As incidents did it that began before a failed search counted as one: once, where a stop does not do."""
        if evidence is self._searched or not look_further(
            self._case.choose(evidence), evidence, self._given.spec.checkpoint
        ):
            return evidence
        if not workflow.patched("search for copies"):
            return evidence
        began = self._story.enter("find")
        try:
            found = await self._awaited(activity_calls.find(self._given.spec, self._given.machines))
        except ActivityError as error:
            self._story.leave(began, "find", f"failed: {error.cause or error}")
            self._searched = evidence
        else:
            self._story.leave(began, "find", web_ui.found_text(found.held))
            self._searched = merged(evidence, found)
        return self._searched

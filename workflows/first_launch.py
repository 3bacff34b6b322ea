"""The first launch of a job: checks whether its checkpoints fit, and whether the requested step exists, and then
launches it."""

from __future__ import annotations

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.agents.check_room import CheckRoom
    from activities.agents.find_checkpoints import FindCheckpoints
    from activities.agents.launch_ranks import LaunchRanks
    from activities.agents.prepare_machines import PrepareMachines
    from activities.agents.read_folder import ReadFolder
    from activities.agents.restore_checkpoints import RestoreCheckpoints
    from activities.pool.requests import LeaseMachines
    from everstep.base.text import listed
    from everstep.decisions.act.versions.book import VersionBook
    from everstep.decisions.keep.choose_restore import NOTHING_HELD, Restore
    from everstep.decisions.keep.lineage import FROM_NOTHING, extended
    from everstep.decisions.keep.starts import choose_start
    from everstep.errors import CheckpointError
    from everstep.model.evidence import Evidence
    from everstep.model.job_state import JobState
    from everstep.model.launch import Launched
    from everstep.model.pool import LeaseRequest
    from everstep.model.state_copy import StateCopies
    from workflows import web_ui
    from workflows.start_activity import start_activity

REFUSALS_NAMED = 4
"""The largest number of refused machines that a message names."""


class CannotStart(Exception):
    """The job cannot start as requested; the message says why, and what is available instead."""


class FirstLaunch:
    """Starts one job. The progress is noted in the job's state, because an incident of the first launch begins with
    that state."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._failed: list[StateCopies] = []
        """Copies that could not be restored."""
        self._evidence = Evidence(generation=0)

    async def check(self) -> None:
        """Lease the machines, check whether the checkpoints fit there, and find the checkpoint from which to start.

        Raises:
            CannotStart: another job has a machine, there is no room, or the checkpoint does not exist.
        """
        state = self._state
        await self._lease()
        try:
            if state.spec.checkpoint.state_mb_per_rank and (
                lacking := await start_activity(CheckRoom(job=state.placed))
            ):
                raise CannotStart(lacking)
            if state.resume_path:
                folder = await start_activity(ReadFolder(machines=state.machines, path=state.resume_path))
                if folder.problem:
                    raise CannotStart(folder.problem)
                state.resume_path_step = folder.step
            elif state.resume_from is not None:
                self._evidence = await start_activity(FindCheckpoints(job=state.placed, at=state.resume_from))
                self._choose()
        except ActivityError as error:
            raise CannotStart(f"the machines could not be checked: {error.cause or error}") from error

    async def _lease(self) -> None:
        state = self._state
        request = LeaseRequest(job=state.spec.name, run=state.run, machines=state.machines)
        leased = await start_activity(LeaseMachines(request=request))
        if leased.refused:
            reasons = [f"{machine}: {reason}" for machine, reason in leased.refused.items()]
            raise CannotStart(f"its machines are not available: {listed(reasons, REFUSALS_NAMED, separator='; ')}")

    def count(self) -> None:
        """Number the next generation and note the step at which it begins, before any part of it can fail."""
        state = self._state
        state.generation += 1
        if state.resume_path:
            state.resume_step = state.resume_path_step
        elif state.resume_from is not None:
            state.resume_step = state.resume_from
        first_step = FROM_NOTHING if state.resume_path else state.resume_step
        state.lineage = extended(state.lineage, [(state.generation, first_step)])
        book = VersionBook.of(state.versions, state.spec.version)
        book.add_first(state.spec, workflow.time_ns())
        book.launched(state.generation, max(state.resume_step, 0), workflow.time_ns())
        state.versions = book.all()
        state.spec = state.spec.model_copy(update={"version": book.running})

    async def launch(self) -> Launched:
        """Prepare the machines, restore checkpoints, and start the first generation.

        Raises:
            CannotStart: the checkpoint that the job starts from is damaged.
            ActivityError: an activity failed; it may be tried again.
        """
        state = self._state
        await start_activity(PrepareMachines(job=state.placed))
        origin = Restore(state.resume_step, "")
        if state.resume_path:
            origin = Restore(state.resume_step, "", folder=state.resume_path)
        elif state.resume_from is not None:
            await self._restore()
        request = LaunchRanks(
            job=state.placed,
            generation=state.generation,
            resume_step=state.resume_step,
            reshard_from=state.resume_path,
            begins_run=True,
            origin="from the beginning" if state.resume_step == NOTHING_HELD else origin.origin,
        )
        return await start_activity(request)

    async def _restore(self) -> None:
        """Restore all copies of the step. A copy that failed is not chosen again, so the loop ends."""
        while (restore := self._choose()).copies:
            state = self._state
            restored = await start_activity(RestoreCheckpoints.of(state.placed, restore, self._evidence))
            failed = [*restored.failed, *restored.unreached]
            if restored.unreachable:
                raise CannotStart(web_ui.restored_text(restored))
            if not failed:
                return
            self._failed += failed

    def _choose(self) -> Restore:
        """Return the copies that are needed for the requested step.

        Raises:
            CannotStart: the step does not exist; the message lists the existing steps.
        """
        state = self._state
        silent = self._evidence.unreachable
        try:
            chosen, state.origin_runs = choose_start(
                self._evidence.held,
                state.spec.assignment([machine.name for machine in state.machines]),
                state.earlier,
                at=state.resume_from,
                bad=self._failed,
            )
        except CheckpointError as error:
            raise CannotStart(f"{error}; {listed(silent)} does not answer" if silent else str(error)) from error
        return chosen

"""Follow one job until it ends, is parked, or the user detaches.

Following a job only reads its state: the job continues when this process ends or is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

from temporalio.client import WorkflowFailureError
from temporalio.service import RPCError

from console.views.display import Display, Ending, Tick
from console.views.parked import parked_lines
from controlplane import text
from controlplane.client import Control
from controlplane.local.cluster_file import ClusterFile
from controlplane.problems import ProblemTracker
from controlplane.progress import JobProgress, ProgressFeed, Rate
from controlplane.queries.events import IncidentEvent, IncidentTracker, parts_line
from controlplane.queries.last_step import last_step
from controlplane.queries.status import ettr_of
from everstep.errors import ClusterError, EverstepError
from everstep.model.incident import IncidentReport
from everstep.model.job_state import JobState
from workflows.messages import JobResult

EXIT_FINISHED, EXIT_FAILED, EXIT_PARKED, EXIT_DETACHED = 0, 1, 4, 130
FRAME_S = 0.1
"""Time between two samples of the ranks, seconds."""
CALM_S, BUSY_S = 1.0, 0.2
"""Time between two queries of the workflow, in normal operation and during an incident, seconds."""
LAST_STEPS = 64
"""The search for the last step of an ended job begins this many steps before the last known step."""


class Follower:
    """Follows one run of a job.

    Args:
        control: Connection to the cluster.
        state: State of the job at the start.
        display: Shows the events.
        attached: Whether the job was running already. If so, its closed incidents are not shown.
    """

    def __init__(self, control: Control, state: JobState, display: Display, *, attached: bool) -> None:
        self._control = control
        self._state = state
        self._job = state.spec.name
        self._topology = state.spec.topology()
        self._display = display
        self._incidents = IncidentTracker()
        self._problems = ProblemTracker()
        if attached:
            self._incidents.skip_closed(state)
        self._steps = Rate()
        self._tokens = Rate()
        self._generation = 0
        self._step: int | None = None
        self._loss: float | None = None
        self._ettr: float | None = None
        self._temporal_silent = False

    async def follow(self) -> Ending:
        """Follow the job to its end; returns the ending, which is not shown yet.

        Raises:
            ClusterError: the local cluster was taken down.
        """
        left = asyncio.Event()
        with _leaving(left):
            async with self._control.feed(self._job, self._state.machines) as feed:
                result = asyncio.create_task(self._result())
                asking = asyncio.create_task(self._ask(feed))
                try:
                    return await self._watch(feed, result, left)
                finally:
                    for task in (result, asking):
                        task.cancel()
                    await asyncio.gather(result, asking, return_exceptions=True)

    async def _watch(self, feed: ProgressFeed, result: asyncio.Task[JobResult], left: asyncio.Event) -> Ending:
        while True:
            self._display.tick(self._tick(feed.current))
            await self._show_incidents()
            if self._state.status == "running":  # during an incident copies fail too, but the incident itself is shown
                for event in self._problems.changes(feed.copying, time.monotonic()):
                    self._display.problem(event)
            if result.done():
                return await self._ended(result.result())
            if self._state.status == "parked":
                return await self._parked()
            if left.is_set():
                return detached(self._job, self._control.option, EXIT_DETACHED)
            cluster = self._control.cluster
            if self._temporal_silent and cluster and not ClusterFile.path_of(cluster.name).exists():
                raise ClusterError(f"cluster {cluster.name} was taken down: 'everstep up' starts it and its jobs again")
            with suppress(TimeoutError):
                async with asyncio.timeout(FRAME_S):
                    await left.wait()

    # Queries of the workflow and the ledger.

    async def _ask(self, feed: ProgressFeed) -> None:
        """Poll the workflow and the ledger. They may not answer while the ranks step."""
        while True:
            try:
                self._state = await self._control.state(self._job)
                feed.move_to(self._state.machines)
                await self._ask_ledger(feed.current)
                if self._temporal_silent:
                    self._temporal_silent = False
                    self._display.note("Temporal answers again")
            except EverstepError as error:
                if not self._temporal_silent:
                    self._temporal_silent = True
                    self._display.note(f"{error}; the ranks are not affected")
            undisturbed = self._state.status == "running" and feed.current.alive >= self._topology.world_size
            await asyncio.sleep(CALM_S if undisturbed else BUSY_S)

    async def _ask_ledger(self, progress: JobProgress | None = None) -> None:
        answer = await ettr_of(self._control, self._job, progress)
        # Until this run is in the ledger, the answer is about an earlier run of the same name.
        age_s = (time.time_ns() - self._state.started_ns) / 1e9
        if answer and self._state.started_ns and answer.wall_s <= age_s + 1:
            self._ettr = answer.ratio

    async def _result(self) -> JobResult:
        """The result of the job, or a result made from the end of its workflow."""
        try:
            return await self._control.result(self._job)
        except WorkflowFailureError as error:
            headline = f"job {self._job} was ended from outside: {error.cause or error}"
            return JobResult(headline=headline, outcome="failed", generations=self._state.generation, incidents=[])
        except RPCError:
            headline = f"Temporal has no job {self._job} any more"
            return JobResult(headline=headline, outcome="failed", generations=0, incidents=[])

    # The display.

    def _tick(self, progress: JobProgress) -> Tick:
        if progress.generation != self._generation:  # a restart must not count as speed
            self._generation, self._steps, self._tokens = progress.generation, Rate(), Rate()
        if progress.step is not None:
            self._steps.add(progress.step, progress.time_ns)
            self._step = progress.step
        self._loss = progress.loss if progress.loss is not None else self._loss
        self._tokens.add(progress.tokens(self._topology), progress.time_ns)
        return Tick(
            job=self._job,
            status=self._state.status_text,
            generation=max(progress.generation, self._state.generation),
            step=self._step,
            loss=self._loss,
            steps_per_s=self._steps.per_second,
            tokens_per_s=self._tokens.per_second,
            ettr=self._ettr,
            ranks_alive=progress.alive,
            ranks=self._topology.world_size,
            incidents=self._state.incidents_so_far,
            silent=progress.silent,
        )

    async def _show_incidents(self) -> None:
        for event in self._incidents.changes(self._state):
            self._display.incident(event, await self._details(event))

    async def _details(self, event: IncidentEvent) -> list[str]:
        """The parts of a recovery with their times."""
        if event.kind != "recovered":
            return []
        handle = self._control.client.get_workflow_handle(event.incident.id, result_type=IncidentReport)
        with suppress(RPCError, WorkflowFailureError, TimeoutError):
            async with asyncio.timeout(CALM_S):
                report = await handle.result()
                return [parts_line(report), f"details: everstep incident {event.incident.id}{self._control.option}"]
        return []

    # The ending.

    async def _ended(self, result: JobResult) -> Ending:
        with suppress(EverstepError):
            self._state = await self._control.state(self._job)
            await self._show_incidents()
            await self._ask_ledger()
        if result.outcome != "finished" and not self._state.launched:
            return self._not_launched(result)
        await self._last_step()
        took = (time.time_ns() - self._state.started_ns) / 1e9 if self._state.started_ns else None
        facts = ", ".join(
            [
                "steps unknown" if self._step is None else text.counted(self._step, "step"),
                *([] if self._loss is None else [f"loss {text.loss(self._loss)}"]),
                f"ETTR {text.ratio(self._ettr)}",
                text.duration(took),
                text.counted(result.generations, "generation"),
            ]
        )
        return Ending(
            outcome=result.outcome,
            headline=result.headline,
            details=(facts, *(f"at its end, {event.line}" for event in self._problems.left()), *self._links()),
            exit_code=EXIT_FINISHED if result.outcome == "finished" else EXIT_FAILED,
            facts={
                "steps": self._step,
                "loss": self._loss,
                "ettr": self._ettr,
                "seconds": took,
                "generations": result.generations,
                "incidents": self._state.incidents_so_far,
            },
        )

    def _not_launched(self, result: JobResult) -> Ending:
        """The ending of a job that never ran; agents and ledger may have an earlier run with this name."""
        facts = {"steps": None, "loss": None, "ettr": None, "seconds": None, "generations": 0, "incidents": 0}
        return Ending(result.outcome, result.headline, tuple(self._links()), EXIT_FAILED, facts)

    async def _last_step(self) -> None:
        """Read the last step from the step records, since ranks may have stepped after the last sample."""
        start = max((self._step or 0) - LAST_STEPS, 0)
        step, loss = await last_step(self._control.agents, self._job, self._state.machines, from_step=start)
        if step is not None and step >= (self._step or 0):
            self._step, self._loss = step, loss if loss is not None else self._loss

    async def _parked(self) -> Ending:
        parked = next((incident for incident in reversed(self._state.incidents) if not incident.resolution), None)
        return Ending(
            outcome="parked",
            headline=f"job {self._job} is parked: it needs an operator. Its checkpoints are kept, and no rank runs",
            details=tuple(await parked_lines(self._control, self._job, parked)) if parked else (),
            exit_code=EXIT_PARKED,
        )

    def _links(self) -> list[str]:
        link = self._control.link(f"job/{self._job}")
        shown = [link] if link else []
        if self._state.incidents:
            shown.append(f"everstep incidents {self._job}{self._control.option}")
        return shown


def detached(job: str, option: str, exit_code: int) -> Ending:
    """The ending if the job continues without this command, with commands for the job."""
    return Ending(
        outcome="detached",
        headline=f"detached: job {job} is still running",
        details=(
            f"everstep attach {job}{option}     follow it again",
            f"everstep status {job}{option}",
            f"everstep logs {job} -f{option}",
            f"everstep stop {job}{option}",
        ),
        exit_code=exit_code,
    )


@contextlib.contextmanager
def _leaving(left: asyncio.Event) -> Iterator[None]:
    """While the block runs, Ctrl-C and SIGTERM detach this command; the job continues."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, left.set)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

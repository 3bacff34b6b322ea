"""New versions of a running job's code.

A version is requested by a signal or by an update of Temporal. It is made, and tried on the machines; after that it is
pending, until it is due. The job's workflow applies due updates by an incident; any other incident includes the pending
updates. If the job continues as new while a version is made or tried, the next run begins this work again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, FailureError

with workflow.unsafe.imports_passed_through():
    from activities.agents.check_version import CheckVersion
    from activities.make_version import MakeVersion
    from everstep.decisions.act.versions.book import VersionBook
    from everstep.decisions.act.versions.request import RequestAnswer, answer_to, same_as
    from everstep.model.incident import Anomaly, IncidentReport, Symptom
    from everstep.model.job_state import JobState
    from everstep.model.version import JobVersion, UpdateRequest, VersionStatus
    from workflows.start_activity import start_activity

WHY_CHARACTERS = 4000
"""The largest number of characters of a traceback that a job keeps."""

IncidentHandle = workflow.ChildWorkflowHandle[Any, IncidentReport]


class Updates:
    """The updates of one job.

    Args:
        state: The job's state, which is changed.
        show: Updates the job's page.
    """

    def __init__(self, state: JobState, show: Callable[[], None]) -> None:
        self._state = state
        self._show = show
        self._under_way: dict[int, asyncio.Task[None]] = {}
        self._timers: dict[int, tuple[int, asyncio.Task[None]]] = {}
        """Version → the time at which it is due, nanoseconds, and the task that wakes the job at that time."""
        self._notifying: set[asyncio.Task[None]] = set()
        self._incident: IncidentHandle | None = None

    # Requests of operators.

    def accept(self, request: UpdateRequest) -> str:
        """Accept a request; returns what is done with it, as text.

        Raises:
            ValueError: the request is impossible; the message says why and what to do.
        """
        book = self._book()
        book.add_first(self._state.spec, workflow.time_ns(), self._launched)
        answer = answer_to(request, book, workflow.time_ns())
        self._keep(book)
        if answer.refused:
            raise ValueError(answer.refused)
        if answer.to_make:
            self._begin(answer.to_make)
        self._changed(answer)
        return answer.text

    def check(self, request: UpdateRequest) -> None:
        """Refuse an impossible request; the job's state is not changed.

        Raises:
            ValueError: the message says why and what to do.
        """
        book = VersionBook.of([version.model_copy() for version in self._state.versions], self._state.spec.version)
        book.add_first(self._state.spec, 0, self._launched)
        if refused := answer_to(request, book, 0).refused:
            raise ValueError(refused)

    # What the job asks.

    @property
    def due(self) -> bool:
        """Whether the job runs and an update must be applied now, without waiting for the next recovery."""
        due_ns = self._book().next_due_ns()
        return self._state.status == "running" and 0 < due_ns <= workflow.time_ns()

    @property
    def under_way(self) -> bool:
        """Whether a continue-as-new would lose work: making or trying a version, or notifying the incident."""
        return bool(self._under_way or self._notifying)

    def anomaly(self) -> Anomaly:
        """Return the anomaly that opens the incident of the due updates."""
        pending = self._book().pending()
        newest = pending[-1]
        wanted = newest.wanted
        reason = f": {wanted.reason}" if wanted.reason else ""
        back = "back to" if wanted.rollback else "update to"
        return Anomaly(
            id=f"update-{newest.number}",
            generation=self._state.generation,
            symptom=Symptom.UPDATE,
            headline=f"{back} {newest.name} by {wanted.operator}{reason}",
            seen_ns=workflow.time_ns(),
        )

    def resume(self) -> None:
        """Continue the work that an earlier run of the workflow had begun."""
        for version in self._state.versions:
            if version.status is VersionStatus.CHECKING:
                self._begin(version.number)
        self._set_timers()

    def incident_opened(self, incident: IncidentHandle, versions: list[JobVersion]) -> None:
        """Note the open incident, which may include pending updates.

        Args:
            incident: The incident.
            versions: The versions with which it was started. A version may have been withdrawn since then.
        """
        self._incident = incident
        if self._state.versions != versions:
            self._notify()

    def incident_closed(self) -> None:
        """Note that no incident is open any more."""
        self._incident = None

    async def notify_incident(self) -> None:
        """Notify the open incident, if there is one, of pending updates."""
        if self._incident is not None and self._state.versions:
            with contextlib.suppress(FailureError):  # the incident is over: the job applies due updates itself
                await self._incident.signal("versions", self._state.versions)

    # Make and try a version.

    def _begin(self, number: int) -> None:
        if number not in self._under_way:
            task = asyncio.create_task(self._make_and_try(number), name=f"version {number}")
            self._under_way[number] = task
            task.add_done_callback(lambda _: self._under_way.pop(number, None))

    async def _make_and_try(self, number: int) -> None:
        """Make a version and try it; after that it is pending, or refused."""
        try:
            await self._make(number)
            if self._is_wanted(number):
                await self._try(number)
        except ActivityError as error:
            self._refuse(number, getattr(error.cause, "message", "") or str(error))
        await self.notify_incident()

    async def _make(self, number: int) -> None:
        book = self._book()
        version, running = book.versions[number], book.versions[book.running]
        assert running.runs is not None  # the running version was made before
        self._show_progress(number, "it is made")
        needed = [one.runs.id for one in book.all() if one.runs is not None]
        spec = self._state.spec
        request = MakeVersion(
            job=spec.name,
            redact=spec.redact,
            running=running.runs,
            request=version.request,
            number=number,
            needed=needed,
        )
        made = await start_activity(request)
        book = self._book()
        book.change(number, runs=made.runs, changed=made.changed)
        self._keep(book)
        if refused := same_as(book, number):
            self._refuse(number, refused)

    async def _try(self, number: int) -> None:
        runs = self._book().versions[number].runs
        assert runs is not None
        self._show_progress(number, f"it is tried on {len(self._state.machines)} machines")
        spec = runs.applied(self._state.spec, number)
        checked = await start_activity(CheckVersion(job=self._state.placed.model_copy(update={"spec": spec})))
        if not self._is_wanted(number):
            return
        if checked.refused:
            self._refuse(number, checked.refused)
            return
        book = self._book()
        book.wait_for_restart(number, workflow.time_ns())
        if checked.told:
            book.change(number, why=checked.told[:WHY_CHARACTERS])
        self._keep(book)
        self._changed(RequestAnswer(""))

    def _is_wanted(self, number: int) -> bool:
        version = self._book().versions.get(number)
        return version is not None and version.status is VersionStatus.CHECKING

    def _show_progress(self, number: int, text: str) -> None:
        book = self._book()
        book.change(number, why=text)
        self._keep(book)
        self._show()

    def _refuse(self, number: int, why: str) -> None:
        if self._is_wanted(number):
            book = self._book()
            book.refuse(number, why[:WHY_CHARACTERS])
            self._keep(book)
        self._show()

    # The state.

    @property
    def _launched(self) -> tuple[int, int]:
        return self._state.generation, self._state.resume_step

    def _book(self) -> VersionBook:
        return VersionBook.of(self._state.versions, self._state.spec.version)

    def _keep(self, book: VersionBook) -> None:
        self._state.versions = book.all()
        if book.running != self._state.spec.version:
            self._state.spec = self._state.spec.model_copy(update={"version": book.running})

    def _changed(self, answer: RequestAnswer) -> None:
        self._set_timers()
        self._show()
        if answer.changed:
            self._notify()

    def _notify(self) -> None:
        if self._incident is not None:
            notifying = asyncio.create_task(self.notify_incident(), name="notify incident")
            self._notifying.add(notifying)
            notifying.add_done_callback(self._notifying.discard)

    def _set_timers(self) -> None:
        """Start timers that wake the job when a version is due; timers that are not needed any more are cancelled."""
        due = {version.number: version.due_ns for version in self._book().pending()}
        for number, (due_ns, waking) in list(self._timers.items()):
            if due.get(number) != due_ns:
                waking.cancel()
                del self._timers[number]
        for number, due_ns in due.items():
            wait_s = (due_ns - workflow.time_ns()) / 1e9
            if wait_s > 0 and number not in self._timers:
                waking = asyncio.create_task(self._wake(number, wait_s), name=f"force v{number}")
                self._timers[number] = due_ns, waking

    async def _wake(self, number: int, wait_s: float) -> None:
        await workflow.sleep(wait_s, summary=f"FORCE UPDATE v{number}")
        self._timers.pop(number)

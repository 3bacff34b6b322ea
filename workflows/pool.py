"""The machine pool: a workflow that owns the machines of a cluster, and knows which job has which machine.

Jobs and incidents send updates to it, through activities; operators send updates too. It polls its machines and the
running jobs, so that its state is correct even after a job was terminated by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from datetime import UTC, datetime, timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, FailureError

with workflow.unsafe.imports_passed_through():
    from activities.pool.look_at_machines import LookAtMachines
    from activities.pool.provision_machines import ProvisionMachines
    from activities.pool.ready_standbys import ReadyStandbys
    from everstep.decisions.pool import book, poll, ready
    from everstep.decisions.pool.unchanged import with_unchanged
    from everstep.model.job_state import job_workflow_id
    from everstep.model.pool import (
        POOL_WORKFLOW,
        GiveBack,
        Leased,
        LeaseRequest,
        OperatorMove,
        PollAnswers,
        PoolMachine,
        PoolPlace,
        PoolState,
        ReadyRequest,
        ReadyResult,
        Replaced,
        ReplaceRequest,
    )
    from workflows import web_ui
    from workflows.start_activity import TASK_TIMEOUT, start_activity

POLL_INTERVAL = timedelta(seconds=30)
"""The time between two polls."""
SOON = timedelta(seconds=1)
"""The time to the next poll if a request waits for that poll."""
OFTEN = timedelta(seconds=3)
"""The time between two polls while a job waits for machines that may be ready soon, or while a machine may still have
ranks of a former job."""
KNOWN_S = 8.0
"""The longest wait of a request for the first poll, seconds; after that the request must be repeated."""
NOT_KNOWN = "PoolUnknown"
"""The error type of a request that must be repeated."""
SHOWN = 20
"""The largest number of machines in the page's table."""
WHY_CHARACTERS = 110
"""The largest number of characters in the reason of a machine."""
ORDER = {PoolPlace.QUARANTINED: 0, PoolPlace.CORDONED: 1, PoolPlace.PROVISIONING: 2, PoolPlace.STANDBY: 3}
"""The order of the table: first the machines that may need a person."""


@workflow.defn(name=POOL_WORKFLOW)
class StandbyPoolWorkflow:
    """All machines of one cluster."""

    @workflow.init
    def __init__(self, state: PoolState) -> None:
        self.state = state
        self.looked = PollAnswers()
        """The complete answers to the newest poll of this run."""
        self.waited_for = False
        """Whether a request waits for the result of the next poll."""
        self._readying: asyncio.Task[None] | None = None

    # Requests of jobs and incidents.

    @workflow.update(name="lease", description="A job that starts leases machines")
    async def lease(self, request: LeaseRequest) -> Leased:
        """Lease the machines that a job names: all of them, or none."""
        await self._known()
        leased = book.lease(self.state, request, now_ns=workflow.time_ns())
        self.waited_for |= leased.may_change
        self._show()
        return leased

    @workflow.update(name="replace", description="An incident evicts machines and leases replacements")
    async def replace(self, request: ReplaceRequest) -> Replaced:
        """Evict machines and lease replacements: for all of them, or for none."""
        await self._known()
        replaced = book.replace(self.state, request, now_ns=workflow.time_ns())
        self.waited_for = True
        self._show()
        return replaced

    @workflow.update(name="give_back", description="A job ended, or left machines")
    def give_back(self, request: GiveBack) -> int:
        """Accept machines that a job gives back; returns their number."""
        count = book.give_back(self.state, request, now_ns=workflow.time_ns())
        self._show()
        return count

    # Requests of operators.

    @workflow.update(name="evict", description='{"machine": "m3", "operator": "you", "reason": "why"}')
    async def evict(self, move: OperatorMove) -> str:
        """Evict a machine: no job gets it, and a job that has it loses it once a replacement is ready."""
        await self._known()
        return self._moved(book.operator_evicts(self.state, move, now_ns=workflow.time_ns()), move)

    @workflow.update(name="release", description='{"machine": "m3", "operator": "you", "reason": "why"}')
    async def release(self, move: OperatorMove) -> str:
        """Allow jobs to use a machine again."""
        await self._known()
        return self._moved(book.operator_releases(self.state, move, now_ns=workflow.time_ns()), move)

    @workflow.query(name="state", description="All machines and the jobs that have them")
    def current_state(self) -> PoolState:
        """Return the pool's state."""
        return self.state

    # The life of the pool.

    @workflow.run
    async def run(self, state: PoolState) -> None:
        """Poll the machines for ever."""
        while True:
            self.waited_for = False
            began_ns = workflow.time_ns()
            looked = await self._look()
            poll.apply(self.state, looked, began_ns=began_ns, now_ns=workflow.time_ns())
            self._show()
            await self._notify_jobs(looked)
            await self._provision()
            self._make_ready(looked)
            if workflow.info().is_continue_as_new_suggested() or self._is_new_version():
                await workflow.wait_condition(workflow.all_handlers_finished)
                workflow.continue_as_new(self.state, task_timeout=TASK_TIMEOUT)
            await workflow.sleep(SOON, summary="shortest time between polls")
            try:
                await workflow.wait_condition(
                    self._is_due, timeout=self._pause() - SOON, timeout_summary="until the next poll"
                )
            except TimeoutError:
                continue

    def _pause(self) -> timedelta:
        now_ns = workflow.time_ns()
        often = poll.is_awaited(self.state, now_ns=now_ns) or poll.is_to_be_cleaned(self.state, now_ns=now_ns)
        return OFTEN if often else POLL_INTERVAL

    def _is_due(self) -> bool:
        is_long = workflow.info().is_continue_as_new_suggested()
        return self.waited_for or not self.state.known or is_long or self._is_new_version()

    def _is_new_version(self) -> bool:
        return workflow.info().is_target_worker_deployment_version_changed()

    async def _look(self) -> PollAnswers:
        try:
            found: PollAnswers = await start_activity(
                LookAtMachines(request=poll.questions(self.state, self.looked), known=len(self.state.machines))
            )
        except ActivityError as error:
            return PollAnswers(listed=False, problem=f"the poll failed: {error.cause or error}"[:300])
        self.looked = with_unchanged(found, self.looked)
        return self.looked

    async def _notify_jobs(self, looked: PollAnswers) -> None:
        """Ask jobs to evict the machines that an operator wants evicted, once there are replacements."""
        for one in poll.leaving(self.state, looked):
            job = workflow.get_external_workflow_handle(job_workflow_id(one.job))
            move = OperatorMove(machine=one.machine.name, operator=one.by, reason=one.why)
            with contextlib.suppress(FailureError):  # the job is over: the next poll shows that
                await job.signal("evict", move)

    async def _provision(self) -> None:
        """Ask the cluster for machines if it has too few and can grow."""
        machines = poll.wanted(self.state, now_ns=workflow.time_ns())
        if not machines:
            if not self.state.short:
                self.state.provisioned = ""
            return
        try:
            await start_activity(ProvisionMachines(machines=machines, listed=self.state.listed))
        except ActivityError as error:
            self.state.provisioned = f"the cluster was asked for {machines} machines: {error.cause or error}"[:300]
        else:
            self.state.provisioned, self.waited_for = f"the cluster was asked for {machines} machines", True
        self._show()

    def _make_ready(self, looked: PollAnswers) -> None:
        """Bring the code of running jobs to idle machines, in the background."""
        if self._readying is not None and not self._readying.done():
            return
        requests = ready.wanted(self.state, looked)
        if requests:
            self._readying = asyncio.create_task(self._ready(requests), name="ready standbys")

    async def _ready(self, requests: list[ReadyRequest]) -> None:
        for request in requests:
            try:
                result: ReadyResult = await start_activity(ReadyStandbys(request=request))
            except ActivityError as error:
                result = ready.failed(request, str(error.cause or error))
            ready.apply(self.state, request, result)
        self._show()

    async def _known(self) -> None:
        """Wait until the machines of the running jobs are known.

        Raises:
            ApplicationError: they are not known yet.
        """
        try:
            await workflow.wait_condition(lambda: self.state.known, timeout=KNOWN_S)
        except TimeoutError:
            why = self.state.problem or "the first poll is running"
            raise ApplicationError(
                f"the pool does not know yet which jobs run on the machines: {why}", type=NOT_KNOWN
            ) from None

    def _moved(self, text: str, move: OperatorMove) -> str:
        if not text:
            known = ", ".join(sorted(self.state.machines)[:20])
            raise ApplicationError(f"there is no machine {move.machine}; there are {known}", type="NoMachine")
        self.waited_for = True
        self._show()
        return text

    def _show(self) -> None:
        workflow.set_current_details(pool_page(self.state, workflow.info().namespace))


def pool_page(state: PoolState, namespace: str) -> str:
    """Return the page with the machines and their jobs. Machines that may need a person are first; of too many
    machines, the last ones are left out."""
    places = Counter(str(one.place) for one in state.machines.values())
    summed = ", ".join(f"{number} {place}" for place, number in sorted(places.items())) or "none is known yet"
    by_need = sorted(state.machines.values(), key=lambda one: (ORDER.get(one.place, 4), not one.fault))
    rows = [_row(one, namespace) for one in by_need[:SHOWN]]
    rest = len(by_need) - len(rows)
    parts = [
        f"## {web_ui.count(len(state.machines), 'machine')}: {summed}",
        f"{state.spare} can replace other machines now; {state.standbys} are to be kept as standbys.",
        f"NOT KNOWN: {state.problem}" if state.problem else "",
        _short(state),
        web_ui.table(["Machine", "State", "Since", "Why"], rows) if rows else "",
        f"… and {rest} more: `everstep machines` shows all." if rest else "",
        "An operator evicts or releases a machine with the update `evict` or `release`: "
        '`{"machine": "m3", "operator": "you", "reason": "why"}`.',
    ]
    return "\n\n".join(part for part in parts if part)[: web_ui.PAGE_CHARACTERS]


def _short(state: PoolState) -> str:
    waiting = ", ".join(f"{job} ({short.machines})" for job, short in state.short.items())
    return "; ".join(
        part for part in (f"Jobs that wait for machines: {waiting}" if waiting else "", state.provisioned) if part
    )


def _row(one: PoolMachine, namespace: str) -> list[str]:
    place = str(one.place)
    if one.job:
        place += f" {web_ui.link(one.job, namespace, job_workflow_id(one.job))}"
    since = datetime.fromtimestamp(one.since_ns / 1e9, UTC).strftime("%m-%d %H:%M") if one.since_ns else ""
    why = "; ".join(part for part in (one.why, one.fault and f"now: {one.fault}", _unfit(one), _leaving(one)) if part)
    by = f"{one.by}: " if why and one.by != f"job {one.job}" else ""
    return [one.machine.name, place, since, f"{by}{why}".replace("|", "/")[:WHY_CHARACTERS]]


def _unfit(one: PoolMachine) -> str:
    """Return which jobs' code failed in a trial on the machine, and why, as text."""
    return "; ".join(f"code of {why}" for why in one.ready.values() if why)


def _leaving(one: PoolMachine) -> str:
    if one.wanted_out:
        return "an operator wants it to leave its job"
    return f"ranks of {one.job} may still run there" if one.uncleaned else ""

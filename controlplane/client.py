"""The connection of a command to the control plane: it starts, queries, signals and follows jobs."""

from __future__ import annotations

import asyncio
import difflib
import functools
import getpass
import lzma
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle, WorkflowQueryFailedError
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.envconfig import ClientConfig
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.runtime import LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter
from temporalio.service import RPCError, RPCStatusCode

from activities.payloads import data_converter
from agent.client import AgentClients
from agent.security import ClientSecurity
from controlplane.inventory import Inventory, inventory_path, load
from controlplane.local.cluster_file import ClusterFile
from controlplane.local.temporal_server import configured
from controlplane.progress import ProgressFeed
from controlplane.references import JobRun, option_of, parse_incident
from everstep.base.text import one_line
from everstep.errors import ClusterError, ConfigError, LedgerError, NoSuchJob
from everstep.model.eviction import EvictionState
from everstep.model.job import JobSpec, owner_of
from everstep.model.job_state import TASK_QUEUE, EarlierRun, IncidentSummary, JobState, job_workflow_id, jobs_query
from everstep.model.machine import Machine
from everstep.model.stage import CurrentStage
from everstep.model.version import JobVersion
from everstep.rank import environment
from workflows import attributes
from workflows.messages import JobResult
from workflows.start_activity import TASK_TIMEOUT
from workflows.web_ui import job_title

if TYPE_CHECKING:  # The ledger imports SQLAlchemy, which is slow, so only commands that read the ledger import it.
    from activities.ledger.ledger import Ledger

ANSWER_LIMIT = timedelta(seconds=5)
"""Time limit for the answer to a query."""
ASK_AGAIN_S = 1.0
"""Wait before the next attempt if Temporal did not answer, seconds."""
JOBS_LISTED = 50


class Control:
    """A connection to Temporal, to the agents and to the ledger; use it as an async context manager."""

    def __init__(self, client: Client, cluster: ClusterFile | None, inventory: Inventory | None = None) -> None:
        self.client = client
        self.cluster = cluster
        self.inventory = inventory
        self._owner = cluster or inventory
        token_file = cluster.token_file if cluster else None
        authority = cluster.agents_ca if cluster else None
        self.agents = AgentClients(ClientSecurity(ca_file=authority, token_file=token_file) if token_file else None)
        self._ledger: Ledger | None = None
        self.task_queue = cluster.task_queue if cluster else os.environ.get(environment.TASK_QUEUE) or TASK_QUEUE
        """Task queue of the cluster's jobs."""

    @classmethod
    async def connect(
        cls, cluster_name: str = "default", *, inventory: Path | None = None, local: bool = False
    ) -> Control:
        """Connect to a local cluster, or else to the server that the user configured for Temporal's tools.

        If there is an inventory, from the argument or from ``EVERSTEP_INVENTORY``, the connection is to the deployed
        cluster that the inventory describes, even if a local cluster runs on this computer.

        Args:
            cluster_name: Name of the local cluster.
            inventory: File with the machines of a deployed cluster.
            local: Connect to the local cluster, and ignore any inventory.

        Raises:
            ClusterError: there is no server, or it does not answer.
            ConfigError: the inventory cannot be used.
        """
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        choice = configured()
        cluster: ClusterFile | None = None
        path = None if local else inventory_path(inventory)
        if path and choice is None:
            raise ConfigError(
                f"the inventory {path} describes a deployed cluster, but the address of its Temporal server is not "
                f"known: set TEMPORAL_ADDRESS, or unset {environment.INVENTORY} to use a local cluster"
            )
        machines = load(path) if path else None
        if not path and (choice is None or ClusterFile.path_of(cluster_name).exists()):
            cluster = ClusterFile.load(cluster_name)
        address = cluster.temporal_address if cluster else choice.address if choice else ""
        try:
            if choice is not None and address == choice.address:  # the configuration has TLS and keys too
                client = await Client.connect(
                    **ClientConfig.load_client_connect_config(),
                    data_converter=data_converter(),
                    runtime=_quiet_runtime(),
                )
            else:
                namespace = cluster.namespace if cluster else "default"
                client = await Client.connect(
                    address, namespace=namespace, data_converter=data_converter(), runtime=_quiet_runtime()
                )
        except RuntimeError as error:
            hint = f"'everstep up{option_of(cluster.name)}' starts it" if cluster else "check TEMPORAL_ADDRESS"
            raise ClusterError(f"Temporal does not answer at {address}: {hint} ({error})") from error
        return cls(client, cluster, machines)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.agents.close()
        if self._ledger is not None:
            self._ledger.close()

    # Addresses and locations.

    def link(self, workflow_id: str) -> str:
        """Address of a workflow in Temporal's Web UI; "" if the address of the Web UI is not known."""
        base = self.cluster.ui_url if self.cluster else os.environ.get(environment.UI_URL, "")
        return f"{base}/namespaces/{self.client.namespace}/workflows/{quote(workflow_id, safe='')}" if base else ""

    @property
    def option(self) -> str:
        """The option that names this cluster in a suggested command."""
        return option_of(self.cluster.name) if self.cluster else ""

    @property
    def all_machines(self) -> list[Machine]:
        """All machines, the standbys last; empty: they are not known."""
        return self._owner.machines if self._owner else []

    @property
    def versions_url(self) -> str:
        """URL of the store of code versions; "" if it is not known here."""
        return self.cluster.versions_url if self.cluster else os.environ.get(environment.VERSIONS, "")

    @property
    def machines(self) -> list[Machine]:
        """The machines that jobs may have: all but the standbys."""
        return self.all_machines[: len(self.all_machines) - self._owner.standbys] if self._owner else []

    async def ledger(self) -> Ledger | None:
        """The ledger; None: no ledger can be read from here."""
        url = self.cluster.ledger_url if self.cluster else os.environ.get(environment.LEDGER_URL, "")
        if self._ledger is None and url:
            from activities.ledger.ledger import Ledger

            with suppress(LedgerError):
                self._ledger = await asyncio.to_thread(Ledger.open, url, create=False)
        return self._ledger

    # Jobs.

    async def start_job(
        self,
        spec: JobSpec,
        machines: Sequence[Machine],
        *,
        resume_from: int | None = None,
        resume_path: str = "",
        last_run: EarlierRun | None = None,
        versions: Sequence[JobVersion] = (),
    ) -> None:
        """Start a job on machines.

        Args:
            spec: The job.
            machines: The machines on which it runs.
            resume_from: Completed steps of a checkpoint of the last run with this name; None: start from step 0.
            resume_path: Folder of a disk checkpoint; it may be of any job, with any parallel sizes.
            last_run: The last run with this name, for ``resume_from``; None: not known.
            versions: The first version of the job's code; empty: the job runs the code that the spec names.

        Raises:
            ConfigError: a job of this name is running, or the name is that of a replay.
            ClusterError: Temporal does not answer.
        """
        if (owner := owner_of(spec.name)) != spec.name:
            raise ConfigError(f"{spec.name!r} names a replay of the job {owner!r}: use a name without '~'")
        with self._answers(spec.name):
            try:
                await self.client.start_workflow(
                    "Job",
                    JobState(
                        spec=spec,
                        machines=list(machines),
                        resume_from=resume_from,
                        resume_path=resume_path,
                        earlier=last_run or EarlierRun(),
                        versions=list(versions),
                    ),
                    id=job_workflow_id(spec.name),
                    task_queue=self.task_queue,
                    task_timeout=TASK_TIMEOUT,
                    id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                    id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
                    search_attributes=attributes.search_attributes(
                        {attributes.JOB_NAME: spec.name, attributes.STAGE: "starting"}
                    ),
                    static_summary=job_title(spec),
                )
            except WorkflowAlreadyStartedError:
                raise ConfigError(
                    f"job {spec.name} is running already: follow it with 'everstep attach {spec.name}{self.option}', "
                    "or choose another --name"
                ) from None

    async def state(self, job: str) -> JobState:
        """The state of a job's newest run, which may have ended.

        Raises:
            ConfigError: there is no such job.
            ClusterError: Temporal does not answer, or no worker does.
        """
        with self._answers(job):
            state: JobState = await self._handle(job).query("state", result_type=JobState, rpc_timeout=ANSWER_LIMIT)
            return state

    async def result(self, job: str) -> JobResult:
        """Wait for a job's end, also through outages of Temporal.

        Raises:
            temporalio.client.WorkflowFailureError: the job's workflow was terminated, or failed.
            temporalio.service.RPCError: Temporal has no such job.
        """
        handle = self.client.get_workflow_handle(job_workflow_id(job), result_type=JobResult)
        while True:
            try:
                result: JobResult = await handle.result()
                return result
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND:
                    raise
                await asyncio.sleep(ASK_AGAIN_S)

    async def run_of(self, job: str) -> JobRun:
        """The newest run of a job.

        Raises:
            ConfigError: there is no such job; the message names jobs with similar names.
        """
        try:
            with self._answers(job):
                description = await self._handle(job).describe()
        except NoSuchJob:
            names = [run.name for run in await self.jobs()]
            near = difflib.get_close_matches(job, names, n=1)
            hint = f"there are {', '.join(names[:8])}" if names else "no job has run yet"
            hint = f"did you mean {near[0]}?" if near else hint
            raise ConfigError(f"there is no job {job}: {hint}") from None
        return JobRun(job, _status(description.status), description.start_time, description.close_time)

    async def jobs(self, limit: int = JOBS_LISTED) -> list[JobRun]:
        """The newest run of every job that Temporal still has, running jobs first, then the newest first.

        Raises:
            ClusterError: Temporal does not answer.
        """
        newest: dict[str, JobRun] = {}
        with self._answers(""):
            listing = self.client.list_workflows(jobs_query(self.task_queue, 'ExecutionStatus!="ContinuedAsNew"'))
            async for workflow in listing:
                name = workflow.id.removeprefix("job/")
                if name not in newest:
                    newest[name] = JobRun(name, _status(workflow.status), workflow.start_time, workflow.close_time)
                if len(newest) >= limit:
                    break
        return sorted(newest.values(), key=lambda run: (not run.running, -run.started.timestamp()))

    async def stop(self, job: str, note: str = "") -> None:
        """Ask a job to end for good.

        Raises:
            ConfigError: there is no such job, or it does not run.
        """
        await self._running(job)
        with self._answers(job):
            await self._handle(job).signal("stop", {"operator": getpass.getuser(), "note": note})

    async def _running(self, job: str) -> None:
        run = await self.run_of(job)
        if not run.running:
            raise ConfigError(f"job {job} does not run any more: see 'everstep status {job}{self.option}'")

    # Incidents.

    async def open_incident(self, reference: str) -> IncidentSummary:
        """The open incident for a name: ``gpt`` (the job's open incident), ``gpt/2`` or ``incident/gpt/0002``.

        Raises:
            ConfigError: there is no such job or incident, or it is not open.
        """
        job, number = parse_incident(reference)
        await self._running(job)
        state = await self.state(job)
        wanted = [incident for incident in state.incidents if number in (None, incident.number)]
        if number is not None and not wanted:
            raise ConfigError(f"job {job} has no incident {number}: see 'everstep incidents {job}{self.option}'")
        still_open = [incident for incident in wanted if not incident.resolution]
        if not still_open:
            why = f"incident {wanted[-1].id} is closed" if number is not None else f"job {job} has no open incident"
            raise ConfigError(f"{why}; the job is {state.status}: see 'everstep status {job}{self.option}'")
        return still_open[-1]

    async def stage(self, incident_id: str) -> CurrentStage:
        """The current stage of an incident, and the reason for it.

        Raises:
            ClusterError: Temporal does not answer, or no worker does.
        """
        with self._answers(incident_id):
            handle = self.client.get_workflow_handle(incident_id)
            stage: CurrentStage = await handle.query("stage", result_type=CurrentStage, rpc_timeout=ANSWER_LIMIT)
            return stage

    async def evictions(self, incident_id: str) -> EvictionState:
        """The evictions of an open or closed incident, with the rules' answers; raises errors as :meth:`stage` does."""
        with self._answers(incident_id):
            handle = self.client.get_workflow_handle(incident_id)
            state: EvictionState = await handle.query("evictions", result_type=EvictionState, rpc_timeout=ANSWER_LIMIT)
            return state

    async def answer(self, incident_id: str, answer: str, note: str = "", *, accept_loss: bool = False) -> None:
        """Send the answer of an operator to an incident.

        Args:
            incident_id: Id of the incident.
            answer: ``resume`` or ``abandon``.
            note: The reason for the answer; it is kept with the incident.
            accept_loss: With ``resume``: give up newer steps that may exist.

        Raises:
            ClusterError: Temporal does not answer.
        """
        with self._answers(incident_id):
            handle = self.client.get_workflow_handle(incident_id)
            more = {"accept_loss": True} if accept_loss else {}
            await handle.signal(answer, {"operator": getpass.getuser(), "note": note, **more})

    # Progress.

    def feed(self, job: str, machines: Sequence[Machine], interval_s: float = 0.2) -> ProgressFeed:
        """Progress of a job's ranks on all machines; use it as an async context manager."""
        return ProgressFeed(self.agents, job, machines, interval_s=interval_s)

    # Helpers.

    def _handle(self, job: str) -> WorkflowHandle[object, object]:
        return self.client.get_workflow_handle(job_workflow_id(job))

    def _address_hint(self) -> str:
        if self.cluster:
            return f"run 'everstep up{self.option}'"
        return "check TEMPORAL_ADDRESS and TEMPORAL_NAMESPACE"

    @contextmanager
    def _answers(self, name: str) -> Iterator[None]:
        """Turn the failures of a call about a job or an incident into errors that name a remedy."""
        try:
            yield
        except WorkflowQueryFailedError as error:
            raise ClusterError(f"{name} cannot be queried now: {error}") from error
        except (ValueError, lzma.LZMAError) as error:  # pydantic's errors are ValueErrors
            raise ClusterError(
                f"this release cannot read the answer of {name}: use the release of everstep that started it, or a "
                f"newer release. 'everstep stop {name}{self.option}' works nevertheless ({one_line(error)})"
            ) from error
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND and "namespace" in str(error).lower():
                raise ClusterError(
                    f"the Temporal server at {self.client.service_client.config.target_host} has no namespace "
                    f"{self.client.namespace}, so it is not the server of this cluster: {self._address_hint()}"
                ) from error
            if error.status is RPCStatusCode.NOT_FOUND:
                raise NoSuchJob(f"there is no job or incident {name}: see 'everstep status'") from error
            if "imeout" in str(error) or error.status is RPCStatusCode.DEADLINE_EXCEEDED:
                hint = (
                    f"'everstep up{self.option}' starts missing workers"
                    if self.cluster
                    else f"check that workers run with task queue {self.task_queue} and this namespace"
                )
                raise ClusterError(f"Temporal is up, but no worker answers for {name}: {hint}") from error
            hint = f"'everstep up{self.option}' starts it" if self.cluster else "check TEMPORAL_ADDRESS"
            raise ClusterError(f"Temporal does not answer ({error}): {hint}") from error


def _status(status: WorkflowExecutionStatus | None) -> str:
    return status.name.lower().replace("_", " ") if status is not None else "unknown"


@functools.cache
def _quiet_runtime() -> Runtime:
    """The SDK's runtime for a terminal: it logs only errors, since everstep reports retries itself."""
    errors = LoggingConfig(filter=TelemetryFilter(core_level="ERROR", other_level="ERROR"))
    return Runtime(telemetry=TelemetryConfig(logging=errors))

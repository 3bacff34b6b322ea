"""Runs a drill: starts the job, injects the fault, gathers the facts, and lets the judge make the result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from temporalio.client import WorkflowFailureError

from controlplane.local import mounts
from controlplane.start_checks.code import start_recorded
from drills import checks
from drills.clusters.local import DrillCluster, Say, silent
from drills.clusters.network import NetworkCluster
from drills.faults.fault import fault_of, inject, opening_of
from drills.inject.context import DrillContext, copies_seen
from drills.inject.detection import await_healed
from drills.inject.plan import planned
from drills.inject.put_back import cleaned, put_back, spare_of
from drills.judge import facts as gather
from drills.judge.compare import compare
from drills.judge.facts import DrillFacts
from drills.judge.result import DrillResult
from drills.observe.processes import CopyWatch
from drills.observe.step_records import Records
from drills.spec.request import PACE, UNEVEN, DrillRequest, example
from drills.verdict import judge
from everstep.errors import ClusterError, EverstepError
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.job import JobSpec
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.rank import environment
from workflows.messages import JobResult

LIMIT_S = 600.0
"""A drill's job must end within this time, seconds."""
POLL_S = 1.0
"""Time between two checks of whether a job is parked, seconds."""


class References:
    """Runs jobs without a fault, each different job once, and keeps their step records."""

    def __init__(self) -> None:
        self._records: dict[str, Records] = {}

    async def of(self, cluster: DrillCluster, spec: JobSpec) -> Records:
        """Return the step records of a job without a fault; run the job first if it has not run yet.

        Raises:
            ClusterError: the job does not finish.
        """
        clean = without_fault(spec)
        key = clean.model_dump_json()
        if key not in self._records:
            cluster.say("running the same job without a fault, to compare its losses")
            clean = clean.model_copy(update={"name": cluster.next_name("reference")})
            machines = cluster.machines[: spec.machines]
            folder = cluster.home / "drills" / clean.name
            await start_recorded(cluster.control, _with_run_folder(clean, folder), machines)
            ended = await _ended(cluster, clean)
            if ended is None or ended.outcome != "finished":
                raise ClusterError(
                    f"the job does not finish even without a fault: {ended.headline if ended else 'it took too long'}; "
                    f"its logs are in {cluster.home}"
                )
            self._records[key], _ = await gather.records(cluster, clean, machines)
        return self._records[key]


class Drill:
    """One drill, which can be run several times on one cluster.

    Args:
        cluster: An open cluster with enough machines.
        request: The fault and the job.
        references: The runs without a fault; several drills can share them.
    """

    def __init__(self, cluster: DrillCluster, request: DrillRequest, references: References | None = None) -> None:
        self.cluster = cluster
        self.request = request
        self.references = references or References()

    async def run(self) -> DrillResult:
        """Run the job with the fault once, and judge the recovery.

        Raises:
            ConfigError: the request makes no sense.
            CannotInject: the fault cannot be injected here.
            ClusterError: the job does not finish even without a fault.
        """
        checks.check(self.request)
        cluster, name = self.cluster, self.cluster.next_name(self.request.fault.name)
        sizes = self.request.spec(name, {})
        self.request = self.request.with_spare(await spare_of(cluster, sizes.machines))
        plan = cluster.home / "drills" / name / "faults.json"
        env = {environment.FAULTS: str(plan), environment.STATE_DIGEST: "1"}
        spec = self.request.spec(name, env, disk=cluster.home / "disk")
        (cluster.home / "disk").mkdir(
            exist_ok=True
        )  # all machines see it at this path, as they see a shared file system
        machines = cluster.machines[: spec.machines]
        plan_of_faults = planned(self.request, spec, plan, cluster)
        plan_of_faults.write()
        cluster.say(f"{name}: {self.request.describe(spec)}")
        context = DrillContext(cluster, self.request, spec, machines, plan_of_faults)
        with fault_of(self.request).prepared(context):
            facts = await self._watched(context)
            facts.marks = plan_of_faults.fired()
            await cleaned(context)
            await self._gather(context, facts)
        await await_healed(context)
        await put_back(context)
        facts.leaked += [f"mount {path}" for path in mounts.below(cluster.file.shm) + mounts.below(cluster.home)]
        if facts.outcome == "finished":
            reference = await self.references.of(cluster, self.request.opening.reference(spec, facts.versions))
            records = facts.records.newest() if self.request.opening.steps_done_anew else facts.records
            facts.comparison = compare(reference, records, spec.topology().world_size)
        return judge(self.request, spec, facts)

    async def _watched(self, context: DrillContext) -> DrillFacts:
        """Run the job to its end, inject the fault, and watch for two processes of one rank."""
        facts = DrillFacts(seen=context.seen)
        watch = CopyWatch(self.cluster.tree())
        watch.start()
        injecting: asyncio.Task[None] | None = None
        try:
            spec = _with_run_folder(context.spec, context.planned.plan.parent)
            await start_recorded(self.cluster.control, spec, context.machines)
            if context.planned.outside:
                injecting = asyncio.create_task(self._inject(context))
            ended = await self._to_its_end(context.spec, facts)
            if ended is not None:
                facts.outcome, facts.headline, facts.generations = ended.outcome, ended.headline, ended.generations
            if injecting is not None and all(context.fired(fault["id"]) for fault in context.planned.outside):
                await injecting  # within BACK_LIMIT_S
        finally:
            if injecting is not None:
                injecting.cancel()
                await asyncio.gather(injecting, return_exceptions=True)
            await asyncio.to_thread(watch.stop)
            await context.power_on()
        facts.duplicates, facts.shared = copies_seen(watch.copies, [context]), sorted(watch.shared)
        facts.samples, facts.blind_s = watch.samples, watch.blind_s
        return facts

    async def _inject(self, context: DrillContext) -> None:
        try:
            await inject(context)
        except (EverstepError, OSError) as error:
            context.seen.trouble = str(error)
            self.cluster.say(f"the fault could not be injected as planned: {error}")

    async def _to_its_end(self, spec: JobSpec, facts: DrillFacts) -> JobResult | None:
        """Wait for the job's end. A job that is parked for good is noted in the facts, and abandoned."""
        ending = asyncio.create_task(_ended(self.cluster, spec))
        try:
            while not ending.done():
                await asyncio.wait([ending], timeout=POLL_S)
                if not ending.done():
                    await self._abandon_if_parked(spec, facts)
            return ending.result()
        finally:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)

    async def _abandon_if_parked(self, spec: JobSpec, facts: DrillFacts) -> None:
        control = self.cluster.control
        if self.request.opening.parked_for_a_while:
            return
        with suppress(EverstepError):
            state = await control.state(spec.name)
            if state.status == "parked" and not facts.parked:
                facts.parked = True
                incident = await control.open_incident(spec.name)
                await control.answer(incident.id, "abandon", "the drill is over")

    async def _gather(self, context: DrillContext, facts: DrillFacts) -> None:
        cluster, spec = self.cluster, context.spec
        facts.incidents = await gather.incidents(cluster, spec.name)
        facts.leaked = await gather.left_behind(cluster, spec, context.machines)
        machines = await gather.recorded_on(cluster, spec, context.machines, context.seen.emptied)
        facts.records, twice = await gather.records(cluster, spec, machines, context.seen.records)
        facts.duplicates += twice
        facts.ettr = await gather.ettr(cluster, spec.name)
        for incident in facts.incidents:
            facts.texts += await gather.texts(cluster, incident)
            facts.launches_ns += await gather.launches(cluster, incident.id)
        await opening_of(self.request).gather(context, facts)
        last = facts.incidents[-1] if facts.incidents else None
        if last and last.report and last.report.recovered and last.report.resume_step > 0:
            moved = await gather.moved(cluster, last.id)
            world_size = spec.topology().world_size
            facts.restored_from = gather.restored_from(moved, world_size, last.report.resume_step)


async def run_drill(request: DrillRequest, *, say: Say = silent, keep: bool = False) -> DrillResult:
    """Run one drill on a new cluster, and take the cluster down unless it is to ``keep``.

    Raises:
        ConfigError: the request makes no sense.
        CannotInject: the fault cannot be injected here.
        ClusterError: the cluster does not come up, or the job does not finish even without a fault.
    """
    return (await run_drills(request, repeat=1, say=say, keep=keep))[0]


async def run_drills(
    request: DrillRequest,
    *,
    repeat: int,
    say: Say = silent,
    keep: bool = False,
    each: Callable[[DrillResult], None] = lambda _: None,
) -> list[DrillResult]:
    """Run one drill ``repeat`` times on one new cluster, as :func:`run_drill` does; ``each`` gets each result."""
    checks.check(request)
    spec = request.spec("drill", {})
    cluster = cluster_for(request, spec.machines, keep=keep, say=say)
    results = []
    async with cluster:
        drill = Drill(cluster, request)
        for _ in range(repeat):
            result = await drill.run()
            if keep and not cluster.prefix:  # a browser cannot reach addresses of another network
                result.links = [link for incident in result.incidents if (link := cluster.control.link(incident))]
            result.cluster, result.prefix = (str(cluster.home), cluster.prefix) if keep else ("", "")
            results.append(result)
            each(result)
    if cluster.leaked:
        last = results[-1]
        last.leaked += cluster.leaked
        last.problems.append(f"left behind: {', '.join(cluster.leaked[:5])}")
        last.ok = False
    return results


def cluster_for(request: DrillRequest, machines: int, *, keep: bool = False, say: Say = silent) -> DrillCluster:
    """Return a cluster of the kind that the request's fault needs, not started yet."""
    standbys = max(request.standbys, request.opening.standbys(request.spec("drill", {}).topology()))
    options: dict[str, Any] = {"machines": machines, "standbys": standbys, "keep": keep, "say": say}
    if request.opening.needs_network:
        return NetworkCluster(with_postgres=request.opening.needs_postgres, **options)
    return DrillCluster(**options)


async def _ended(cluster: DrillCluster, spec: JobSpec) -> JobResult | None:
    """Wait for the end of a job; returns None if it took too long and was stopped.

    Raises:
        ClusterError: the job's workflow failed.
    """
    try:
        async with asyncio.timeout(LIMIT_S):
            return await cluster.control.result(spec.name)
    except TimeoutError:
        with suppress(EverstepError):
            await cluster.control.stop(spec.name, "the drill took too long")
        return None
    except WorkflowFailureError as error:
        raise ClusterError(f"the job's workflow failed: {error.cause or error}") from error


def _with_run_folder(spec: JobSpec, folder: Path) -> JobSpec:
    """Make the run's folder, and return the job with this folder in place of ``{run}`` in its arguments."""
    folder.mkdir(parents=True, exist_ok=True)
    return spec.model_copy(update={"args": [argument.replace("{run}", str(folder)) for argument in spec.args]})


def without_fault(spec: JobSpec) -> JobSpec:
    """Return the job with the same losses, but without the fault, and with default policies and no delays in its steps.

    Drills that differ only in these share one job without a fault.
    """
    args = list(spec.args)
    for option, values in ((PACE, 1), (UNEVEN, 3)):
        while Path(spec.script) == example("gpt.py") and option in args:
            at = args.index(option)
            del args[at : at + 1 + values]
    env = {key: value for key, value in spec.env.items() if key != environment.FAULTS}
    changed = {"name": "reference", "env": env, "args": args}
    return spec.model_copy(update={**changed, "checkpoint": CheckpointPolicy(), "policy": RecoveryPolicy()})

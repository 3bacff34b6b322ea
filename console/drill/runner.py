"""Running a drill: job, fault, facts, verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from temporalio.client import WorkflowFailureError

from console.drill import facts as gather
from console.drill.catalogue import MACHINE_FAULTS, RANK_FAULTS
from console.drill.cluster import DrillCluster, Say, silent
from console.drill.copies import CopyWatch
from console.drill.facts import Facts
from console.drill.inject import Absorbed, Planned, kill_part, planned
from console.drill.judge import judge
from console.drill.losses import Records, differences
from console.drill.request import DrillRequest
from console.drill.result import DrillResult
from everstep import environment
from everstep.errors import ClusterError, EverstepError
from everstep.job import JobSpec
from everstep.machine import Machine
from workflows.messages import JobResult

LIMIT_S = 600.0
"""A drill's job must have ended within this long (ours)."""
LOOK_S = 1.0
"""Between two looks whether a job is parked (ours)."""


class References:
    """Step records of jobs without a fault, one run for each different job."""

    def __init__(self) -> None:
        self._known: dict[str, Records] = {}

    async def of(self, cluster: DrillCluster, spec: JobSpec) -> Records:
        """The records of this job without a fault; runs it if it has not run yet."""
        clean = spec.model_copy(update={"name": "reference", "env": _without_plan(spec)})
        key = clean.model_dump_json()
        if key not in self._known:
            cluster.say("running the same job without a fault, to compare its losses")
            clean = clean.model_copy(update={"name": cluster.next_name("reference")})
            machines = cluster.machines[: spec.machines]
            await cluster.control.start_job(_placed(clean, cluster.home / "drills" / clean.name), machines)
            ended = await _ended(cluster, clean)
            if ended is None or ended.outcome != "finished":
                raise ClusterError(
                    f"the job does not run without a fault either: {ended.headline if ended else 'not in time'}; "
                    f"its logs are in {cluster.home}"
                )
            self._known[key], _ = await gather.records(cluster, clean, machines)
        return self._known[key]


class Drill:
    """One request, run once or several times on one cluster.

    Args:
        cluster: an open cluster with enough machines.
        request: what to inject, into which job.
        references: to share runs without a fault between drills.
    """

    def __init__(self, cluster: DrillCluster, request: DrillRequest, references: References | None = None) -> None:
        self.cluster = cluster
        self.request = request
        self.references = references or References()

    async def run(self) -> DrillResult:
        """Inject once and judge.

        Raises:
            ConfigError: the request makes no sense.
            CannotInject: the fault cannot be injected here.
            ClusterError: the job does not run even without a fault.
        """
        self.request.check()
        cluster, name = self.cluster, self.cluster.next_name(self.request.fault)
        plan = cluster.home / "drills" / name / "faults.json"
        spec = self.request.spec(name, {environment.FAULTS: str(plan)})
        machines = cluster.machines[: spec.machines]
        given = planned(self.request, spec, plan, cluster)
        given.write()
        cluster.say(f"{name}: {describe(self.request, spec)}")
        facts = await self._watched(spec, machines, given)
        facts.marks = given.fired()
        await self._gather(spec, machines, facts)
        return judge(self.request, spec, facts)

    async def _watched(self, spec: JobSpec, machines: list[Machine], given: Planned) -> Facts:
        """Run the job to its end while the fault is injected and copies of ranks are looked for."""
        facts = Facts()
        watch = CopyWatch(self.cluster.tree())
        watch.start()
        killing: asyncio.Task[Absorbed] | None = None
        try:
            await self.cluster.control.start_job(_placed(spec, given.plan.parent), machines)
            if self.request.fault in MACHINE_FAULTS:
                killing = asyncio.create_task(kill_part(self.cluster, self.request, spec, machines, given))
            ended = await self._to_its_end(spec, facts)
            if ended is not None:
                facts.outcome, facts.headline, facts.generations = ended.outcome, ended.headline, ended.generations
            if killing is not None and given.fired()[self.request.fault]:
                facts.absorbed = await killing  # bounded: see inject.BACK_LIMIT_S
        finally:
            if killing is not None:
                killing.cancel()
                await asyncio.gather(killing, return_exceptions=True)
            await asyncio.to_thread(watch.stop)
        facts.duplicates = len(watch.copies)
        return facts

    async def _to_its_end(self, spec: JobSpec, facts: Facts) -> JobResult | None:
        """Wait for the job; one that is parked is given up, after it was noted."""
        ending = asyncio.create_task(_ended(self.cluster, spec))
        control = self.cluster.control
        while not ending.done():
            await asyncio.wait([ending], timeout=LOOK_S)
            if ending.done():
                continue
            with suppress(EverstepError):
                state = await control.state(spec.name)
                if state.status == "parked" and not facts.parked:
                    facts.parked = True
                    open_one = await control.open_incident(spec.name)
                    await control.tell(open_one.id, "abandon", "the drill is over")
        return ending.result()

    async def _gather(self, spec: JobSpec, machines: list[Machine], facts: Facts) -> None:
        cluster = self.cluster
        facts.incidents = await gather.incidents(cluster, spec.name)
        facts.leaked = await gather.left_behind(cluster, spec, machines)
        facts.records, too_many = await gather.records(cluster, spec, machines)
        facts.duplicates += too_many
        facts.ettr = await gather.ettr(cluster, spec.name)
        if self.request.during == "launch":
            for incident in facts.incidents:
                facts.launches_ns += await gather.launches(cluster, incident.id)
        if facts.records.of and facts.outcome == "finished":
            facts.differences = differences(await self.references.of(cluster, spec), facts.records)


async def run_drill(request: DrillRequest, *, say: Say = silent, keep: bool = False) -> DrillResult:
    """One drill on a cluster of its own, torn down afterwards.

    Raises:
        ConfigError: the request makes no sense.
        CannotInject: the fault cannot be injected here.
        ClusterError: the cluster or the job does not run even without a fault.
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
    """The same drill several times on one cluster; ``each`` takes a run when it is over.

    Raises as :func:`run_drill` does.
    """
    request.check()
    spec = request.spec("drill", {})
    cluster = DrillCluster(machines=spec.machines, standbys=request.standbys, keep=keep, say=say)
    results = []
    async with cluster:
        drill = Drill(cluster, request)
        for _ in range(repeat):
            result = await drill.run()
            result.links = [link for one in result.incidents if keep and (link := cluster.control.link(one))]
            result.cluster = str(cluster.home) if keep else ""
            results.append(result)
            each(result)
    if cluster.leaked:
        last = results[-1]
        last.leaked += cluster.leaked
        last.problems.append(f"left behind: {', '.join(cluster.leaked[:5])}")
        last.ok = False
    return results


def describe(request: DrillRequest, spec: JobSpec) -> str:
    """One line about what is going to happen."""
    ranks = " and ".join(f"rank {rank}" for rank in request.struck_ranks(spec))
    how = {
        "kill-rank": f"SIG{request.signal} to {ranks}",
        "stop-rank": f"SIGSTOP to {ranks}",
        "exit-rank": f"{ranks} leaves with code {request.code}",
        "raise": f"{ranks} raises {request.exception}",
        "kill-during-save": f"SIGKILL to {ranks} in the middle of a save",
        "kill-agent": f"SIGKILL to the agent of {request.struck_machine(spec)}",
        "kill-forkserver": f"SIGKILL to the fork server of {request.struck_machine(spec)}",
    }
    line = how.get(request.base, request.base) + f" at step {request.at_step}"
    if request.times > 1:
        line += f", {request.times} times"
    if request.fault not in RANK_FAULTS and request.fault != request.base:
        part = {"kill-worker": "worker", "kill-temporal": "Temporal server"}.get(request.fault, "agent")
        where = f"stage {request.in_stage}" if request.in_stage else f"the launch on {request.struck_machine(spec)}"
        if request.at_event is not None:
            where = f"event {request.at_event} of the incident"
        line += f", then SIGKILL to the {part} at {where}"
    return line


async def _ended(cluster: DrillCluster, spec: JobSpec) -> JobResult | None:
    """The end of a job; None when it did not come in time, and then it is stopped."""
    try:
        async with asyncio.timeout(LIMIT_S):
            return await cluster.control.result(spec.name)
    except TimeoutError:
        with suppress(EverstepError):
            await cluster.control.stop(spec.name, "the drill took too long")
        return None
    except WorkflowFailureError as error:
        raise ClusterError(f"the job's workflow failed: {error.cause or error}") from error


def _placed(spec: JobSpec, folder: Path) -> JobSpec:
    """The job with ``{run}`` in its arguments replaced by a folder that no other run has."""
    folder.mkdir(parents=True, exist_ok=True)
    return spec.model_copy(update={"args": [one.replace("{run}", str(folder)) for one in spec.args]})


def _without_plan(spec: JobSpec) -> dict[str, str]:
    return {key: value for key, value in spec.env.items() if key != environment.FAULTS}

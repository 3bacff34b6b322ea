"""Runs a soak: its clusters, the run without faults, the job with its episodes, and the checks at the end."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from temporalio.client import WorkflowFailureError

from controlplane.start_checks.code import start_recorded
from drills.clusters.local import DrillCluster, Say, silent
from drills.clusters.network import NetworkCluster
from drills.clusters.network import missing as network_lacks
from drills.faults.all import fault_named
from drills.judge import facts as gather
from drills.judge.compare import compare
from drills.observe.step_records import Records
from drills.runner import Drill, References
from drills.spec.request import DrillRequest
from everstep.errors import CannotInject, ClusterError, EverstepError
from everstep.model.job_state import job_workflow_id
from soaks.draw import left_out
from soaks.episode import Episodes
from soaks.job import POLICY, SoakJob
from soaks.left import LeftCluster, alone_in
from soaks.observe import failed_tasks
from soaks.other_job import OtherJob
from soaks.plan import Episode, Setting, SoakPlan
from soaks.reduce import reduced
from soaks.result import EpisodeResult, Journal, PartResult, SoakResult, no_result

PLAN, JOURNAL, CLUSTER = "plan.json", "journal.jsonl", "cluster.json"
"""Names of the files in the folder of a soak."""
END_LIMIT_S = 120.0
"""The job ends within this time after its last gate, seconds."""

Each = Callable[[EpisodeResult, SoakResult], None]
"""A function that gets each finished episode, and the result so far."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A run without faults. Its losses are right for a shorter job too."""

    records: Records
    steps: int
    """Number of its steps; only a job of the same length has the same last state."""


class Soak:
    """One soak.

    Args:
        plan: The plan.
        folder: Folder of plan and journal.
        minutes: Time after which it ends early; None: it runs the complete plan.
        reference: A run without faults that is long enough; None: it is run first.
        keep: Whether the cluster stays up after a violation.
        say: Shows lines of progress.
        each: Gets each finished episode.
    """

    def __init__(
        self,
        plan: SoakPlan,
        folder: Path,
        *,
        minutes: float | None = None,
        reference: Reference | None = None,
        keep: bool = True,
        say: Say = silent,
        each: Each = lambda *_: None,
    ) -> None:
        self.plan, self.folder, self.minutes = plan, folder, minutes
        self.keep, self.say, self.each = keep, say, each
        self.reference = reference
        self.violated = False
        """Whether there was a violation in a part that ran in this process."""
        self.ran: list[int] = []
        """Numbers of the episodes that ran on the current cluster."""
        self.journal = Journal(folder / JOURNAL)
        self.left = LeftCluster(folder / CLUSTER)
        folder.mkdir(parents=True, exist_ok=True)

    async def run(self) -> SoakResult:
        """Run the episodes that the journal does not have, until the end or the first violation.

        Raises:
            ClusterError: a cluster does not come up, or the job does not finish even without a fault.
        """
        with alone_in(self.folder):
            return await self._run()

    async def _run(self) -> SoakResult:
        self.plan.write(self.folder / PLAN)
        for left in (self.left, *map(LeftCluster, self.folder.glob(f"reducing/*/{CLUSTER}"))):
            await left.end(self.say)
        done, ends = self.journal.read()
        result = SoakResult(seed=self.plan.seed, planned=self.plan.faults, left_out=left_out())
        result.violations = [text for end in ends for text in end.violations]
        rest = self.rest(done, {end.setting for end in ends})
        to_come = {episode.number for episode in rest.episodes}
        result.episodes = [episode for episode in done if episode.number not in to_come]
        self._deadline = math.inf if self.minutes is None else time.monotonic() + self.minutes * 60
        for setting, part in rest.parts():
            if lacking := missing(setting):
                kinds = {kind for episode in part.episodes for kind in episode.kinds}
                result.left_out |= {kind: lacking for kind in kinds if needs_network(kind)}
            elif setting == "network" and len(self.plan.parts()) > 1:
                await self._in_another_process(part, result)
            elif result.ok and not result.stopped:
                self.ran.clear()
                await self._part(setting, part, result)
                self.violated = not result.ok
        return result

    def rest(self, done: Sequence[EpisodeResult], ended: Collection[Setting]) -> SoakPlan:
        """Return the plan with the episodes that are not done, and with the last episode of each part whose end was not
        checked."""
        numbers = {episode.number for episode in self.plan.episodes} - {episode.number for episode in done}
        if all(not episode.violations for episode in done):
            numbers |= {part.episodes[-1].number for setting, part in self.plan.parts() if setting not in ended}
        return self.plan.only(numbers)

    async def _part(self, setting: Setting, plan: SoakPlan, result: SoakResult) -> None:
        """Run the episodes of one setting on a cluster of their own."""
        machines = self.plan.sizes.machines + self.plan.other
        options: dict[str, Any] = {"machines": machines, "standbys": self.plan.standbys, "say": self.say}
        options["workers"] = self.plan.workers
        cluster = NetworkCluster(with_postgres=True, **options) if setting == "network" else DrillCluster(**options)
        cluster.before_start = self.left.record
        before = len(result.violations)
        async with cluster:
            own = {episode.number for episode in plan.episodes if episode.own_job}
            if long := plan.only({episode.number for episode in plan.episodes} - own).episodes:
                await self._one_job(cluster, plan.only({episode.number for episode in long}), result)
            await self._own_jobs(cluster, plan.only(own), result)
            cluster.keep = self.keep and not result.ok
            result.kept, result.prefix = (str(cluster.home), cluster.prefix) if cluster.keep else ("", "")
        self.left.forget()
        result.violations += [f"nothing is left behind: {text}" for text in cluster.leaked]
        if not result.stopped:
            self.journal.add(PartResult(setting=setting, violations=result.violations[before:]))

    async def _one_job(self, cluster: DrillCluster, plan: SoakPlan, result: SoakResult) -> None:
        """Run the episodes of the long job."""
        if "temporal" not in cluster.processes():
            result.left_out["kill-temporal"] = (
                f"the server at {cluster.file.temporal_address} does not belong to this cluster"
            )
            possible = {episode.number for episode in plan.episodes if "kill-temporal" not in episode.kinds}
            if not possible:
                return
            plan = plan.only(possible)
        job = SoakJob(cluster, plan, cluster.next_name("soak"))
        if self.reference is None or self.reference.steps < plan.steps:
            self.reference = Reference(await References().of(cluster, job.spec), plan.steps)
        job.write()
        self.say(f"{plan.faults} faults in {len(plan.episodes)} episodes, {plan.steps} steps")
        other = OtherJob(cluster, plan, cluster.next_name("other"), POLICY) if plan.other else None
        if other is not None:
            await other.start()
        await start_recorded(cluster.control, job.spec, job.machines)
        episodes = Episodes(job, self.reference.records, other)
        result.violations += await episodes.begin()
        for index, episode in enumerate(plan.episodes):
            if not self._may_continue(result):
                if result.ok:
                    await cluster.control.stop(job.spec.name, result.stopped)
                    await cluster.control.result(job.spec.name)
                    result.violations += await self._other_ended(other)
                return
            self.ran.append(episode.number)
            self._add(await episodes.run(index), result)
        if result.ok:
            job.gate(len(plan.episodes)).open()
            result.violations += await self._ended(cluster, job, self.reference, other)

    @staticmethod
    async def _other_ended(other: OtherJob | None) -> list[str]:
        """Stop the second job; returns its violations."""
        if other is None:
            return []
        try:
            return [f"the second job runs: {text}" for text in await other.end()]
        except (EverstepError, WorkflowFailureError) as error:
            return [f"the second job runs: it cannot be stopped: {error}"]

    async def _own_jobs(self, cluster: DrillCluster, plan: SoakPlan, result: SoakResult) -> None:
        """Run the episodes that have a job of their own."""
        references = References()
        for episode in plan.episodes:
            if not self._may_continue(result):
                return
            try:
                ended = await run_own_job(cluster, plan, episode, references)
            except CannotInject as error:
                result.left_out |= dict.fromkeys(episode.kinds, str(error))
                continue
            self.ran.append(episode.number)
            self._add(ended, result)

    async def _in_another_process(self, plan: SoakPlan, result: SoakResult) -> None:
        """In another process, run the episodes whose machines have a network of their own.

        This process cannot enter that network with all its threads.
        """
        if not self._may_continue(result):
            return
        folder = self.folder / "network"
        command = [sys.executable, "-P", "-m", "soaks", "soak", "--json", "--tries", "0"]
        if (folder / PLAN).exists():
            command += ["--resume", str(folder)]
        else:
            plan.write(self.folder / "network.json")
            command += ["--plan", str(self.folder / "network.json"), "--folder", str(folder)]
        if self._deadline < math.inf:
            command += ["--minutes", str(max(self._deadline - time.monotonic(), 0) / 60)]
        child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            output, _ = await child.communicate()
        except asyncio.CancelledError:
            child.terminate()
            await child.wait()
            raise
        if not output:
            result.violations.append(f"the part on the network ended with code {child.returncode} and without a result")
            return
        found = SoakResult.model_validate_json(output)
        result.episodes += found.episodes
        result.violations += found.violations
        result.stopped = result.stopped or found.stopped
        result.kept, result.prefix = result.kept or found.kept, result.prefix or found.prefix

    def _may_continue(self, result: SoakResult) -> bool:
        """Return whether the next episode may run. If the time is over, this is recorded in the result."""
        if time.monotonic() > self._deadline and not result.stopped:
            result.stopped = f"{self.minutes:g} minutes are over"
        return result.ok and not result.stopped

    def _add(self, episode: EpisodeResult, result: SoakResult) -> None:
        result.episodes.append(episode)
        self.journal.add(episode)
        self.each(episode, result)

    async def _ended(
        self, cluster: DrillCluster, job: SoakJob, reference: Reference, other: OtherJob | None
    ) -> list[str]:
        """Wait for the end of the job, and stop the second job; return the violations."""
        try:
            async with asyncio.timeout(END_LIMIT_S):
                ended = await cluster.control.result(job.spec.name)
        except TimeoutError:
            with suppress(EverstepError):
                await cluster.control.stop(job.spec.name, "the soak is over")
            return [f"the job ends: not within {END_LIMIT_S:.0f} s"]
        except WorkflowFailureError as error:
            return [f"the job ends: its workflow failed: {error.cause or error}"]
        found = [] if ended.outcome == "finished" else [f"the job ends: {ended.outcome}: {ended.headline}"]
        found += await self._other_ended(other)
        failed = await failed_tasks(cluster, job_workflow_id(job.spec.name))
        found += [f"workflows do not fail: {text}" for text in failed]
        left = await gather.left_behind(cluster, job.spec, job.machines)
        records, twice = await gather.records(cluster, job.spec, job.machines)
        found += [f"nothing is left behind: {text}" for text in left]
        found += [f"one process of a rank: the logs show {twice} second processes"] if twice else []
        if reference.steps == job.plan.steps:
            expected, reported = Records(final=reference.records.final), Records(final=records.final)
            last = compare(expected, reported, job.spec.topology().world_size)
            state = ["no rank logged it"] if last.state is None else last.state
            found += [f"the last state is equal: {text}" for text in state]
        return found


async def run_own_job(cluster: DrillCluster, plan: SoakPlan, episode: Episode, references: References) -> EpisodeResult:
    """Run the fault of an episode as a drill; the problems that its judge reports are the violations.

    Raises:
        CannotInject: the fault cannot be injected on this computer.
    """
    began, result = time.monotonic(), no_result(episode)
    fault, sizes = episode.faults[0], plan.sizes.model_dump()
    if fault.alike:
        sizes |= {"ranks_per_machine": 1, "tp": 1, "pp": 1}
    try:
        drilled = await Drill(cluster, DrillRequest(fault=fault, **sizes), references).run()
    except ClusterError as error:
        result.violations.append(f"the job steps: {error}")
        return result
    result.steps = (0, drilled.steps or 0)
    result.incidents, result.recovered_s = drilled.incidents, drilled.recovered_s
    result.steps_lost = drilled.steps_lost or 0
    if drilled.fired:
        result.violations = drilled.problems
    else:
        # Most problems follow from the fault that did not fire. Some problems are violations, whichever fault struck
        # the job.
        result.not_fired = drilled.problems[:1] or [f"{drilled.fault} did not fire"]
        undisturbed = not drilled.leaked and not drilled.duplicates and drilled.losses_match and drilled.state_match
        result.violations = [] if undisturbed else drilled.problems
    result.seconds = round(time.monotonic() - began, 3)
    return result


def missing(setting: Setting) -> str:
    """Return what this computer lacks for episodes of a setting; empty: nothing."""
    return network_lacks(with_postgres=True) if setting == "network" else ""


def needs_network(kind: str) -> bool:
    """Return whether a kind of fault needs machines with a network of their own."""
    return fault_named(kind).needs_network


async def soak_and_reduce(
    plan: SoakPlan, folder: Path, *, minutes: float | None, tries: int, say: Say, each: Each
) -> SoakResult:
    """Run a soak and, after a violation, shorter soaks that search for fewer episodes with a violation.

    Args:
        plan: The plan.
        folder: Folder of plan and journal; the shorter plan is written to ``reduced.json`` there.
        minutes: Time after which the soak ends early; None: it runs the complete plan.
        tries: The largest number of shorter soaks.
        say: Shows lines of progress.
        each: Gets each finished episode.

    Raises:
        ClusterError: a cluster does not come up, or the job does not finish even without a fault.
    """
    soak = Soak(plan, folder, minutes=minutes, say=say, each=each)
    result = await soak.run()
    if not soak.violated or not soak.ran or not tries:
        return result
    if any(episode.setting == "network" for episode in plan.episodes if episode.number == soak.ran[-1]):
        say("there is no search for a shorter plan: this process cannot enter another network")
        return result

    async def violated(numbers: Sequence[int]) -> bool:
        say(f"do {len(numbers)} of {len(soak.ran)} episodes have a violation?")
        own = folder / "reducing" / f"{time.time_ns()}"
        shorter = await Soak(plan.only(set(numbers)), own, reference=soak.reference, say=silent, keep=False).run()
        say("no" if shorter.ok else "yes")
        return not shorter.ok

    try:
        result.reduced = await reduced(soak.ran, violated, tries=tries)
        plan.only(set(result.reduced)).write(folder / "reduced.json")
    except EverstepError as error:
        say(f"no shorter plan was found: {error}")
    return result

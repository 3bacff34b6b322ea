"""Running a soak: a cluster, the undisturbed run, the job with its episodes, and what is left at the end."""

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
from drills.runner import References
from everstep.errors import CannotInject, EverstepError
from everstep.model.job_state import job_workflow_id
from soaks.draw import left_out
from soaks.episode import Episodes
from soaks.job import POLICY, SoakJob
from soaks.left import LeftCluster, alone_in
from soaks.look import failed_tasks
from soaks.other_job import OtherJob
from soaks.own_job import run_own_job
from soaks.plan import Setting, SoakPlan
from soaks.reduce import reduced
from soaks.result import EpisodeResult, Journal, PartResult, SoakResult

PLAN, JOURNAL, CLUSTER = "plan.json", "journal.jsonl", "cluster.json"
END_LIMIT_S = 120.0
"""The job ends within this long after its last gate."""

Each = Callable[[EpisodeResult, SoakResult], None]


@dataclass(frozen=True, slots=True)
class Reference:
    """The ranks' reports in a run without faults. A step does not depend on the number of steps after it."""

    records: Records
    steps: int
    """Length of that job: its last state is that of a job of the same length."""


class Soak:
    """One soak.

    Args:
        plan: its episodes.
        folder: where plan and journal are kept.
        minutes: when it ends early; None: not before its plan does.
        reference: of a job as long or longer; None: it is run first.
        keep: whether the cluster is left up after a violation.
        say: takes a line about what begins.
        each: takes each episode when it is over.
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
        """Something was, in a part that ran in this process."""
        self.ran: list[int] = []
        """Numbers of the episodes that were run on the cluster at hand."""
        self.journal = Journal(folder / JOURNAL)
        self.left = LeftCluster(folder / CLUSTER)
        folder.mkdir(parents=True, exist_ok=True)

    async def run(self) -> SoakResult:
        """Run what the journal has not, to the end or to the first violation.

        Raises:
            ClusterError: a cluster does not come up, or the job does not run even without a fault.
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
            if said := missing(setting):
                kinds = {kind for episode in part.episodes for kind in episode.kinds}
                result.left_out |= {kind: said for kind in kinds if needs_network(kind)}
            elif setting == "network" and len(self.plan.parts()) > 1:
                await self._elsewhere(part, result)
            elif result.ok and not result.stopped:
                self.ran.clear()
                await self._part(setting, part, result)
                self.violated = not result.ok
        return result

    def rest(self, done: Sequence[EpisodeResult], ended: Collection[Setting]) -> SoakPlan:
        """The episodes that are not done. Of a part whose end was not looked at the last one is run again."""
        numbers = {episode.number for episode in self.plan.episodes} - {episode.number for episode in done}
        if all(not episode.violations for episode in done):
            numbers |= {part.episodes[-1].number for setting, part in self.plan.parts() if setting not in ended}
        return self.plan.only(numbers)

    async def _part(self, setting: Setting, plan: SoakPlan, result: SoakResult) -> None:
        """The episodes of one setting, on a cluster of their own."""
        machines = self.plan.sizes.machines + self.plan.other
        options: dict[str, Any] = {"machines": machines, "standbys": self.plan.standbys, "say": self.say}
        options["workers"] = self.plan.workers
        cluster = NetworkCluster(with_postgres=True, **options) if setting == "network" else DrillCluster(**options)
        cluster.before_start = self.left.note
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
        """Episodes within one long job."""
        if "temporal" not in cluster.processes():
            result.left_out["kill-temporal"] = f"the server at {cluster.file.temporal_address} is not ours to kill"
            others = {episode.number for episode in plan.episodes if "kill-temporal" not in episode.kinds}
            if not others:
                return
            plan = plan.only(others)
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
            if not self._goes_on(result):
                if result.ok:
                    await cluster.control.stop(job.spec.name, result.stopped)
                    await cluster.control.result(job.spec.name)
                    result.violations += await self._other_ended(other)
                return
            self.ran.append(episode.number)
            self._note(await episodes.run(index), result)
        if result.ok:
            job.gate(len(plan.episodes)).open()
            result.violations += await self._ended(cluster, job, self.reference, other)

    @staticmethod
    async def _other_ended(other: OtherJob | None) -> list[str]:
        """The violations of the second job, after it was stopped."""
        if other is None:
            return []
        try:
            return [f"the other job goes on: {text}" for text in await other.end()]
        except (EverstepError, WorkflowFailureError) as error:
            return [f"the other job goes on: it cannot be stopped: {error}"]

    async def _own_jobs(self, cluster: DrillCluster, plan: SoakPlan, result: SoakResult) -> None:
        """Episodes that are jobs of their own."""
        references = References()
        for episode in plan.episodes:
            if not self._goes_on(result):
                return
            try:
                ended = await run_own_job(cluster, plan, episode, references)
            except CannotInject as error:
                result.left_out |= dict.fromkeys(episode.kinds, str(error))
                continue
            self.ran.append(episode.number)
            self._note(ended, result)

    async def _elsewhere(self, plan: SoakPlan, result: SoakResult) -> None:
        """Episodes on machines with a network of their own, in a process of its own: one that has been on other
        machines cannot enter that network with all its threads."""
        if not self._goes_on(result):
            return
        place = self.folder / "network"
        command = [sys.executable, "-P", "-m", "console.main", "soak", "--json", "--tries", "0"]
        if (place / PLAN).exists():
            command += ["--resume", str(place)]
        else:
            plan.write(self.folder / "network.json")
            command += ["--plan", str(self.folder / "network.json"), "--folder", str(place)]
        if self._deadline < math.inf:
            command += ["--minutes", str(max(self._deadline - time.monotonic(), 0) / 60)]
        child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            said, _ = await child.communicate()
        except asyncio.CancelledError:
            child.terminate()
            await child.wait()
            raise
        if not said:
            result.violations.append(f"the part with a network of its own ended with code {child.returncode}, unjudged")
            return
        found = SoakResult.model_validate_json(said)
        result.episodes += found.episodes
        result.violations += found.violations
        result.stopped = result.stopped or found.stopped
        result.kept, result.prefix = result.kept or found.kept, result.prefix or found.prefix

    def _goes_on(self, result: SoakResult) -> bool:
        if time.monotonic() > self._deadline and not result.stopped:
            result.stopped = f"{self.minutes:g} minutes are over"
        return result.ok and not result.stopped

    def _note(self, episode: EpisodeResult, result: SoakResult) -> None:
        result.episodes.append(episode)
        self.journal.add(episode)
        self.each(episode, result)

    async def _ended(
        self, cluster: DrillCluster, job: SoakJob, reference: Reference, other: OtherJob | None
    ) -> list[str]:
        """The violations after the job has ended and the second job was stopped."""
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
        found += [f"one copy of a rank: the logs show {twice} twice"] if twice else []
        if reference.steps == job.plan.steps:
            expected, told = Records(final=reference.records.final), Records(final=records.final)
            last = compare(expected, told, job.spec.topology().world_size)
            state = ["nobody tells of it"] if last.state is None else last.state
            found += [f"the last state is equal: {text}" for text in state]
        return found


def missing(setting: Setting) -> str:
    """What an episode of that setting lacks here; empty: nothing."""
    return network_lacks(with_postgres=True) if setting == "network" else ""


def needs_network(kind: str) -> bool:
    """Whether a kind of fault is why an episode has the setting ``network``."""
    return fault_named(kind).needs_network


async def soak_and_reduce(
    plan: SoakPlan, folder: Path, *, minutes: float | None, tries: int, say: Say, each: Each
) -> SoakResult:
    """A soak; after a violation, shorter ones that look for fewer episodes that are violated too.

    Args:
        plan: its episodes.
        folder: where plan and journal are kept, and ``reduced.json`` where a shorter plan is enough.
        minutes: when it ends early; None: not before its plan does.
        tries: shorter soaks at most.
        say: takes a line about what begins.
        each: takes each episode when it is over.

    Raises:
        ClusterError: the cluster does not come up, or the job does not run even without a fault.
    """
    soak = Soak(plan, folder, minutes=minutes, say=say, each=each)
    result = await soak.run()
    if not soak.violated or not soak.ran or not tries:
        return result
    if any(episode.setting == "network" for episode in plan.episodes if episode.number == soak.ran[-1]):
        say("no shorter plan is looked for: this process cannot enter another network")
        return result

    async def violated(numbers: Sequence[int]) -> bool:
        say(f"is it violated by {len(numbers)} of {len(soak.ran)} episodes?")
        place = folder / "reducing" / f"{time.time_ns()}"
        shorter = await Soak(plan.only(set(numbers)), place, reference=soak.reference, say=silent, keep=False).run()
        say("no" if shorter.ok else "yes")
        return not shorter.ok

    try:
        result.reduced = await reduced(soak.ran, violated, tries=tries)
        plan.only(set(result.reduced)).write(folder / "reduced.json")
    except EverstepError as error:
        say(f"no shorter plan was found: {error}")
    return result

"""Running a soak: a cluster, the undisturbed run, the job with its episodes, and what is left at the end."""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from temporalio.client import WorkflowFailureError

from console.drill import facts as gather
from console.drill.cluster import DrillCluster, Say, silent
from console.drill.compare import compare
from console.drill.losses import Records
from console.drill.runner import References
from console.soak.draw import left_out
from console.soak.episode import Episodes
from console.soak.job import SoakJob
from console.soak.plan import SoakPlan
from console.soak.reduce import reduced
from console.soak.result import EpisodeResult, Journal, SoakResult
from everstep.errors import EverstepError

PLAN, JOURNAL = "plan.json", "journal.jsonl"
END_LIMIT_S = 120.0
"""The job ends within this long after its last gate (ours)."""

Each = Callable[[EpisodeResult, SoakResult], None]


class Soak:
    """One soak.

    Args:
        plan: its episodes.
        folder: where plan and journal are kept.
        minutes: when it ends early; None: not before its plan does.
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
        keep: bool = True,
        say: Say = silent,
        each: Each = lambda *_: None,
    ) -> None:
        self.plan, self.folder, self.minutes = plan, folder, minutes
        self.keep, self.say, self.each = keep, say, each
        self.ran: list[int] = []
        """Numbers of the episodes that were run on the cluster at hand."""
        self.journal = Journal(folder / JOURNAL)
        folder.mkdir(parents=True, exist_ok=True)

    async def run(self) -> SoakResult:
        """Run what the journal has not, to the end or to the first violation.

        Raises:
            ClusterError: the cluster does not come up, or the job does not run even without a fault.
        """
        self.plan.write(self.folder / PLAN)
        done = self.journal.read()
        result = SoakResult(seed=self.plan.seed, planned=self.plan.faults, episodes=done, left_out=left_out())
        rest = self.plan.only({one.number for one in self.plan.episodes} - {one.number for one in done})
        if not rest.episodes or not result.ok:
            return result
        cluster = DrillCluster(machines=self.plan.sizes.machines, standbys=0, workers=2, say=self.say)
        async with cluster:
            await self._on(cluster, rest, result)
            cluster.keep = self.keep and not result.ok
            result.kept = str(cluster.home) if cluster.keep else ""
        result.violations += [f"nothing is left behind: {text}" for text in cluster.leaked]
        return result

    async def _on(self, cluster: DrillCluster, plan: SoakPlan, result: SoakResult) -> None:
        job = SoakJob(cluster, plan, cluster.next_name("soak"))
        reference = await References().of(cluster, job.spec)
        job.write()
        self.say(f"{plan.faults} faults in {len(plan.episodes)} episodes, {plan.steps} steps")
        await cluster.control.start_job(job.spec, job.machines)
        episodes, deadline = Episodes(job, reference), self._deadline()
        result.violations += await episodes.begin()
        for index in range(len(plan.episodes)):
            if not result.ok:
                return
            if time.monotonic() > deadline:
                result.stopped = f"{self.minutes:g} minutes are over"
                await cluster.control.stop(job.spec.name, result.stopped)
                return
            self.ran.append(plan.episodes[index].number)
            one = await episodes.run(index)
            result.episodes.append(one)
            self.journal.add(one)
            self.each(one, result)
        if result.ok:
            job.gate(len(plan.episodes)).open()
            result.violations += await self._ended(cluster, job, reference)

    def _deadline(self) -> float:
        return math.inf if self.minutes is None else time.monotonic() + self.minutes * 60

    async def _ended(self, cluster: DrillCluster, job: SoakJob, reference: Records) -> list[str]:
        """What does not hold once the job has come to its end."""
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
        left = await gather.left_behind(cluster, job.spec, job.machines)
        records, twice = await gather.records(cluster, job.spec, job.machines)
        found += [f"nothing is left behind: {text}" for text in left]
        found += [f"one copy of a rank: the logs show {twice} twice"] if twice else []
        last = compare(Records(final=reference.final), Records(final=records.final), job.spec.topology().world_size)
        state = ["nobody tells of it"] if last.state is None else last.state
        return found + [f"the last state is equal: {text}" for text in state]


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
    if result.ok or not soak.ran or not tries:
        return result

    async def violated(numbers: Sequence[int]) -> bool:
        say(f"is it violated by {len(numbers)} of {len(soak.ran)} episodes?")
        place = folder / "reducing" / "-".join(map(str, numbers[-8:]))
        shutil.rmtree(place, ignore_errors=True)
        shorter = await Soak(plan.only(set(numbers)), place, say=silent, keep=False).run()
        say("no" if shorter.ok else "yes")
        return not shorter.ok

    result.reduced = await reduced(soak.ran, violated, tries=tries)
    plan.only(set(result.reduced)).write(folder / "reduced.json")
    return result

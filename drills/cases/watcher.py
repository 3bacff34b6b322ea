"""The watcher of a case's job: it gives the state of the machines to the rules as facts, and reports what they
detect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drills.cases.temporal import S, UpdateRefusedError
from drills.cases.traced import trace
from drills.cases.world import JOB, TICK_S, Generation, World
from everstep.decisions.detect.hang import first_sample_s
from everstep.decisions.detect.job_facts import FindingSeen, JobFacts, RankFacts
from everstep.decisions.detect.rules import anomalies
from everstep.model.incident import STILL_RUNNING, Anomaly
from everstep.model.job_state import job_workflow_id

CALM_S = 10.0
"""The time between two looks at a job that trains, seconds."""


class CaseWatcher:
    """Watches the job of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._reported: set[tuple[int, str]] = set()
        """Generation and id of the anomalies that the job has accepted."""
        self._known: dict[str, int] = {}
        """Subject of a finding that the job has accepted → when that finding began."""
        world.observers.append(self.look)
        self._tick()

    @property
    def is_calm(self) -> bool:
        """Whether the job trains, and nothing is wrong with its machines."""
        generation, world = self._world.generation, self._world
        if generation is None or generation.frozen_ns or generation.stopped:
            return False
        here = set(generation.names)
        return here.isdisjoint(world.silent_ns) and not any(found.machine in here for found in world.findings)

    def _tick(self) -> None:
        self._world.changed()
        self._world.temporal.at(CALM_S if self.is_calm else TICK_S, self._tick)

    def look(self) -> None:
        """Report the first anomaly that the job does not know yet."""
        generation = self._world.generation
        if generation is None or generation.stopped:
            return
        for anomaly in anomalies(self._facts(generation)):
            if (generation.number, anomaly.id) not in self._reported:
                self._report(generation, anomaly)
            return

    def _report(self, generation: Generation, anomaly: Anomaly) -> None:
        key = (generation.number, anomaly.id)
        self._reported.add(key)
        is_observed = anomaly.symptom in STILL_RUNNING

        def answered(answer: Any) -> None:
            if isinstance(answer, UpdateRefusedError):  # the job does not accept it yet: the next look sends it again
                self._reported.discard(key)
            elif is_observed:
                self._known.update((found.about, found.finding.since_ns) for found in anomaly.findings)

        name = "observe" if is_observed else "report"
        self._world.temporal.update(job_workflow_id(JOB), name, anomaly, str, answered)

    def _facts(self, generation: Generation) -> JobFacts:
        world, job = self._world, self._world.case.job
        now_ns, completed, stepped = world.temporal.now_ns, world.completed(), world.stepped() > 0
        quiet_ns = now_ns - max(generation.frozen_ns, generation.loop_ns) if generation.frozen_ns else 0
        names = generation.names
        unheard_s = {name: (now_ns - world.silent_ns.get(name, now_ns)) / S for name in names}
        facts = JobFacts(
            spec=world.spec,
            generation=generation.number,
            now_ns=now_ns,
            exits=dict(generation.ends),
            ranks=[self._rank(generation, rank) for rank in range(world.world_size)],
            quiet_s=quiet_ns / S if stepped else 0.0,
            typical_step_s=job.step_s,
            longest_step_s=max(job.step_s, job.longest_pause_s),
            last_step=completed,
            machine_names=names,
            silent=[name for name in names if world.is_silent(name)],
            unheard_s=unheard_s,
            others_answer=not world.cut_off,
            findings=[
                FindingSeen(
                    f"{found.machine}-{number}-{found.finding.since_ns}",
                    found.machine,
                    found.finding,
                    found.finding.since_ns,
                    number,
                )
                for number, found in enumerate(world.findings, 1)
                if found.machine in names and self._known.get(found.about, -1) < found.finding.since_ns
            ],
        )
        first_s = first_sample_s(facts)
        if generation.hung and first_s is not None and facts.quiet_s >= first_s:
            facts = replace(facts, hang_check=trace(world, generation).check)
        return facts

    def _rank(self, generation: Generation, rank: int) -> RankFacts:
        world, now_ns = self._world, self._world.temporal.now_ns
        stepped = world.stepped()
        return RankFacts(
            rank=rank,
            machine=world.home(rank),
            alive=rank not in generation.ends,
            completed_steps=world.completed(),
            steps=world.completed(),
            stepped=stepped > 0,
            steps_since=stepped,
            in_loop=now_ns >= generation.loop_ns,
            left_loop=False,
            saved_step=world.completed(),
            saved_ns=now_ns,
            first_step_ns=generation.loop_ns if stepped else 0,
            heard_ns=now_ns,
        )

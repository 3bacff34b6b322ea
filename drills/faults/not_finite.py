"""Faults that make a loss or gradient norm not finite: a NaN in a forward pass, and a machine that flips bits."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from pydantic import Field

from drills.faults.fault import RankFault
from drills.judge.facts import DrillFacts
from drills.spec import settings
from drills.spec.fault import Entry, OnMachine, OnRanks
from drills.spec.job_options import JobOptions
from drills.spec.request import DrillRequest
from drills.spec.settings import machine_names
from everstep.decisions.blame.replay.group_jobs import no_replay
from everstep.decisions.blame.replay.groups import replica_machines
from everstep.errors import ConfigError
from everstep.model.incident import IncidentReport, Symptom
from everstep.model.job import JobSpec
from everstep.model.job_state import replay_workflow_id
from everstep.model.launch import Showing
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.topology import Topology

KEEP = 8
"""Number of checkpoints that a drill keeps on disk, so that the job can resume from a step before the NaN. When the NaN
is detected, all copies in memory are from later steps. On a busy computer, the newest two on disk are from later steps
too."""
DISK_STEPS = 2
"""The job resumes at most this many checkpoints before the fault: the newest one may not be complete yet."""


class NotFinite(RankFault):
    """A loss or gradient norm is not finite, and the job resumes from a checkpoint on disk."""

    point = "begin"
    own_job = True
    steps_done_anew = True
    step_s: ClassVar = settings.STEP_S  # long enough for backups, and to resume before the job ends

    @property
    def shows_not_finite(self) -> bool:
        return True

    def checkpoint(self, disk: Path) -> dict[str, Any]:
        """Many checkpoints on disk."""
        return settings.disk_settings(disk) | {"disk_keep": KEEP}

    def problems(
        self, drill: DrillRequest, spec: JobSpec, facts: DrillFacts, reports: Sequence[IncidentReport]
    ) -> list[str]:
        """The incidents must report that a number is not finite."""
        return [] if not self.shows_not_finite else not_finite_problems(drill.at_step, spec, facts, reports)


class Nan(OnRanks, OnMachine, NotFinite):
    """The forward pass of a rank computes a NaN."""

    name = "nan"
    summary = "NaN in a rank's forward pass; with --machine it repeats there at that step"
    line = "NaN in the forward pass of {ranks}"
    action = "nan"

    @property
    def is_bound(self) -> bool:
        """Whether the fault stays with a machine, whichever ranks run there."""
        return self.machine != "" and not self.ranks

    @property
    def repeats(self) -> int:
        """A fault that stays with a machine repeats after each recovery, until the job is parked."""
        return max(self.times, RecoveryPolicy().retry.max_failures_at_step) if self.is_bound else self.times

    def describe(self, spec: JobSpec) -> str:
        return f"NaN in the forward pass of {self.machine}" if self.is_bound else super().describe(spec)

    def details(self, spec: JobSpec) -> Entry:
        return {"machine": self.machine} if self.is_bound else {}

    @classmethod
    def draw(cls, rng: Random, topology: Topology, *, alone: bool) -> dict[str, Any]:
        return {"ranks": [rng.randrange(topology.world_size)]}


class MachineBitflip(OnMachine, NotFinite):
    """A machine computes wrong gradients."""

    name = "bitflip"
    summary = (
        "from a step on, one bit of a gradient flips on the machine, in the job and in all tests, or with "
        "--only-in-job in no test; numbers become infinite, or with --finite only wrong: then a check on another "
        "machine aborts the job"
    )
    action = "bitflip"
    least_machines = 4

    only_in_job: bool = Field(False, description="The bit flips in no test, and only in jobs of several machines.")
    shows_every: int = Field(
        1,
        ge=0,
        description="With --only-in-job: the bit flips only in every N-th run of a replay; 0: in no run.",
        json_schema_extra={"metavar": "N"},
    )
    finite: bool = Field(False, description="Numbers are wrong but finite; a check on another machine aborts the job.")

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse a fault that neither a test nor a replay could show."""
        super().refuse(drill, spec)
        if self.shows_every != 1 and not self.only_in_job:
            raise ConfigError(
                "--shows-every needs --only-in-job: otherwise a test detects the machine before the replay"
            )
        if self.finite and spec.machines == 1:
            raise ConfigError("--finite: another machine has to abort the job: use 2 machines or more")
        if self.only_in_job and (why := no_replay(spec, Showing(kind="steps"))):
            raise ConfigError(f"--only-in-job: no replay can show the fault: {why}")

    def describe(self, spec: JobSpec) -> str:
        tests = "none" if self.only_in_job else "each"
        line = f"a bit of a gradient flips on {self.struck_machine(spec)} again and again, and in {tests} of its tests"
        line += "; all numbers stay finite" if self.finite else ""
        if self.shows_every == 1:
            return line
        return f"{line}, and in {f'every {self.shows_every} runs' if self.shows_every else 'none'} of its replays"

    def details(self, spec: JobSpec) -> Entry:
        shows = {"only_in_job": self.only_in_job, "shows_every": self.shows_every, "finite": self.finite}
        return {"machine": self.struck_machine(spec), **shows}

    def rank_entries(self, at_step: int, spec: JobSpec, plan: Path) -> list[Entry]:
        """With ``--finite`` one more entry: a rank of another machine aborts the job if gradients have wrong bits."""
        entries = super().rank_entries(at_step, spec, plan)
        if not self.finite:
            return entries
        elsewhere = spec.topology().ranks((self.machine_index(spec) + 1) % spec.machines)[0]
        at = {"rank": elsewhere, "at_step": at_step, "point": "step"}
        return [*entries, {"id": "check", "fault": "check", "of": entries[0]["id"], **at}]

    def worker_entries(self, spec: JobSpec, plan: Path, processes: Callable[[], Mapping[str, int]]) -> list[Entry]:
        """Return the entry for diagnostic tests, which read the plan of the workers."""
        if self.only_in_job:
            return []
        machine = self.struck_machine(spec)
        return [{"id": f"bitflip-{spec.name}", "fault": "bitflip", "machine": machine, "of_tests": True}]

    @property
    def patience(self) -> dict[str, Any]:
        """With ``--only-in-job``, short replays that are repeated until the fault must show."""
        if not self.only_in_job:
            return super().patience
        return settings.DRILL_POLICY | settings.SHORT_REPLAY | {"replay.fault_share": 1.0 / (self.shows_every or 2)}

    @property
    def parks(self) -> bool:
        """The job is parked if the fault shows in no replay."""
        return self.shows_every == 0

    parked_words = ("not reproduced on groups of", "is missed with probability")

    @property
    def shows_not_finite(self) -> bool:
        return not self.finite

    def leaving(self, spec: JobSpec) -> list[str]:
        return [self.struck_machine(spec)]

    @property
    def incidents_due(self) -> int:
        """One more incident if tests do not detect the machine: the NaN repeats after the restart, before a replay."""
        return self.repeats + (self.only_in_job and not self.finite)

    @property
    def launches_due(self) -> int:
        """With ``--finite``, one more launch before the tests, and one more before the replay."""
        return super().launches_due + self.finite * (1 + self.only_in_job)

    def swept(self, job: str) -> str:
        """Return the workflow of the replay, if there is one."""
        return replay_workflow_id(job, 1 if self.finite else 2, 1) if self.only_in_job else super().swept(job)

    @classmethod
    def draw(cls, rng: Random, topology: Topology, *, alone: bool) -> dict[str, Any]:
        """Draw a machine, and whether the fault is a NaN, finite, or shows only in the job."""
        can_replay = 2 * replica_machines(topology) <= topology.machines
        how = rng.choice(({}, {"finite": True}, {"only_in_job": True} if can_replay else {}))
        return super().draw(rng, topology, alone=alone) | how


def not_finite_problems(at_step: int, spec: JobSpec, facts: DrillFacts, reports: Sequence[IncidentReport]) -> list[str]:
    """Return problems with the incidents of a NaN.

    They must name the ranks that had the NaN first, and the job must resume from a step shortly before it.
    """
    found = []
    for report in reports:
        cause = report.failures[0].symptom if report.failures else None
        if cause is not Symptom.NOT_FINITE or f"since step {at_step}" not in report.headline:
            found.append(f"something else was reported: {report.headline}")
        elif lacking := [name for name in first_bad(facts, spec) if name not in report.headline]:
            found.append(f"{lacking[0]} had it first, and is not named: {report.headline}")
        every = spec.checkpoint.disk_every_steps
        oldest = at_step - DISK_STEPS * every if every else 0
        if report.recovered and not oldest <= report.resume_step <= at_step:
            found.append(f"the job resumed from step {report.resume_step}, not from one of {oldest} to {at_step}")
    return found


def first_bad(facts: DrillFacts, spec: JobSpec) -> list[str]:
    """Return the ranks that reported a NaN before others, with their machines; empty: all reported it in one step."""
    steps: dict[int, int] = {}
    with_loss = 0
    for rank, records in facts.records.of.items():
        bad = [record.step for record in records if not math.isfinite(struct.unpack("<d", record.bits)[0])]
        with_loss += len(bad) < len(records)
        if bad:
            steps[rank] = min(bad)
    first = [rank for rank, step in steps.items() if step == min(steps.values())]
    names = machine_names(spec.machines)
    return [f"rank {rank} on {names[spec.topology().machine(rank)]}" for rank in first if len(first) < with_loss]

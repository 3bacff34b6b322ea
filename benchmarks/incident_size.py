"""What an incident costs at size: CPU of the first workflow task after Stop, and the largest payloads.

    .venv/bin/python -P benchmarks/incident_size.py [MACHINES …]

Every machine has 8 ranks. One rank died and the others were stopped; each rank has two steps in its own memory and in
that of its peer. The first task after Stop reads the machines' evidence, records the failure, asks the rules of
eviction, and plans the restart. The second row of each size has a fault that a third of the machines report.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from pydantic import BaseModel

from activities.agents.evidence import evidence_of
from activities.agents.restore_checkpoints import RestoreCheckpoints
from activities.agents.stop_ranks import StopRanks
from activities.payloads import packed_bytes
from agent.v1 import agent_pb2 as pb
from everstep.decisions.act.evict.plan_evictions import EvictFacts, plan_evictions
from everstep.decisions.act.recover.incident_state import IncidentState
from everstep.decisions.act.recover.plan import RestartPlan, plan_restart
from everstep.decisions.keep.placement import place_backups
from everstep.model.evidence import Evidence
from everstep.model.incident import Anomaly, Symptom
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState
from everstep.model.machine import Machine
from everstep.model.pool import PollAnswers, RunningJob

RANKS = 8
SIZES = (1200, 2000, 4000, 10_000)
ROUNDS = 5
"""The shortest of this many times counts, since other processes disturb it least."""
NOW_NS = 10**18


class Size(NamedTuple):
    """A row of the result."""

    machines: int
    evidence_s: float
    """CPU of the activity that converts the answers, seconds."""
    task_s: float
    """CPU of the workflow's first task after Stop, seconds."""
    payloads: dict[str, int]
    """Payload → its size in Temporal, bytes."""


def job(machines: int) -> JobSpec:
    """A job with tensor parallelism within machines, and pipelines of 4 machines."""
    return JobSpec(name="large", script="/job.py", machines=machines, ranks_per_machine=RANKS, tp=RANKS, pp=4)


def machines_of(count: int) -> list[Machine]:
    """Machines in racks of 16."""
    return [
        Machine(
            name=f"gpu-{n:05d}", address=f"10.{n // 62500}.{n // 250 % 250}.{n % 250}:7070", domain=f"rack-{n // 16}"
        )
        for n in range(count)
    ]


def replies_of(spec: JobSpec, machines: list[Machine], *, faulty: int) -> dict[str, pb.StopReply]:
    """The answers of all machines to a stop; the first ``faulty`` ones report that they lost a GPU."""
    peers = place_backups(spec.topology(), [machine.domain for machine in machines]).peers
    backups: dict[int, list[int]] = {}
    for rank, peer in enumerate(peers):
        if peer is not None:
            backups.setdefault(peer // RANKS, []).append(rank)
    finding = pb.Finding(
        inspection="kernel-log", reason="gpu-lost", verdict="faulty", item="GPU 3", text="Xid 79", owner="machine",
        sure=True, since_ns=NOW_NS, evidence=["NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus."],
    )  # fmt: skip
    return {
        machine.name: pb.StopReply(
            ranks=[_end(rank) for rank in range(RANKS * index, RANKS * (index + 1))],
            checkpoints=[
                pb.HeldCheckpoint(
                    rank=rank, completed_steps=step, valid=True, tier=tier, bytes=10**10 + 64 * (rank % 7),
                    saved_ns=NOW_NS + 10**9 * step + 977 * rank, generation=3, run="a1b2c3d4e5f6", unverified=own,
                )
                for tier, ranks, own in (
                    (pb.HeldCheckpoint.OWN, range(RANKS * index, RANKS * (index + 1)), True),
                    (pb.HeldCheckpoint.BACKUP, backups.get(index, []), False),
                )
                for rank in ranks
                for step in (99, 100)
            ],
            findings=[finding] if index < faulty else [],
        )
        for index, machine in enumerate(machines)
    }  # fmt: skip


def _end(rank: int) -> pb.RankEnd:
    died = rank == 5
    return pb.RankEnd(
        rank=rank, pid=1000 + rank, exit=pb.Exit(kind=pb.Exit.SIGNAL, value=9, time_ns=NOW_NS + rank), shown_steps=100,
        stopped_by_us=not died, completed_steps=100 + rank % 2, log_tail="" if not died else "a line of a log\n" * 250,
    )  # fmt: skip


def state_of(spec: JobSpec, machines: list[Machine]) -> IncidentState:
    """The state of an incident that has just begun."""
    anomaly = Anomaly(id="m0-1", generation=3, symptom=Symptom.CRASH, headline="rank 5 died")
    return IncidentState(
        spec=spec, machines=machines, anomaly=anomaly, generation=3, resume_step=0, lineage=[(3, 0)],
        run="a1b2c3d4e5f6", number=1,
    )  # fmt: skip


def first_task(state: IncidentState, text: str) -> RestartPlan:
    """What the workflow does in its first task after Stop."""
    evidence = state.merge_evidence(Evidence.model_validate_json(text))
    state.explain(evidence)
    state.record_failure(state.read_failure(evidence, now_ns=NOW_NS, first=True))
    names = [machine.name for machine in state.machines]
    facts = EvictFacts(now_ns=NOW_NS, machines=names, findings=evidence.findings, alike=evidence.alike)
    plan_evictions(facts, state.spec.policy)
    plan = plan_restart(evidence, state)
    RestoreCheckpoints.of(state.placed, plan.restore, evidence).model_dump_json()
    return plan


def cpu_s(prepare: Callable[[], Callable[[], object]]) -> float:
    """The CPU time of a call, seconds; each round has a new call."""
    times = []
    for _ in range(ROUNDS):
        call = prepare()
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return min(times)


def measure(machines: int, *, faulty: int = 0) -> Size:
    """Measure an incident of a job with this many machines."""
    spec, places = job(machines), machines_of(machines)
    replies, assignment = replies_of(spec, places, faulty=faulty), spec.assignment([one.name for one in places])
    evidence = evidence_of(3, replies, [], assignment)
    text = evidence.model_dump_json()

    def task() -> Callable[[], object]:
        state = state_of(spec, places)
        return lambda: first_task(state, text)

    state = state_of(spec, places)
    plan = first_task(state, text)
    state.findings = evidence.findings
    running = RunningJob(job="large", run="r", machines=places, settled=True)
    messages: dict[str, BaseModel] = {
        "Stop's input": StopRanks(job=state.placed, generation=3),
        "evidence": evidence,
        "restore's input": RestoreCheckpoints.of(state.placed, plan.restore, evidence),
        "incident's state": state,
        "job's state": JobState(spec=spec, machines=places),
        "first poll": PollAnswers(machines=places, standbys=0, jobs=[running]),
        "next poll": PollAnswers(same_machines=True, same_jobs=["large"]),
    }
    payloads = {name: packed_bytes(message.model_dump_json()) for name, message in messages.items()}
    return Size(machines, cpu_s(lambda: lambda: evidence_of(3, replies, [], assignment)), cpu_s(task), payloads)


def main() -> None:
    """Print the table."""
    for machines in [int(size) for size in sys.argv[1:]] or SIZES:
        for faulty in (0, machines // 3):
            found = measure(machines, faulty=faulty)
            sizes = ", ".join(f"{name} {size / 1000:.1f}" for name, size in found.payloads.items())
            what = f"{faulty} with a fault: " if faulty else ""
            print(
                f"{machines} machines: {what}evidence made {found.evidence_s:.2f} s, first task "
                f"{1000 * found.task_s:.0f} ms; kB: {sizes}",
                flush=True,
            )


if __name__ == "__main__":
    main()

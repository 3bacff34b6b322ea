"""The findings of inspections of machines, from their agents."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from pydantic import BaseModel

from agent.client import AgentClients
from agent.reporting.observations import finding_of
from agent.v1 import agent_pb2 as pb
from everstep.errors import EverstepError
from everstep.model.finding import Finding, Health, worst_first
from everstep.model.machine import Machine
from everstep.model.pool import PoolMachine, PoolState

ASKED_AT_ONCE = 64
"""Number of machines that are queried at the same time."""
ANSWER_S = 5.0
"""The verdict on a machine that does not answer within this time is unknown, seconds."""


class InspectionReport(BaseModel):
    """The result of one inspection on one machine."""

    name: str
    looks_at: str
    verdict: Health
    findings: list[Finding]
    measures: dict[str, float]
    note: str
    """Why there is nothing to inspect; empty: there is something."""
    interval_s: float
    looked_ns: int
    """Time of its last run, by the machine's clock, nanoseconds; 0: not yet."""


class MachineReport(BaseModel):
    """One machine; an entry of the JSON of ``everstep machines``."""

    machine: str
    address: str
    verdict: Health
    problem: str = ""
    """Why its agent does not answer; empty: it answers."""
    findings: list[Finding] = []
    """Findings of all inspections, the worst first."""
    facts: dict[str, str] = {}
    """Facts that should be equal on all machines of a job."""
    inspections: list[InspectionReport] = []
    now_ns: int = 0
    """Time of the answer, by the machine's clock, nanoseconds."""
    place: str = ""
    """The use of the machine, a ``PoolPlace``; empty: the machine pool does not know the machine."""
    job: str = ""
    """The job that has the machine, or from which it was evicted; empty: there is no such job."""
    place_since_ns: int = 0
    """Time since which the machine has this use, by Temporal's clock, nanoseconds."""
    place_by: str = ""
    """The operator or program that changed the use last."""
    place_why: str = ""


class OddMachine(BaseModel):
    """Machines on which a fact differs from most machines."""

    fact: str
    value: str
    machines: list[str]
    usual: str
    """The value on most machines; empty: no value is the most frequent."""


async def ask_machines(agents: AgentClients, machines: Sequence[Machine]) -> list[MachineReport]:
    """Query all machines in parallel; the verdict on a silent machine is unknown."""
    gate = asyncio.Semaphore(ASKED_AT_ONCE)

    async def ask(machine: Machine) -> MachineReport:
        async with gate:
            try:
                return report_of(machine, await agents.get(machine.address).inspect(timeout_s=ANSWER_S))
            except EverstepError as error:
                return MachineReport(
                    machine=machine.name, address=machine.address, verdict=Health.UNKNOWN, problem=str(error)
                )

    return list(await asyncio.gather(*map(ask, machines)))


def with_places(reports: Sequence[MachineReport], pool: PoolState | None) -> list[MachineReport]:
    """Add the use of each machine, from the machine pool."""
    known = pool.machines if pool else {}
    return [
        report.model_copy(update=_place_of(known[report.machine])) if report.machine in known else report
        for report in reports
    ]


def _place_of(machine: PoolMachine) -> dict[str, object]:
    leaving = "an operator requested that it leaves its job. " if machine.wanted_out else ""
    return {
        "place": str(machine.place),
        "job": machine.job,
        "place_since_ns": machine.since_ns,
        "place_by": machine.by,
        "place_why": leaving + machine.why,
    }


def report_of(machine: Machine, reply: pb.InspectReply) -> MachineReport:
    """The report of one machine, from its answer."""
    inspections = [
        InspectionReport(
            name=state.name,
            looks_at=state.looks_at,
            verdict=Health(state.verdict),
            findings=list(map(finding_of, state.findings)),
            measures=dict(state.measures),
            note=state.note,
            interval_s=state.interval_s,
            looked_ns=state.looked_ns,
        )
        for state in reply.inspections
    ]
    off = "" if inspections else "its monitor is off"
    return MachineReport(
        machine=machine.name,
        address=machine.address,
        verdict=Health(reply.verdict) if inspections else Health.UNKNOWN,
        problem=off,
        findings=worst_first(found for inspection in inspections for found in inspection.findings),
        facts={name: value for state in reply.inspections for name, value in state.facts.items()},
        inspections=inspections,
        now_ns=reply.time_ns,
    )


def odd_ones(reports: Iterable[MachineReport]) -> list[OddMachine]:
    """Facts that differ between machines; if two values are equally frequent, there is no usual value."""
    values: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for report in reports:
        for fact, value in report.facts.items():
            values[fact][value].append(report.machine)
    found = []
    for fact, machines in sorted(values.items()):
        if len(machines) < 2:
            continue
        counts = Counter({value: len(names) for value, names in machines.items()}).most_common()
        usual = counts[0][0] if counts[0][1] > counts[1][1] else ""
        found += [
            OddMachine(fact=fact, value=value, machines=names, usual=usual)
            for value, names in sorted(machines.items())
            if value != usual
        ]
    return found

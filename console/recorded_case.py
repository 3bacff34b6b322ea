"""Makes a case of an incident in the ledger: what was broken, what was seen of it, and what everstep did about it.

A person corrects the expectation. The ledger has what machines reported; it does not know how long a cause was there.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from activities.ledger.records import IncidentRecord, LedgerJob
from agent.v1 import agent_pb2 as pb
from everstep.dumps.py_spy import MAIN
from everstep.errors import LedgerError
from everstep.model.evidence import Evidence, RankExit
from everstep.model.finding import FindingSource, Health, MachineFinding
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec

LOG_CHARACTERS = 4000
"""The last output of a rank is cut to this many characters."""
STACK_FRAMES = 12
"""The number of innermost frames that are kept for a rank that hangs."""


def recorded_case(incident: IncidentRecord, run: LedgerJob, samples: Sequence[tuple[int, str, int, bytes]]) -> str:
    """Return the case of a closed incident, as TOML.

    Args:
        incident: The incident.
        run: The run of its job.
        samples: The samples of its ranks, as ``Ledger.looks`` returns them.

    Raises:
        LedgerError: the incident is open, or the ledger has neither the end of a rank, nor a hang, nor a finding.
    """
    report = incident.parsed_report()
    if incident.cleaned:
        raise LedgerError(f"{incident.id} cannot be recorded any more: {incident.cleaned}")
    if report is None:
        raise LedgerError(f"{incident.id} is open, or its report cannot be read: record it when it is closed")
    spec = JobSpec.model_validate(run.spec or {})
    evidence = incident.parsed_evidence() or Evidence(generation=0)
    names = {name: f"m{number}" for number, name in enumerate(_machines(evidence, report))}
    faults = [*_ends(evidence), *_hangs(report, samples), *_findings(evidence, report, names)]
    if not faults:
        raise LedgerError(
            f"the ledger has no end of a rank, no hang and no finding of {incident.id}: nothing to record"
        )
    tables = [_table("job", _job(spec)), *(_table("[fault]", fault) for fault in faults)]
    expected: dict[str, Any] = {
        "evicted": {names.get(name, name): _rule(report, name) for name in report.evicted},
        "rungs": [str(tried.rung) for tried in report.tried],
    }
    head = {"title": report.headline[:200], "source": incident.id}
    lines = [f"{key} = {_value(value)}" for key, value in head.items()]
    note = "# This is what was done. Correct it to what should have been done."
    return "\n\n".join(["\n".join(lines), *tables, f"{note}\n{_table('expect', expected)}"]) + "\n"


def _machines(evidence: Evidence, report: IncidentReport) -> list[str]:
    """Return the known machines: first those of the job, in the order of their ranks, then the others."""
    others = [*evidence.unreachable, *evidence.dying, *report.evicted, *(about.machine for about in evidence.findings)]
    return [*dict.fromkeys([*evidence.machines, *others])]


def _job(spec: JobSpec) -> dict[str, Any]:
    """Return the size of the job, and the settings of its policy that differ from the defaults."""
    mesh, policy = dict(spec.topology().mesh), spec.policy.model_dump(mode="json", exclude_defaults=True)
    size = {"machines": spec.machines, "ranks_per_machine": spec.ranks_per_machine}
    return size | {axis: mesh.get(axis, 1) for axis in ("tp", "pp")} | ({"policy": policy} if policy else {})


def _ends(evidence: Evidence) -> list[dict[str, Any]]:
    """Return the fault of the first rank that ended by itself; the ends of other ranks follow from it."""
    ended = sorted((one for one in evidence.exits if not one.stopped_by_us), key=lambda one: one.time_ns)
    first = [one for one in ended if not (one.classification and one.classification.consequence)] or ended
    return [_end(first[0], len(ended))] if first else []


def _end(end: RankExit, ended: int) -> dict[str, Any]:
    fault: dict[str, Any] = {"rank": end.rank}
    if end.exception:
        fault["raises"] = end.exception[-LOG_CHARACTERS:]
    if end.log_tail:
        fault["log"] = end.log_tail[-LOG_CHARACTERS:]
    if end.signal:
        fault["signal"] = end.signal
    elif not end.exception:
        fault["exit"] = end.code or 0
    if ended > 1:
        fault["others"] = "connection lost"
    return fault


def _hangs(report: IncidentReport, samples: Sequence[tuple[int, str, int, bytes]]) -> list[dict[str, Any]]:
    """Return the hang of the first rank that was named, with its stack from the last sample."""
    if report.hang is None or not report.hang.ranks:
        return []
    rank = report.hang.ranks[0]
    return [{"rank": rank, "hangs": True, "stack": _stack(rank, samples)}]


def _stack(rank: int, samples: Sequence[tuple[int, str, int, bytes]]) -> list[str]:
    """Return the frames of a rank's main thread, the innermost first; empty: no sample has them."""
    for _, _, _, data in reversed(samples):
        reply = pb.StacksReply()
        with suppress(Exception):  # a sample of another release
            reply.ParseFromString(data)
        for process in reply.processes:
            if process.rank == rank and process.role == "trainer" and process.stacks:
                with suppress(Exception):
                    threads = json.loads(gzip.decompress(process.stacks))
                    frames: list[Any] = next((one["frames"] for one in threads if one["thread_name"] == MAIN), [])
                    return [f"{frame['name']} ({frame['short_filename']})" for frame in frames[:STACK_FRAMES]]
    return []


def _findings(evidence: Evidence, report: IncidentReport, names: Mapping[str, str]) -> list[dict[str, Any]]:
    about = {(one.machine, one.finding.reason): one for one in (*report.findings, *evidence.findings)}
    faults = [_finding(one, names) for one in about.values() if _is_reported(one)]
    silent = [{"machine": names.get(name, name), "silent": True} for name in evidence.unreachable]
    return [*faults, *silent]


def _is_reported(about: MachineFinding) -> bool:
    """Return whether an inspection reported the finding. Findings of hangs, tests and silence follow when the case is
    played."""
    return about.finding.source is FindingSource.INSPECTION and about.finding.verdict is Health.FAULTY


def _finding(about: MachineFinding, names: Mapping[str, str]) -> dict[str, Any]:
    finding = about.finding
    return {
        "machine": names.get(about.machine, about.machine),
        "finding": {
            "reason": finding.reason,
            "inspection": finding.inspection,
            "text": finding.text,
            "owner": str(finding.owner),
            "sure": finding.sure,
        },
    }


def _rule(report: IncidentReport, machine: str) -> str:
    return next((answer.rule for answer in report.asked if answer.yes and answer.machine == machine), "")


def _table(name: str, fields: Mapping[str, Any]) -> str:
    return "\n".join([f"[{name}]", *(f"{key} = {_value(value)}" for key, value in fields.items())])


def _value(value: Any) -> str:
    """Return a value as TOML, whose strings, numbers and lists are written like those of JSON."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return text.encode(errors="replace").decode()  # a lone surrogate is no text

"""A verdict over a hang, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from console.views.incident_report import aligned
from controlplane.shown import clean
from everstep.base.text import listed
from everstep.decisions.blame.hang.verdict import HangVerdict, ParallelGroup, names_of
from everstep.model.hang import HangConclusion
from everstep.model.topology import Topology


def text_of(verdict: HangVerdict, topology: Topology, names: Sequence[str] = ()) -> str:
    """The verdict in one line, what to do, the evidence, and the topology with the state of each rank."""
    machines = names_of(verdict.machines, names)
    facts = [
        ("method", verdict.method.value),
        ("evict", listed(machines) if machines else "nobody"),
        ("innocent", f"{verdict.innocent} of them, on purpose" if verdict.innocent else ""),
        ("group", str(verdict.group) if verdict.conclusion is HangConclusion.OVER_EVICTS and verdict.group else ""),
        ("not known", f"rank {listed(verdict.unknown)}, which is no sign of health" if verdict.unknown else ""),
        ("topology", f"{topology.machines} machines of {topology.ranks_per_machine} ranks: {topology.text}"),
    ]
    blocks = [
        f"{verdict.conclusion.value}: {verdict.reason}",
        *aligned([row for row in facts if row[1]], "  "),
    ]
    if verdict.evidence:
        blocks += ["", "Evidence", *(f"  {line}" for line in verdict.evidence)]
    if verdict.stacks:
        blocks += ["", "Who does what", *(f"  {line}" for line in verdict.picture.splitlines())]
    return clean("\n".join(blocks))


def as_object(verdict: HangVerdict, topology: Topology, names: Sequence[str] = ()) -> str:
    """The verdict as a JSON object; its keys do not change between releases."""
    return json.dumps(
        {
            "conclusion": verdict.conclusion.value,
            "method": verdict.method.value,
            "reason": verdict.reason,
            "ranks": list(verdict.ranks),
            "machines": list(verdict.machines),
            "names": list(names_of(verdict.machines, names)),
            "innocent": verdict.innocent,
            "group": group_object(verdict.group) if verdict.group else None,
            "alternatives": [group_object(one) for one in verdict.alternatives],
            "unexplained": list(verdict.unexplained),
            "unknown": list(verdict.unknown),
            "evidence": list(verdict.evidence),
            "stacks": [
                {"text": one.text, "ranks": list(one.ranks), "dominant": one.dominant} for one in verdict.stacks
            ],
            "topology": str(topology),
        },
        indent=2,
    )


def group_object(group: ParallelGroup) -> dict[str, Any]:
    """A group as JSON."""
    return {"kind": group.kind, "ranks": list(group.ranks), "machines": list(group.machines)}

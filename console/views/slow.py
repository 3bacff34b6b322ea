"""A verdict over a slow job, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from console.views.hang import group_object
from console.views.incident_report import aligned
from controlplane.shown import clean
from everstep.base.text import listed
from everstep.decisions.blame.hang.verdict import names_of
from everstep.decisions.blame.slow.vote import SlowVerdict
from everstep.model.topology import Topology


def text_of(verdict: SlowVerdict, topology: Topology, names: Sequence[str] = ()) -> str:
    """The verdict in one line, what to do, and the votes."""
    machines = names_of(verdict.machines, names)
    facts = [
        ("evict", listed(machines) if machines else "nobody"),
        ("topology", f"{topology.machines} machines of {topology.ranks_per_machine} ranks: {topology.text}"),
    ]
    blocks = [f"{verdict.conclusion.value}: {verdict.reason}", *aligned(facts, "  ")]
    if verdict.evidence:
        blocks += ["", "Beside it", *(f"  {line}" for line in verdict.evidence)]
    if verdict.rounds:
        rows = [
            (
                f"round {number}",
                f"{len(one.outliers)} slow" + (f": rank {listed(one.outliers)}" if one.outliers else ""),
                f"flag for {one.flagged}" if one.flagged else "no flag",
            )
            for number, one in enumerate(verdict.rounds, start=1)
        ]
        blocks += ["", "Votes", *aligned(rows, "  ")]
    if len(verdict.stages) > 1:
        stages = [(f"stage {stage}", f"{seconds:.4g} s computed a step") for stage, seconds in verdict.stages]
        blocks += ["", "Stages", *aligned(stages, "  ")]
    return clean("\n".join(blocks))


def as_object(verdict: SlowVerdict, topology: Topology, names: Sequence[str] = ()) -> str:
    """The verdict as a JSON object; its keys do not change between releases."""
    return json.dumps(
        {
            "conclusion": verdict.conclusion.value,
            "reason": verdict.reason,
            "machines": list(verdict.machines),
            "names": list(names_of(verdict.machines, names)),
            "ranks": list(verdict.ranks),
            "group": group_object(verdict.group) if verdict.group else None,
            "flags": verdict.flags,
            "slowdown": verdict.slowdown,
            "rounds": [
                {"outliers": list(one.outliers), "flagged": group_object(one.flagged) if one.flagged else None}
                for one in verdict.rounds
            ],
            "stages": [{"stage": stage, "seconds": seconds} for stage, seconds in verdict.stages],
            "evidence": list(verdict.evidence),
            "topology": str(topology),
        },
        indent=2,
    )

"""The ladder as a flow chart, made from its table."""

from __future__ import annotations

from collections.abc import Iterator

from everstep.decisions.act.ladder.paths import PATHS

AFTER = {
    "reattempt": "launch again",
    "diagnose": "test the machines",
    "rollback": "earlier code",
    "replay": "replay in groups",
}
"""Each rung in two or three words."""


def diagram() -> str:
    """The decision as a flow chart (mermaid)."""
    return "\n".join(["flowchart TD", '  failed(["the job is stopped"]) --> q0', *_lines(), *_ends()])


def _lines() -> Iterator[str]:
    for number, path in enumerate(PATHS):
        last = number == len(PATHS) - 1
        if last:
            yield f'  q{number}["{path.when}"] --> p{number}_0'
        else:
            yield f'  q{number}{{"{path.when.replace("`", "")}?"}} -- yes --> p{number}_0'
            yield f"  q{number} -- no --> q{number + 1}"
        for place, rung in enumerate(path.rungs):
            after = f"p{number}_{place + 1}" if place + 1 < len(path.rungs) else "limits"
            looks = rung in {"diagnose", "replay"}
            arrow = "-- nobody is at fault -->" if looks else "-- fails again -->"
            yield f'  p{number}_{place}["{AFTER[rung]}"] {arrow} {after}'
            if looks:
                yield f"  p{number}_{place} -- a machine is at fault --> evict"


def _ends() -> Iterator[str]:
    yield '  evict(["it is evicted, and the job launched again"])'
    yield '  limits(["launch again as often as the policy allows, then park"])'

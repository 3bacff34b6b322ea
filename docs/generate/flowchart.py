"""The ladder as a flow chart, made from its table."""

from __future__ import annotations

from collections.abc import Iterator

from everstep.decisions.act.ladder.paths import PATHS

WORDS = {
    "reattempt": "launch again",
    "diagnose": "test the machines",
    "rollback": "earlier code",
    "replay": "replay in groups",
}
"""Rung → its text in the chart."""


def diagram() -> str:
    """The paths of the ladder as a flow chart in mermaid."""
    return "\n".join(["flowchart TD", '  failed(["the job is stopped"]) --> q0', *_lines(), *_ends()])


def _lines() -> Iterator[str]:
    for number, path in enumerate(PATHS):
        last = number == len(PATHS) - 1
        if last:
            yield f'  q{number}["{path.when}"] --> p{number}_0'
        else:
            yield f'  q{number}{{"{path.when.replace("`", "")}?"}} -- yes --> p{number}_0'
            yield f"  q{number} -- no --> q{number + 1}"
        for index, rung in enumerate(path.rungs):
            after = f"p{number}_{index + 1}" if index + 1 < len(path.rungs) else "limits"
            judges = rung in {"diagnose", "replay"}
            arrow = "-- no machine is at fault -->" if judges else "-- fails again -->"
            yield f'  p{number}_{index}["{WORDS[rung]}"] {arrow} {after}'
            if judges:
                yield f"  p{number}_{index} -- a machine is at fault --> evict"


def _ends() -> Iterator[str]:
    yield '  evict(["it is evicted, and the job launched again"])'
    yield '  limits(["launch again as often as the policy allows, then park"])'

"""The living page of the pool in the Web UI."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

from everstep.model.job_state import job_workflow_id
from everstep.model.pool import PoolMachine, PoolPlace, PoolState
from workflows.web_ui import PAGE_CHARACTERS, count, link, table

SHOWN = 20
"""The largest number of machines in the table."""
WHY_CHARACTERS = 110
"""The largest number of characters in the reason of a machine."""
ORDER = {PoolPlace.QUARANTINED: 0, PoolPlace.CORDONED: 1, PoolPlace.PROVISIONING: 2, PoolPlace.STANDBY: 3}
"""The order of the table: first the machines that may need a person."""


def pool_page(state: PoolState, namespace: str) -> str:
    """Return the page with all machines and their jobs; if there are too many, those out of use come first."""
    places = Counter(str(one.place) for one in state.machines.values())
    summed = ", ".join(f"{number} {place}" for place, number in sorted(places.items())) or "none is known yet"
    by_need = sorted(state.machines.values(), key=lambda one: (ORDER.get(one.place, 4), not one.fault))
    rows = [_row(one, namespace) for one in by_need[:SHOWN]]
    rest = len(by_need) - len(rows)
    parts = [
        f"## {count(len(state.machines), 'machine')}: {summed}",
        f"{state.spare} can take the place of others now; {state.standbys} are to be kept as standbys.",
        f"NOT KNOWN: {state.problem}" if state.problem else "",
        _short(state),
        table(["Machine", "Is", "Since", "Why"], rows) if rows else "",
        f"… and {rest} more: `everstep machines` shows all." if rest else "",
        "An operator evicts or releases a machine with the update `evict` or `release`: "
        '`{"machine": "m3", "operator": "you", "reason": "why"}`.',
    ]
    return "\n\n".join(part for part in parts if part)[:PAGE_CHARACTERS]


def _short(state: PoolState) -> str:
    waiting = ", ".join(f"{job} ({short.machines})" for job, short in state.short.items())
    return "; ".join(
        part for part in (f"Jobs that wait for machines: {waiting}" if waiting else "", state.provisioned) if part
    )


def _row(one: PoolMachine, namespace: str) -> list[str]:
    place = str(one.place)
    if one.job:
        place += f" {link(one.job, namespace, job_workflow_id(one.job))}"
    since = datetime.fromtimestamp(one.since_ns / 1e9, UTC).strftime("%m-%d %H:%M") if one.since_ns else ""
    why = "; ".join(part for part in (one.why, one.fault and f"now: {one.fault}", _unfit(one), _leaving(one)) if part)
    by = f"{one.by}: " if why and one.by != f"job {one.job}" else ""
    return [one.machine.name, place, since, f"{by}{why}".replace("|", "/")[:WHY_CHARACTERS]]


def _unfit(one: PoolMachine) -> str:
    """Return the jobs' code that failed in a trial on the machine."""
    return "; ".join(f"code of {why}" for why in one.ready.values() if why)


def _leaving(one: PoolMachine) -> str:
    if one.wanted_out:
        return "it leaves its job, as an operator said"
    return f"ranks of {one.job} may live there" if one.uncleaned else ""

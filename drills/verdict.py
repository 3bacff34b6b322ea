"""The judge of a drill: makes the result from the facts. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Collection
from pathlib import Path
from typing import Any

from drills.faults.fault import Fault, fault_of, opening_of
from drills.judge.compare import Comparison
from drills.judge.evictions import eviction_problems, over_evicted
from drills.judge.facts import OBSERVED, DrillFacts, is_observed
from drills.judge.findings import finding_problems
from drills.judge.result import DrillResult
from drills.spec.fault import STRIKE
from drills.spec.request import DrillRequest, example
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec

MAX_LOST = 1
"""The largest number of steps that a fault may cost by default: only the step under way, since every step is saved."""
MAX_PACE = 1.5
"""While a peer's agent hangs, a step may take this many times as long as before; differences by chance are far
smaller."""
AWAY_STEPS = 2
"""If a part was back within the time of this many steps, the job need not have made a step in that time."""
LAG = 2
"""Backups that are this many steps behind show that their peer accepts none."""
MAX_BLIND_S = 10.0
"""Longest allowed time without a sample of the processes, seconds; there is one every 0.1 s on an idle machine."""
SHOWN = 5
"""The largest number of differences that are named."""
DAMAGE_WORDS = ("checksum", "damaged", "truncated", "cut short", "bytes")
"""A text about a damaged copy has at least one of these words."""


def judge(request: DrillRequest, spec: JobSpec, facts: DrillFacts) -> DrillResult:
    """Judge a drill."""
    counted = [incident for incident in facts.incidents if request.only_reported or not is_observed(incident)]
    reports = [incident.report for incident in counted if incident.report]
    comparison = facts.comparison or Comparison(not_compared=["any value: the job did not finish"])
    result = DrillResult(
        fault=request.fault.name,
        job=spec.name,
        fired=bool(facts.marks) and all(facts.marks.values()),
        incidents=[incident.id for incident in facts.incidents],
        evicted=sorted({machine for report in reports for machine in report.evicted}),
        over_evicted=over_evicted(reports, request.leaving(spec)),
        stages=[(stage.name, stage.seconds) for report in reports for stage in report.timings],
        tried=[(str(rung.rung), round(rung.seconds, 3)) for report in reports for rung in report.tried],
        steps_redone=facts.records.redone(),
        steps=facts.records.steps or None,
        losses_match=_equal(comparison.losses),
        state_match=_equal(comparison.state),
        compared=comparison.compared,
        not_compared=comparison.not_compared,
        ettr=None if facts.ettr is None else round(facts.ettr, 4),
        leaked=facts.leaked,
        duplicates=facts.duplicates,
        generations=facts.generations,
        headline=facts.headline,
        restored_from=facts.restored_from,
        emptied=facts.seen.emptied,
        damaged=[f"rank {copy.rank}, step {copy.step}: {copy.path}: {copy.what}" for copy in facts.seen.damaged],
        said=sorted(facts.seen.reported),
        lag=facts.seen.lag,
        pace=_pace(request, facts),
    )
    if facts.seen.promise:
        result.steps_promised, result.promise = facts.seen.promise.steps, facts.seen.promise.reason
    _time(request, facts, result, reports)
    result.problems = [
        *_not_fired(facts),
        *(_not_absorbed(facts, result) if request.absorbed else _not_recovered(request, spec, facts, result, reports)),
        *copy_report_problems(request, facts, result),
        *finding_problems(request, spec, facts),
        *eviction_problems(
            request,
            spec,
            result.evicted,
            standby=facts.seen.standby,
            beside=result.over_evicted,
        ),
        *(problem for fault in _faults(request) for problem in fault.problems(request, spec, facts, reports)),
        *_differences(spec, facts),
        *_not_clean(facts),
    ]
    result.ok = not result.problems
    return result


def _faults(request: DrillRequest) -> list[Fault]:
    """Return the drill's fault, and the fault that opens the incident, if it is a different one."""
    return [fault_of(request), *([] if request.fault is request.opening else [opening_of(request)])]


def _equal(differences: list[str] | None) -> bool | None:
    return None if differences is None else not differences


def _differences(spec: JobSpec, facts: DrillFacts) -> list[str]:
    """Return the differences from the run without a fault. If the script is the example, all values must have been
    compared."""
    if facts.comparison is None:
        return []
    found = (facts.comparison.losses or [])[:SHOWN] + (facts.comparison.state or [])[:SHOWN]
    if Path(spec.script) == example("gpt.py"):
        found += [f"not compared: {text}" for text in facts.comparison.not_compared]
    return found


def _time(request: DrillRequest, facts: DrillFacts, result: DrillResult, reports: list[IncidentReport]) -> None:
    """Set the times and the resolution of the result; times count from the fault that opened the incident."""
    times = [mark["time_ns"] for name, mark in facts.marks.items() if mark and _opens(request, name, facts.marks)]
    fault_ns = min(times, default=None)
    result.step_s = None if fault_ns is None else facts.records.step_s(0, fault_ns)
    if facts.seen.detected_ns is not None and (broken := facts.marks.get(request.opening.name)):
        result.found_s = _seconds(broken["time_ns"], facts.seen.detected_ns)
    if request.only_reported:
        result.resolution, result.steps_lost = OBSERVED, 0
        if facts.incidents and fault_ns is not None:
            result.detected_s = _seconds(fault_ns, facts.incidents[0].opened_ns)
        elif facts.seen.absence and facts.seen.absence.back_ns:
            result.detected_s = _seconds(facts.seen.absence.began_ns, facts.seen.absence.back_ns)
        return
    opened = [incident for incident in facts.incidents if not is_observed(incident)]
    if request.absorbed:
        result.resolution = "absorbed" if not opened else None
        result.steps_lost = 0 if not opened else None
        if facts.seen.absence and facts.seen.absence.back_ns:
            result.recovered_s = _seconds(facts.seen.absence.began_ns, facts.seen.absence.back_ns)
    if opened and fault_ns is not None:
        result.detected_s = _seconds(fault_ns, opened[0].opened_ns)
        if result.found_s is None and opened[0].seen_ns:
            result.found_s = _seconds(fault_ns, opened[0].seen_ns)
    if not reports:
        return
    last = reports[-1]
    result.resolution = "parked" if facts.parked else last.resolution
    lost = [report.lost_steps for report in reports if report.lost_steps is not None]
    result.steps_lost = sum(lost) if lost else None
    if last.confirmation and last.recovered:
        result.parts = last.confirmation.parts
        if fault_ns is not None:
            # After several incidents, the last one counts.
            result.recovered_s = _seconds(fault_ns, last.confirmation.stepped_ns)


def _opens(request: DrillRequest, fault_id: str, ids: Collection[str]) -> bool:
    """Return whether times count from this fault."""
    if STRIKE in ids:
        return fault_id == STRIKE
    return request.fault is request.opening or not fault_id.startswith(request.fault.name)


def _seconds(begin_ns: int, end_ns: int) -> float:
    return round((end_ns - begin_ns) / 1e9, 4)


def _pace(request: DrillRequest, facts: DrillFacts) -> float | None:
    away = facts.seen.absence
    if not request.opening.delays_backups or away is None or away.back_ns is None:
        return None
    before = facts.records.step_s(0, away.began_ns)
    during = facts.records.step_s(away.began_ns, away.back_ns)
    return round(during / before, 3) if before and during else None


def _not_fired(facts: DrillFacts) -> list[str]:
    if not facts.marks:
        return ["no fault was planned"]
    if facts.seen.trouble:
        return [facts.seen.trouble]
    return [f"fault {name} did not fire" for name, mark in facts.marks.items() if mark is None]


def _not_absorbed(facts: DrillFacts, result: DrillResult) -> list[str]:
    found = []
    if facts.outcome != "finished":
        found.append(f"the job did not finish: {facts.headline or 'not in time'}")
    opened = [incident for incident in facts.incidents if not is_observed(incident)]
    if opened:
        found.append(f"{len(opened)} incidents were opened although no rank was hurt")
    if facts.generations > 1:
        found.append(f"the job was launched {facts.generations} times")
    if facts.seen.absence is None or facts.seen.absence.back_ns is None:
        found.append("the killed part did not come back in time")
    elif facts.records.of and _made_no_step(facts, facts.seen.absence.began_ns, facts.seen.absence.back_ns):
        found.append("the job did not step while the part was away")
    if result.steps_redone:
        found.append(f"{result.steps_redone} steps were done twice")
    return found


def _made_no_step(facts: DrillFacts, begin_ns: int, end_ns: int) -> bool:
    """Return whether the job made no step in a time in which it should have made one."""
    step_s = facts.records.step_s(0, begin_ns) or 0.0
    return (end_ns - begin_ns) / 1e9 > AWAY_STEPS * step_s and not facts.records.stepped_between(begin_ns, end_ns)


def _not_recovered(
    request: DrillRequest, spec: JobSpec, facts: DrillFacts, result: DrillResult, reports: list[IncidentReport]
) -> list[str]:
    opening = request.opening
    if opening.parks:
        return _not_parked(request, facts)
    if opening.repeats >= spec.policy.retry.max_failures_at_step and not request.leaving(spec):
        # A fault that repeats at one step needs an operator: a job that restarts for ever would be wrong.
        return [] if facts.parked else [f"{opening.repeats} faults at one step and the job was not parked"]
    found = []
    if facts.outcome != "finished":
        found.append(f"the job did not finish: {facts.headline or 'not in time'}")
    opened = [incident for incident in facts.incidents if not is_observed(incident)]
    # The strikes of a repeated exception may all fall into one incident.
    fewest = 1 if request.leaving(spec) and opening.repeats > 1 else opening.incidents_due
    if not fewest <= len(opened) <= opening.incidents_due:
        found.append(f"{len(opened)} incidents were opened, and {opening.incidents_due} are due")
    found += [f"{incident.id} is still open" for incident in facts.incidents if incident.report is None]
    found += [f"not recovered: {report.headline}" for report in reports if not report.recovered]
    found += _steps(request, facts, result, reports)
    if facts.generations > opening.launches_due:
        found.append(f"the job was launched {facts.generations} times, and {opening.launches_due} are enough")
    return found


def _not_parked(request: DrillRequest, facts: DrillFacts) -> list[str]:
    """Return problems of a drill whose job must be parked for the right reason."""
    reason = request.opening.parked_words
    has_reason = any(all(words in text for words in reason) for text in facts.texts)
    return [
        *([] if facts.parked else ["the job was not parked although only a person can help"]),
        *([] if has_reason else [f"no incident gives the reason for parking: {', '.join(reason)}"]),
    ]


def _steps(request: DrillRequest, facts: DrillFacts, result: DrillResult, reports: list[IncidentReport]) -> list[str]:
    """Return problems with the number of lost steps: too many, or not the number that the step records show."""
    lost, redone = result.steps_lost, result.steps_redone
    if lost is None or redone is None:
        return []
    most = MAX_LOST if result.steps_promised is None else result.steps_promised
    found = [
        f"{report.lost_steps} steps were lost, and at most {most} may be"
        for report in reports
        if report.lost_steps and report.lost_steps > most
        if not request.opening.shows_not_finite  # the fault's own check compares the step
    ]
    # At each failure, a step may have been reported and not completed.
    failures = sum(max(len(report.failures), 1) for report in reports)
    if facts.records.of and not lost <= redone <= lost + failures:
        found.append(f"by the incidents {lost} steps were lost, by the step records {redone} were done again")
    return found


def copy_report_problems(request: DrillRequest, facts: DrillFacts, result: DrillResult) -> list[str]:
    """Return problems with the reports of damaged copies, of machines that came back empty and of full file systems."""
    promise = facts.seen.promise
    found = [promise.reason] if promise and promise.begins_again else []
    for copy in facts.seen.damaged:
        rank, texts = f"rank {copy.rank} ", facts.texts
        if not any(rank in text and any(word in text for word in DAMAGE_WORDS) for text in texts):
            found.append(f"the incident does not name the damaged copy of rank {copy.rank}")
    if facts.incidents:
        found += [
            f"the incident does not report that {name} came back empty"
            for name in facts.seen.emptied
            if name not in result.evicted
            if not any(name in text and "empty" in text for text in facts.texts)
        ]
    if request.opening.must_be_reported and not facts.seen.reported:
        found.append(f"no agent reported a problem although {request.opening.name.replace('-', ' is ')}")
    if request.opening.delays_backups and not facts.seen.reported and (facts.seen.lag or 0) < LAG:
        found.append("backups did not fall behind while the agent hung")
    if result.pace is not None and result.pace > MAX_PACE:
        found.append(f"steps took {result.pace:.2f} times as long while the agent hung")
    return found


def _not_clean(facts: DrillFacts) -> list[str]:
    found = [f"left behind: {', '.join(facts.leaked[:5])}"] if facts.leaked else []
    if facts.duplicates:
        found.append(f"{facts.duplicates} ranks had two processes at once")
    found += [f"{machine} had ranks of {' and '.join(jobs)} at the same time" for machine, jobs in facts.shared]
    found += facts.records.overlaps()
    if not facts.samples or facts.blind_s > MAX_BLIND_S:
        found.append(f"the processes were not sampled for {facts.blind_s:.1f} s ({facts.samples} samples in all)")
    return found


def merged(results: list[DrillResult]) -> dict[str, Any]:
    """Return one object for several runs: the keys of a result with medians or worst values, ``runs`` and
    ``summary``."""
    figures = summary(results)
    first = results[0].model_dump()
    lost = [result.steps_lost for result in results if result.steps_lost is not None]
    matches = [result.losses_match for result in results]
    return first | {
        "ok": all(result.ok for result in results),
        "fired": all(result.fired for result in results),
        "detected_s": figures["detected_s"] and figures["detected_s"]["median"],
        "recovered_s": figures["recovered_s"] and figures["recovered_s"]["median"],
        "steps_lost": max(lost, default=None),
        "losses_match": False if False in matches else None if None in matches else True,
        "incidents": [name for result in results for name in result.incidents],
        "leaked": [name for result in results for name in result.leaked],
        "problems": [f"{result.job}: {problem}" for result in results for problem in result.problems],
        "duplicates": sum(result.duplicates for result in results),
        "summary": figures,
        "runs": [result.model_dump() for result in results],
    }


def summary(results: list[DrillResult]) -> dict[str, Any]:
    """Return the number of runs and of successful runs, and median, p90 and maximum of their times."""
    found: dict[str, Any] = {"runs": len(results), "ok": sum(result.ok for result in results)}
    for name in ("detected_s", "recovered_s"):
        times = sorted(t for result in results if (t := getattr(result, name)) is not None)
        found[name] = (
            {
                "median": round(statistics.median(times), 4),
                "p90": times[min(len(times) - 1, -(-len(times) * 9 // 10) - 1)],
                "max": times[-1],
            }
            if times
            else None
        )
    return found

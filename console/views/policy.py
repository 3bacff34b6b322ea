"""The policy of evictions, as text."""

from __future__ import annotations

from console.views.incident_report import aligned, clock, since
from controlplane import text
from everstep.decisions.act.evict.explain import (
    DescribedBreaker,
    DescribedPolicy,
    DescribedRule,
    ExplainedAnswer,
    Explanation,
    RuleNumber,
)
from everstep.decisions.act.evict.simulate import SimulatedEviction, Simulation
from everstep.model.eviction import EvictMode

INDENT = " " * 4
NO_ANSWER = (
    "no rule said anything: nothing was known against any machine, or the incident only told a fault and did nothing"
)


def policy_lines(policy: DescribedPolicy) -> list[str]:
    """Every rule in the order in which it is applied, and the breaker."""
    size = f", {policy.machines} machines" if policy.machines is not None else ""
    lines = [f"policy of evictions: {policy.of}{size}"]
    if policy.evict_mode is not EvictMode.ACT:
        lines.append(f"policy.evict.mode = {policy.evict_mode}: no rule may do more than that")
    for rule in policy.rules:
        lines += ["", f"{rule.position}  {rule.name}: {what_it_may(rule)}", *_about(rule)]
    lines += ["", f"{len(policy.rules) + 1}  {policy.breaker.name}: asks an operator", *_about(policy.breaker)]
    if policy.machines is not None:
        lines.append(
            f"{INDENT}of {policy.machines} machines {policy.breaker.without_operator} may leave without an operator"
        )
    return lines


def what_it_may(rule: DescribedRule) -> str:
    """The mode of a rule, and the setting that chose it."""
    means = {
        EvictMode.ACT: "act (evicts)",
        EvictMode.APPROVE: "approve (asks an operator)",
        EvictMode.SHADOW: "shadow (only writes down)",
        EvictMode.OFF: "off (is not asked)",
    }
    if not rule.evicts and rule.mode is not EvictMode.OFF:
        return "never evicts, says why not"
    return means.get(rule.mode, str(rule.mode)) + (f", by policy.{rule.mode_from}" if rule.mode_from else "")


def _about(one: DescribedRule | DescribedBreaker) -> list[str]:
    return [
        f"{INDENT}{one.asks}",
        *([f"{INDENT}source: {one.source}"] if one.source else []),
        *aligned([_cells(number) for number in one.numbers], INDENT),
    ]


def _cells(number: RuleNumber) -> tuple[str, ...]:
    meaning = f"{number.says} ({number.source})" if number.source else number.says
    if number.default is None:
        return f"{number.name} = {number.value:g}", "fixed", meaning
    kind = "default" if number.value == number.default else f"default {number.default:g}"
    return f"policy.{number.name} = {number.value:g}", kind, meaning


def explanation_lines(told: Explanation) -> list[str]:
    """The answers of the rules in one incident, machine by machine, and the result."""
    lines = [
        f"{told.incident}: {told.headline}",
        *aligned([("outcome", told.outcome), ("evicted", ", ".join(told.evicted) or "nobody")], INDENT),
    ]
    if not told.answers:
        lines += ["", NO_ANSWER]
    for machine in dict.fromkeys(answer.machine for answer in told.answers):
        rows = [_answer(answer) for answer in told.answers if answer.machine == machine]
        lines += ["", machine or "all machines together", *aligned(rows, INDENT)]
    rest = [
        ("nothing to say", ", ".join(told.nothing_to_say or [])),
        ("not asked (off)", ", ".join(told.not_asked)),
    ]
    if rows := [row for row in rest if row[1]]:
        lines += ["", "the other rules", *aligned(rows, INDENT)]
    if told.story:
        story = [(since(line.time_ns, told.fault_ns), line.stage, line.text) for line in told.story]
        lines += ["", "what followed", *aligned(story, INDENT)]
    return lines


def _answer(answer: ExplainedAnswer) -> tuple[str, ...]:
    mode = "" if answer.mode is EvictMode.ACT else f" ({answer.mode})"
    return "yes" if answer.yes else "no", f"{answer.rule}{mode}", answer.why, f"-> {answer.followed}"


def simulation_lines(done: Simulation, of: str) -> list[str]:
    """The evictions that a policy would have made on a recording, and their cost."""
    length = text.duration(done.hours * 3600)
    about = [
        ("policy", of),
        (
            "events",
            f"{done.events} of {done.machines} machines, {clock(done.begin_ns)} to {clock(done.end_ns)}, {length}",
        ),
        ("left out", f"lines that say no time: {done.without_time}" if done.without_time else ""),
    ]
    told = [(one.time_ns, _simulated(one)) for one in done.done]
    told += [(one.time_ns, ("breaker", "", "", "", one.why)) for one in done.tripped]
    rows = [(clock(time_ns), *cells) for time_ns, cells in sorted(told, key=lambda one: one[0])]
    out, asked, shadow = (done.of(mode) for mode in (EvictMode.ACT, EvictMode.APPROVE, EvictMode.SHADOW))
    share = text.ratio(done.machine_hours_out / done.machine_hours if done.machine_hours else None)
    cost = [
        ("evicted", f"{done.machines_out} of {done.machines} machines, {_times(len(out))}"),
        ("operator asked", f"{_times(len(asked))}; the breaker tripped {_times(len(done.tripped))}"),
        ("written down", _times(len(shadow))),
        ("cost", f"{done.machine_hours_out:.2f} of {done.machine_hours:.2f} machine hours without them ({share})"),
    ]
    return [
        "what the policy would have done, had the job failed whenever anything was heard: the most that it may do",
        *aligned([row for row in about if row[1]], INDENT),
        "",
        *(aligned(rows) or ["nothing"]),
        "",
        "what that would have cost",
        *aligned(cost, INDENT),
    ]


def _times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")


def _simulated(one: SimulatedEviction) -> tuple[str, ...]:
    """The cells of a row: mode, machine, rule, reason code, why, and when an evicted machine was healthy again."""
    done = one.eviction
    if one.mode is not EvictMode.ACT:
        return str(one.mode), done.machine, done.rule, done.reason, done.why
    back_s = None if one.back_ns is None else (one.back_ns - one.time_ns) / 1e9
    back = "not well again" if back_s is None else f"well again after {text.duration(back_s)}"
    return str(one.mode), done.machine, done.rule, done.reason, done.why, f"-> {back}"

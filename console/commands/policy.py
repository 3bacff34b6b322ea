"""``everstep policy``: show which machines leave a job, by which rules."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from console.commands.shared import (
    ClusterOption,
    DefaultCommand,
    JsonOption,
    LedgerOption,
    finish,
    known_cluster,
    open_ledger,
)
from console.terminal import aligned
from controlplane import text
from controlplane.shown import clean
from everstep.decisions.act.evict import simulate as simulation
from everstep.decisions.act.evict.explain import (
    DescribedBreaker,
    DescribedPolicy,
    DescribedRule,
    ExplainedAnswer,
    Explanation,
    RuleNumber,
    describe,
)
from everstep.decisions.act.evict.simulate import SimulatedEviction, Simulation
from everstep.errors import LedgerError
from everstep.model.eviction import EvictMode
from everstep.model.recovery_policy import RecoveryPolicy

if TYPE_CHECKING:
    from activities.ledger.ledger import Ledger

INDENT = " " * 4
NO_ANSWER = (
    "no rule gave an answer: no fault of any machine was known, or the incident only recorded a fault without acting"
)


class ShowUnlessNamed(DefaultCommand):
    """``everstep policy gpt`` is short for ``everstep policy show gpt``."""

    default = "show"


app = typer.Typer(
    name="policy",
    cls=ShowUnlessNamed,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _policies() -> None:
    """Show by which rules machines leave a job, why a machine left, and why another machine did not.

    `everstep policy gpt` is short for `everstep policy show gpt`.

    Examples:

        everstep policy

        everstep policy gpt.toml

        everstep policy explain gpt/2

        everstep policy simulate events.jsonl --job gpt.toml

        everstep policy record gpt/2 > case.toml

        everstep policy play case.toml
    """


@app.command()
def show(
    job: Annotated[
        str, typer.Argument(metavar="JOB.toml|JOB", help="A job file, or the name of a job. Default: the defaults.")
    ] = "",
    cluster: ClusterOption = "default",
    as_json: JsonOption = False,
) -> None:
    """Show every rule of eviction: its condition, its mode, and its numbers with their sources.

    The rules are shown in the order in which they are applied. The last one is the breaker, which limits how many
    machines may leave without an operator. The settings are in the table policy of the job file:
    docs/guides/eviction-policy.md.

    Examples:

        everstep policy

        everstep policy gpt.toml

        everstep policy gpt --json | jq '.rules[] | {name, mode}'

    Exit codes: 0 shown; 2 no such job, or a wrong job file; 3 no cluster or no Temporal.
    """
    finish(_show(job, cluster, as_json=as_json))


@app.command()
def explain(
    incident: Annotated[
        str, typer.Argument(metavar="INCIDENT", help="gpt/2 or incident/gpt/0002; gpt means its newest incident.")
    ],
    ledger: LedgerOption = "",
    cluster: ClusterOption = "default",
    as_json: JsonOption = False,
) -> None:
    """Show the answers of the eviction rules in an incident: yes or no for each machine, why, and the result.

    The answers of a closed incident are in the ledger, so the cluster need not be up. An open incident is queried.

    Examples:

        everstep policy explain gpt

        everstep policy explain gpt/2

        everstep policy explain incident/gpt/0002 --json | jq '.answers[] | select(.yes)'

    Exit codes: 0 explained; 1 not found, or the ledger cannot be read; 2 not an incident;
    3 it is open, and no cluster or no Temporal answers.
    """
    with open_ledger(ledger, cluster, known_cluster(cluster)) as opened:
        finish(_explain(incident, opened, cluster, as_json=as_json))


@app.command()
def simulate(
    events: Annotated[str, typer.Argument(metavar="EVENTS.jsonl", help="A recording, or - for standard input.")],
    job: Annotated[
        Path | None,
        typer.Option("--job", metavar="JOB.toml", help="Job file with the policy. Default: the default policy."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show which evictions a policy would have made on recorded events, and their cost. No cluster is needed.

    The rules are applied at every event, as if the job failed each time: so the result is an upper limit of the
    evictions. `everstep machines --record` makes a recording.

    Examples:

        everstep machines --record events.jsonl

        everstep policy simulate events.jsonl

        everstep policy simulate events.jsonl --job gpt.toml --json | jq .machine_hours_out

    Exit codes: 0 simulated; 2 a line of the recording or the job file is wrong.
    """
    from controlplane.recording import read_recording

    policy, name, machines = RecoveryPolicy(), "defaults", 0
    if job is not None:
        from controlplane.job_file.job_file import load_job

        spec = load_job(job)
        policy, name, machines = spec.policy, f"job file {job}", spec.topology().machines
    simulated = simulation.simulate(read_recording(events), policy, machines=machines)
    if as_json:
        print(json.dumps({"policy": name} | simulated.as_object(), indent=2))
    else:
        _print_lines(simulation_lines(simulated, name))


@app.command()
def play(
    cases: Annotated[list[Path], typer.Argument(metavar="CASE.toml…", help="Files with a case each.")],
    as_json: JsonOption = False,
) -> None:
    """Play cases in simulated time: show what everstep would do about the faults, and whether each case expects that.

    A case says what is broken and what can be seen of it. The workflows and decisions are those of a real incident;
    only the machines are simulated. No cluster is needed, and an hour takes less than a second: docs/guides/cases.md.

    Examples:

        everstep policy play case.toml

        everstep policy play tests/cases/*.toml --json | jq '.[] | select(.differences != [])'

    Exit codes: 0 all as expected; 1 a course differs; 2 a file is not a case.
    """
    from console.views.played import played_lines
    from drills.cases.case import read_case
    from drills.cases.play import differences
    from drills.cases.play import play as played

    read = [(path, read_case(path)) for path in cases]
    wrong, objects = 0, []
    for path, case in read:
        course = played(case)
        differs = differences(case, course)
        wrong += bool(differs)
        if as_json:
            objects.append(
                {"file": str(path), "title": case.title, "differences": [asdict(one) for one in differs]}
                | course.as_object()
            )
        else:
            _print_lines(played_lines(str(path), case, course, differs))
    if as_json:
        print(json.dumps(objects, indent=2))
    elif len(read) > 1:
        _print_lines([f"{len(read) - wrong} of {len(read)} cases are as expected"])
    raise typer.Exit(1 if wrong else 0)


@app.command()
def record(
    incident: Annotated[
        str, typer.Argument(metavar="INCIDENT", help="gpt/2 or incident/gpt/0002; gpt means its newest incident.")
    ],
    ledger: LedgerOption = "",
    cluster: ClusterOption = "default",
) -> None:
    """Print the case of a closed incident: what was broken, what was seen of it, and what everstep did about it.

    Correct the expectation, and keep the case where your other cases are: it is a test of the next release. The case
    has the last output of ranks, so read it before you send it to another person: docs/guides/cases.md.

    Examples:

        everstep policy record gpt/2 > cases/loader-deadlock.toml

        everstep policy play cases/loader-deadlock.toml

    Exit codes: 0 printed; 1 the ledger has no such incident, or the incident is open, or has nothing to play; 2 not an
    incident.
    """
    from console.recorded_case import recorded_case
    from controlplane.references import parse_incident
    from everstep.model.job_state import incident_workflow_id

    job, number = parse_incident(incident)
    with open_ledger(ledger, cluster, known_cluster(cluster)) as opened:
        newest = opened.incidents(job, limit=1)
        id = incident_workflow_id(job, number) if number else newest[0].id if newest else ""
        found = opened.incident(id) if id else None
        if found is None:
            raise LedgerError(f"the ledger has no incident {incident}: 'everstep incidents' lists its incidents")
        run = next(one for one in opened.jobs() if one.run == found.run)
        print(recorded_case(found, run, opened.looks(found.id)), end="")


async def _explain(incident: str, ledger: Ledger, cluster: str, *, as_json: bool) -> int:
    from controlplane.queries.explanation import explanation_of

    explanation = await explanation_of(incident, ledger, cluster)
    if as_json:
        print(explanation.model_dump_json(indent=2))
    else:
        _print_lines(explanation_lines(explanation))
    return 0


async def _show(job: str, cluster: str, *, as_json: bool) -> int:
    described = await _described(job, cluster)
    if as_json:
        print(described.model_dump_json(indent=2))
    else:
        _print_lines(policy_lines(described))
    return 0


async def _described(job: str, cluster: str) -> DescribedPolicy:
    """The policy of a job file or of a job's newest run, or the defaults."""
    if not job:
        return describe(RecoveryPolicy())
    if is_job_file(job):
        from controlplane.job_file.job_file import load_job

        spec = load_job(Path(job))
        return describe(spec.policy, of=f"job file {job}", machines=spec.topology().machines)
    from controlplane.client import Control

    async with await Control.connect(cluster) as control:
        await control.run_of(job)
        state = await control.state(job)
    return describe(state.spec.policy, of=f"job {job}, {state.status}", machines=len(state.machines))


def is_job_file(job: str) -> bool:
    """Whether the argument is a file name: names of jobs contain neither a dot nor a slash."""
    return "." in job or "/" in job


def _print_lines(lines: list[str]) -> None:
    for line in lines:
        print(clean(line))


def policy_lines(policy: DescribedPolicy) -> list[str]:
    """All rules in the order in which they are applied, and the breaker."""
    size = f", {policy.machines} machines" if policy.machines is not None else ""
    lines = [f"policy of evictions: {policy.of}{size}"]
    if policy.evict_mode is not EvictMode.ACT:
        lines.append(f"policy.evict.mode = {policy.evict_mode}: no rule may do more than that")
    for rule in policy.rules:
        lines += ["", f"{rule.position}  {rule.name}: {what_it_may(rule)}", *_about(rule)]
    lines += ["", f"{len(policy.rules) + 1}  {policy.breaker.name}: asks an operator", *_about(policy.breaker)]
    if policy.machines is not None:
        lines.append(
            f"{INDENT}{policy.breaker.without_operator} of {policy.machines} machines may leave without an operator"
        )
    return lines


def what_it_may(rule: DescribedRule) -> str:
    """The mode of a rule, and the setting that chose it."""
    means = {
        EvictMode.ACT: "act (evicts)",
        EvictMode.APPROVE: "approve (asks an operator)",
        EvictMode.SHADOW: "shadow (only records)",
        EvictMode.OFF: "off (is not applied)",
    }
    if not rule.evicts and rule.mode is not EvictMode.OFF:
        return "never evicts, only explains why not"
    return means.get(rule.mode, str(rule.mode)) + (f", by policy.{rule.mode_from}" if rule.mode_from else "")


def _about(rule: DescribedRule | DescribedBreaker) -> list[str]:
    return [
        f"{INDENT}{rule.asks}",
        *([f"{INDENT}source: {rule.source}"] if rule.source else []),
        *aligned([_cells(number) for number in rule.numbers], INDENT),
    ]


def _cells(number: RuleNumber) -> tuple[str, ...]:
    meaning = f"{number.meaning} ({number.source})" if number.source else number.meaning
    if number.default is None:
        return f"{number.name} = {number.value:g}", "fixed", meaning
    kind = "default" if number.value == number.default else f"default {number.default:g}"
    return f"policy.{number.name} = {number.value:g}", kind, meaning


def explanation_lines(explanation: Explanation) -> list[str]:
    """The answers of the rules in one incident, machine by machine, and the result."""
    facts = [("outcome", explanation.outcome), ("evicted", ", ".join(explanation.evicted) or "no machine")]
    lines = [f"{explanation.incident}: {explanation.headline}", *aligned(facts, INDENT)]
    if not explanation.answers:
        lines += ["", NO_ANSWER]
    for machine in dict.fromkeys(answer.machine for answer in explanation.answers):
        rows = [_answer(answer) for answer in explanation.answers if answer.machine == machine]
        lines += ["", machine or "all machines together", *aligned(rows, INDENT)]
    rest = [
        ("no answer", ", ".join(explanation.no_answer or [])),
        ("off", ", ".join(explanation.not_asked)),
    ]
    if rows := [row for row in rest if row[1]]:
        lines += ["", "the other rules", *aligned(rows, INDENT)]
    if explanation.story:
        story = [(text.since(line.time_ns, explanation.fault_ns), line.stage, line.text) for line in explanation.story]
        lines += ["", "what followed", *aligned(story, INDENT)]
    return lines


def _answer(answer: ExplainedAnswer) -> tuple[str, ...]:
    mode = "" if answer.mode is EvictMode.ACT else f" ({answer.mode})"
    return "yes" if answer.yes else "no", f"{answer.rule}{mode}", answer.why, f"-> {answer.result}"


def simulation_lines(result: Simulation, policy: str) -> list[str]:
    """The evictions that a policy would have made on a recording, and their cost.

    Args:
        result: Result of the simulation.
        policy: The policy as text: ``defaults``, or the name of the job file.
    """
    span = f"{text.moment_ns(result.begin_ns)} to {text.moment_ns(result.end_ns)}"
    about = [
        ("policy", policy),
        ("events", f"{result.events} of {result.machines} machines, {span}, {text.duration(result.hours * 3600)}"),
        ("left out", f"lines without a time: {result.without_time}" if result.without_time else ""),
    ]
    events = [(eviction.time_ns, _simulated(eviction)) for eviction in result.done]
    events += [(tripped.time_ns, ("breaker", "", "", "", tripped.why)) for tripped in result.tripped]
    rows = [(text.moment_ns(time_ns), *cells) for time_ns, cells in sorted(events, key=lambda event: event[0])]
    out, asked, shadow = (result.of(mode) for mode in (EvictMode.ACT, EvictMode.APPROVE, EvictMode.SHADOW))
    share = text.ratio(result.machine_hours_out / result.machine_hours if result.machine_hours else None)
    hours = f"{result.machine_hours_out:.2f} of {result.machine_hours:.2f} machine hours"
    cost = [
        ("evicted", f"{result.machines_out} of {result.machines} machines, {_times(len(out))}"),
        ("operator asked", f"{_times(len(asked))}; the breaker tripped {_times(len(result.tripped))}"),
        ("only recorded", _times(len(shadow))),
        ("cost", f"{hours} without the evicted machines ({share})"),
    ]
    return [
        "the evictions that the policy would have made if the job had failed at every event: an upper limit",
        *aligned([row for row in about if row[1]], INDENT),
        "",
        *(aligned(rows) or ["nothing"]),
        "",
        "their cost",
        *aligned(cost, INDENT),
    ]


def _times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")


def _simulated(simulated: SimulatedEviction) -> tuple[str, ...]:
    """The cells of a row: mode, machine, rule, reason code, why, and when an evicted machine was healthy again."""
    eviction = simulated.eviction
    cells = str(simulated.mode), eviction.machine, eviction.rule, eviction.reason, eviction.why
    if simulated.mode is not EvictMode.ACT:
        return cells
    back_s = None if simulated.back_ns is None else (simulated.back_ns - simulated.time_ns) / 1e9
    return *cells, "-> not healthy again" if back_s is None else f"-> healthy again after {text.duration(back_s)}"

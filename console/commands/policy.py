"""``everstep policy``: which machines leave a job, by which rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from console.commands.default_command import DefaultCommand
from console.commands.ledgers import ClusterOption, JsonOption, LedgerOption, known_cluster, open_ledger

if TYPE_CHECKING:
    from activities.ledger.ledger import Ledger
    from everstep.decisions.act.evict.explain import DescribedPolicy


class ShowsUnlessNamed(DefaultCommand):
    """``everstep policy gpt`` is short for ``everstep policy show gpt``."""

    default = "show"


app = typer.Typer(
    name="policy",
    cls=ShowsUnlessNamed,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _policies() -> None:
    """Show which machines leave a job by which rules, why they did, and why others did not.

    `everstep policy gpt` is short for `everstep policy show gpt`.

    Examples:

        everstep policy

        everstep policy gpt.toml

        everstep policy explain gpt/2

        everstep policy simulate events.jsonl --job gpt.toml
    """


@app.command()
def show(
    job: Annotated[
        str, typer.Argument(metavar="JOB.toml|JOB", help="A job file, or a job; default: the defaults.")
    ] = "",
    cluster: ClusterOption = "default",
    as_json: JsonOption = False,
) -> None:
    """Show every rule of eviction: what it asks, how far it may go, the numbers that it goes by, and whose they are.

    The rules are in the order in which they are asked. The last of all is the breaker, which limits how many machines
    leave without an operator. What can be set is in the table policy of the job file: docs/guides/eviction-policy.md.

    Examples:

        everstep policy

        everstep policy gpt.toml

        everstep policy gpt --json | jq '.rules[] | {name, mode}'

    Exit codes: 0 shown; 2 no such job, or a wrong job file; 3 no cluster or no Temporal.
    """
    from console.commands.exit_codes import finish

    finish(_show(job, cluster, as_json=as_json))


@app.command()
def explain(
    incident: Annotated[str, typer.Argument(metavar="INCIDENT", help="gpt/2, incident/gpt/0002; gpt: its newest.")],
    ledger: LedgerOption = "",
    cluster: ClusterOption = "default",
    as_json: JsonOption = False,
) -> None:
    """Say of an incident which rules said yes or no of which machine, why, and what followed.

    What is said of a closed incident is in the ledger, so the cluster need not be up. An open one is asked itself.

    Examples:

        everstep policy explain gpt

        everstep policy explain gpt/2

        everstep policy explain incident/gpt/0002 --json | jq '.answers[] | select(.yes)'

    Exit codes: 0 explained; 1 not found, or the ledger cannot be read; 2 not an incident;
    3 it is open, and no cluster or no Temporal answers.
    """
    from console.commands.exit_codes import finish

    with open_ledger(ledger, cluster, known_cluster(cluster)) as opened:
        finish(_explain(incident, opened, cluster, as_json=as_json))


@app.command()
def simulate(
    events: Annotated[str, typer.Argument(metavar="EVENTS.jsonl", help="A recording; - for standard input.")],
    job: Annotated[
        Path | None,
        typer.Option("--job", metavar="JOB.toml", help="The policy of this job file; default: the defaults."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a policy would have done about recorded events, and what that would have cost. No cluster is needed.

    It is decided whenever anything is heard, as if the job failed each time: what is evicted here is the most that
    would have been. A recording is made by `everstep machines --record`.

    Examples:

        everstep machines --record events.jsonl

        everstep policy simulate events.jsonl

        everstep policy simulate events.jsonl --job gpt.toml --json | jq .machine_hours_out

    Exit codes: 0 simulated; 2 a line of the recording is wrong, or the job file is.
    """
    from controlplane.recording import read_recording
    from everstep.decisions.act.evict import simulate as simulation
    from everstep.model.recovery_policy import RecoveryPolicy

    policy, of, machines = RecoveryPolicy(), "defaults", 0
    if job is not None:
        from controlplane.job_file.job_file import load_job

        spec = load_job(job)
        policy, of, machines = spec.policy, f"job file {job}", spec.topology().machines
    done = simulation.simulate(read_recording(events), policy, machines=machines)
    if as_json:
        print(json.dumps({"policy": of} | done.as_object(), indent=2))
        return
    from console.views.policy import simulation_lines

    _print_lines(simulation_lines(done, of))


async def _explain(incident: str, ledger: Ledger, cluster: str, *, as_json: bool) -> int:
    from controlplane.queries.explanation import explanation_of

    told = await explanation_of(incident, ledger, cluster)
    if as_json:
        print(told.model_dump_json(indent=2))
        return 0
    from console.views.policy import explanation_lines

    _print_lines(explanation_lines(told))
    return 0


async def _show(job: str, cluster: str, *, as_json: bool) -> int:
    described = await _described(job, cluster)
    if as_json:
        print(described.model_dump_json(indent=2))
        return 0
    from console.views.policy import policy_lines

    _print_lines(policy_lines(described))
    return 0


async def _described(job: str, cluster: str) -> DescribedPolicy:
    """The policy of a job file or of a job's newest run, or the defaults."""
    from everstep.decisions.act.evict.explain import describe
    from everstep.model.recovery_policy import RecoveryPolicy

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
    """Whether the argument is a file: names of jobs contain neither a dot nor a slash."""
    return "." in job or "/" in job


def _print_lines(lines: list[str]) -> None:
    from controlplane.shown import clean

    for line in lines:
        print(clean(line))

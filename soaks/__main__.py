"""``python -P -m soaks``: long runs for developers, which are no part of what is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from console.main import main

EXIT_VIOLATED, EXIT_NOT_FIRED = 1, 4
app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)


@app.command()
def soak(  # noqa: PLR0917 - one parameter for each option
    faults: Annotated[int, typer.Option(min=1, help="How many faults, or one more.")] = 200,
    seed: Annotated[int | None, typer.Option(help="Draws the plan. Default: another one each time.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="End after the episode in which they are over.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Draw from these kinds of fault; several at once.")] = None,
    machines: Annotated[int, typer.Option(min=1, help="Machines of the job.")] = 4,
    ranks_per_machine: Annotated[int, typer.Option(min=1, help="Ranks on each.")] = 2,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 2,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline-parallel size.")] = 2,
    plan: Annotated[Path | None, typer.Option(help="Run this plan instead of drawing one.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the soak in this folder.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="For plan and journal. Default: soaks/… in the everstep home.")
    ] = None,
    tries: Annotated[int, typer.Option(min=0, help="Runs that look for a shorter plan of a violation.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object at the end.")] = False,
) -> None:
    """Run one long job in which faults of every kind meet each other.

    They come alone, two at once, and one within the recovery from another. Before each of them all ranks wait at a
    step, the gate. What is there is looked at from outside (processes, files, step records, histories) and held to a
    list of invariants: the job steps again, losses equal the undisturbed run bit for bit, no rank lives twice, copies
    are where they belong, nothing piles up, status is true. The first violation ends the soak. Its cluster is left up
    (its job goes on), and shorter plans are run to find the shortest that is violated too.

    The same seed draws the same plan. A soak that was killed goes on with --resume. What this machine cannot inject
    (without root: the network, small file systems) is left out and listed. 300 faults take about 40 min on two cores.

    Examples:

        python -P -m soaks soak --faults 300 --seed 7

        python -P -m soaks soak --only kill-rank --only kill-machine --minutes 10

        python -P -m soaks soak --plan reduced.json

        python -P -m soaks soak --resume ~/.local/state/everstep/soaks/7-300

    Exit codes: 0 nothing was violated; 1 something was; 2 wrong usage; 3 it
    cannot run here; 4 as 0, but some faults did not fire.
    """
    from console.views import drill
    from drills import interrupts
    from everstep.errors import CannotInject, ConfigError
    from soaks import report
    from soaks.choose import chosen
    from soaks.runner import soak_and_reduce

    if plan and resume:
        raise ConfigError("--plan and --resume: a soak that goes on has its plan already")
    sizes = {"machines": machines, "ranks_per_machine": ranks_per_machine, "tp": tp, "pp": pp}
    taken, place = chosen(
        faults=faults, seed=seed, only=only or [], sizes=sizes, plan=plan, resume=resume, folder=folder
    )
    drill.progress(f"seed {taken.seed}; plan and journal are in {place}")
    try:
        result = interrupts.run(
            soak_and_reduce(taken, place, minutes=minutes, tries=tries, say=drill.progress, each=report.each)
        )
    except CannotInject as refused:
        print(f"error: {refused}", file=sys.stderr)
        raise typer.Exit(3) from None
    except KeyboardInterrupt:
        drill.progress(f"go on with: python -P -m soaks soak --resume {place}")
        raise
    if as_json:
        print(report.as_json(result))
    else:
        report.show(result, place)
    if not result.ok:
        raise typer.Exit(EXIT_VIOLATED)
    if not result.episodes and not result.stopped:
        print("error: nothing of the plan can be injected here", file=sys.stderr)
        raise typer.Exit(3)
    raise typer.Exit(EXIT_NOT_FIRED if any(episode.not_fired for episode in result.episodes) else 0)


@app.command()
def sweep(  # noqa: PLR0917 - options of a command
    first: Annotated[int, typer.Option("--from", min=1, help="First event.")] = 1,
    last: Annotated[int | None, typer.Option("--to", min=1, help="Last event. Default: the history's last.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Only every so many events.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes; with 1 each kill stops all control.")] = 1,
    of: Annotated[
        str, typer.Option(help="Of whose incident: crash, eviction, update, rollback of a bad version, or replay.")
    ] = "crash",
    as_json: Annotated[bool, typer.Option("--json", help="Print rows and verdict as one JSON object.")] = False,
) -> None:
    """Kill the worker at every event of an incident's history in turn.

    For each event n a short job runs on one local cluster, a rank of it is killed, a machine of it is lost for good, or
    it is updated, and the worker dies as soon as event n is durable. The decision and the outcome must be the same each
    time. A kill that came late is tried again. About 10 s for each event, and 20 s for an eviction's or a replay's.

    Examples:

        python -P -m soaks sweep

        python -P -m soaks sweep --from 6 --to 12

        python -P -m soaks sweep --every 5 --json

        python -P -m soaks sweep --of update

        python -P -m soaks sweep --of eviction

    Exit codes: 0 the same at each event; 1 not; 2 wrong usage.
    """
    from rich.table import Table

    from console.terminal import PlainConsole, styled
    from console.views import drill
    from drills import interrupts
    from everstep.errors import ConfigError
    from soaks.sweep import SWEPT, SweepRow, run_sweep

    if last is not None and last < first:
        raise ConfigError(f"--from {first} comes after --to {last}: no event lies between them")

    if of not in SWEPT:
        raise ConfigError(f"--of {of}: use one of {', '.join(SWEPT)}")

    def each(row: SweepRow) -> None:
        verdict = "same" if row.ok else "NOT THE SAME: " + "; ".join(row.problems)
        drill.progress(f"event {row.event} {row.kind} ({row.place or 'not hit'}): {verdict}")

    result = interrupts.run(
        run_sweep(first=first, last=last, every=every, workers=workers, of=of, say=drill.progress, each=each)
    )
    if as_json:
        print(result.model_dump_json(indent=2))
        raise typer.Exit(0 if result.ok else 1)
    table = Table(box=None, pad_edge=False)
    for name in ("n", "event", "worker hit", "killed after", "recovered", "decision and outcome"):
        table.add_column(name)
    for row in result.rows:
        seconds = "" if row.recovered_s is None else f"{row.recovered_s:.2f} s"
        verdict = styled("same" if row.ok else "; ".join([row.decision, row.outcome, *row.problems]))
        verdict.style = "" if row.ok else "red"
        late = "" if row.in_time or row.newest is None else ", late"
        after = f"{row.newest or ''}{late}"
        table.add_row(str(row.event), row.kind, row.place, after, seconds, verdict)
    out = PlainConsole()
    out.print(table)
    out.print(f"without a kill: {result.decision}; {result.outcome}")
    same = sum(row.ok for row in result.rows)
    out.print(f"the same in {same} of {len(result.rows)} runs")
    hit = len(result.rows) - len(result.late)
    out.print(f"a worker was killed in time at {hit} of {len(result.rows)} events of the history's {result.events}")
    if result.late:
        out.print(f"hit after a later event than meant: {', '.join(map(str, result.late))}")
    if result.leaked:
        out.print(f"left behind: {', '.join(result.leaked)}", style="red")
    raise typer.Exit(0 if result.ok else 1)


if __name__ == "__main__":
    main(app)

"""The commands ``python -P -m soaks soak`` and ``sweep``: long runs for developers.

The package ``soaks`` is not installed with everstep.
"""

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
    faults: Annotated[
        int, typer.Option(min=1, help="Number of faults. There may be one more, since the last episode may have two.")
    ] = 200,
    seed: Annotated[int | None, typer.Option(help="Seed of the plan. Default: a random one.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="Begin no new episode after this many minutes.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Draw only this kind of fault; can be given several times.")
    ] = None,
    machines: Annotated[int, typer.Option(min=1, help="Machines of the job.")] = 4,
    ranks_per_machine: Annotated[int, typer.Option(min=1, help="Ranks on each machine.")] = 2,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 2,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline-parallel size.")] = 2,
    plan: Annotated[Path | None, typer.Option(help="Run this plan instead of drawing one.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the soak in this folder.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of plan and journal. Default: soaks/… in the everstep home.")
    ] = None,
    tries: Annotated[
        int, typer.Option(min=0, help="Largest number of runs that search for a shorter plan with a violation.")
    ] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Run one long job in which faults of every kind meet each other.

    A fault strikes alone, at the same time as another one, or within the recovery from another one. Before each of
    these episodes all ranks wait at a step, the gate. There the soak observes processes, files, step records and
    histories from outside, and checks a list of invariants: the job steps again, losses equal those of an undisturbed
    run bit for bit, no rank has two processes, copies of the state are where they belong, no files or memory
    accumulate, and the status is right. The first violation ends the soak. Its cluster and its job stay up, and shorter
    plans are run to find the shortest one with a violation.

    The same seed draws the same plan. --resume continues a soak that was killed. Faults that this computer cannot
    inject are left out and listed; without root these are the faults that need networks or small file systems. 300
    faults take about 40 min on two cores.

    Examples:

        python -P -m soaks soak --faults 300 --seed 7

        python -P -m soaks soak --only kill-rank --only kill-machine --minutes 10

        python -P -m soaks soak --plan reduced.json

        python -P -m soaks soak --resume ~/.local/state/everstep/soaks/7-300

    Exit codes: 0 no violation; 1 a violation; 2 wrong usage; 3 the soak cannot run here; 4 no violation, but some
    faults did not fire.
    """
    from console.views import drill
    from drills import interrupts
    from everstep.errors import CannotInject, ConfigError
    from soaks import report
    from soaks.choose import chosen
    from soaks.runner import soak_and_reduce

    if plan and resume:
        raise ConfigError("--plan and --resume: a resumed soak has its plan already")
    sizes = {"machines": machines, "ranks_per_machine": ranks_per_machine, "tp": tp, "pp": pp}
    drawn, soak_folder = chosen(
        faults=faults, seed=seed, only=only or [], sizes=sizes, plan=plan, resume=resume, folder=folder
    )
    drill.progress(f"seed {drawn.seed}; plan and journal are in {soak_folder}")
    try:
        result = interrupts.run(
            soak_and_reduce(drawn, soak_folder, minutes=minutes, tries=tries, say=drill.progress, each=report.each)
        )
    except CannotInject as refused:
        print(f"error: {refused}", file=sys.stderr)
        raise typer.Exit(3) from None
    except KeyboardInterrupt:
        drill.progress(f"resume it with: python -P -m soaks soak --resume {soak_folder}")
        raise
    if as_json:
        print(report.as_json(result))
    else:
        report.show(result, soak_folder)
    if not result.ok:
        raise typer.Exit(EXIT_VIOLATED)
    if not result.episodes and not result.stopped:
        print("error: no fault of the plan can be injected here", file=sys.stderr)
        raise typer.Exit(3)
    raise typer.Exit(EXIT_NOT_FIRED if any(episode.not_fired for episode in result.episodes) else 0)


@app.command()
def sweep(  # noqa: PLR0917 - options of a command
    first: Annotated[int, typer.Option("--from", min=1, help="First event.")] = 1,
    last: Annotated[int | None, typer.Option("--to", min=1, help="Last event. Default: the history's last.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Sweep only every N-th event.")] = 1,
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of worker processes; with 1, each kill stops the whole control plane except Temporal.",
        ),
    ] = 1,
    of: Annotated[str, typer.Option(help="Incident to sweep: crash, eviction, update, rollback or replay.")] = "crash",
    as_json: Annotated[bool, typer.Option("--json", help="Print rows and verdict as one JSON object.")] = False,
) -> None:
    """Kill the worker at every event of an incident's history in turn.

    For each event n a short job runs on a local cluster, and a fault strikes it: a rank is killed, a machine is lost
    for good or computes wrongly, or the code is updated. The worker is killed as soon as event n is durable. The
    decision and the outcome must be the same each time. If a kill was late, the run for that event is repeated. An
    event takes about 10 s, or 20 s for an eviction or a replay.

    Examples:

        python -P -m soaks sweep

        python -P -m soaks sweep --from 6 --to 12

        python -P -m soaks sweep --every 5 --json

        python -P -m soaks sweep --of update

        python -P -m soaks sweep --of eviction

    Exit codes: 0 the same result at each event; 1 another result; 2 wrong usage.
    """
    from rich.table import Table

    from console.terminal import PlainConsole, styled
    from console.views import drill
    from drills import interrupts
    from everstep.errors import ConfigError
    from soaks.sweep import SWEPT, SweepRow, run_sweep

    if last is not None and last < first:
        raise ConfigError(f"--from {first} is after --to {last}: there is no event between them")

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
    out.print(f"the result was the same in {same} of {len(result.rows)} runs")
    hit = len(result.rows) - len(result.late)
    out.print(f"a worker was killed in time at {hit} of {len(result.rows)} events; the history has {result.events}")
    if result.late:
        out.print(f"the worker was killed too late for events {', '.join(map(str, result.late))}")
    if result.leaked:
        out.print(f"left behind: {', '.join(result.leaked)}", style="red")
    raise typer.Exit(0 if result.ok else 1)


if __name__ == "__main__":
    main(app)

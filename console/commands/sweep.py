"""``everstep sweep``: the worker killed at every event of an incident."""

from __future__ import annotations

from typing import Annotated

import typer


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

    For each event n a short job runs on one local cluster, a rank of it is
    killed, a machine of it is lost for good, or it is updated, and the worker
    dies as soon as event n is durable. The decision and the outcome must be
    the same each time. A kill that came late is tried again. About 10 s for
    each event, and 20 s for an eviction's or a replay's.

    Examples:

        everstep sweep

        everstep sweep --from 6 --to 12

        everstep sweep --every 5 --json

        everstep sweep --of update

        everstep sweep --of eviction

    Exit codes: 0 the same at each event; 1 not; 2 wrong usage.
    """
    from rich.table import Table

    from console.terminal import PlainConsole, styled
    from console.views import drill
    from drills import interrupts
    from drills.sweep import SWEPT, SweepRow, run_sweep
    from everstep.errors import ConfigError

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

"""``everstep soak``: faults of every kind meet each other in one long job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

EXIT_VIOLATED, EXIT_NOT_FIRED = 1, 4


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

    They come alone, two at once, and one within the recovery from another.
    Before each of them all ranks wait at a step, the gate. What is there is
    looked at from outside (processes, files, step records, histories) and held
    to a list of invariants: the job steps again, losses equal the undisturbed
    run bit for bit, no rank lives twice, copies are where they belong, nothing
    piles up, status is true. The first violation ends the soak. Its cluster is
    left up (its job goes on), and shorter plans are run to find the shortest that
    is violated too.

    The same seed draws the same plan. A soak that was killed goes on with
    --resume. What this machine cannot inject (without root: the network, small
    file systems) is left out and listed. 300 faults take about 40 min on two cores.

    Examples:

        everstep soak --faults 300 --seed 7

        everstep soak --only kill-rank --only kill-machine --minutes 10

        everstep soak --plan reduced.json

        everstep soak --resume ~/.local/state/everstep/soaks/7-300

    Exit codes: 0 nothing was violated; 1 something was; 2 wrong usage; 3 it
    cannot run here; 4 as 0, but some faults did not fire.
    """
    from console.views import drill, soak
    from drills import interrupts
    from drills.soak.choose import chosen
    from drills.soak.runner import soak_and_reduce
    from everstep.errors import CannotInject, ConfigError

    if plan and resume:
        raise ConfigError("--plan and --resume: a soak that goes on has its plan already")
    sizes = {"machines": machines, "ranks_per_machine": ranks_per_machine, "tp": tp, "pp": pp}
    taken, place = chosen(
        faults=faults, seed=seed, only=only or [], sizes=sizes, plan=plan, resume=resume, folder=folder
    )
    drill.progress(f"seed {taken.seed}; plan and journal are in {place}")
    try:
        result = interrupts.run(
            soak_and_reduce(taken, place, minutes=minutes, tries=tries, say=drill.progress, each=soak.each)
        )
    except CannotInject as refused:
        print(f"error: {refused}", file=sys.stderr)
        raise typer.Exit(3) from None
    except KeyboardInterrupt:
        drill.progress(f"go on with: everstep soak --resume {place}")
        raise
    if as_json:
        print(soak.as_json(result))
    else:
        soak.show(result, place)
    if not result.ok:
        raise typer.Exit(EXIT_VIOLATED)
    if not result.episodes and not result.stopped:
        print("error: nothing of the plan can be injected here", file=sys.stderr)
        raise typer.Exit(3)
    raise typer.Exit(EXIT_NOT_FIRED if any(episode.not_fired for episode in result.episodes) else 0)

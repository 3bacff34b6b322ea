"""``everstep analyze``: which machine a job hangs on, or is slowed down by, from files alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from console.commands.default_command import DefaultCommand

if TYPE_CHECKING:
    from everstep.model.topology import Topology

EXIT_NOT_KNOWN = 4


class HangUnlessNamed(DefaultCommand):
    """``everstep analyze DIR`` is short for ``everstep analyze hang DIR``."""

    default = "hang"


app = typer.Typer(
    name="analyze",
    cls=HangUnlessNamed,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Machines = Annotated[int | None, typer.Option(help="Number of machines.", rich_help_panel="Sizes")]
RanksPerMachine = Annotated[
    int | None, typer.Option(help="Ranks on each; default: 1, so that each rank is named.", rich_help_panel="Sizes")
]
Tp = Annotated[int | None, typer.Option(help="Tensor-parallel size.", rich_help_panel="Sizes")]
Pp = Annotated[int | None, typer.Option(help="Pipeline-parallel size; data-parallel follows.", rich_help_panel="Sizes")]
MeshOption = Annotated[
    str | None,
    typer.Option(
        metavar="AXES",
        help="All axes instead, in order, the last varies fastest: dp=4,pp=4,tp=2; -1: what the others leave.",
        rich_help_panel="Sizes",
    ),
]
GroupOption = Annotated[
    list[str] | None,
    typer.Option(metavar="GROUP", help="A group laid over axes: ep=4:dp+tp. Once for each.", rich_help_panel="Sizes"),
]
HostsOption = Annotated[
    str, typer.Option(metavar="NAMES", help="Names of the machines, in their order: m0,m1,m2.", rich_help_panel="Sizes")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def _analyses() -> None:
    """Say which machine a job hangs on, or is slowed down by, from files of any job; no cluster is needed.

    `everstep analyze DIR` is short for `everstep analyze hang DIR`.

    Examples:

        everstep analyze dumps/ --ranks-per-machine 8 --tp 8 --pp 4

        everstep analyze timings steps.csv --pp 4
    """


@app.command()
def hang(  # noqa: PLR0917 - options of a command
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with the dumps of a job that hangs.")],
    machines: Machines = None,
    ranks_per_machine: RanksPerMachine = None,
    tp: Tp = None,
    pp: Pp = None,
    mesh: MeshOption = None,
    group: GroupOption = None,
    hosts: HostsOption = "",
    stacks_only: Annotated[
        bool, typer.Option("--stacks-only", help="As in the paper: over-evict the group that outliers share.")
    ] = False,
    hung: Annotated[
        bool,
        typer.Option("--hung", help="The job is known not to step: one look at its stacks is enough."),
    ] = False,
    pickles: Annotated[
        bool,
        typer.Option(
            "--pickles",
            help="Read flight records that are pickles. Only plain data is taken from them and no code runs, but a "
            "file that somebody made on purpose can use up all memory: take them from people you trust.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say which machine a job hangs on, by its stacks and flight records.

    The folder has dumps of py-spy (text, or --json), flight records of torch (JSON; pickles with --pickles), and
    reports of NCCL's RAS; any of them, packed by gzip or not. Whose a file is stands in its name or its folder's, as in
    rank-5.json or nccl_trace_rank_5, or in processes.json. Several looks at a job lie in folders snapshot-1, snapshot-2
    …: docs/concepts/hangs.md. One look at stacks evicts nobody, but with --hung.

    Examples:

        everstep analyze dumps/ --ranks-per-machine 8 --tp 8 --pp 4

        everstep analyze dumps/ --machines 16 --ranks-per-machine 2 --mesh dp=4,pp=4,tp=2 --json

    Exit codes: 0 a machine or the script is named, or the job is not hung; 1 a file cannot be read;
    2 wrong usage; 4 nothing is known.
    """
    from dataclasses import replace

    from console.views.hang import as_object, text_of
    from everstep.decisions.blame.hang.analysis import judge_hang
    from everstep.decisions.blame.hang.conclusions import HangLimits
    from everstep.dumps.folder import read_folder
    from everstep.errors import DumpError
    from everstep.model.hang import HangConclusion, HangMethod

    evidence = replace(read_folder(folder, pickles=pickles), is_hung=hung)
    known = [*evidence.ranks, *(rank for ranks in evidence.groups.values() for rank in ranks)]
    topology = _topology(max(known) + 1, machines, ranks_per_machine, tp, pp, mesh, group)
    if max(known) >= topology.world_size:
        raise DumpError(f"{folder} has a dump of rank {max(known)}, and the sizes make {topology.world_size} ranks")
    if evidence.ras_ranks not in {0, topology.world_size}:
        raise DumpError(
            f"{folder}: NCCL's RAS knows {evidence.ras_ranks} ranks, and the sizes make {topology.world_size}: which "
            "of them it numbers cannot be told; use flight records"
        )
    limits = HangLimits(methods=(HangMethod.STACKS,)) if stacks_only else HangLimits()
    names = [one.strip() for one in hosts.split(",")] if hosts else []
    verdict = judge_hang(evidence, topology, limits, names)
    print(as_object(verdict, topology, names) if as_json else text_of(verdict, topology, names))
    raise typer.Exit(EXIT_NOT_KNOWN if verdict.conclusion is HangConclusion.UNKNOWN else 0)


@app.command()
def timings(  # noqa: PLR0917 - options of a command
    file: Annotated[Path, typer.Argument(metavar="FILE", help="CSV (also .gz), or Parquet where pyarrow is there.")],
    machines: Machines = None,
    ranks_per_machine: RanksPerMachine = None,
    tp: Tp = None,
    pp: Pp = None,
    mesh: MeshOption = None,
    group: GroupOption = None,
    hosts: HostsOption = "",
    unit: Annotated[str, typer.Option(help="Of times in the table: s, ms, us, ns.")] = "s",
    as_json: AsJson = False,
) -> None:
    """Say which machine slows a job down, by what its ranks took for the parts of their steps.

    One row for each operation of a rank in a step, with the columns step; rank, or dp_rank and stage; operation; start;
    duration; and tokens, if you know them. Ranks are compared with those of their own stage. Where the job itself is
    uneven (a heavy stage, sequences of uneven length) no machine is named: docs/concepts/hangs.md.

    Examples:

        everstep analyze timings steps.csv --ranks-per-machine 8 --tp 8 --pp 4

        everstep analyze timings trace.parquet --unit us --json

    Exit codes: 0 judged, "even" included; 1 the table cannot be read; 2 wrong usage; 4 nothing is known.
    """
    from console.views.slow import as_object, text_of
    from everstep.decisions.blame.slow.by_timings import judge_slow
    from everstep.dumps.timings import UNITS, read_timings
    from everstep.errors import ConfigError
    from everstep.model.slow import SlowConclusion

    if unit not in UNITS:
        raise ConfigError(f"--unit is {unit}; it must be one of {', '.join(UNITS)}")
    table = read_timings(file, unit)
    given = any(one is not None for one in (machines, ranks_per_machine, tp, pp, mesh, group))
    sizes = (machines, ranks_per_machine, tp, pp, mesh, group)
    topology = _topology(table.ranks, *sizes) if given else table.topology()
    verdict = judge_slow(list(table.times(topology)), topology)
    names = [one.strip() for one in hosts.split(",")] if hosts else []
    print(as_object(verdict, topology, names) if as_json else text_of(verdict, topology, names))
    raise typer.Exit(EXIT_NOT_KNOWN if verdict.conclusion is SlowConclusion.UNKNOWN else 0)


def _topology(  # noqa: PLR0917 - the options of both commands
    ranks: int,
    machines: int | None,
    ranks_per_machine: int | None,
    tp: int | None,
    pp: int | None,
    mesh: str | None,
    groups: list[str] | None,
) -> Topology:
    """The topology that the options name; what they leave open follows from the number of ranks."""
    from everstep.errors import ConfigError
    from everstep.model.topology import Topology, parse_laid, parse_mesh

    if mesh and (tp is not None or pp is not None):
        raise ConfigError("--mesh names all axes: leave --tp and --pp out, or name them in it")
    per_machine = ranks_per_machine or (-(-ranks // machines) if machines else 1)
    count = machines or -(-ranks // per_machine)
    laid = tuple(map(parse_laid, groups or ()))
    if mesh:
        return Topology(count, per_machine, tuple(parse_mesh(mesh).items()), laid)
    short = Topology.of(count, per_machine, tp=tp or 1, pp=pp or 1)
    return Topology(count, per_machine, short.mesh, laid)

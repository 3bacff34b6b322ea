"""``everstep analyze``: find the machine on which a job hangs, or which slows the job down, from files alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from console.commands.shared import EXIT_UNKNOWN, DefaultCommand, JsonOption
from console.terminal import aligned
from controlplane.shown import clean
from everstep.base.text import listed
from everstep.decisions.blame.hang.analysis import judge_hang
from everstep.decisions.blame.hang.conclusions import HangLimits
from everstep.decisions.blame.hang.verdict import HangVerdict, ParallelGroup, names_of
from everstep.decisions.blame.slow.by_timings import judge_slow
from everstep.decisions.blame.slow.vote import SlowVerdict
from everstep.dumps.folder import read_folder
from everstep.dumps.timings import UNITS, read_timings
from everstep.errors import ConfigError, DumpError
from everstep.model.hang import HangConclusion, HangMethod
from everstep.model.slow import SlowConclusion
from everstep.model.topology import Topology, parse_laid, parse_mesh

UNREAD_SHOWN = 5
"""Number of files that could not be read and are listed."""


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
    int | None,
    typer.Option(help="Ranks on each machine. Default: 1, so that each rank is named.", rich_help_panel="Sizes"),
]
Tp = Annotated[int | None, typer.Option(help="Tensor-parallel size.", rich_help_panel="Sizes")]
Pp = Annotated[
    int | None,
    typer.Option(help="Pipeline-parallel size; the data-parallel size follows.", rich_help_panel="Sizes"),
]
MeshOption = Annotated[
    str | None,
    typer.Option(
        metavar="AXES",
        help="All axes in order, instead of --tp and --pp: dp=4,pp=4,tp=2. The last axis varies fastest. A size of -1 "
        "follows from the others.",
        rich_help_panel="Sizes",
    ),
]
GroupOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GROUP",
        help="A kind of parallel group that is not an axis: ep=4:dp+tp makes ep groups of four ranks each, along the "
        "axes dp and tp. Repeat the option for each kind.",
        rich_help_panel="Sizes",
    ),
]
HostsOption = Annotated[
    str, typer.Option(metavar="NAMES", help="Names of the machines, in their order: m0,m1,m2.", rich_help_panel="Sizes")
]


@app.callback()
def _analyses() -> None:
    """Find the machine on which a job hangs, or which slows the job down, from files of any job. No cluster is needed.

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
        bool, typer.Option("--stacks-only", help="Use the paper's method: over-evict the group that outliers share.")
    ] = False,
    hung: Annotated[
        bool,
        typer.Option("--hung", help="The job is known to hang: one sample of its stacks is enough."),
    ] = False,
    pickles: Annotated[
        bool,
        typer.Option(
            "--pickles",
            help="Also read flight records that are pickles. Only plain data is read from them and no code runs, but a "
            "malicious file can use up all memory: read only files from people you trust.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find the machine on which a job hangs, by its stacks and flight records.

    The folder has dumps of py-spy (text, or --json), flight records of torch (JSON; pickles with --pickles), and
    reports of NCCL's RAS. Files may be compressed by gzip. The rank of a file is in its name or in the name of its
    folder, as in rank-5.json or nccl_trace_rank_5, or in processes.json. Several samples of a job lie in folders
    snapshot-1, snapshot-2 …: docs/concepts/hangs.md. A single sample of stacks is enough to evict a machine only with
    --hung.

    Examples:

        everstep analyze dumps/ --ranks-per-machine 8 --tp 8 --pp 4

        everstep analyze dumps/ --machines 16 --ranks-per-machine 2 --mesh dp=4,pp=4,tp=2 --json

    Exit codes: 0 a machine or the script is named, or the job does not hang; 1 no file can be read;
    2 wrong usage; 4 nothing is known.
    """
    samples = replace(read_folder(folder, pickles=pickles), is_hung=hung)
    last = max([*samples.ranks, *(rank for ranks in samples.groups.values() for rank in ranks)])
    topology = _topology(last + 1, machines, ranks_per_machine, tp, pp, mesh, group)
    if last >= topology.world_size:
        raise DumpError(f"{folder} has a dump of rank {last}, and the sizes make {topology.world_size} ranks")
    if samples.ras_ranks not in {0, topology.world_size}:
        raise DumpError(
            f"{folder}: NCCL's RAS knows {samples.ras_ranks} ranks, and the sizes make {topology.world_size}: it is "
            "not known which ranks of the job these are. Use flight records instead"
        )
    limits = HangLimits(methods=(HangMethod.STACKS,)) if stacks_only else HangLimits()
    names = _names(hosts)
    verdict = judge_hang(samples, topology, limits, names)
    shown = hang_json if as_json else hang_text
    print(shown(verdict, topology, names, samples.unread))
    raise typer.Exit(EXIT_UNKNOWN if verdict.conclusion is HangConclusion.UNKNOWN else 0)


@app.command()
def timings(  # noqa: PLR0917 - options of a command
    file: Annotated[Path, typer.Argument(metavar="FILE", help="CSV (also .gz), or Parquet if pyarrow is installed.")],
    machines: Machines = None,
    ranks_per_machine: RanksPerMachine = None,
    tp: Tp = None,
    pp: Pp = None,
    mesh: MeshOption = None,
    group: GroupOption = None,
    hosts: HostsOption = "",
    unit: Annotated[str, typer.Option(help="Unit of the times in the table: s, ms, us or ns.")] = "s",
    as_json: JsonOption = False,
) -> None:
    """Find the machine that slows a job down, by the durations of the ranks' operations.

    The table has one row for each operation of a rank in a step, with the columns step; rank, or dp_rank and stage;
    operation; start; duration; and tokens, if you know them. Ranks are compared with those of their own stage. If the
    job itself is uneven (a heavy stage, or sequences of uneven length), no machine is named: docs/concepts/hangs.md.

    Examples:

        everstep analyze timings steps.csv --ranks-per-machine 8 --tp 8 --pp 4

        everstep analyze timings trace.parquet --unit us --json

    Exit codes: 0 judged, "even" included; 1 the table cannot be read; 2 wrong usage; 4 nothing is known.
    """
    if unit not in UNITS:
        raise ConfigError(f"--unit is {unit}; it must be one of {', '.join(UNITS)}")
    table = read_timings(file, unit)
    sizes = (machines, ranks_per_machine, tp, pp, mesh, group)
    topology = table.topology() if all(size is None for size in sizes) else _topology(table.ranks, *sizes)
    verdict = judge_slow(list(table.times(topology)), topology)
    names = _names(hosts)
    print(slow_json(verdict, topology, names) if as_json else slow_text(verdict, topology, names))
    raise typer.Exit(EXIT_UNKNOWN if verdict.conclusion is SlowConclusion.UNKNOWN else 0)


def _names(hosts: str) -> list[str]:
    return [name.strip() for name in hosts.split(",")] if hosts else []


def _topology(  # noqa: PLR0917 - the options of both commands
    ranks: int,
    machines: int | None,
    ranks_per_machine: int | None,
    tp: int | None,
    pp: int | None,
    mesh: str | None,
    groups: list[str] | None,
) -> Topology:
    """The topology that the options describe; sizes without an option follow from the number of ranks."""
    if mesh and (tp is not None or pp is not None):
        raise ConfigError("--mesh names all axes: leave --tp and --pp out, or name these axes in --mesh")
    per_machine = ranks_per_machine or (-(-ranks // machines) if machines else 1)
    count = machines or -(-ranks // per_machine)
    laid = tuple(map(parse_laid, groups or ()))
    if mesh:
        return Topology(count, per_machine, tuple(parse_mesh(mesh).items()), laid)
    short = Topology.of(count, per_machine, tp=tp or 1, pp=pp or 1)
    return Topology(count, per_machine, short.mesh, laid)


def hang_text(verdict: HangVerdict, topology: Topology, names: Sequence[str] = (), unread: Sequence[str] = ()) -> str:
    """The verdict on a hang in one line, the machines to evict, the evidence, and a picture of the topology.

    Args:
        verdict: The verdict.
        topology: The topology of the job.
        names: The names of the machines, in their order.
        unread: Why files could not be read, one text for each.
    """
    machines = names_of(verdict.machines, names)
    facts = [
        ("method", verdict.method.value),
        ("evict", listed(machines) if machines else "no machine"),
        ("innocent", f"{verdict.innocent} of them, on purpose" if verdict.innocent else ""),
        ("group", str(verdict.group) if verdict.conclusion is HangConclusion.OVER_EVICTS and verdict.group else ""),
        ("not known", f"rank {listed(verdict.unknown)}, which may be healthy or not" if verdict.unknown else ""),
        ("not read", f"{len(unread)} file{'s' * (len(unread) > 1)}" if unread else ""),
        ("topology", _sizes_text(topology)),
    ]
    blocks = [
        f"{verdict.conclusion.value}: {verdict.reason}",
        *aligned([row for row in facts if row[1]], "  "),
    ]
    if verdict.evidence:
        blocks += ["", "Evidence", *(f"  {line}" for line in verdict.evidence)]
    if unread:
        rest = [f"{len(unread) - UNREAD_SHOWN} more"] if len(unread) > UNREAD_SHOWN else []
        blocks += ["", "Files that were not read", *(f"  {line}" for line in [*unread[:UNREAD_SHOWN], *rest])]
    if verdict.stacks:
        blocks += ["", "Activity of the ranks", *(f"  {line}" for line in verdict.picture.splitlines())]
    return clean("\n".join(blocks))


def hang_json(verdict: HangVerdict, topology: Topology, names: Sequence[str] = (), unread: Sequence[str] = ()) -> str:
    """The verdict on a hang as a JSON object; its keys do not change between releases. The arguments are those of
    ``hang_text``."""
    return json.dumps(
        {
            "conclusion": verdict.conclusion.value,
            "method": verdict.method.value,
            "reason": verdict.reason,
            "ranks": list(verdict.ranks),
            "machines": list(verdict.machines),
            "names": list(names_of(verdict.machines, names)),
            "innocent": verdict.innocent,
            "group": _group(verdict.group),
            "alternatives": [_group(group) for group in verdict.alternatives],
            "unexplained": list(verdict.unexplained),
            "unknown": list(verdict.unknown),
            "unread": list(unread),
            "evidence": list(verdict.evidence),
            "stacks": [
                {"text": stack.text, "ranks": list(stack.ranks), "dominant": stack.dominant} for stack in verdict.stacks
            ],
            "topology": str(topology),
        },
        indent=2,
    )


def slow_text(verdict: SlowVerdict, topology: Topology, names: Sequence[str] = ()) -> str:
    """The verdict on a slow job in one line, the machines to evict, and the votes."""
    machines = names_of(verdict.machines, names)
    facts = [("evict", listed(machines) if machines else "no machine"), ("topology", _sizes_text(topology))]
    blocks = [f"{verdict.conclusion.value}: {verdict.reason}", *aligned(facts, "  ")]
    if verdict.evidence:
        blocks += ["", "Evidence", *(f"  {line}" for line in verdict.evidence)]
    if verdict.rounds:
        rows = [
            (
                f"round {number}",
                f"{len(vote.outliers)} slow" + (f": rank {listed(vote.outliers)}" if vote.outliers else ""),
                f"flag for {vote.flagged}" if vote.flagged else "no flag",
            )
            for number, vote in enumerate(verdict.rounds, start=1)
        ]
        blocks += ["", "Votes", *aligned(rows, "  ")]
    if len(verdict.stages) > 1:
        stages = [(f"stage {stage}", f"computes {seconds:.4g} s in a step") for stage, seconds in verdict.stages]
        blocks += ["", "Stages", *aligned(stages, "  ")]
    return clean("\n".join(blocks))


def slow_json(verdict: SlowVerdict, topology: Topology, names: Sequence[str] = ()) -> str:
    """The verdict on a slow job as a JSON object; its keys do not change between releases."""
    return json.dumps(
        {
            "conclusion": verdict.conclusion.value,
            "reason": verdict.reason,
            "machines": list(verdict.machines),
            "names": list(names_of(verdict.machines, names)),
            "ranks": list(verdict.ranks),
            "group": _group(verdict.group),
            "flags": verdict.flags,
            "slowdown": verdict.slowdown,
            "rounds": [{"outliers": list(vote.outliers), "flagged": _group(vote.flagged)} for vote in verdict.rounds],
            "stages": [{"stage": stage, "seconds": seconds} for stage, seconds in verdict.stages],
            "evidence": list(verdict.evidence),
            "topology": str(topology),
        },
        indent=2,
    )


def _sizes_text(topology: Topology) -> str:
    return f"{topology.machines} machines of {topology.ranks_per_machine} ranks: {topology.text}"


def _group(group: ParallelGroup | None) -> dict[str, Any] | None:
    return {"kind": group.kind, "ranks": list(group.ranks), "machines": list(group.machines)} if group else None

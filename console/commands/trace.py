"""``everstep trace`` and ``everstep stacks``: show the present stacks of ranks, or the stacks kept with an incident."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from console.commands.analyze import hang_json, hang_text
from console.commands.incidents import IncidentArgument, id_of
from console.commands.shared import (
    EXIT_UNKNOWN,
    ClusterOption,
    JsonOption,
    LedgerOption,
    finish,
    known_cluster,
    open_ledger,
    print_json,
)
from console.terminal import aligned
from controlplane.shown import clean
from everstep.base.text import listed
from everstep.decisions.blame.hang.examples import examples
from everstep.dumps.py_spy import MAIN, ProcessDump, StackReader, role_of_process
from everstep.errors import ConfigError, DumpError, LedgerError
from everstep.model.hang import HangConclusion

if TYPE_CHECKING:
    from agent.v1 import agent_pb2 as pb

SERVERS = "agent/launcher/"
"""Frames of files in this folder belong to the launcher, and are not shown."""
PROCESSES_NAMED = 8
"""Number of processes that are named for one stack."""
OutOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Write the samples there, in the form that `everstep analyze DIR` reads.",
        show_default=False,
    ),
]
RankOption = Annotated[
    list[int] | None,
    typer.Option("--rank", "-r", help="Show only this rank, with all threads. Repeat the option for more ranks."),
]


def trace(  # noqa: PLR0917 - options of a command
    job: Annotated[str, typer.Argument(help="Name of a running job.")],
    apart: Annotated[float, typer.Option(min=0, help="Seconds between two samples; 0: only one sample.")] = 2.0,
    hung: Annotated[
        bool, typer.Option("--hung", help="The job is known to hang: one sample of its stacks is enough.")
    ] = False,
    stacks: Annotated[
        bool,
        typer.Option(
            "--stacks", help="Show the stacks too, each stack once. If the job is large, a few ranks are shown."
        ),
    ] = False,
    rank: RankOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
    cluster: ClusterOption = "default",
) -> None:
    """Sample what all ranks of a job do now, and show on which machine the job hangs, if it hangs. Nothing is stopped.

    Each rank pauses for some milliseconds while its stack is read. Two samples show whether the ranks make progress:
    this distinguishes a job that hangs from a job that computes.

    Examples:

        everstep trace gpt

        everstep trace gpt --stacks

        everstep trace gpt --rank 5 --apart 10 --out dumps/

    Exit codes: 0 a machine or the script is named, or the job does not hang; 2 no such job;
    3 no cluster or no Temporal; 4 nothing is known.
    """
    finish(_trace(job, apart, rank or [], out, cluster, hung=hung, stacks=stacks, as_json=as_json))


async def _trace(job: str, apart: float, ranks: Sequence[int], out: Path | None, cluster: str, **flags: bool) -> int:
    from activities.agents.looks import judge_looks, look, trace, whole_stacks
    from controlplane.client import Control

    async with await Control.connect(cluster) as control:
        await control.run_of(job)
        state = await control.state(job)
        machines = state.machines
        if apart:
            samples, judged = await trace(control.agents, state.spec, machines, apart_s=apart, is_hung=flags["hung"])
        else:
            samples = [await look(control.agents, job, machines)]
            judged = judge_looks(samples, state.spec, machines, is_hung=flags["hung"])
        if out:
            looks = [await whole_stacks(control.agents, job, machines, sample) for sample in samples]
            _write(out, dict(enumerate(looks, 1)))
        whole = []
        if (flags["stacks"] or ranks) and not flags["as_json"]:
            shown = ranks or [*examples(judged.evidence, judged.check.verdict.ranks)]
            whole = await whole_stacks(control.agents, job, machines, samples[-1], shown)
    for name, why in sorted(samples[-1].silent.items()):
        print(f"{name}: {why}", file=sys.stderr)
    for problem in judged.evidence.unread:
        print(f"left out: {problem}", file=sys.stderr)
    verdict, topology = judged.check.verdict, state.spec.topology()
    names = [machine.name for machine in machines]
    print(hang_json(verdict, topology, names) if flags["as_json"] else hang_text(verdict, topology, names))
    if whole:
        print(f"\n{stacks_text(whole, ranks)}")
    return EXIT_UNKNOWN if verdict.conclusion is HangConclusion.UNKNOWN else 0


def stacks(  # noqa: PLR0917 - options of a command
    incident: IncidentArgument = "",
    rank: RankOption = None,
    look: Annotated[int, typer.Option(min=1, help="Number of the sample, if the incident has several.")] = 1,
    out: OutOption = None,
    as_json: JsonOption = False,
    ledger: LedgerOption = "",
    cluster: ClusterOption = "default",
) -> None:
    """Show the stacks of ranks before an incident stopped them: each stack once, with the ranks that had it.

    The ledger is read, so the cluster need not be up. If the job has more than 64 ranks, the ledger has the stacks of
    the ranks that were named, and of a few examples of the others.

    Examples:

        everstep stacks gpt/1

        everstep stacks gpt/1 --rank 5

        everstep stacks gpt/1 --out dumps/ && everstep analyze dumps/

    Exit codes: 0 shown; 1 the ledger cannot be read, or has no stacks of this incident; 2 not an id.
    """
    from agent.v1 import agent_pb2 as pb

    with open_ledger(ledger, cluster, known_cluster(cluster)) as opened:
        id = id_of(opened, incident)
        rows = opened.looks(id) if id else []
        record = opened.incident(id) if id else None
    if not rows:
        why = (record and record.cleaned) or "its ranks were not sampled"
        raise LedgerError(f"the ledger has no stacks of incident {incident or id}: {why}")
    samples: dict[int, list[pb.StacksReply]] = {}
    for number, machine, _, data in rows:
        reply = pb.StacksReply.FromString(data)
        reply.machine = machine
        samples.setdefault(number, []).append(reply)
    if look not in samples:
        raise ConfigError(f"--look {look}: the incident has the samples {', '.join(map(str, samples))}")
    if out:
        _write(out, samples)
    hang: dict[str, Any] = (record.report or {}).get("hang") or {} if record else {}
    if as_json:
        print_json({"incident": id, "looks": sorted(samples), "hang": hang or None})
        return
    if hang:
        print(f"{hang['conclusion']}: {hang['reason']}\n\n{hang['picture']}\n")
    print(stacks_text(samples[look], rank or []))


def _write(folder: Path, samples: dict[int, list[pb.StacksReply]]) -> None:
    """Write samples by their numbers, each as a folder of compressed dumps."""
    from agent.tracer.dump_files import files_of

    for number, replies in samples.items():
        for reply in replies:
            for name, data in files_of(reply):
                path = folder / f"snapshot-{number}" / f"{name}.gz"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(gzip.compress(data))
    print(f"written to {folder}", file=sys.stderr)


def stacks_text(replies: Iterable[pb.StacksReply], ranks: Iterable[int] = ()) -> str:
    """The stacks of one sample, the most frequent first; then the processes without a stack, and why.

    Args:
        replies: Answers of the machines.
        ranks: Show only these ranks, with all threads. Empty: all ranks, with the main thread of each process.
    """
    wanted = set(ranks)
    reader, processes_of, missing = StackReader(), dict[str, list[str]](), dict[str, list[str]]()
    for reply in sorted(replies, key=lambda reply: reply.machine):
        for process in reply.processes:
            if wanted and process.rank not in wanted:
                continue
            dumps = _dumps(reader, process)
            name = f"rank {process.rank} on {reply.machine}, pid {process.pid}, state {process.state}"
            if others := reply.alike.get(process.rank, 1) - 1:
                name += f" ({others} more rank{'s' * (others > 1)} alike)"
            if not dumps:
                missing.setdefault(process.problem or "no stacks", []).append(name)
            for dump in dumps:
                role = process.role or role_of_process(dump).value
                for frames in _threads(dump, every=bool(wanted)):
                    processes_of.setdefault(f"{role}\n{frames}", []).append(name)
    lines = []
    for stack, names in sorted(processes_of.items(), key=lambda item: -len(item[1])):
        role, _, frames = stack.partition("\n")
        lines += [f"{len(names)} x {role}: {_named(names)}", frames, ""]
    if missing:
        lines += ["Without stacks", *aligned([(_named(names), problem) for problem, names in missing.items()], "  ")]
    return clean("\n".join(lines).rstrip())


def _named(processes: Sequence[str]) -> str:
    return listed(processes, PROCESSES_NAMED, separator="; ")


def _dumps(reader: StackReader, process: pb.TracedProcess) -> list[ProcessDump]:
    from agent.tracer.dump_files import unpacked

    data = unpacked(process.stacks)
    try:
        return reader.read(f"pid {process.pid}", data) if data else []
    except DumpError:
        return []


def _threads(dump: ProcessDump, *, every: bool) -> Iterator[str]:
    """The frames of the main thread, or of every thread, the innermost frame last."""
    main = dump.main()
    for name, stack in dump.threads:
        if every or stack is main:
            head = [f"    thread {name}"] if name not in {"", MAIN} else []
            own = [frame for frame in stack.frames if every or not frame.file.startswith(SERVERS)]
            frames = [f"    {frame.function} ({frame.file}:{frame.line})" for frame in reversed(own)]
            yield "\n".join([*head, *(frames or ["    nothing in Python"])])

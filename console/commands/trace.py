"""``everstep trace`` and ``everstep stacks``: the stacks of ranks now, and those that an incident recorded."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from console.commands.ledgers import ClusterOption, JsonOption, LedgerOption, known_cluster, open_ledger
from everstep.errors import ConfigError, LedgerError

if TYPE_CHECKING:
    from agent.v1 import agent_pb2 as pb

EXIT_NOT_KNOWN = 4
OutOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Write what was seen there, as `everstep analyze DIR` takes it.", show_default=False
    ),
]
RankOption = Annotated[
    list[int] | None, typer.Option("--rank", "-r", help="Only this rank, with all threads; once for each.")
]


def trace(  # noqa: PLR0917 - options of a command
    job: Annotated[str, typer.Argument(help="Name of a running job.")],
    apart: Annotated[float, typer.Option(min=0, help="Seconds between two looks; 0: one look only.")] = 2.0,
    hung: Annotated[bool, typer.Option("--hung", help="The job is known not to step: one look is enough.")] = False,
    stacks: Annotated[bool, typer.Option("--stacks", help="Show the stacks too, each once.")] = False,
    rank: RankOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
    cluster: ClusterOption = "default",
) -> None:
    """Look at what all ranks of a job do now, and say on which machine it hangs, if it does. Nothing is stopped.

    Each rank is held up for some milliseconds, while its stack is read. Two looks show whether the ranks come on: only
    so a job that hangs is told from one that computes.

    Examples:

        everstep trace gpt

        everstep trace gpt --stacks

        everstep trace gpt --rank 5 --apart 10 --out dumps/

    Exit codes: 0 a machine or the script is named, or the job is not hung; 2 no such job;
    3 no cluster or no Temporal; 4 nothing is known.
    """
    from console.commands.exit_codes import finish

    finish(_trace(job, apart, rank or [], out, cluster, hung=hung, stacks=stacks, as_json=as_json))


async def _trace(job: str, apart: float, ranks: Sequence[int], out: Path | None, cluster: str, **flags: bool) -> int:
    from activities.agents.looks import judge_looks, look, trace
    from console.views.hang import as_object, text_of
    from console.views.stacks import stacks_text
    from controlplane.client import Control
    from everstep.model.hang import HangConclusion

    async with await Control.connect(cluster) as control:
        await control.run_of(job)
        state = await control.state(job)
        machines = state.machines
        if apart:
            looks, judged = await trace(control.agents, state.spec, machines, apart_s=apart, is_hung=flags["hung"])
        else:
            looks = [await look(control.agents, job, machines)]
            judged = judge_looks(looks, state.spec, machines, is_hung=flags["hung"])
    for name, why in sorted(looks[-1].silent.items()):
        print(f"{name}: {why}", file=sys.stderr)
    for text in judged.unread:
        print(f"left out: {text}", file=sys.stderr)
    if out:
        for number, one in enumerate(looks, 1):
            write_look(out, number, list(one.replies.values()))
        print(f"written to {out}", file=sys.stderr)
    verdict, topology = judged.check.verdict, state.spec.topology()
    names = [machine.name for machine in machines]
    print(as_object(verdict, topology, names) if flags["as_json"] else text_of(verdict, topology, names))
    if (flags["stacks"] or ranks) and not flags["as_json"]:
        print(f"\n{stacks_text(looks[-1].replies.values(), ranks)}")
    return EXIT_NOT_KNOWN if verdict.conclusion is HangConclusion.UNKNOWN else 0


def stacks(  # noqa: PLR0917 - options of a command
    incident: Annotated[
        str, typer.Argument(help="incident/gpt/0001, or gpt/1, or 1; default: the newest.", show_default=False)
    ] = "",
    rank: RankOption = None,
    look: Annotated[int, typer.Option(min=1, help="Of several looks at the ranks the one with this number.")] = 1,
    out: OutOption = None,
    as_json: JsonOption = False,
    ledger: LedgerOption = "",
    cluster: ClusterOption = "default",
) -> None:
    """Show what the ranks were seen to do before an incident stopped them: every stack once, and who had it.

    The ledger is read, so the cluster need not be up.

    Examples:

        everstep stacks gpt/1

        everstep stacks gpt/1 --rank 5

        everstep stacks gpt/1 --out dumps/ && everstep analyze dumps/

    Exit codes: 0 shown; 1 the ledger cannot be read, or has no stacks of it; 2 not an id.
    """
    from agent.v1 import agent_pb2 as pb
    from console.commands.incidents import id_of
    from console.views.stacks import stacks_text

    described = known_cluster(cluster)
    with open_ledger(ledger, cluster, described) as opened:
        id = id_of(opened, incident)
        rows = opened.looks(id) if id else []
        record = opened.incident(id) if id else None
    if not rows:
        raise LedgerError(f"the ledger has no stacks of incident {incident or id}: its ranks were not looked at")
    taken: dict[int, list[pb.StacksReply]] = {}
    for number, machine, _, data in rows:
        reply = pb.StacksReply.FromString(data)
        reply.machine = machine
        taken.setdefault(number, []).append(reply)
    if look not in taken:
        raise ConfigError(f"--look {look}: there are {', '.join(map(str, taken))}")
    if out:
        for number, replies in taken.items():
            write_look(out, number, replies)
        print(f"written to {out}", file=sys.stderr)
    found: dict[str, Any] = (record.report or {}).get("hang") or {} if record else {}
    if as_json:
        print(json.dumps({"incident": id, "looks": sorted(taken), "hang": found or None}, indent=2))
        return
    if found:
        print(f"{found['conclusion']}: {found['reason']}\n\n{found['picture']}\n")
    print(stacks_text(taken[look], rank or []))


def write_look(folder: Path, number: int, replies: Sequence[pb.StacksReply]) -> None:
    """Write one sample of all ranks as a folder of compressed dumps."""
    from agent.tracer.dump_files import files_of

    for reply in replies:
        for name, data in files_of(reply):
            path = folder / f"snapshot-{number}" / f"{name}.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress(data))

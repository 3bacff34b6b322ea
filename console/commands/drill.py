"""``everstep drill``: a game day."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

EXIT_NOT_RECOVERED, EXIT_USAGE, EXIT_CANNOT, EXIT_NOT_COMPARED = 1, 2, 3, 4


def drill(  # noqa: PLR0917 - one parameter for each option
    fault: Annotated[str, typer.Argument(help="Which fault; --list names them.", show_default=False)] = "",
    script: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- SCRIPT ARGS…]", help="Default: the example GPT.", show_default=False),
    ] = None,
    list_faults: Annotated[bool, typer.Option("--list", help="List all faults.")] = False,
    rank: Annotated[list[int] | None, typer.Option(help="Rank to strike; several at once. Default: the last.")] = None,
    signal: Annotated[str, typer.Option(help="kill-rank: KILL, SEGV or ABRT.")] = "KILL",
    code: Annotated[
        int | None, typer.Option(min=0, max=255, help="exit-rank: the exit code, 0 included; xid: its number.")
    ] = None,
    exception: Annotated[str, typer.Option(help="raise: a built-in exception.")] = "RuntimeError",
    reason: Annotated[str, typer.Option(help="machine-fault: the reason code, see docs/concepts/inspections.md.")] = "",
    everywhere: Annotated[
        bool, typer.Option("--everywhere", help="xid, machine-fault: on all machines of the job at once.")
    ] = False,
    count: Annotated[int, typer.Option(min=1, help="hang-agents: of so many machines.")] = 2,
    machine: Annotated[str, typer.Option(help="Machine to strike, m2 or 2.")] = "",
    at_step: Annotated[int, typer.Option(min=0, help="Step at which the fault strikes.")] = 20,
    times: Annotated[int, typer.Option(min=1, max=20, help="Strike again at that step after each recovery.")] = 1,
    in_stage: Annotated[
        str,
        typer.Option(
            help="kill-worker, kill-temporal: report, vote, trace, stop, evict, prepare, await, decide, diagnose, "
            "replay, restore, reattempt, confirm; of an update make, try and align as well."
        ),
    ] = "",
    at_event: Annotated[int | None, typer.Option(min=1, help="kill-worker: instead, an event of the history.")] = None,
    during: Annotated[
        str,
        typer.Option(
            help="… of the incident that this fault opens; kill-agent: launch; update: kill-rank, parked, update, "
            "kill-workers, kill-temporal or kill-agent."
        ),
    ] = "",
    moment: Annotated[str, typer.Option(help="… at the begin, in the middle or at the end of its work.")] = "middle",
    kind: Annotated[str, typer.Option(help="kill-group: an axis of the mesh, or a group laid over it.")] = "",
    index: Annotated[int, typer.Option(min=0, help="kill-group: which group of that kind.")] = 0,
    where: Annotated[str, typer.Option(help="flip-bit: buffer (own memory), backup (the peer's) or file (disk).")] = "",
    fits: Annotated[str, typer.Option(help="shm-full: nothing, or own (but no backups of others).")] = "nothing",
    then: Annotated[
        str,
        typer.Option(
            help="kill-agent, kill-peer: kill-rank or kill-machine, once it is back; update --lazy: what it rides on, "
            "kill-forkserver too."
        ),
    ] = "",
    seconds: Annotated[
        float,
        typer.Option(
            help="hang-peer, hang-agents, link-down, cut-off, kill-postgres, kill-workers: for how long.", max=300
        ),
    ] = 6.0,
    factor: Annotated[
        float,
        typer.Option(
            min=1.5, max=20, help="slow-machine, uneven-work, slow-link: steps are to take so many times as long."
        ),
    ] = 2.0,
    between: Annotated[
        tuple[str, str] | None, typer.Option(metavar="M1 M2", help="slow-link, cut-link: between which machines.")
    ] = None,
    cut_from: Annotated[str, typer.Option("--from", help="cut-off: from whom; control is all there is.")] = "control",
    lazy: Annotated[
        bool, typer.Option("--lazy", help="update, bad-version: with the fault of --then, or after --window.")
    ] = False,
    window: Annotated[float, typer.Option(min=0, help="update --lazy: forced after so many seconds.")] = 0.0,
    at_start: Annotated[bool, typer.Option("--at-start", help="bad-version: it fails at its import.")] = False,
    fails_after: Annotated[int, typer.Option(min=0, help="bad-version: steps after which it fails.")] = 1,
    changes_state: Annotated[
        bool, typer.Option("--changes-state", help="bad-version: it has a parameter that the state lacks.")
    ] = False,
    only_in_job: Annotated[
        bool, typer.Option("--only-in-job", help="bitflip: not in tests, only in jobs of several machines.")
    ] = False,
    shows_every: Annotated[
        int, typer.Option(min=0, help="--only-in-job: in every so many runs of a replay only; 0: in none.")
    ] = 1,
    finite: Annotated[
        bool, typer.Option("--finite", help="bitflip: numbers are wrong and finite; a check elsewhere aborts the job.")
    ] = False,
    machines: Annotated[int | None, typer.Option(min=1, help="Machines of the job. Default: 4.")] = None,
    ranks_per_machine: Annotated[int | None, typer.Option(min=1, help="Ranks on each. Default: 2.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel size. Default: 2.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline-parallel size. Default: 2.")] = None,
    mesh: Annotated[str, typer.Option(metavar="AXES", help="All axes instead: dp_replicate=2,dp_shard=2.")] = "",
    group: Annotated[
        list[str] | None, typer.Option(metavar="GROUP", help="A group laid over axes: ep=4:dp_shard+tp.")
    ] = None,
    gone: Annotated[
        bool,
        typer.Option(
            "--gone", help="kill-machine, kill-group: they do not come back; others take their places. Or kill-agent."
        ),
    ] = False,
    standby: Annotated[
        str, typer.Option(help="… and the one that is to take the place is sick, dies, or comes late.")
    ] = "",
    standbys: Annotated[int, typer.Option(min=0, help="Machines beside those of the job.")] = 1,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the job, handed to the script as --steps.")] = None,
    step_seconds: Annotated[
        float | None, typer.Option(min=0, help="Shortest step of the example; 0.2 where backups must keep pace.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A job file; options win.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="So many runs on one cluster; then median, p90, maximum.")] = 1,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the cluster up: its incidents can be read.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object; with --repeat also runs and summary.")
    ] = False,
) -> None:
    """Run a job, inject a real fault, judge the recovery.

    The job runs on a local cluster of its own, which is torn down afterwards,
    and its ledger with it: the incident can be read later only with --keep,
    which ends with the commands for it.
    The same job then runs without the fault: the losses of all steps and the last
    state of every rank must be equal bit for bit. Of a script that reports no losses
    and has no checkpoint there is nothing to compare, and the result says so.
    Nothing may be left behind, and no rank may ever have two copies. In a script's
    arguments `{run}` stands for a folder that each run has of its own, for checkpoints
    that the script writes itself.

    Where a drill takes copies of the training state away or damages them, it
    looks itself at what is left, and says how many steps that may cost: one where
    the placement of the backups promises it. Small file systems need root, and so do
    drills of the network, whose machines are network namespaces with TLS.

    Examples:

        everstep drill kill-rank --rank 5 --at-step 20

        everstep drill kill-rank --rank 1 --rank 6 --repeat 10

        everstep drill kill-group --kind pp --index 0 --keep

        everstep drill kill-machine --machine m2 --gone

        everstep drill machine-fault --machine m1 --reason disk-failed

        everstep drill hang-agents --machines 10 --ranks-per-machine 1 --count 3 --seconds 20

        everstep drill flip-bit --where backup --rank 5

        everstep drill kill-worker --in-stage restore --during kill-machine --machine m2

        everstep drill link-down --machine m2 --seconds 10

        everstep drill exit-rank --code 0 --json -- examples/ddp_plain.py --out '{run}'

    Exit codes: 0 fired and recovered as the fault deserves; 1 not; 2 wrong
    usage; 3 this fault cannot be injected here; 4 as 0, but nothing could be
    compared with the run without the fault.
    """
    from console.views import drill
    from drills import interrupts
    from drills.judge.judge import together
    from drills.runner import run_drills
    from drills.spec.request import DrillRequest
    from everstep.errors import CannotInject, ConfigError

    if list_faults:
        drill.catalogue(as_json=as_json)
        return
    if not fault:
        raise ConfigError("name a fault; 'everstep drill --list' shows them")
    for option, goes_with, changed in (
        ("--signal", "kill-rank", signal != "KILL"),
        ("--code", "exit-rank xid", code is not None),
        ("--exception", "raise", exception != "RuntimeError"),
        ("--kind", "kill-group", kind != ""),
        ("--index", "kill-group", index != 0),
        ("--where", "flip-bit", where != ""),
        ("--fits", "shm-full", fits != "nothing"),
        ("--reason", "machine-fault", reason != ""),
        ("--everywhere", "xid machine-fault", everywhere),
        ("--count", "hang-agents", count != 2),
        ("--seconds", "hang-peer hang-agents link-down cut-off kill-postgres kill-workers update", seconds != 6.0),
        ("--gone", "kill-machine kill-group kill-agent update bad-version", gone),
        ("--standby", "kill-machine kill-group", standby != ""),
        ("--lazy", "update bad-version", lazy),
        ("--window", "update bad-version", window != 0.0),
        ("--at-start", "bad-version", at_start),
        ("--fails-after", "bad-version", fails_after != 1),
        ("--changes-state", "bad-version", changes_state),
        ("--only-in-job", "bitflip", only_in_job),
        ("--shows-every", "bitflip", shows_every != 1),
        ("--finite", "bitflip", finite),
        ("--from", "cut-off", cut_from != "control"),
    ):
        if changed and not {fault, during} & set(goes_with.split()):
            raise ConfigError(f"{option} goes with {goes_with.replace(' ', ', ')}, not with {fault}")
    try:
        request = DrillRequest(
            fault=fault,
            ranks=rank or [],
            signal=signal.upper().removeprefix("SIG"),
            code=code,
            exception=exception,
            reason=reason,
            everywhere=everywhere,
            count=count,
            standby=standby,
            factor=factor,
            between=between,
            machine=machine,
            at_step=at_step,
            times=times,
            in_stage=in_stage,
            at_event=at_event,
            during=during,
            moment=moment,
            kind=kind,
            index=index,
            where=where,
            fits=fits,
            then=then,
            seconds=seconds,
            cut_from=cut_from,
            lazy=lazy,
            window=window,
            at_start=at_start,
            fails_after=fails_after,
            changes_state=changes_state,
            only_in_job=only_in_job,
            shows_every=shows_every,
            finite=finite,
            machines=machines,
            ranks_per_machine=ranks_per_machine,
            tp=tp,
            pp=pp,
            mesh=mesh,
            groups=group or [],
            standbys=standbys,
            gone=gone,
            steps=steps,
            step_seconds=step_seconds,
            config=config,
            script=script or [],
        )
        results = interrupts.run(run_drills(request, repeat=repeat, say=drill.progress, keep=keep, each=drill.each))
    except CannotInject as refused:
        if as_json:
            print(json.dumps({"fault": fault, "fired": False, "refused": str(refused)}))
        print(f"error: {refused}", file=sys.stderr)
        raise typer.Exit(EXIT_CANNOT) from None
    if as_json:
        answer: Any = results[0].model_dump()
        if repeat > 1:
            answer = together(results)
        print(json.dumps(answer, indent=2))
    else:
        drill.results(results)
    if not all(result.ok for result in results):
        raise typer.Exit(EXIT_NOT_RECOVERED)
    blind = [result for result in results if not result.compared and result.resolution != "parked"]
    raise typer.Exit(EXIT_NOT_COMPARED if blind else 0)

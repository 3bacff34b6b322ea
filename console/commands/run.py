"""``everstep run`` and ``everstep attach``: start a training job, and follow it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from console.commands.shared import ClusterOption, finish
from everstep.errors import ClusterError, ConfigError
from everstep.model.job import IN_PLACE

if TYPE_CHECKING:
    from console.views.display import Display
    from controlplane.client import Control
    from everstep.model.job import JobSpec
    from everstep.model.version import JobVersion

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]

REFUSAL_S = 5.0
"""--detach waits this long to see whether the job is refused, seconds."""


@dataclass(frozen=True, slots=True)
class Start:
    """The state and the code with which a job begins; by default a new state and the present code."""

    step: int | Literal["latest"] | None
    """A step of the job's last run; ``latest``: the newest step that every rank can restore; None: the job does not
    continue a run."""
    folder: str
    """Folder of a disk checkpoint; empty: the job does not start from a folder."""
    version: str
    """Version of the code, from an earlier run; empty: the code as it is now."""


def run(  # noqa: PLR0917 - options of a command
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="JOB.toml -- SCRIPT ARGS", help="A job file, a script, or both.", show_default=False),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the job. Default: the name in the job file, or SCRIPT-xxxx.")
    ] = None,
    machines: Annotated[int | None, typer.Option(help="Number of machines.", rich_help_panel="Sizes")] = None,
    ranks_per_machine: Annotated[
        int | None, typer.Option(help="Ranks on each machine.", rich_help_panel="Sizes")
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel size.", rich_help_panel="Sizes")] = None,
    pp: Annotated[
        int | None,
        typer.Option(help="Pipeline-parallel size; the data-parallel size follows.", rich_help_panel="Sizes"),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXES",
            help="All axes in order, instead of --tp and --pp: pp=2,dp_replicate=2,dp_shard=-1,tp=2. A size of -1 "
            "follows from the others.",
            rich_help_panel="Sizes",
        ),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GROUP",
            help="A kind of parallel group that is not an axis: ep=4:dp_shard+tp makes ep groups of four ranks each, "
            "along the axes dp_shard and tp. Repeat the option for each kind.",
            rich_help_panel="Sizes",
        ),
    ] = None,
    resume_from: Annotated[
        str | None,
        typer.Option(
            metavar="STEP",
            help="Continue from this step of the last run with this name, or from its 'latest' step.",
            rich_help_panel="Continue",
        ),
    ] = None,
    resume_path: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Start from a checkpoint on disk, of any job and any sizes: …/gpt/step-000000120.",
            rich_help_panel="Continue",
        ),
    ] = None,
    code: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the first version of the code, with the script in it. Default: the script's folder.",
            rich_help_panel="Code",
        ),
    ] = None,
    in_place: Annotated[
        bool,
        typer.Option(
            "--in-place",
            help="Run the script from its own folder; its code is not recorded.",
            rich_help_panel="Code",
        ),
    ] = False,
    version: Annotated[
        str | None,
        typer.Option(
            metavar="V",
            help="Use code, arguments and variables of a version from an earlier run, by its number or id.",
            rich_help_panel="Code",
        ),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Start the job and return.")] = False,
    no_up: Annotated[
        bool,
        typer.Option("--no-up", help="Fail if no cluster is up, instead of starting one.", rich_help_panel="Where"),
    ] = False,
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="NAME", help="Name of the local cluster.", rich_help_panel="Where")
    ] = "default",
    inventory: Annotated[
        Path | None,
        typer.Option(
            "--inventory",
            metavar="FILE",
            help="File with the machines of a deployed cluster. Default: EVERSTEP_INVENTORY.",
            rich_help_panel="Where",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a training job and follow it: steps, loss, speed, ETTR, and incidents as they happen.

    The job is a TOML file, a script after `--`, or both; with both, this script replaces the script in the file. The
    files in the script's folder are the first version of the job's code, and every machine gets them; `everstep update`
    adds later versions (docs/guides/update-code.md). If no cluster is up, a local cluster is started. Ctrl-C detaches:
    the job continues, and it also continues if this command is killed.

    Keys of a job file: name, script, args, code (a folder, or "in-place"), cwd, python, env, env_from, env_file,
    redact, store_ports, machines, ranks_per_machine, tp, pp, order, mesh, groups, and two tables. Name secrets in
    env_from, and never write them into env (docs/guides/security.md). store_ports limits the ports of the rendezvous
    store: docs/guides/deploy.md. The table checkpoint decides where copies of the training state are kept:
    docs/reference/checkpoint.md. The table policy decides how the job is recovered: docs/reference/policy.md.
    Environment variables can set these keys too: EVERSTEP_JOB_TP=4 sets tp, and EVERSTEP_JOB_CHECKPOINT_SLOTS=4 sets
    checkpoint.slots.

    With --resume-from, a job that has ended continues from one of its checkpoints on disk or on remote storage, e.g. to
    repeat some steps with changed code. `everstep checkpoints` lists the checkpoints; 'latest' is the newest step that
    every rank can restore. Copies of later steps are set aside. With --version the job runs the code of a version that
    ran before (`everstep versions`), so that steps are repeated bit for bit.

    Examples:

        everstep run job.toml

        everstep run --machines 4 --ranks-per-machine 2 --tp 2 --pp 2 -- examples/gpt.py --steps 300

        everstep run job.toml --name gpt-2 --detach

        everstep run job.toml --resume-from 120

        everstep run job.toml --resume-from latest

        everstep run job.toml --version 2 --resume-from 120

        everstep run --machines 2 --resume-path /disk/gpt/step-000000120 -- examples/gpt.py --steps 300

        everstep run job.toml --inventory machines.toml

        everstep run job.toml --json | jq 'select(.event == "incident")'

    Exit codes: 0 finished; 1 failed, stopped or abandoned; 2 wrong usage or a wrong job; 3 no cluster or no Temporal;
    4 parked, it needs an operator; 130 detached, the job continues.
    """
    from controlplane.job_file.job_file import load_job
    from controlplane.start_checks.resume import checked_path, parse_step

    if in_place and code is not None:
        raise ConfigError("--in-place and --code exclude each other: give only one of them")
    if resume_from is not None and resume_path is not None:
        raise ConfigError("--resume-from and --resume-path exclude each other: give only one of them")
    path, script = split_arguments(what or [])
    if version is not None and (script or in_place or code is not None):
        raise ConfigError(
            "--version already decides script, arguments and code: leave --code, --in-place and the script out"
        )
    options: dict[str, Any] = {
        "name": name,
        "machines": machines,
        "ranks_per_machine": ranks_per_machine,
        "tp": tp,
        "pp": pp,
        "mesh": mesh,
        "groups": group,
        "code": IN_PLACE if in_place else code,
    }
    if script:
        options |= {"script": script[0], "args": script[1:]}
    spec = load_job(path, options, recorded=version is not None)
    if resume_from is not None and path is None and name is None:
        raise ConfigError("--resume-from continues an earlier job: name it with --name or by its job file")
    start = Start(
        parse_step(resume_from) if resume_from is not None else None,
        checked_path(resume_path) if resume_path else "",
        version or "",
    )
    finish(_run(spec, start, cluster, inventory, no_up=no_up, detach=detach, as_json=as_json))


def attach(
    job: Annotated[str, typer.Argument(help="Name of a running job.")],
    cluster: ClusterOption = "default",
    as_json: AsJson = False,
) -> None:
    """Follow a running job, as `everstep run` does.

    Examples:

        everstep attach gpt

        everstep attach gpt --json

    Exit codes: those of `everstep run`; 2 also if there is no such job.
    """
    finish(_attach(job, cluster, as_json=as_json))


def split_arguments(words: list[str]) -> tuple[Path | None, list[str]]:
    """Split the arguments of ``everstep run``; returns the job file, if any, and the script with its arguments.

    Raises:
        ConfigError: there is neither a job file nor a script.
    """
    if not words:
        raise ConfigError(
            "nothing to run: name a job file, as in 'everstep run job.toml', or a script after '--', as in "
            "'everstep run --machines 2 -- train.py --steps 300'"
        )
    if words[0].endswith(".toml"):
        return Path(words[0]), words[1:]
    return None, words


async def _run(
    spec: JobSpec, start: Start, cluster: str, inventory: Path | None, *, no_up: bool, detach: bool, as_json: bool
) -> int:
    from activities.payloads import key_file
    from console.views.display import Ending, display_for
    from console.views.follower import Follower, detached
    from controlplane.job_file.checks import env_warnings
    from controlplane.start_checks.backups import backup_warnings
    from controlplane.start_checks.machines import choose_machines
    from controlplane.start_checks.resume import as_earlier, check_step, earlier_run
    from controlplane.start_checks.storage import check_storage
    from everstep.model.job_state import JobState

    display = display_for(as_json=as_json)
    async with await _connect(cluster, inventory, spec.machines, display, no_up=no_up) as control:
        before = await earlier_run(control, spec) if start.step is not None else None
        chosen = await choose_machines(control, spec, {machine.name for machine in before.machines} if before else ())
        resume_from, last_run = None, as_earlier(before) if before else None
        if start.step is not None:
            resume_from, source = await check_step(control, spec, chosen, start.step, last_run)
            display.note(source)
        for warning in [] if key_file() else env_warnings(spec):
            display.note(f"warning: {warning}")
        await check_storage(control, spec, chosen)
        for warning in await backup_warnings(control, spec, chosen):
            display.note(f"warning: {warning}")
        spec, versions, notes = await _code(control, spec, start.version, resume_from, display.note)
        for note in notes:
            display.note(note)
        await control.start_job(
            spec,
            chosen,
            resume_from=resume_from,
            resume_path=start.folder,
            last_run=last_run,
            versions=versions,
        )
        _show_start(control, spec, [machine.name for machine in chosen], display)
        if detach:
            refusal = await refused(control, spec.name)
            display.ended(Ending("failed", refusal, (), 1) if refusal else detached(spec.name, control.option, 0))
            return 1 if refusal else 0
        ending = await Follower(control, JobState(spec=spec, machines=chosen), display, attached=False).follow()
        display.ended(ending)
        return ending.exit_code


async def _code(
    control: Control, spec: JobSpec, version: str, step: int | None, show: Callable[[str], None]
) -> tuple[JobSpec, list[JobVersion], list[str]]:
    """The job with the code that it begins with, its versions, and notes for the user. The code is the present state of
    the folder, or a recorded version."""
    if not version:
        from controlplane.start_checks.code import first_version

        spec, versions, note = await first_version(control, spec, show)
        return spec, versions, [note] if note else []
    from controlplane.start_checks.recorded import recorded_version

    start = await recorded_version(control, spec, version, step)
    return start.spec, start.versions, start.notes


async def refused(control: Control, job: str) -> str:
    """The reason why a newly submitted job was refused; empty: it was launched, or not refused within ``REFUSAL_S``."""
    with contextlib.suppress(TimeoutError, ClusterError):
        async with asyncio.timeout(REFUSAL_S):
            while not (state := await control.state(job)).launched:
                if state.outcome:
                    return f"job {job} {state.outcome}"
                await asyncio.sleep(0.1)
    return ""


async def _attach(job: str, cluster: str, *, as_json: bool) -> int:
    from console.views.display import display_for
    from console.views.follower import Follower
    from controlplane.client import Control

    display = display_for(as_json=as_json)
    async with await Control.connect(cluster) as control:
        if not (await control.run_of(job)).running:
            raise ConfigError(f"job {job} does not run any more: see 'everstep status {job}{control.option}'")
        state = await control.state(job)
        _show_start(control, state.spec, [machine.name for machine in state.machines], display)
        ending = await Follower(control, state, display, attached=True).follow()
        display.ended(ending)
        return ending.exit_code


async def _connect(cluster: str, inventory: Path | None, machines: int, display: Display, *, no_up: bool) -> Control:
    """Connect to the cluster; if none answers, start a local cluster first."""
    from controlplane.client import Control
    from controlplane.inventory import inventory_path
    from controlplane.local import cluster as local
    from controlplane.references import option_of

    try:
        return await Control.connect(cluster, inventory=inventory)
    except ClusterError:
        if no_up or inventory_path(inventory):
            raise
        display.note(
            f"cluster {cluster} does not answer: starting it with {machines} machines (with --no-up this is an error)"
        )

        def show(line: str) -> None:
            print(f"  {line}", file=sys.stderr, flush=True)

        await asyncio.to_thread(local.up, cluster, machines=machines, progress=show)
        display.note(f"cluster {cluster} is up; 'everstep down{option_of(cluster)}' stops it")
    return await Control.connect(cluster)


def _show_start(control: Control, spec: JobSpec, machines: list[str], display: Display) -> None:
    topology = spec.topology()
    link = control.link(f"job/{spec.name}")
    facts = {
        "machines": machines,
        "world_size": topology.world_size,
        "tp": topology.tp,
        "pp": topology.pp,
        "dp": topology.dp,
        "mesh": dict(topology.mesh),
        "script": spec.script,
        "args": spec.args,
        "link": link,
    }
    lines = [
        f"job {spec.name}: {' '.join([spec.script, *spec.args])}",
        f"  {topology.world_size} ranks on {', '.join(machines)}: {topology.text}",
        *([f"  {link}"] if link else []),
    ]
    display.started(spec.name, facts, lines)

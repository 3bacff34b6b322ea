"""``everstep run`` and ``everstep attach``: start a training job, follow it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from everstep.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from console.views.display import Display
    from controlplane.client import Control
    from everstep.model.job import JobSpec
    from everstep.model.version import JobVersion

Cluster = Annotated[str, typer.Option("--cluster", metavar="NAME", help="Local cluster.", rich_help_panel="Where")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]

InventoryFile = Annotated[
    Path | None,
    typer.Option(
        "--inventory",
        metavar="FILE",
        help="Machines of a deployed cluster; also as EVERSTEP_INVENTORY.",
        rich_help_panel="Where",
    ),
]

REFUSAL_S = 5.0
"""--detach waits this long to see whether the job is refused, seconds."""


@dataclass(frozen=True, slots=True)
class Start:
    """The state from which a job begins; by default a new state."""

    step: int | Literal["latest"] | None = None
    """Step of the last run of its name; ``latest``: the newest that every rank can restore."""
    folder: str = ""
    """Folder of a disk checkpoint."""
    version: str = ""
    """Version of the code, from an earlier run; empty: the code as it is now."""


def run(  # noqa: PLR0917 - options of a command
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="JOB.toml -- SCRIPT ARGS", help="A job file, a script, or both.", show_default=False),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job; default: the job file's, or SCRIPT-xxxx.")] = None,
    machines: Annotated[int | None, typer.Option(help="Number of machines.", rich_help_panel="Sizes")] = None,
    ranks_per_machine: Annotated[int | None, typer.Option(help="Ranks on each.", rich_help_panel="Sizes")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel size.", rich_help_panel="Sizes")] = None,
    pp: Annotated[
        int | None, typer.Option(help="Pipeline-parallel size; data-parallel follows.", rich_help_panel="Sizes")
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXES",
            help="All axes instead, in order: pp=2,dp_replicate=2,dp_shard=-1,tp=2; -1: what the others leave.",
            rich_help_panel="Sizes",
        ),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GROUP",
            help="A group laid over axes: ep=4:dp_shard+tp, four ranks of these. Once for each.",
            rich_help_panel="Sizes",
        ),
    ] = None,
    resume_from: Annotated[
        str | None,
        typer.Option(
            metavar="STEP", help="Go on from this step of its last run, or from its 'latest'.", rich_help_panel="Go on"
        ),
    ] = None,
    resume_path: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Start from a checkpoint on disk, of any job and any sizes: …/gpt/step-000000120.",
            rich_help_panel="Go on",
        ),
    ] = None,
    code: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder that is its first version; it holds the script. Default: the script's.",
            rich_help_panel="Code",
        ),
    ] = None,
    in_place: Annotated[
        bool,
        typer.Option("--in-place", help="Run the script where it lies; nothing is recorded.", rich_help_panel="Code"),
    ] = False,
    version: Annotated[
        str | None,
        typer.Option(
            metavar="V",
            help="Code, arguments and variables of a version that an earlier run of it had: number or id.",
            rich_help_panel="Code",
        ),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Start the job and return.")] = False,
    no_up: Annotated[
        bool, typer.Option("--no-up", help="Fail when no cluster is up.", rich_help_panel="Where")
    ] = False,
    cluster: Cluster = "default",
    inventory: InventoryFile = None,
    as_json: AsJson = False,
) -> None:
    """Run a training job and follow it: steps, loss, speed, ETTR, and incidents as they happen.

    The job is a TOML file, a script after `--`, or both: then the script wins. The files of the script's folder are its
    first version: every machine gets them, and later ones come with `everstep update` (docs/guides/update-code.md). A
    local cluster is started when none is up. Ctrl-C detaches: the job goes on, and so it does when this command is
    killed.

    Keys of a job file: name, script, args, code (a folder, or "in-place"), cwd, python, env, env_from, env_file,
    redact, machines, ranks_per_machine, tp, pp, order, mesh, groups, and two tables. Secrets are named in env_from,
    never written into env (docs/guides/security.md). The table checkpoint says where copies of the training state go:
    slots, overlap, backup, backup_slots, backup_every_steps, backup_rate_mb_s, backup_chunk_mb, disk, disk_path,
    disk_every_steps, disk_every_min, disk_keep, remote_url, remote_keep, state_mb_per_rank, max_unsaved_steps,
    max_unsaved_s (docs/concepts/checkpoints.md explains them). The table policy has the limits of
    everstep/model/recovery_policy.py. EVERSTEP_JOB_TP=4 sets tp, EVERSTEP_JOB_CHECKPOINT_SLOTS=4 checkpoint.slots, and
    so on.

    A job that has ended can go on from one of its checkpoints with --resume-from, e.g. to replay some steps with
    changed code; `everstep checkpoints` lists them, and 'latest' is the newest that every rank can restore. Only what
    is on disk or on remote storage is left by then. What the job had saved beyond that step is set aside. With
    --version the code is that of a version that ran then (`everstep versions`): so its steps are repeated bit for bit.

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

    Exit codes: 0 finished; 1 failed, stopped or abandoned; 2 wrong usage or a wrong job; 3 no cluster or no Temporal; 4
    parked, it needs an operator; 130 detached, the job runs on.
    """
    from console.commands.exit_codes import finish
    from controlplane.job_file.job_file import load_job
    from controlplane.start_checks.resume import checked_path, parse_step
    from everstep.model.job import IN_PLACE

    if in_place and code is not None:
        raise ConfigError("--in-place and --code exclude each other: give one of them")
    if resume_from is not None and resume_path is not None:
        raise ConfigError("--resume-from and --resume-path exclude each other: give one of them")
    path, script = split_arguments(what or [])
    if version is not None and (script or in_place or code is not None):
        raise ConfigError("--version says script, arguments and code: give no --code, --in-place or script beside it")
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
        raise ConfigError(
            "--resume-from goes on with a job that was there before: say which, with --name or a job file"
        )
    start = Start(
        parse_step(resume_from) if resume_from is not None else None,
        checked_path(resume_path) if resume_path else "",
        version or "",
    )
    finish(_run(spec, start, cluster, inventory, no_up=no_up, detach=detach, as_json=as_json))


def attach(
    job: Annotated[str, typer.Argument(help="Name of a running job.")],
    cluster: Cluster = "default",
    as_json: AsJson = False,
) -> None:
    """Follow a job that runs, as `everstep run` does.

    Examples:

        everstep attach gpt

        everstep attach gpt --json

    Exit codes: as of `everstep run`; 2 also when there is no such job.
    """
    from console.commands.exit_codes import finish

    finish(_attach(job, cluster, as_json=as_json))


def split_arguments(words: list[str]) -> tuple[Path | None, list[str]]:
    """The job file, if there is one, and the script with its arguments.

    Raises:
        ConfigError: there is neither.
    """
    if not words:
        raise ConfigError(
            "what shall run? Name a job file, or a script after '--': "
            "everstep run job.toml, or everstep run --machines 2 -- train.py --steps 300"
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
            resume_from, why = await check_step(control, spec, chosen, start.step, last_run)
            display.note(why)
        for warning in [] if key_file() else env_warnings(spec):
            display.note(f"warning: {warning}")
        await check_storage(control, spec, chosen)
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
    control: Control, spec: JobSpec, version: str, step: int | None, say: Callable[[str], None]
) -> tuple[JobSpec, list[JobVersion], list[str]]:
    """The job with its first version (its folder as it is now, or a recorded version), and notes for the user."""
    if not version:
        from controlplane.start_checks.code import first_version

        spec, versions, note = await first_version(control, spec, say)
        return spec, versions, [note] if note else []
    from controlplane.start_checks.recorded import recorded_version

    start = await recorded_version(control, spec, version, step)
    return start.spec, start.versions, start.notes


async def refused(control: Control, job: str) -> str:
    """Why a job that was just submitted was not started; empty when it is launched, or still open after a while."""
    with contextlib.suppress(TimeoutError, ClusterError):
        async with asyncio.timeout(REFUSAL_S):
            while not (state := await control.state(job)).launched:
                if state.outcome:
                    return f"{job} {state.outcome}"
                await asyncio.sleep(0.1)
    return ""


async def _attach(job: str, cluster: str, *, as_json: bool) -> int:
    from console.views.display import display_for
    from console.views.follower import Follower
    from controlplane.client import Control

    display = display_for(as_json=as_json)
    async with await Control.connect(cluster) as control:
        newest = await control.run_of(job)
        if not newest.running:
            raise ConfigError(f"job {job} does not run any more: see 'everstep status {job}{control.option}'")
        state = await control.state(job)
        _show_start(control, state.spec, [machine.name for machine in state.machines], display)
        ending = await Follower(control, state, display, attached=True).follow()
        display.ended(ending)
        return ending.exit_code


async def _connect(cluster: str, inventory: Path | None, machines: int, display: Display, *, no_up: bool) -> Control:
    """Connect; start a local cluster when no cluster answers."""
    from controlplane.client import Control
    from controlplane.inventory import inventory_path
    from controlplane.local import cluster as local
    from controlplane.references import option_of

    try:
        return await Control.connect(cluster, inventory=inventory)
    except ClusterError:
        if no_up or inventory_path(inventory):
            raise
        display.note(f"no cluster {cluster} answers: starting one with {machines} machines (--no-up refuses instead)")

        def say(line: str) -> None:
            print(f"  {line}", file=sys.stderr, flush=True)

        await asyncio.to_thread(local.up, cluster, machines=machines, progress=say)
        display.note(f"cluster {cluster} is up; 'everstep down{option_of(cluster)}' ends it")
    return await Control.connect(cluster)


def _show_start(control: Control, spec: JobSpec, machines: list[str], display: Display) -> None:
    topology = spec.topology()
    link = control.link(f"job/{spec.name}")
    command = " ".join([spec.script, *spec.args])
    size = f"{topology.world_size} ranks on {', '.join(machines)}: {topology.text}"
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
    lines = [f"job {spec.name}: {command}", f"  {size}", *([f"  {link}"] if link else [])]
    display.started(spec.name, facts, lines)

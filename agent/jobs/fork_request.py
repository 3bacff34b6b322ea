"""This module builds the request to fork the ranks of a launch, with script, environment and files of each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from agent.checkpoints import save_watch
from agent.checkpoints.job_checkpoints import slots_of
from agent.jobs.host import Host
from agent.launcher.fork_client import inherited_environment
from agent.reporting.step_archive import Reports
from agent.state.job_record import JobRecord
from agent.tracer.tracer import server_of
from agent.v1 import agent_pb2 as pb
from everstep.errors import ConfigError
from everstep.rank import environment
from everstep.slots.format import own_slots


def check_launch(request: pb.LaunchRequest) -> None:
    """Refuse a launch that cannot run, before anything is forked.

    Raises:
        ConfigError: there are no ranks, a rank is named twice, or the script or folder does not exist.
    """
    ranks = [rank.rank for rank in request.ranks]
    if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0:
        raise ConfigError(f"ranks are {ranks}; at least one rank must be named, each only once, counted from 0")
    script = request.program.script
    check_paths(script, folder_to_work_in(request.program, Path(script)))


def folder_to_work_in(program: pb.Program, script: Path) -> str:
    """Return the working directory.

    It is the script's folder if no folder is requested, or if the requested folder is a default and does not exist.

    Args:
        program: The program of a launch, or of a trial.
        script: Path of the script on this machine.
    """
    if program.cwd_by_default and not Path(program.cwd).is_dir():
        return str(script.parent)
    return program.cwd or str(script.parent)


def check_paths(script: str, cwd: str) -> None:
    """Refuse a script or a working directory that does not exist; an empty working directory is accepted.

    Raises:
        ConfigError: the script or the working directory does not exist.
    """
    if not Path(script).is_absolute() or not Path(script).is_file():
        raise ConfigError(f"script {script} is not a file on this machine; give the absolute path of one")
    if cwd and not Path(cwd).is_dir():
        raise ConfigError(f"cwd {cwd} is not a folder on this machine")


def fork_arguments(
    request: pb.LaunchRequest,
    ranks: Iterable[pb.RankLaunch],
    *,
    host: Host,
    record: JobRecord,
    reports: Reports,
    output: Callable[[int, str], Path],
) -> dict[str, Any]:
    """Return the arguments of the fork server's ``fork``; makes the report files of the ranks.

    Args:
        request: The launch.
        ranks: Ranks of the launch that do not run yet.
        host: The machine.
        record: Record of the job.
        reports: Makes the report files, in the job's shared memory.
        output: Returns the path for a rank's output; suffix ``out`` or ``err``.
    """
    shm, program = host.shm_dir / request.job, request.program
    shared = {
        "OMP_NUM_THREADS": "1",  # torchrun does this too
        **host.sockets,
        **inherited_environment(),
        **dict(record.env),
        **dict(program.env),
        environment.JOB: request.job,
        environment.RUN: record.run,
        environment.MACHINE: host.machine,
        environment.GENERATION: str(request.generation),
        environment.RESUME_STEP: str(request.resume_step),
        environment.VERSION: str(request.version),
        **checkpoint_environment(request, shm),
    }
    rows = []
    for rank in ranks:
        report = reports.prepare(rank.rank, request.generation, max(request.save_every, 1))
        own = {
            **dict(rank.env),
            environment.REPORT_FILE: str(report),
            environment.CHECKPOINT_FILE: str(own_slots(shm, rank.rank)),
            environment.CONTROL_SOCKET: str(server_of(shm, rank.rank)),
        }
        files = {stream: str(output(rank.rank, stream[3:])) for stream in ("stdout", "stderr")}
        rows.append({"rank": rank.rank, "env": own, "report": str(report), **files})
    return {
        "generation": request.generation,
        "fenced": record.fenced,
        "script": program.script,
        "args": list(program.args),
        "cwd": folder_to_work_in(program, Path(program.script)),
        "env": shared,
        "ranks": rows,
    }


def checkpoint_environment(request: pb.LaunchRequest, shm: Path) -> dict[str, str]:
    """Return the variables that define how a rank keeps its state."""
    options = request.checkpoint
    overlap = request.program.env.get(environment.CHECKPOINT_OVERLAP) or str(int(options.overlap))
    backups = options.backup_slots if options.backup and request.peers else 0
    return {
        environment.CHECKPOINT_SLOTS: str(slots_of(options)),
        environment.CHECKPOINT_OVERLAP: overlap,
        environment.SAVE_SIGNAL: str(shm / save_watch.NAME),
        environment.BACKUP_SLOTS: str(backups),
        environment.DISK_EVERY_STEPS: str(options.disk_every_steps if options.disk else 0),
        environment.RESHARD_FROM: options.reshard_from,
    }

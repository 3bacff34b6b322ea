"""What a drill is refused for, before anything is started."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from controlplane.local import mounts
from drills.clusters import network
from drills.inject import cpu_group, devices, memory_group
from drills.spec import settings
from drills.spec.catalogue import (
    CONTROL_FAULTS,
    DAMAGE,
    FITS,
    HANGS,
    LOSSES,
    NOT_FINITE,
    RANK_FAULTS,
    ROOM,
    SHARED,
    SLOWED,
    STANDBY,
    THEN,
    UPDATES,
    WHERE,
    kind_of,
)
from drills.spec.request import DrillRequest
from drills.spec.settings import STEPS_AGAIN, machine_names, placement_of
from drills.spec.stages import BEFORE_AN_UPDATE, MOMENTS, REPORT, STAGES
from drills.spec.sure_faults import LINES, SURE
from drills.spec.updates import DURING
from drills.spec.updates import THEN as RIDES_ON
from everstep.decisions.act.evict.rules import SHARED_MACHINES
from everstep.decisions.blame.replay.group_jobs import why_not
from everstep.errors import CannotInject, ConfigError
from everstep.model.job import JobSpec
from everstep.model.launch import Showing
from everstep.model.topology import SHORT_ORDER
from everstep.rank.drill_faults import exception_named

SIGNALS = ("KILL", "SEGV", "ABRT")
NOTICED_S = 2.0
"""Beyond the time after which a job counts as hanging: what is over sooner heals by itself."""
LEDGER_LIMIT_S = 20.0
"""The end of a job is written for 30 s; it is to be in the ledger."""
HANG_LIMIT_S = 30.0
AFTER_WHICH = ("kill-agent", "kill-peer", "xid", "gpu-lost")
"""Faults after which another one may follow."""
EVICTS = ("gpu-lost", "machine-fault")
"""Faults with which the ranks go on, until another machine is ready."""
OF_EVICTIONS = ("evict", "prepare")
"""Stages of an incident in which a machine is replaced."""
OPENS = (*RANK_FAULTS, *LOSSES, *UPDATES)
"""Faults that open an incident for others to strike in."""


class Needs(NamedTuple):
    """What opens an incident that has a stage."""

    faults: tuple[str, ...]
    why: str
    """What does not happen after other faults."""


OF_FAULTS = {
    "vote": Needs(("slow-machine",), "nobody looks for a slow machine"),
    "trace": Needs(HANGS, "nobody looks at ranks"),
    "diagnose": Needs(NOT_FINITE, "machines are tested at once only where a loss is not finite"),
    "replay": Needs(("bitflip",), "the job is not run again on groups of its machines"),
    "rollback": Needs(("bad-version",), "no code is taken back"),
    "restore": Needs((*LOSSES, *HANGS), "copies are moved only where memory was lost"),
}
"""Stages that not every incident has."""


def check(request: DrillRequest) -> None:
    """Refuse what makes no sense, or cannot be injected on this machine.

    Raises:
        ConfigError: wrong usage.
        CannotInject: the fault cannot be injected here.
    """
    check_sense(request)
    if request.needs_network and (said := network.missing(with_postgres=request.base == "kill-postgres")):
        raise CannotInject(f"{request.base}: {said}")
    if request.base == "oom" and (said := memory_group.why_not()):
        raise CannotInject(f"oom: {said}")
    if request.base == "slow-machine" and (said := cpu_group.why_not()):
        raise CannotInject(f"slow-machine: {said}")
    if request.base == "slow-link" and not shutil.which("tc"):
        raise CannotInject("slow-link: there is no program tc (package iproute2)")
    in_kernel_log = request.base == "xid" or (request.base == "machine-fault" and request.reason in LINES)
    if in_kernel_log and (said := devices.why_not()):
        raise CannotInject(f"{request.base}: {said}")
    if request.base in (*ROOM, "fs-readonly") and (said := mounts.why_not(Path(tempfile.gettempdir()))):
        raise CannotInject(f"{request.base}: {said}")


def check_sense(request: DrillRequest) -> None:
    """Refuse what makes no sense on any machine.

    Raises:
        ConfigError: wrong usage.
    """
    kind_of(request.fault)
    if request.base != request.fault:
        kind_of(request.base)
    _check_during(request)
    _check_choices(request)
    if not request.script and request.config is None:
        _check_steps(request)
    spec = request.spec("drill", {})
    _check_places(request, spec)
    _check_bits(request, spec)
    _check_copies(request, spec)
    _check_shared(request, spec)
    _check_away(request, spec)


def _check_bits(request: DrillRequest, spec: JobSpec) -> None:
    for option, chosen in (("--only-in-job", request.only_in_job), ("--finite", request.finite)):
        if chosen and request.base != "bitflip":
            raise ConfigError(f"{option} goes with bitflip, not with {request.base}")
    if request.shows_every != 1 and not request.only_in_job:
        raise ConfigError("--shows-every goes with --only-in-job: a test finds the machine before")
    if request.finite and spec.machines == 1:
        raise ConfigError("--finite: the check that aborts the job is on another machine: use 2 or more")
    if request.only_in_job and (why := why_not(spec, Showing(kind="steps"))):
        raise ConfigError(f"--only-in-job: nobody would find it: {why}")


def _check_during(request: DrillRequest) -> None:
    if request.fault in CONTROL_FAULTS:
        _check_stage(request)
    elif request.fault in UPDATES:
        _check_update(request)
        return
    elif request.during and not (request.fault == "kill-agent" and request.during == "launch"):
        raise ConfigError(f"--during {request.during} does not go with {request.fault}: use it with kill-worker")
    if request.then:
        if request.fault not in AFTER_WHICH or request.during:
            raise ConfigError(f"--then {request.then} goes with {', '.join(AFTER_WHICH)}, and without --during")
        _one_of("--then", request.then, THEN if request.fault in ("kill-agent", "kill-peer") else THEN[:1])


def _check_update(request: DrillRequest) -> None:
    _one_of("--during", request.during, DURING)
    _one_of("--then", request.then, RIDES_ON)
    if request.fault == "bad-version" and request.during:
        raise ConfigError(f"--during {request.during} goes with update")
    if request.lazy != bool(request.then or request.window) or (request.then and request.window):
        raise ConfigError(
            "a lazy update rides on --then FAULT, or is forced after --window S: --lazy takes one of them"
        )
    if request.lazy and request.during:
        raise ConfigError(f"--during {request.during} goes with an urgent update, without --lazy")


def _check_stage(request: DrillRequest) -> None:
    if request.at_event is not None and (request.fault != "kill-worker" or request.in_stage):
        raise ConfigError("--at-event goes with kill-worker and without --in-stage")
    if request.at_event is None:
        _one_of("--in-stage", request.in_stage, (REPORT, *STAGES))
    _one_of("--moment", request.moment, MOMENTS)
    opens = (*OPENS, *EVICTS, *SLOWED)
    if request.base not in opens:
        raise ConfigError(f"--during {request.base} opens no incident: use one of {', '.join(opens)}")
    if request.base in (*EVICTS, *SLOWED) and request.in_stage == REPORT:
        raise ConfigError(f"--in-stage {REPORT}: {request.base} hurts no rank: name a later stage")
    if (needs := OF_FAULTS.get(request.in_stage)) and request.base not in needs.faults:
        raise ConfigError(
            f"--in-stage {request.in_stage}: {needs.why}: add --during {' or --during '.join(needs.faults)}"
        )
    if request.in_stage == "replay" and not request.only_in_job:
        raise ConfigError("--in-stage replay: a test finds the machine before: add --only-in-job")
    if request.in_stage in OF_EVICTIONS and not request.gone and request.base not in (*EVICTS, *HANGS):
        raise ConfigError(
            f"--in-stage {request.in_stage}: machines leave only where they stay away, or are at fault: "
            f"add --during kill-machine --gone, or --during {' or --during '.join((*EVICTS, *HANGS))}"
        )
    if request.in_stage in BEFORE_AN_UPDATE and request.base not in UPDATES:
        raise ConfigError(f"--in-stage {request.in_stage}: add --during {' or --during '.join(UPDATES)}")
    if request.in_stage == "await" and request.standby != "late":
        raise ConfigError("--in-stage await: nothing is waited for: add --during kill-machine --gone --standby late")


def _check_choices(request: DrillRequest) -> None:
    _one_of("--signal", request.signal, SIGNALS)
    if request.base == "raise":
        try:
            exception_named(request.exception)
        except ValueError as error:
            raise ConfigError(f"--exception {error}") from error
    if request.base == "flip-bit":
        _one_of("--where", request.where, WHERE)
    if request.base == "shm-full":
        _one_of("--fits", request.fits, FITS)
    if request.base == "machine-fault":
        _one_of("--reason", request.reason, SURE)
    if request.standby:
        _one_of("--standby", request.standby, STANDBY)
        if not (request.gone and request.base in LOSSES):
            raise ConfigError("--standby goes with kill-machine --gone and kill-group --gone: nobody is replaced else")
    if request.everywhere and (request.base not in SHARED or request.then):
        raise ConfigError(f"--everywhere goes with {', '.join(SHARED)}, and without --then")
    if request.base == "cut-off":
        _one_of("--from", request.cut_from, ("control",))
    if request.base == "kill-postgres" and request.seconds > LEDGER_LIMIT_S:
        raise ConfigError(f"--seconds {request.seconds:g}: the ledger may be away for {LEDGER_LIMIT_S:g} s at most")
    if request.base == "hang-peer" and request.seconds > HANG_LIMIT_S:
        raise ConfigError(f"--seconds {request.seconds:g}: an agent may hang for {HANG_LIMIT_S:g} s at most")


def _one_of(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{option} {value or 'is missing'}: use one of {', '.join(choices)}")


def _check_steps(request: DrillRequest) -> None:
    total, last = request.total_steps, max(request.at_step, request.strike_hold or 0)
    if request.base in UPDATES and request.hold_step >= total:
        raise ConfigError(
            f"--at-step {request.at_step}: a job of --steps {total} ends before its update was tried: it waits "
            f"for that at step {request.hold_step}"
        )
    if last >= total:
        second = f" (its second fault comes at step {last})" if last > request.at_step else ""
        raise ConfigError(
            f"--at-step {request.at_step}{second} is not reached by a job of --steps {total}: "
            f"its steps are 0 to {total - 1}"
        )


def _check_places(request: DrillRequest, spec: JobSpec) -> None:
    topology = spec.topology()
    if request.mesh and not (request.script or request.config or set(topology.axes) == set(SHORT_ORDER)):
        raise ConfigError(
            "--mesh goes with a script of its own, after `--`: the example GPT has the axes pp, dp and tp"
        )
    for rank in request.ranks:
        if not 0 <= rank < topology.world_size:
            raise ConfigError(f"--rank {rank} does not exist: ranks go from 0 to {topology.world_size - 1}")
    names = machine_names(spec.machines)
    if request.machine and request.machine not in names:
        raise ConfigError(f"--machine {request.machine} does not exist: machines are {', '.join(names)}")
    for name in request.between or ():
        _one_of("--between", name, names)
    of_a_link = request.base in ("slow-link", "cut-link")
    if request.between and not (of_a_link and len(set(request.between)) == 2):
        raise ConfigError("--between names two machines, and goes with slow-link and cut-link")
    if request.base == "kill-group":
        _one_of("--kind", request.kind, topology.kinds)
    if request.base == "kill-group" and request.index >= (count := len(topology.groups(request.kind))):
        raise ConfigError(f"--index {request.index} does not exist: {request.kind} groups go from 0 to {count - 1}")


def _check_shared(request: DrillRequest, spec: JobSpec) -> None:
    """What many machines have, or so many of them that an operator has to be asked."""
    if request.everywhere and spec.machines <= SHARED_MACHINES:
        raise ConfigError(f"--everywhere: {spec.machines} machines share nothing: use {SHARED_MACHINES + 1} or more")
    if request.base != "hang-agents":
        return
    most = max(spec.policy.evict.share * spec.machines, spec.policy.evict.at_least)
    if not most < request.count < spec.machines:
        raise ConfigError(
            f"--count {request.count} of {spec.machines} machines: the breaker lets {most:g} go, and one has to be "
            f"left: use {math.floor(most) + 1} to {spec.machines - 1}"
        )
    if hung := [rank for rank in request.ranks if spec.topology().machine(rank) >= spec.machines - request.count]:
        raise ConfigError(f"--rank {hung[0]} is on a machine whose agent hangs: name another one")


def _check_away(request: DrillRequest, spec: JobSpec) -> None:
    """What is away must be missed, and the job must not end before it is back."""
    if request.base == "link-down":
        pace_s = settings.STEP_S if request.step_seconds is None else request.step_seconds
        least = max(spec.policy.hang.floor_s, spec.policy.hang.factor * pace_s) + NOTICED_S
        if request.seconds < least:
            raise ConfigError(f"--seconds {request.seconds:g} is too short to be noticed: use {least:g} or more")
    own = not request.script and request.config is None
    if request.base == "kill-postgres" and own and request.at_step + STEPS_AGAIN >= request.total_steps:
        raise ConfigError(f"--at-step {request.at_step}: the job needs {STEPS_AGAIN} steps more, to show that it steps")


def _check_copies(request: DrillRequest, spec: JobSpec) -> None:
    """The copies that a fault is about must exist."""
    policy = spec.checkpoint
    backed_up = placement_of(spec).peers[request.struck_ranks(spec)[0]] is not None
    about_backups = request.base in ("hang-peer", "kill-peer", "shm-full") or request.where == "backup"
    if about_backups and not request.parks and not backed_up:
        raise ConfigError(f"{request.base}: the job has no backups: it needs two machines, and backup = true")
    about_disk = request.base == "disk-full" or (request.base in DAMAGE and request.where in ("", "file"))
    if about_disk and not (policy.disk and policy.disk_every_steps):
        raise ConfigError(f"{request.base}: the job writes no checkpoints to disk: set disk and disk_every_steps")
    if about_disk and policy.disk_every_steps * 2 > request.at_step:
        raise ConfigError(
            f"{request.base}: at step {request.at_step} the disk has no two checkpoints yet: "
            f"use --at-step {policy.disk_every_steps * 2} or later"
        )
    if request.base == "disk-full" and policy.disk_path:
        raise ConfigError("disk-full: disk_path is the same for all machines here: leave it away, or fill it yourself")

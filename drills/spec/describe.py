"""One line about what a drill is going to do."""

from __future__ import annotations

from drills.spec.catalogue import CONTROL_FAULTS, MACHINE_FAULTS, UPDATES
from drills.spec.loss import Loss, hung_machines, loss_of
from drills.spec.request import DrillRequest
from drills.spec.settings import placement_of
from drills.spec.updates import AGAIN, PARKED
from everstep.model.job import JobSpec

WHILE = {
    "kill-rank": "the job recovers from the loss of a rank",
    PARKED: "the job is parked",
    AGAIN: "another update is applied",
    "kill-workers": "no worker lives",
    "kill-temporal": "Temporal is down",
    "kill-agent": "an agent is down",
}
LOSS = "{loss}"
"""Stands in a line for what is lost."""


def describe(request: DrillRequest, spec: JobSpec) -> str:
    """One line about what is going to happen."""
    line = f"{_fault(request, spec)} at step {request.at_step}"
    if request.times > 1:
        line += f", {request.times} times"
    if lost := _lost_text(loss_of(request, spec)):
        line = line.replace(LOSS, lost) if LOSS in line else f"{line}; then {lost}"
    if request.fault in CONTROL_FAULTS:
        part = {"kill-worker": "worker", "kill-temporal": "Temporal server"}[request.fault]
        event = f"event {request.at_event} of {request.swept(spec.name)}"
        where = f"stage {request.in_stage}" if request.in_stage else event
        line += f", then SIGKILL to the {part} at {where}"
    elif request.fault in MACHINE_FAULTS and request.during:
        line += f", then SIGKILL to the agent at the launch on {request.struck_machine(spec)}"
    return line


def _fault(request: DrillRequest, spec: JobSpec) -> str:
    ranks = " and ".join(f"rank {rank}" for rank in request.struck_ranks(spec))
    machine, seconds = request.struck_machine(spec), f"{request.seconds:g} s"
    copy = {"buffer": "own memory", "backup": f"backup on {peer_of(request, spec)}", "file": "newest file on disk"}
    return {
        "kill-rank": f"SIG{request.signal} to {ranks}",
        "stop-rank": f"SIGSTOP to {ranks}",
        "spin": f"a loop without end in {ranks}",
        "deadlock": f"a deadlock in {ranks}",
        "skip-collective": f"{ranks} skips a collective",
        "hang-dataloader": f"the data loader of {ranks} waits for ever",
        "wrong-order": "collectives in an order that works on no machine",
        "exit-rank": f"{ranks} leaves with code {request.exit_code}",
        "raise": f"{ranks} raises {request.exception}",
        "nan": f"NaN in the forward pass of {machine if request.bound else ranks}",
        "bitflip": f"from step {request.at_step} on a bit of a gradient flips on {machine}, and in "
        f"{'none' if request.only_in_job else 'each'} of its tests"
        f"{'; all numbers stay finite' if request.finite else ''}{_in_replays(request)}",
        "kill-during-save": f"SIGKILL to {ranks} in the middle of a save",
        "kill-agent": f"SIGKILL to the agent of {machine}",
        "kill-forkserver": f"SIGKILL to the fork server of {machine}",
        "kill-machine": LOSS,
        "kill-group": f"{request.kind} group {request.index}: {LOSS}",
        "flip-bit": f"a bit of the state of {ranks} flips in its {copy.get(request.where, 'memory')}",
        "truncate-file": f"the newest file on disk of {ranks} is cut short",
        "shm-full": f"shared memory of {machine} has room for {'nothing' if request.parks else 'its own ranks only'}",
        "disk-full": f"the disk of {machine} is full",
        "hang-peer": f"SIGSTOP to the agent of {machine} for {seconds}",
        "link-down": f"the link of {machine} is down for {seconds}",
        "cut-link": f"{' and '.join(request.ends(spec))} do not reach each other",
        "cut-off": f"{machine} and the control host do not reach each other for {seconds}",
        "kill-postgres": f"SIGKILL to the ledger's server, which stays away for {seconds} at least",
        "kill-workers": f"SIGKILL to all workers, which stay away for {seconds}",
        "xid": f"Xid {request.xid_code} in the kernel log of {machine}",
        "gpu-lost": f"a GPU of {machine} is lost",
        "machine-fault": f"{request.reason} on {machine}",
        "hang-agents": f"SIGSTOP to the agents of {' and '.join(hung_machines(request, spec))} for {seconds}",
        "gpu-hot": f"a GPU of {machine} is too hot",
        "nic-down": f"a network card of {machine} is down",
        "nic-flap": f"a network card of {machine} goes down and up",
        "switch-down": "a network card of every machine is down",
        "fs-readonly": f"the file system of the disk checkpoints of {machine} turns read-only",
        "oom": f"{ranks} is killed for memory",
        **dict.fromkeys(UPDATES, _update(request)),
        "kill-peer": f"SIGKILL to the agent of {machine} in the middle of a backup",
    }.get(request.base, request.base)


def _in_replays(request: DrillRequest) -> str:
    if request.shows_every == 1:
        return ""
    return f", and in {f'every {request.shows_every} runs' if request.shows_every else 'none'} of its replays"


def _update(request: DrillRequest) -> str:
    when = f"forced after {request.window:g} s" if request.window else "lazy" if request.lazy else "urgent"
    if request.base == "update":
        what = "other learning rates" if request.asked_during == AGAIN else "another learning rate"
    elif request.at_start:
        what = "code that cannot be imported"
    elif request.changes_state:
        what = "code with one parameter more"
    else:
        what = f"code that fails after {request.fails_after} steps"
    while_ = f", asked for while {WHILE[request.asked_during]}" if request.asked_during else ""
    return f"an update ({when}) to {what}{while_}"


def _lost_text(loss: Loss) -> str:
    if loss.machines:
        names = " and ".join(f"m{index}" for index in loss.machines)
        return f"everything of {names} is killed and {'comes back empty' if loss.disks else 'loses its memory'}"
    if loss.ranks:
        return f"SIGKILL to {' and '.join(f'rank {rank}' for rank in loss.ranks)}"
    return ""


def peer_of(request: DrillRequest, spec: JobSpec) -> str:
    """The machine that holds the backup of the struck rank."""
    peer = placement_of(spec).peers[request.struck_ranks(spec)[0]]
    return f"m{spec.topology().machine(peer)}" if peer is not None else "no machine"

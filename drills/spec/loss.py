"""What a drill kills in the end, and what a job deserves to lose by it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from drills.spec.request import DrillRequest
from drills.spec.settings import machine_names, placement_of
from everstep.decisions.keep.placement import survives
from everstep.model.job import JobSpec
from everstep.model.topology import Topology

SURVIVED = 1
"""What the placement of backups survives costs the step that was under way, and no more (section 7: every step)."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Second fault: what is killed so that copies are needed."""

    machines: tuple[int, ...] = ()
    """They lose power, and with it their memory."""
    disks: bool = True
    """Their disks are lost too: they come back empty."""
    ranks: tuple[int, ...] = ()
    """Or these are killed, and no machine is lost."""


@dataclass(frozen=True, slots=True)
class Promise:
    """How many steps a strike may cost, and why."""

    steps: int | None
    """None: nothing is promised but that what the disks hold is used."""
    reason: str
    begins_again: bool = False
    """No step is left that every rank can restore."""


def loss_of(request: DrillRequest, spec: JobSpec) -> Loss:
    """What a drill kills in the end; nothing where the fault itself is all."""
    topology, peers = spec.topology(), placement_of(spec).peers
    rank, machine = request.struck_ranks(spec)[0], request.target_machine_index(spec)

    def with_peer(owner: int) -> set[int]:
        peer = peers[owner]
        return {topology.machine(owner)} | ({topology.machine(peer)} if peer is not None else set())

    machines: set[int] = set()
    ranks: tuple[int, ...] = ()
    match request.base:
        case "kill-machine":
            machines = {machine}
        case "kill-group":
            machines = machines_of_group(request, topology)
        case "flip-bit" if request.where == "buffer":
            ranks = (rank,)
        case "flip-bit" if request.where == "backup":
            machines = {topology.machine(rank)}
        case "flip-bit" | "truncate-file":
            machines = with_peer(rank)
        case "disk-full":
            machines = {holder for owner in topology.ranks(machine) for holder in with_peer(owner)}
        case "shm-full" if not request.parks:
            machines = {topology.machine(owners(peers, topology, machine)[0])}
        case "kill-peer" if request.then == "kill-rank":
            ranks = (owners(peers, topology, machine)[0],)
        case "kill-peer":
            machines = {topology.machine(owners(peers, topology, machine)[0])}
        case "kill-postgres" | "kill-workers" | "hang-agents" | "update" | "bad-version" if request.kills_ranks:
            ranks = tuple(request.struck_ranks(spec))
        case "kill-agent" | "xid" | "gpu-lost" if request.then == "kill-rank":
            ranks = (topology.ranks(machine)[0],)
        case "kill-agent" | "update" | "bad-version" if request.then == "kill-machine":
            machines = {machine}
    return Loss(tuple(sorted(machines)), disks=request.base != "disk-full", ranks=ranks)


def hung_machines(request: DrillRequest, spec: JobSpec) -> list[str]:
    """The machines whose agents hang: the last ones of the job."""
    return machine_names(spec.machines)[-request.count :]


def machines_of_group(request: DrillRequest, topology: Topology) -> set[int]:
    """All machines that hold a rank of the group."""
    return {topology.machine(rank) for rank in topology.groups(request.kind)[request.index]}


def owners(peers: Iterable[int | None], topology: Topology, machine: int) -> list[int]:
    """The ranks whose backup lies on a machine."""
    return [rank for rank, peer in enumerate(peers) if peer is not None and topology.machine(peer) == machine]


def promise_of(spec: JobSpec, loss: Loss) -> Promise:
    """What the placement of the backups promises for the loss of the struck machines."""
    topology, placement = spec.topology(), placement_of(spec)
    lost = set(loss.machines)
    if survives(topology, placement, lost):
        return Promise(SURVIVED, placement.reason if lost else "every rank's own memory is left")
    return Promise(None, f"owner and peer are lost together: what the disks hold counts ({placement.reason})")


def best_step(stored: Mapping[int, AbstractSet[int]]) -> int:
    """The latest step that every rank can restore; 0: the job begins again.

    Args:
        stored: For each rank the steps of which a copy is left.
    """
    steps = [set(copy) for copy in stored.values()]
    return max(set.intersection(*steps), default=0) if steps else 0

"""Conversions between the agents' messages and the types of the decisions."""

from __future__ import annotations

from collections.abc import Mapping

from agent.v1 import agent_pb2 as pb
from everstep.decisions.keep.placement import Placement
from everstep.model.job import JobSpec
from everstep.model.machine import Assignment, Machine
from everstep.model.state_copy import Tier
from everstep.rank import environment
from everstep.rank.import_variables import read_at_import

TIERS = {
    pb.HeldCheckpoint.OWN: Tier.OWN,
    pb.HeldCheckpoint.BACKUP: Tier.BACKUP,
    pb.HeldCheckpoint.DISK: Tier.DISK,
    pb.HeldCheckpoint.REMOTE: Tier.REMOTE,
}
TO_WIRE = {tier: wire for wire, tier in TIERS.items()}


def shared_environment(spec: JobSpec, host: str, port: int, generation: int) -> dict[str, str]:
    """Return the environment that all ranks of a job share: variables of the user, of torchrun and of the topology."""
    topology = spec.topology()
    return {
        "OMP_NUM_THREADS": "1",
        **spec.env,
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_WORLD_SIZE": str(topology.ranks_per_machine),
        "GROUP_WORLD_SIZE": str(topology.machines),
        "ROLE_WORLD_SIZE": str(topology.world_size),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": spec.name,
        "TORCHELASTIC_RESTART_COUNT": str(generation - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.policy.retry.max_attempts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        environment.TOPOLOGY: str(topology),
    }


def rank_launches(spec: JobSpec, machine: int) -> list[pb.RankLaunch]:
    """Return the ranks of one machine, each with its own torchrun variables."""
    return [
        pb.RankLaunch(
            rank=rank,
            env={
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "GROUP_RANK": str(machine),
                "ROLE_RANK": str(rank),
            },
        )
        for local, rank in enumerate(spec.topology().ranks(machine))
    ]


def checkpoint_options(spec: JobSpec, *, reshard_from: str = "") -> pb.CheckpointOptions:
    """Return the checkpoint settings that the agents need."""
    policy = spec.checkpoint
    return pb.CheckpointOptions(
        slots=policy.slots,
        overlap=policy.overlap,
        backup=policy.backup,
        backup_slots=policy.backup_slots,
        backup_every_steps=policy.backup_every_steps,
        backup_rate_mb_s=policy.backup_rate_mb_s,
        backup_card_share=policy.backup_card_share,
        backup_chunk_mb=policy.backup_chunk_mb,
        transfer_connections=policy.transfer_connections,
        disk=policy.disk,
        disk_path=policy.disk_path,
        disk_every_steps=policy.disk_every_steps,
        disk_keep=policy.disk_keep,
        remote_url=policy.remote_url,
        remote_keep=policy.remote_keep,
        reshard_from=reshard_from,
    )


def backup_peers(assignment: Assignment[Machine], placement: Placement, machine: int) -> list[pb.BackupPeer]:
    """Return where a machine sends the backups of its ranks; ``machine`` is its index in the job."""
    peers = []
    for rank in assignment.topology.ranks(machine):
        peer = placement.peers[rank]
        if peer is not None:
            to = assignment.home(peer)
            peers.append(pb.BackupPeer(rank=rank, machine=to.name, address=to.address))
    return peers


def program_of(spec: JobSpec, env: Mapping[str, str]) -> pb.Program:
    """Return the program that a job's ranks run.

    Args:
        spec: The job's specification.
        env: The environment, without the variables that each machine takes from its own environment or file.
    """
    return pb.Program(
        script=spec.script,
        args=spec.args,
        cwd=spec.cwd,
        cwd_by_default=spec.cwd_by_default,
        env=env,
        env_from=spec.env_from,
        env_file=spec.env_file,
        code=spec.code,
        imports=imports_of(spec),
    )


def imports_of(spec: JobSpec) -> pb.Imports:
    """Return the modules that the job's fork server imports."""
    return pb.Imports(python=spec.python, env=import_environment(spec))


def import_environment(spec: JobSpec) -> dict[str, str]:
    """Return the variables that the fork server must have at its start; a rank gets all other variables at its fork."""
    return {name: value for name, value in spec.env.items() if read_at_import(name)}

"""What a job asks of its machines, and the rates that each of its ranks gets while all ranks do the same."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.hardware import Hardware
from everstep.slots.checksum import MOST_THREADS

FORWARD_SHARE = 0.9
"""Share of a step before the call of ``optimizer.step``; assumed."""


@dataclass(frozen=True, slots=True)
class Load:
    """A job, its machines, and how everstep uses them."""

    state_bytes: int
    """Size of the state of one rank, bytes."""
    ranks: int
    """Ranks on each machine."""
    machines: int
    step_s: float
    """Time of a step without saves, seconds."""
    policy: CheckpointPolicy
    hardware: Hardware
    hash_threads: int = MOST_THREADS
    """Threads that hash one slot, where there are cores for them."""
    forward_share: float = FORWARD_SHARE
    """Share of a step before the call of ``optimizer.step``, from 0 to 1."""

    @property
    def on_gpu(self) -> bool:
        """Whether the state is in the memory of GPUs."""
        return self.hardware.device_gb_s > 0

    @property
    def machine_bytes(self) -> int:
        """Size of the states of a machine's ranks, bytes."""
        return self.ranks * self.state_bytes

    @property
    def backup_slots(self) -> int:
        """Slots of each backup; 0: there are no backups, since they are turned off or there is no other machine."""
        return self.policy.backup_slots if self.policy.backup and self.machines > 1 else 0

    def rate(self, gb_s: float, *, threads: float = 1, traffic: float = 1) -> float:
        """Bytes per second that each rank moves while all ranks of the machine do the same.

        Args:
            gb_s: Rate of one thread, GB/s.
            threads: Threads of each rank; 0: a device moves the bytes, which needs no core.
            traffic: Bytes that memory moves for each byte: 1 for a hash, 2 for a copy, 0 for bytes in the cache
                and for page tables.
        """
        own = gb_s * min(threads, self.hardware.cores / self.ranks) if threads else gb_s
        return 1e9 * (min(own, self.hardware.memory_gb_s / self.ranks / traffic) if traffic else own)

    @property
    def device_rate(self) -> float:
        """Bytes per second between memory and the GPU of each rank."""
        return self.rate(self.hardware.device_gb_s, threads=0)

    @property
    def copy_rate(self) -> float:
        """Bytes per second with which one thread copies between the host's memory and a slot."""
        return self.rate(self.hardware.copy_gb_s, traffic=2)

    @property
    def hash_rate(self) -> float:
        """Bytes per second with which the threads of a rank hash its slot."""
        return self.rate(self.hardware.hash_gb_s, threads=self.hash_threads)

"""Defines how large and how fast a machine is, with the source of each default.

The defaults describe a node with 8 GPUs, 2 TB of memory and a card of 400 Gbit/s for each GPU. ``everstep plan``
computes with them until a site gives its own numbers, or measures them. docs/concepts/sizes.md explains each number.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

VM = "measured, 2 cores of a virtual machine"
H200 = "measured, one H200"
NODE = "data sheet of a node with 8 GPUs"
PAGES = "computed from the time for a page"
ASSUMED = "assumed"


def _number(default: float, source: str, description: str, **limits: Any) -> Any:
    """A field with the source of its default."""
    return Field(default, description=description, json_schema_extra={"source": source}, **limits)


class Hardware(BaseModel):
    """The sizes and rates of one machine. GB are 10^9 bytes; rates are of one thread, unless said otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    memory_gb: float = _number(2000.0, NODE, "Memory, GB.", gt=0)
    shm_gb: float = _number(0.0, "Linux", "Size of /dev/shm, GB; 0: half of the memory, as Linux makes it.", ge=0)
    cores: int = _number(112, NODE, "Cores.", ge=1)
    memory_gb_s: float = _number(
        400.0, "computed, 2 x 8 channels of DDR5-4800, two thirds of the peak", "Memory, all threads, GB/s.", gt=0
    )
    copy_gb_s: float = _number(11.0, VM, "Copy of tensors into shared memory, GB/s.", gt=0)
    piece_copy_gb_s: float = _number(5.5, VM, "Copy from shared memory in small pieces, GB/s.", gt=0)
    hash_gb_s: float = _number(13.3, VM, "Checksum (xxh3) of shared memory, GB/s.", gt=0)
    cached_hash_gb_s: float = _number(18.2, VM, "Checksum of bytes in the processor's cache, GB/s.", gt=0)
    verify_gb_s: float = _number(7.0, VM, "An agent reads a slot and hashes it, GB/s.", gt=0)
    allocate_gb_s: float = _number(4.4, VM, "New pages of shared memory, GB/s.", gt=0)
    map_write_gb_s: float = _number(3.5, VM, "Pages of a slot at their first use for a save, GB/s.", gt=0)
    map_gb_s: float = _number(15.8, VM, "Pages of a slot at their first use for a restore, GB/s.", gt=0)
    clear_gb_s: float = _number(7.1, VM, "New private memory, GB/s.", gt=0)
    unmap_gb_s: float = _number(24.0, VM, "Pages of slots that the end of a rank unmaps, GB/s.", gt=0)
    device_gb_s: float = _number(
        50.0, H200 + " (54 GB/s)", "Between memory and each GPU, GB/s; 0: the state is in the host's memory.", ge=0
    )
    pin_gb_s: float = _number(
        10.0, "published by vLLM (issue 51080), an H200", "Memory that CUDA pins for a rank, GB/s.", gt=0
    )
    unpin_gb_s: float = _number(100.0, PAGES + " (40 ns)", "Pinned memory that the end of a rank releases, GB/s.", gt=0)
    cards: int = _number(
        8, NODE, "Network cards for training, which backups use too; 0: they use the card for management.", ge=0
    )
    card_gbit_s: float = _number(400.0, NODE, "Each of these cards, Gbit/s.", gt=0)
    management_gbit_s: float = _number(10.0, ASSUMED, "The card for management, Gbit/s; 0: there is none.", ge=0)
    connection_gb_s: float = _number(2.7, VM, "Backups over one connection, verified, GB/s.", gt=0)
    disk_write_gb_s: float = _number(4.0, ASSUMED, "Local disk, writing, GB/s.", gt=0)
    disk_read_gb_s: float = _number(6.0, ASSUMED, "Local disk, reading, GB/s.", gt=0)
    remote_gb_s: float = _number(1.0, ASSUMED, "Remote storage, for each machine, GB/s.", gt=0)

    @property
    def shm_bytes(self) -> int:
        """Size of /dev/shm, bytes."""
        return round(1e9 * (self.shm_gb or self.memory_gb / 2))

    @property
    def memory_bytes(self) -> int:
        """Size of the memory, bytes."""
        return round(1e9 * self.memory_gb)

    @property
    def card_gb_s(self) -> float:
        """Rate of one card for training, GB/s."""
        return self.card_gbit_s / 8


def source_of(name: str) -> str:
    """The source of the default of a field of ``Hardware``."""
    extra = Hardware.model_fields[name].json_schema_extra
    return str(extra["source"]) if isinstance(extra, dict) else ""

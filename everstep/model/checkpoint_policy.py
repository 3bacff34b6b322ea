"""Defines every setting that decides how a job's state is kept, with the source of its default.

A default that comes from the paper on ByteRobust names the section; the paper does not specify the other defaults.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class CheckpointPolicy(BaseModel):
    """Where copies of the training state go, and how often. The table ``[checkpoint]`` of a job file."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    slots: int = Field(
        5,
        ge=2,
        le=8,
        description="Buffers per rank in shared memory: the double buffer of ByteRobust (section 7), a third, which an "
        "overlapped copy needs, and two for the steps that a slow peer already has and that it receives. "
        "With fewer than 4, a backup or a file that takes longer than a step is never completed.",
    )
    overlap: bool = Field(
        True, description="Copy during the next forward and backward; false: training waits for each copy."
    )
    save_every_steps: int = Field(
        0,
        ge=0,
        description="Save every n-th step in memory; 0: every step (section 7), or every 2nd, 4th, … step if a save "
        "takes longer than a step. With 2 slots, 0 means every step.",
    )
    backup: bool = Field(True, description="Copy each shard to a peer outside its parallel groups (section 7).")
    backup_slots: int = Field(2, ge=2, le=8, description="Buffers per backup at the peer (double buffer, section 7).")
    backup_every_steps: int = Field(
        1, ge=1, description="Back up the steps that are multiples of n and are saved (every step, section 7)."
    )
    backup_rate_mb_s: float = Field(
        0.0,
        ge=0,
        description="Limit of the rate at which one machine sends backups, MB/s, to spare training traffic; 0: none.",
    )
    backup_card_share: float = Field(
        0.25,
        ge=0,
        le=1,
        description="Share of the speed of each network card that backups may use; 0: no limit. A card whose speed is "
        "not known has no such limit.",
    )
    backup_chunk_mb: float = Field(
        4.0,
        gt=0,
        le=256,
        description="Size of the pieces in which a backup is sent, MB (small chunks, section 7).",
    )
    transfer_connections: int = Field(
        4,
        ge=1,
        le=32,
        description="Connections over which one large state is sent at once, as a backup or for a restore: one TCP "
        "connection does not fill a fast network card.",
    )
    disk: bool = Field(True, description="Keep checkpoints on the machines' local disks too (section 7).")
    disk_path: str = Field(
        "",
        description="Folder of disk checkpoints, the same on all machines, shared or not; empty: the agent's state "
        "folder.",
    )
    disk_every_steps: int = Field(0, ge=0, description="Write every n-th step to disk; 0: by time only.")
    disk_every_min: float = Field(15.0, ge=0, description="Write to disk this often, minutes; 0: by steps only.")
    disk_keep: int = Field(2, ge=1, description="Checkpoints kept on disk.")
    remote_url: str = Field(
        "", description="Folder of a shared or object storage to which disk checkpoints are copied; an fsspec URL."
    )
    remote_keep: int = Field(2, ge=1, description="Checkpoints kept in remote_url.")
    state_mb_per_rank: float = Field(
        0.0,
        ge=0,
        description="Size of a rank's state, MB, to check before the start that there is enough room; 0: the check "
        "waits until the size is known.",
    )
    verify_at_stop_mb: float = Field(
        256.0,
        ge=0,
        description="If the copies in the own slots of a machine's ranks have at most this size together, MB, all are "
        "verified when the ranks stop; otherwise only those of the step that is to be restored.",
    )
    max_unsaved_steps: int = Field(
        100,
        ge=1,
        description="An incident is opened when the newest save is this many steps old, and max_unsaved_s as well.",
    )
    max_unsaved_s: float = Field(
        60.0, gt=0, description="Least age of the newest save, seconds, for the incident of max_unsaved_steps."
    )

    @model_validator(mode="after")
    def _saves_in_time(self) -> CheckpointPolicy:
        if 2 * self.save_every_steps > self.max_unsaved_steps:
            raise ValueError(
                f"save_every_steps = {self.save_every_steps} is more than half of max_unsaved_steps = "
                f"{self.max_unsaved_steps}, so a job whose saves are in time would open incidents: raise "
                "max_unsaved_steps, or save more often"
            )
        return self

    @property
    def most_distance(self) -> int:
        """The largest number of steps between two saves; a power of two unless ``save_every_steps`` is set."""
        if self.save_every_steps:
            return self.save_every_steps
        # The newest save may be two distances old. With two slots, ranks that change the distance could have no step in
        # common.
        return 1 << (max(self.max_unsaved_steps // 2, 1).bit_length() - 1) if self.slots > 2 else 1

    def first_distance(self, before: int) -> int:
        """The number of steps between two saves with which a generation begins.

        Args:
            before: That of the generation before; 0: not known.
        """
        return self.save_every_steps or min(max(before, 1), self.most_distance)

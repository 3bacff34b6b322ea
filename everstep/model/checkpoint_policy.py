"""Every number that decides how a job's state is kept, with its source.

A number from a paper names its section; the papers leave the others open.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class CheckpointPolicy(BaseModel):
    """Where copies of the training state go, and how often. The table ``[checkpoint]`` of a job file."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    slots: int = Field(
        4,
        ge=2,
        le=8,
        description="Buffers per rank in shared memory: the double buffer of ByteRobust (section 7), a third, which an "
        "overlapped copy needs (measured), and a fourth for the step that a slow peer holds already.",
    )
    overlap: bool = Field(
        True, description="Copy during the next forward and backward; false: training waits for each copy."
    )
    backup: bool = Field(True, description="Copy each shard to a peer outside its parallel groups (section 7).")
    backup_slots: int = Field(2, ge=2, le=8, description="Buffers per backup at the peer (double buffer, section 7).")
    backup_every_steps: int = Field(1, ge=1, description="Back up every n-th step (every step, section 7).")
    backup_rate_mb_s: float = Field(
        0.0,
        ge=0,
        description="Most that one machine sends, MB/s, to spare training traffic; 0: no limit.",
    )
    backup_chunk_mb: float = Field(
        4.0,
        gt=0,
        le=256,
        description="Size of the pieces of a backup on its way, MB (small chunks, section 7).",
    )
    disk: bool = Field(True, description="Keep checkpoints on the machines' local disks too (section 7).")
    disk_path: str = Field(
        "", description="Folder for them, the same on all machines, shared or not; empty: the agent's state folder."
    )
    disk_every_steps: int = Field(0, ge=0, description="Write every n-th step to disk; 0: by time only.")
    disk_every_min: float = Field(15.0, ge=0, description="Write to disk this often, minutes; 0: by steps only.")
    disk_keep: int = Field(2, ge=1, description="Checkpoints kept on disk.")
    remote_url: str = Field(
        "", description="Folder of a shared or object storage to which what is on disk is copied; an fsspec URL."
    )
    remote_keep: int = Field(2, ge=1, description="Checkpoints kept there.")
    state_mb_per_rank: float = Field(
        0.0,
        ge=0,
        description="Size of a rank's state, MB, to check the room before the job starts; 0: when known.",
    )
    verify_at_stop_mb: float = Field(
        256.0,
        ge=0,
        description="Own slots of a machine that have no more together are verified when it stops, MB; larger ones "
        "when a step is chosen, that one only. Reading them costs less than asking again.",
    )
    max_unsaved_steps: int = Field(
        100, ge=1, description="An incident is opened when the newest save is so many steps old …"
    )
    max_unsaved_s: float = Field(60.0, gt=0, description="… and so many seconds.")

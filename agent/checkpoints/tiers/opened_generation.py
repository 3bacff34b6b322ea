"""This module keeps, in a file of the job's folder, the generation for which the lower tiers were opened.

An earlier run of the same job name may have left any generation and step on disk; the run's id identifies these copies.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from agent.checkpoints.options import LaunchOptions, Place
from everstep.model.run_id import is_older
from everstep.shards.atomic_output import replace_file
from everstep.shards.folders import ShardOnDisk
from everstep.shards.manifest import Summary

NAME = "tiers.json"


@dataclass(frozen=True)
class OpenedGeneration:
    """The generation of a job for which its lower tiers are open."""

    launch: LaunchOptions

    def disowns(self, copy: ShardOnDisk | Summary) -> bool:
        """Return whether a copy belongs to a future that this generation abandons, or to another run of the job."""
        step = copy.completed_steps if isinstance(copy, ShardOnDisk) else copy.step
        if 0 < step <= self.launch.resume_step:
            return False  # the job resumed from that step, or from a later step
        return copy.run != self.launch.run or copy.generation < self.launch.generation

    def may_set_aside(self, copy: ShardOnDisk | Summary) -> bool:
        """Return whether a copy is disowned and may be renamed. Copies of a newer run must not be renamed."""
        return not is_older(self.launch.run, copy.run) and self.disowns(copy)

    def save(self, place: Place) -> None:
        """Write the file; raises CheckpointError."""
        text = json.dumps(self.launch.to_json())
        replace_file(_path(place), text.encode())

    @classmethod
    def load(cls, place: Place) -> OpenedGeneration | None:
        """Read the file; None: it does not exist, or cannot be read."""
        try:
            return cls(LaunchOptions.from_json(json.loads(_path(place).read_bytes())))
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _path(place: Place) -> Path:
    return place.state_dir / "jobs" / place.job / NAME

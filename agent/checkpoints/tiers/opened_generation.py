"""What the agent remembers of the generation for which the lower tiers were opened, in a file of the job's folder.

What an earlier run of the same name left on disk may be of any generation and
step; its id tells it apart. A manifest from before there were ids has none: then
it counts whether it was saved before the generation that goes on from an earlier
step began.
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
    """A generation, and when it began here."""

    launch: LaunchOptions
    ns: int
    """When the agent was told to launch it, nanoseconds of the wall clock."""

    def disowns(self, copy: ShardOnDisk | Summary) -> bool:
        """Whether a copy belongs to a future that this generation does not go on from, or to another run of the job."""
        step = copy.completed_steps if isinstance(copy, ShardOnDisk) else copy.step
        if 0 < step <= self.launch.resume_step:
            return False  # the job went on from there, or from later
        if self._runs_known(copy):
            return copy.run != self.launch.run or copy.generation < self.launch.generation
        return copy.generation < self.launch.generation or copy.saved_ns < self.ns

    def may_set_aside(self, copy: ShardOnDisk | Summary) -> bool:
        """Whether such a copy in a folder is to be renamed: never what a newer run saved.

        Others may have gone on already in a folder that is shared. Where runs are not known, and only clocks could
        tell, of ranks that are not this machine's only what an older generation saved is renamed.
        """
        if self._runs_known(copy):
            return not is_older(self.launch.run, copy.run) and self.disowns(copy)
        ours = copy.rank in self.launch.ranks or copy.generation < self.launch.generation
        return ours and self.disowns(copy)

    def _runs_known(self, copy: ShardOnDisk | Summary) -> bool:
        return bool(self.launch.run and copy.run)

    def save(self, place: Place) -> None:
        """Write it; raises CheckpointError."""
        text = json.dumps({"ns": self.ns, "terms": self.launch.to_json()})
        replace_file(_path(place), text.encode())

    @classmethod
    def load(cls, place: Place) -> OpenedGeneration | None:
        """What was written; None: nothing was, or it cannot be read."""
        try:
            fields = json.loads(_path(place).read_bytes())
            return cls(LaunchOptions.from_json(fields["terms"]), int(fields["ns"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _path(place: Place) -> Path:
    return place.state_dir / "jobs" / place.job / NAME

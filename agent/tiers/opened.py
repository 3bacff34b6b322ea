"""What the agent remembers of the generation for which the lower tiers were opened, in a file of the job's folder.

Generations count from 1 in every run of a job, and what an earlier run of the
same name left on disk may be of any generation and step. What tells them apart
is when they were saved: before the generation that goes on from an earlier step
began.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from agent.terms import Place, Terms
from everstep.shard_output import replace_file

NAME = "tiers.json"


@dataclass(frozen=True)
class Opened:
    """A generation, and when it began here."""

    terms: Terms
    ns: int
    """When the agent was told to launch it, nanoseconds of the wall clock."""

    def disowns(self, step: int, generation: int, saved_ns: int) -> bool:
        """Whether a copy belongs to a future that this generation does not go on from, or to another run of the job."""
        later = self.terms.resume_step <= 0 or step > self.terms.resume_step
        return later and (generation < self.terms.generation or saved_ns < self.ns)

    def may_set_aside(self, rank: int, step: int, generation: int, saved_ns: int) -> bool:
        """Whether such a copy in a folder is to be renamed.

        Others may have gone on already in a folder that is shared, and by their own clocks: of ranks that are not
        this machine's, only what an older generation saved.
        """
        ours = rank in self.terms.ranks or generation < self.terms.generation
        return ours and self.disowns(step, generation, saved_ns)

    def save(self, place: Place) -> None:
        """Write it; raises CheckpointError."""
        text = json.dumps({"ns": self.ns, "terms": self.terms.to_json()})
        replace_file(_path(place), text.encode())

    @classmethod
    def load(cls, place: Place) -> Opened | None:
        """What was written; None: nothing was, or it cannot be read."""
        try:
            fields = json.loads(_path(place).read_bytes())
            return cls(Terms.from_json(fields["terms"]), int(fields["ns"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _path(place: Place) -> Path:
    return place.state_dir / "jobs" / place.job / NAME

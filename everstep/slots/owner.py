"""Says whose state a slot has. The owner is in the header of a slot file, and part of each slot's checksum."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import xxhash


@dataclass(frozen=True, slots=True)
class SlotOwner:
    """The rank whose state is in a slot file, in one run of a job."""

    job: str
    """Name of the job."""
    run: str
    """Id of the job's run (``everstep/model/run_id.py``); empty: not known."""
    rank: int

    @classmethod
    def outside_a_job(cls, path: Path) -> Self:
        """The owner of a file that belongs to no job: the name of the file says the rank, e.g. ``checkpoint-5``."""
        number = path.name.rpartition("-")[2]
        return cls("", "", int(number) if number.isdecimal() else 0)

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """The owner from the text of ``pack``.

        Raises:
            ValueError, TypeError, KeyError: the text has another form.
        """
        fields = json.loads(text)
        return cls(str(fields["job"]), str(fields["run"]), int(fields["rank"]))

    def pack(self) -> bytes:
        """The owner as JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    def seed(self, completed_steps: int) -> int:
        """Seed of the checksum of this owner's state after a number of completed steps, 64 bits."""
        return xxhash.xxh3_64_intdigest(self.pack(), seed=completed_steps)

    def __str__(self) -> str:
        run = f", run {self.run}" if self.run else ""
        return f"rank {self.rank} of {f'job {self.job}' if self.job else 'no job'}{run}"

"""Notes which observations of one job have been handled, and so may be acknowledged to the agents."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from agent.reporting.observations import OF_NO_JOB
from agent.v1 import agent_pb2 as pb


@dataclass(slots=True)
class Acknowledgements:
    """The handled observations of a job's machines; each agent numbers its own observations."""

    reported: set[int] = field(default_factory=set)
    """The generations whose end was reported to the job's workflow."""
    _ends: dict[str, dict[int, int]] = field(default_factory=dict)
    """Machine → generation → number of the newest observation that a rank of the generation ended."""
    _noted: dict[str, dict[int, tuple[str, asyncio.Future[None]]]] = field(default_factory=dict)
    """Machine → number of a machine event → its job, and a future that is done once the event is in the ledger."""
    _heard: dict[str, int] = field(default_factory=dict)
    """Machine → number of its newest machine event."""

    def ended(self, machine: str, observation: pb.Observation) -> None:
        """Note the end of a rank; it may be acknowledged once its generation is in ``reported``."""
        self._ends.setdefault(machine, {})[observation.generation] = observation.sequence

    def noted(self, machine: str, observation: pb.Observation, written: asyncio.Future[None]) -> None:
        """Note a machine event; ``written`` is done once the event is in the ledger."""
        self._heard[machine] = observation.sequence
        noted = self._noted.setdefault(machine, {})
        if observation.sequence < max(noted, default=0):
            noted.clear()  # the agent has lost its log, and counts from 1 again
        noted[observation.sequence] = observation.job, written

    def acknowledged(self, machine: str, owner: str, up_to: int) -> None:
        """Note that the agent received an acknowledgement, and has dropped the observations up to a number."""
        job_name, noted = "" if owner == OF_NO_JOB else owner, self._noted.get(machine, {})
        self._noted[machine] = {seq: event for seq, event in noted.items() if seq > up_to or event[0] != job_name}

    def heard(self, machine: str) -> int:
        """Return the number of a machine's newest event; 0: there is none."""
        return self._heard.get(machine, 0)

    def handled(self, machine: str, owner: str) -> int:
        """Return the number up to which all observations of a machine may be acknowledged; 0: none may.

        Args:
            machine: The name of the machine.
            owner: The name of the job, or ``OF_NO_JOB``.
        """
        job_name = "" if owner == OF_NO_JOB else owner
        noted = {seq: written.done() for seq, (job, written) in self._noted.get(machine, {}).items() if job == job_name}
        newest = max(self.reported, default=0)
        ends = {} if owner == OF_NO_JOB else self._ends.get(machine, {})
        ends_reported = [seq for generation, seq in ends.items() if generation <= newest]
        missing = [seq for seq, is_written in noted.items() if not is_written]
        done = [seq for seq, is_written in noted.items() if is_written and owner == OF_NO_JOB]
        return min([max([*ends_reported, *done], default=0), *(seq - 1 for seq in missing)])

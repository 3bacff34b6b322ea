"""This module has the record of a job, which is kept in a file that survives the agent."""

from __future__ import annotations

from pydantic import BaseModel, Field

from agent.state.rank_record import RankRecord

FILE = "job.json"
"""Name of the file in a job's folder."""
KEPT_GENERATIONS = 2
"""The ranks of this many of the newest generations are kept in the record after they have ended."""


class StoreRecord(BaseModel):
    """The rendezvous store of a generation."""

    generation: int
    pid: int
    start_ticks: int
    port: int


class JobRecord(BaseModel):
    """A job on this machine."""

    job: str
    run: str = ""
    """Id of the run of the job, ``everstep/model/run_id.py``; empty: not known."""
    boot: str
    """Id of the boot of the machine in which the processes of the job were started."""
    python: str = ""
    env: dict[str, str] = Field(default_factory=dict)
    revision: int = 0
    """The number of the write. If two copies of the record exist, the copy with the higher number is used."""
    prepared: bool = False
    """Whether a Prepare was carried out. False: the record has only a fence, which a Stop before any Prepare set."""
    generation: int = 0
    fenced: int = 0
    heard: int = 0
    """The newest generation that was stopped since the machine lost its shared memory."""
    fork_server_pid: int = 0
    fork_server_ticks: int = 0
    released: bool = False
    terms: str = ""
    """The checkpoint options of the newest Launch, as ``LaunchOptions.to_json`` writes them."""
    emptied: bool = False
    """Whether the job's shared memory was gone when the agent started, and nothing was launched since then."""
    code: str = ""
    """Digest of the snapshot of code that the newest Launch ran; empty: the script ran in place."""
    versions: list[tuple[int, int]] = Field(default_factory=list)
    """Pairs of a generation and the version of the job's code that runs from this generation on, ascending."""
    network: dict[str, str] = Field(default_factory=dict)
    """Variables of the newest Launch that say which interfaces its ranks use (``agent/monitor/network/used.py``)."""
    ranks: list[RankRecord] = Field(default_factory=list)
    stores: list[StoreRecord] = Field(default_factory=list)

    def find(self, generation: int, rank: int) -> RankRecord | None:
        """Return the record of a rank."""
        return next((r for r in self.ranks if r.generation == generation and r.rank == rank), None)

    def of(self, generation: int) -> list[RankRecord]:
        """Return the ranks of a generation, ascending."""
        return sorted((r for r in self.ranks if r.generation == generation), key=lambda r: r.rank)

    def launched(self, generation: int, code: str, version: int) -> None:
        """Record the code and the version that a generation runs."""
        self.code = code
        self.versions = [(first, known) for first, known in self.versions if first < generation]
        if self.version_of(generation) != version:
            self.versions.append((generation, version))

    def version_of(self, generation: int) -> int:
        """Return the version of the job's code that a generation ran; 0: not known."""
        return next((version for first, version in reversed(self.versions) if first <= generation), 0)

    def living(self) -> list[RankRecord]:
        """Return the ranks that are not known to have ended."""
        return [r for r in self.ranks if r.end is None]

    def prune(self) -> None:
        """Forget ranks of old generations."""
        oldest = self.generation - KEPT_GENERATIONS + 1
        self.ranks = [r for r in self.ranks if r.generation >= oldest or r.end is None]

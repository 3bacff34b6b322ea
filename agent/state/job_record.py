"""The record of a job, in a file that survives the agent."""

from __future__ import annotations

from pydantic import BaseModel, Field

from agent.launcher.processes import End
from everstep.model.evidence import Classification

FILE = "job.json"
"""In the folder of a job."""
KEPT_GENERATIONS = 2
"""Ranks of older generations are forgotten."""


class RankRecord(BaseModel):
    """A rank of a generation that was forked on this machine."""

    rank: int
    generation: int
    pid: int
    start_ticks: int
    forked_ns: int
    end: End | None = None
    ending: End | None = None
    """How it ends by itself, noticed while its process was still there, and reported from then on."""
    stopped: bool = False
    """It lived until a Stop killed it."""
    exception: str = ""
    """The line of its error output that names what it raised."""
    classification: Classification | None = None
    """What ended it; None: it lived until a Stop killed it, or its output was not read yet."""
    sequence: int = 0
    """Number of the observation of its end; 0: none is due; -1: it is to be made."""

    @property
    def exit_code(self) -> int | None:
        """Exit code of the rank, or minus the signal that ended it; None: it runs, or its exit code is not known."""
        end = self.end or self.ending
        if end is None or end.kind == "unknown":
            return None
        return -end.value if end.kind == "signal" else end.value


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
    """Which run of its name, ``everstep/model/run_id.py``; empty: not known."""
    boot: str
    """The boot of the machine during which its processes were started, ``boot_id``."""
    python: str = ""
    env: dict[str, str] = Field(default_factory=dict)
    revision: int = 0
    """Number of the write: of two copies the one with the higher number counts."""
    prepared: bool = False
    """False when only a fence is known, from a Stop that came before any Prepare."""
    generation: int = 0
    fenced: int = 0
    heard: int = 0
    """The newest generation whose Stop came since the machine lost what it had in memory."""
    fork_server_pid: int = 0
    fork_server_ticks: int = 0
    released: bool = False
    terms: str = ""
    """The newest Launch's options for copies of state, ``LaunchOptions.to_json``."""
    emptied: bool = False
    """Its shared memory was gone when the agent started, and nothing was launched since."""
    code: str = ""
    """Digest of the snapshot that the newest Launch ran; empty: it ran in place."""
    versions: list[tuple[int, int]] = Field(default_factory=list)
    """(generation, version of the job's code that ran from it on), ascending."""
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

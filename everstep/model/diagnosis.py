"""What diagnostic tests of stopped machines say: of each machine, of pairs, and of all together.

These models cross Temporal and are stored in histories: fields are only added, with defaults.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from everstep.model.finding import Finding, Health, verdict_of
from everstep.model.message import Model, Words


class Diagnostic(Words):
    """The tests (``agent.diagnoser.all`` has them; docs/concepts/diagnostic-tests.md says what each does)."""

    DCGM = "dcgm"
    EUD = "eud"
    MEMORY = "memory"
    DISK = "disk"
    GPU_COPY = "gpu-copy"
    LOOPBACK = "loopback"
    ALL_TO_ALL = "all-to-all"
    BITWISE = "bitwise"
    ALL_GATHER = "all-gather"
    NIC = "nic"


BETWEEN_MACHINES = frozenset({Diagnostic.ALL_GATHER, Diagnostic.NIC})
"""Tests that two machines run together; the others are of one machine."""
STEADY = frozenset({Diagnostic.MEMORY, Diagnostic.GPU_COPY, Diagnostic.LOOPBACK, Diagnostic.ALL_TO_ALL})
"""Tests that take the fastest of several rounds: other work hardly changes what they measure. Only their bandwidths can
show a fault."""
SPEED = "bytes_per_second"
"""How the name of a measure ends that is a bandwidth: it is compared with that of other machines."""


class DiagnosticResult(Model):
    """What one test says of the machine on which it ran."""

    test: str
    findings: list[Finding] = Field(default_factory=list)
    """What it found; empty: all was well, or there was nothing to test."""
    nothing: str = ""
    """Why there was nothing to test, e.g. ``no GPU``; empty: there was."""
    measures: dict[str, float] = Field(default_factory=dict)
    """Name with unit, e.g. ``write_bytes_per_second``."""
    digests: dict[str, str] = Field(default_factory=dict)
    """What was computed → its digest, e.g. ``rank 3 gradients``; compared between machines of one kind."""
    kind: str = ""
    """What machines have in common whose digests and bandwidths can be compared."""
    seconds: float = 0.0

    @property
    def verdict(self) -> Health:
        """What it says of the machine."""
        return verdict_of(self.findings)


class PairResult(Model):
    """What a test between two machines says of the pair."""

    test: str
    machines: tuple[str, str]
    passed: bool | None
    """None: it could not be run, for a reason that says nothing of what connects them."""
    text: str = ""
    """Where it did not pass: how."""
    measures: dict[str, float] = Field(default_factory=dict)
    """The lower one of both machines."""
    kind: str = ""
    """What both are, e.g. a new machine and an old one: bandwidths of pairs of one kind can be compared."""
    seconds: float = 0.0


class MachineDiagnosis(Model):
    """What is known of one machine after all tests."""

    machine: str
    verdict: Health
    findings: list[Finding] = Field(default_factory=list)
    """Of its own tests, of pairs, and of comparisons with other machines; the worst first."""
    results: list[DiagnosticResult] = Field(default_factory=list)
    """Of its own tests."""


class BadLink(Model):
    """What lies between two machines does not work; each of them works with others."""

    machines: tuple[str, str]
    test: str
    text: str


class Measured(Model):
    """One figure over all machines that have it."""

    name: str
    """Test and measure."""
    machines: int
    low: float
    lowest: str
    """The machine with the lowest."""
    median: float
    high: float


class Diagnosis(Model):
    """What tests of several machines say."""

    machines: list[MachineDiagnosis] = Field(default_factory=list)
    links: list[BadLink] = Field(default_factory=list)
    pairs: list[PairResult] = Field(default_factory=list)
    measured: list[Measured] = Field(default_factory=list)
    tests: list[str] = Field(default_factory=list)
    seconds: float = 0.0

    @property
    def faulty(self) -> list[str]:
        """Machines at fault."""
        return [one.machine for one in self.machines if one.verdict is Health.FAULTY]

    @property
    def verdict(self) -> Health:
        """Faulty: a machine or a link is. Unknown: something could not be judged."""
        if self.faulty or self.links:
            return Health.FAULTY
        return Health.HEALTHY if all(one.verdict is Health.HEALTHY for one in self.machines) else Health.UNKNOWN

    def short(self) -> Diagnosis:
        """The same without what only healthy tests measured: a history keeps it, of thousands of machines too."""
        machines = [one.model_copy(update={"results": list(_told(one.results))}) for one in self.machines]
        pairs = [pair for pair in self.pairs if not pair.passed]
        return self.model_copy(update={"machines": machines, "pairs": pairs})


def _told(results: Iterable[DiagnosticResult]) -> Iterable[DiagnosticResult]:
    for one in results:
        if one.findings:
            yield one.model_copy(update={"digests": {}, "findings": []})

"""Defines the results of diagnostic tests of stopped machines: of each machine, of pairs, and of all together.

These models are sent through Temporal and are stored in histories, so fields are only added, with defaults.
"""

from __future__ import annotations

from pydantic import Field

from everstep.model.finding import Finding, Health, verdict_of
from everstep.model.message import Model, Words


class Diagnostic(Words):
    """The names of the tests (``agent.diagnoser.all``); docs/concepts/diagnostic-tests.md describes each."""

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
"""Tests that two machines run together; all other tests run on one machine."""
STEADY = frozenset({Diagnostic.MEMORY, Diagnostic.GPU_COPY, Diagnostic.LOOPBACK, Diagnostic.ALL_TO_ALL})
"""Tests that report the fastest of several rounds, so that other work hardly changes the result. Only the bandwidths of
these tests can show a fault."""
SPEED = "bytes_per_second"
"""End of the name of each measure that is a bandwidth. Bandwidths are compared between machines."""


class DiagnosticResult(Model):
    """The result of one test on one machine."""

    test: str
    findings: list[Finding] = Field(default_factory=list)
    """The faults and doubts that the test reports; empty: it passed, or there was nothing to test."""
    nothing: str = ""
    """Why there was nothing to test, e.g. ``no GPU``; empty: something was tested."""
    measures: dict[str, float] = Field(default_factory=dict)
    """Name with unit, e.g. ``write_bytes_per_second``."""
    digests: dict[str, str] = Field(default_factory=dict)
    """Name of a computed value, e.g. ``rank 3 gradients`` → its digest."""
    kind: str = ""
    """The kind of the machine: digests and bandwidths are compared between machines of one kind."""
    seconds: float = 0.0

    @property
    def verdict(self) -> Health:
        """The verdict about the machine."""
        return verdict_of(self.findings)


class PairResult(Model):
    """The result of a test between two machines."""

    test: str
    machines: tuple[str, str]
    passed: bool | None
    """Whether the test passed; None: it could not be run, for a reason that is not the connection."""
    text: str = ""
    """How the test failed; empty: it did not fail."""
    measures: dict[str, float] = Field(default_factory=dict)
    """Name with unit → the lower value of the two machines."""
    kind: str = ""
    """The kinds of both machines; bandwidths are compared between pairs of equal kinds."""
    seconds: float = 0.0


class MachineDiagnosis(Model):
    """The verdict about one machine after all tests."""

    machine: str
    verdict: Health
    findings: list[Finding] = Field(default_factory=list)
    """Findings from its own tests, from pairs, and from comparisons with other machines; the worst first."""
    results: list[DiagnosticResult] = Field(default_factory=list)
    """The results of its own tests."""


class BadLink(Model):
    """A broken connection between two machines, each of which works with other machines."""

    machines: tuple[str, str]
    test: str
    text: str


class Measured(Model):
    """The range of one measure over all machines that measured it."""

    name: str
    """Test and measure."""
    machines: int
    low: float
    lowest: str
    """The machine with the lowest value."""
    median: float
    high: float


class Diagnosis(Model):
    """The outcome of the tests of several machines."""

    machines: list[MachineDiagnosis] = Field(default_factory=list)
    links: list[BadLink] = Field(default_factory=list)
    pairs: list[PairResult] = Field(default_factory=list)
    measured: list[Measured] = Field(default_factory=list)
    tests: list[str] = Field(default_factory=list)
    seconds: float = 0.0

    @property
    def faulty(self) -> list[str]:
        """Machines at fault."""
        return [machine.machine for machine in self.machines if machine.verdict is Health.FAULTY]

    @property
    def verdict(self) -> Health:
        """Faulty if a machine or a link is faulty; otherwise unknown if the verdict about a machine is unknown."""
        if self.faulty or self.links:
            return Health.FAULTY
        return Health.HEALTHY if all(machine.verdict is Health.HEALTHY for machine in self.machines) else Health.UNKNOWN

    def short(self) -> Diagnosis:
        """This diagnosis without the measures of passed tests, so that a history can hold thousands of machines."""

        def failed(results: list[DiagnosticResult]) -> list[DiagnosticResult]:
            return [result.model_copy(update={"digests": {}, "findings": []}) for result in results if result.findings]

        machines = [machine.model_copy(update={"results": failed(machine.results)}) for machine in self.machines]
        pairs = [pair for pair in self.pairs if not pair.passed]
        return self.model_copy(update={"machines": machines, "pairs": pairs})

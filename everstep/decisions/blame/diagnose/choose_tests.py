"""The choice of diagnostic tests for a symptom (ByteRobust, section 4.2 and figure 5).

One table, the first row that fits counts. The order of the tests is that of the paper: tests of a single machine come
before tests of two machines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from everstep.decisions.blame.classify.rule import FaultClass
from everstep.model.diagnosis import Diagnostic
from everstep.model.finding import Owner
from everstep.model.incident import Symptom


@dataclass(frozen=True, slots=True)
class Choice:
    """Tests, and why these."""

    tests: tuple[Diagnostic, ...]
    why: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class ChoiceRow:
    """A row of the table: a condition, and the tests to run."""

    choice: Choice
    faults: frozenset[str] = frozenset()
    """Classes of the end; empty: any."""
    symptoms: frozenset[str] = frozenset()
    """Empty: any."""
    owners: frozenset[str] = frozenset()
    """Empty: any."""

    def fits(self, symptom: str, fault: str, owner: str) -> bool:
        """Return whether this row applies."""
        wanted = ((self.faults, fault), (self.symptoms, symptom), (self.owners, owner))
        return all(not values or value in values for values, value in wanted)


NETWORK = (Diagnostic.ALL_TO_ALL, Diagnostic.LOOPBACK, Diagnostic.ALL_GATHER, Diagnostic.NIC)
GPUS = (Diagnostic.DCGM, Diagnostic.EUD, Diagnostic.GPU_COPY)
PAPER = "ByteRobust, section 4.2"
ROWS = (
    ChoiceRow(Choice((), "nothing failed: its code is updated"), symptoms=frozenset({Symptom.UPDATE})),
    ChoiceRow(
        Choice(
            (Diagnostic.EUD, Diagnostic.DCGM, Diagnostic.ALL_TO_ALL, Diagnostic.BITWISE, Diagnostic.ALL_GATHER),
            "a loss that is not finite",
            PAPER,
        ),
        symptoms=frozenset({Symptom.NOT_FINITE}),
    ),
    ChoiceRow(
        Choice(
            (
                Diagnostic.EUD,
                Diagnostic.DCGM,
                Diagnostic.ALL_TO_ALL,
                Diagnostic.LOOPBACK,
                Diagnostic.ALL_GATHER,
                Diagnostic.NIC,
            ),
            "an error of communication",
            PAPER,
        ),
        faults=frozenset(
            {
                FaultClass.NCCL_ERROR,
                FaultClass.HANG,
                FaultClass.INFINIBAND,
                FaultClass.NETWORK,
                FaultClass.CONNECTION_LOST,
            }
        ),
    ),
    ChoiceRow(
        Choice((*GPUS, Diagnostic.ALL_TO_ALL, Diagnostic.BITWISE), "an error of a GPU"),
        faults=frozenset({FaultClass.CUDA_ERROR, FaultClass.GPU_MEMORY, FaultClass.GPU_UNAVAILABLE}),
    ),
    ChoiceRow(
        Choice((Diagnostic.DISK,), "an error of a disk"),
        faults=frozenset({FaultClass.DISK_FAULT, FaultClass.DISK_FULL, FaultClass.MOUNT}),
    ),
    ChoiceRow(
        Choice((), "the fault is one of code, data or shared storage: no machine is tested"),
        owners=frozenset({Owner.CODE, Owner.DATA, Owner.STORAGE, Owner.SCHEDULER}),
    ),
    ChoiceRow(
        Choice((), "the program's own error: no machine is tested, the code is rolled back", PAPER),
        symptoms=frozenset({Symptom.USER_ERROR, Symptom.EARLY_EXIT}),
    ),
    ChoiceRow(
        Choice((Diagnostic.EUD, Diagnostic.DCGM, *NETWORK), "ranks wait for each other"),
        symptoms=frozenset({Symptom.HANG, Symptom.CONNECTION_LOST, Symptom.MACHINE_SILENT}),
    ),
    ChoiceRow(
        Choice(
            (
                Diagnostic.EUD,
                Diagnostic.DCGM,
                Diagnostic.MEMORY,
                Diagnostic.DISK,
                Diagnostic.GPU_COPY,
                Diagnostic.ALL_TO_ALL,
                Diagnostic.LOOPBACK,
                Diagnostic.BITWISE,
                Diagnostic.ALL_GATHER,
                Diagnostic.NIC,
            ),
            "nothing says what failed: all tests",
        )
    ),
)


def choose_tests(symptom: str, fault: str = "", owner: str = "", off: Iterable[str] = ()) -> Choice:
    """The tests of a stopped job's machines, in order; none: no machine is tested.

    Args:
        symptom: What was seen.
        fault: Class of the end that began it (``everstep.decisions.blame.classify``); empty: not known.
        owner: Whose matter that is; empty: not known.
        off: Tests that are never run.
    """
    found = next(row.choice for row in ROWS if row.fits(symptom, fault, owner))
    left_out = frozenset(off)
    return Choice(tuple(test for test in found.tests if test not in left_out), found.why, found.source)

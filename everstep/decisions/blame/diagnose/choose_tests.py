"""Chooses the diagnostic tests for a symptom (ByteRobust, section 4.2 and figure 5).

``ROWS`` is a table: the first row that fits a failure counts. As in the paper, tests of a single machine come before
tests of two machines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from everstep.decisions.blame.classify.rule import FaultClass
from everstep.model.diagnosis import Diagnostic
from everstep.model.finding import Owner
from everstep.model.incident import Symptom


@dataclass(frozen=True, slots=True)
class Choice:
    """The tests to run, and the reason."""

    tests: tuple[Diagnostic, ...]
    why: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class ChoiceRow:
    """A row of the table: a condition, and the tests to run."""

    choice: Choice
    faults: frozenset[str] = frozenset()
    """The classes of the failure that fit; empty: all."""
    symptoms: frozenset[str] = frozenset()
    """The symptoms that fit; empty: all."""
    owners: frozenset[str] = frozenset()
    """The owners of the fault that fit; empty: all."""

    def fits(self, symptom: str, fault: str, owner: str) -> bool:
        """Return whether this row applies."""
        conditions = ((self.faults, fault), (self.symptoms, symptom), (self.owners, owner))
        return all(not fitting or value in fitting for fitting, value in conditions)


NETWORK = (Diagnostic.ALL_TO_ALL, Diagnostic.LOOPBACK, Diagnostic.ALL_GATHER, Diagnostic.NIC)
GPUS = (Diagnostic.DCGM, Diagnostic.EUD, Diagnostic.GPU_COPY)
PAPER = "ByteRobust, section 4.2"
NAN = Choice(
    (Diagnostic.EUD, Diagnostic.DCGM, Diagnostic.ALL_TO_ALL, Diagnostic.BITWISE, Diagnostic.ALL_GATHER),
    "a loss that is not finite",
    PAPER,
)
ROWS = (
    ChoiceRow(Choice((), "nothing failed: the code of the job is updated"), symptoms=frozenset({Symptom.UPDATE})),
    ChoiceRow(NAN, symptoms=frozenset({Symptom.NOT_FINITE})),
    ChoiceRow(NAN, faults=frozenset({FaultClass.NAN})),
    ChoiceRow(
        Choice(
            (Diagnostic.EUD, Diagnostic.DCGM, *NETWORK),
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
        Choice((), "code, data, storage, an external service or the scheduler is at fault: no machine is tested"),
        owners=frozenset({Owner.CODE, Owner.DATA, Owner.STORAGE, Owner.EXTERNAL, Owner.SCHEDULER}),
    ),
    ChoiceRow(
        Choice((), "the program is at fault: no machine is tested, and the code is rolled back", PAPER),
        symptoms=frozenset({Symptom.EXCEPTION, Symptom.EARLY_EXIT}),
        owners=frozenset({"", Owner.UNKNOWN}),
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
            "the failure is not known: all tests",
        )
    ),
)


def choose_tests(symptom: str, fault: str = "", owner: str = "", off: Iterable[str] = ()) -> Choice:
    """Return the tests for the machines of a stopped job, in order. If there are none, no machine is tested.

    Args:
        symptom: The symptom of the failure.
        fault: The class of the failure (``everstep.decisions.blame.classify``); empty if not known.
        owner: The owner of the fault; empty if not known.
        off: Tests that are never run.
    """
    choice = next(row.choice for row in ROWS if row.fits(symptom, fault, owner))
    left_out = frozenset(off)
    return replace(choice, tests=tuple(test for test in choice.tests if test not in left_out))

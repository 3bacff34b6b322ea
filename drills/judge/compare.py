"""Compares two runs of a job bit for bit, and lists the values that could not be compared. Pure."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from drills.observe.step_records import Records, ReportedStep


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of a run with the run without a fault."""

    losses: list[str] | None = None
    """Differences of the losses; None: neither run reports losses."""
    state: list[str] | None = None
    """Differences of the states at the end of the loop; None: neither run reports them."""
    compared: list[str] = field(default_factory=list)
    """The values that were compared, in words."""
    not_compared: list[str] = field(default_factory=list)


def compare(reference: Records, run: Records, ranks: int) -> Comparison:
    """Compare all ranks and steps of a run with those of the run without a fault.

    A rank that reports losses in one run must report them in the other, for the same steps, and with the same bits each
    time that it did a step. A missing report counts as a difference, since it may hide one.

    Args:
        reference: Records of the run without a fault.
        run: Records of the run with the fault.
        ranks: Number of ranks of the job.
    """
    expected, found = _with_losses(reference), _with_losses(run)
    unknown = [
        *(f"without a fault: {text}" for text in reference.unknown),
        *(f"with the fault: {text}" for text in run.unknown),
    ]
    compared, not_compared = [], []
    losses: list[str] | None = None
    if reporting := expected.keys() | found.keys():
        losses = unknown + [text for rank in sorted(reporting) for text in _of_rank(rank, expected, found)]
        steps = {record.step for records in expected.values() for record in records}
        compared.append(f"losses of {len(reporting)} ranks, {len(steps)} steps")
    if silent := [rank for rank in range(ranks) if rank not in reporting]:
        not_compared.append(f"losses of {_ranks(silent, ranks)}: no loss is reported")
    state: list[str] | None = None
    if ends := reference.final.keys() | run.final.keys():
        state = [] if losses is not None else list(unknown)
        state += [
            f"rank {rank} ends with another state"
            if rank in reference.final and rank in run.final
            else f"rank {rank} logged its last state only {'without' if rank in reference.final else 'with'} a fault"
            for rank in sorted(ends)
            if reference.final.get(rank) != run.final.get(rank)
        ]
        compared.append(f"the last state of {len(ends)} ranks")
    if silent := [rank for rank in range(ranks) if rank not in ends]:
        not_compared.append(f"the last state of {_ranks(silent, ranks)}: run.steps() logged none")
    if losses is None and state is None:
        not_compared += unknown
    return Comparison(losses, state, compared, not_compared)


def _with_losses(records: Records) -> dict[int, list[ReportedStep]]:
    """Return the records of the ranks that report losses; a script may report steps without losses."""
    return {
        rank: reported
        for rank, reported in records.of.items()
        if any(math.isfinite(struct.unpack("<d", record.bits)[0]) for record in reported)
    }


def _of_rank(rank: int, expected: dict[int, list[ReportedStep]], found: dict[int, list[ReportedStep]]) -> list[str]:
    right = {record.step: record.bits for record in expected.get(rank, [])}
    seen = {record.step for record in found.get(rank, [])}
    differences = []
    if missing := sorted(right.keys() - seen):
        differences.append(f"rank {rank} has no report of step {_some(missing)}")
    if extra := sorted(seen - right.keys()):
        differences.append(f"rank {rank} reported step {_some(extra)}, which the run without a fault did not report")
    common = [record for record in found.get(rank, []) if record.step in right]
    wrong = {record.step for record in common if record.bits != right[record.step]}
    if wrong:
        differences.append(f"rank {rank} has another loss at step {_some(sorted(wrong))}")
    return differences


def _ranks(ranks: Sequence[int], count: int) -> str:
    return "all ranks" if len(ranks) == count else f"rank{'s' if len(ranks) > 1 else ''} {_some(ranks)}"


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (" …" if len(numbers) > 5 else "")

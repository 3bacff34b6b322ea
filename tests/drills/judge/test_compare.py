"""Two runs of a job are compared bit for bit. The result names differences, and data that could not be compared."""

from __future__ import annotations

import math
import struct

import pytest

from agent.launcher.rank_process import BESIDE, generation_marker
from drills.judge.compare import Comparison, compare
from drills.observe.step_records import Records, ReportedStep, copies_in


def records(*steps: int, ranks: int = 2, loss: float = 0.5, state: str = "") -> Records:
    made = [ReportedStep(step, 1, step, struct.pack("<d", loss + step)) for step in steps]
    final = {rank: f"{state}{rank}" for rank in range(ranks)} if state else {}
    return Records({rank: list(made) for rank in range(ranks)}, final)


def other_bits() -> Records:
    """Return records in which only the first attempt at a step has wrong bits. These must be found, too."""
    found = records(0, 1, 2)
    found.of[1].insert(1, ReportedStep(1, 1, 0, struct.pack("<d", 1.5000000000000002)))
    return found


@pytest.mark.parametrize(
    ("reference", "run", "said"),
    [
        (records(0, 1, 2), records(0, 1, 1, 2), []),
        (records(0, 1, 2), records(0, 2), [f"rank {rank} has no report of step 1" for rank in (0, 1)]),
        (
            records(0, 1),
            records(0, 1, 2, ranks=1),
            ["rank 0 reported step 2, which", "rank 1 has no report of step 0, 1"],
        ),
        (records(0, 1, ranks=1), records(0, 1), ["rank 1 reported step 0, 1, which"]),
        (Records(), records(0), ["rank 0 reported step 0, which", "rank 1 reported step 0, which"]),
        (records(0, 1, 2), Records(), [f"rank {rank} has no report of step 0, 1, 2" for rank in (0, 1)]),
        (records(0, 1, 2), other_bits(), ["rank 1 has another loss at step 1"]),
        (Records(), Records(), None),
        (records(0, loss=math.nan), records(0, loss=math.nan), None),
    ],
)
def test_every_rank_and_step_of_both_runs_is_compared(reference: Records, run: Records, said: list[str] | None) -> None:
    found = compare(reference, run, 2)

    if said is None:
        assert found.losses is None
        assert found.compared == []
        assert "losses of all ranks: no loss is reported" in found.not_compared
    else:
        assert found.losses is not None and len(found.losses) == len(said)
        assert all(text.startswith(begin) for text, begin in zip(found.losses, said, strict=True)), found.losses


def test_ranks_that_report_nothing_on_either_side_are_named() -> None:
    found = compare(records(0, 1, ranks=1), records(0, 1, ranks=1), 4)
    assert found == Comparison(
        losses=[],
        state=None,
        compared=["losses of 1 ranks, 2 steps"],
        not_compared=[
            "losses of ranks 1, 2, 3: no loss is reported",
            "the last state of all ranks: run.steps() logged none",
        ],
    )


def test_a_missing_report_of_a_machine_counts_as_a_difference() -> None:
    silent = records(0, 1)
    silent.unknown.append("m1 did not report its step records: no answer")
    for reference, run, where in (
        (silent, records(0, 1), "without a fault"),
        (records(0, 1), silent, "with the fault"),
    ):
        assert compare(reference, run, 2).losses == [f"{where}: m1 did not report its step records: no answer"]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (records(0, state="a"), []),
        (records(0, state="b"), ["rank 0 ends with another state", "rank 1 ends with another state"]),
        (records(0, state="a", ranks=1), ["rank 1 logged its last state only without a fault"]),
        (records(0, state="a", ranks=3), ["rank 2 logged its last state only with a fault"]),
        (records(0), [f"rank {rank} logged its last state only without a fault" for rank in (0, 1)]),
    ],
)
def test_the_final_state_is_compared_too(state: Records, said: list[str]) -> None:
    assert compare(records(0, state="a"), state, 2).state == said


def test_a_rank_that_ran_twice_is_found_in_its_log() -> None:
    begins = [f"{generation_marker(3, generation)} pid 7, 2026-11-22T14:00:00Z" for generation in (1, 2)]
    assert copies_in("\n".join([*begins, "some output"])) == 0
    assert copies_in("\n".join([*begins, begins[1]])) == 1
    assert copies_in("\n".join([begins[0], f"{begins[1]}, {BESIDE} 7"])) == 1

"""How likely a hang is, from two samples. It depends on the verdict, and on whether the suspects work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from everstep.decisions.blame.hang.progress import HangSign, RankWork, check_hang, work_of
from everstep.decisions.blame.hang.rank_samples import JobSamples, ProcessSample, RankSample
from everstep.decisions.blame.hang.verdict import HangVerdict
from everstep.model.hang import HangConclusion, HangMethod

UNMOVED, ONE_SAMPLE = JobSamples({}, moved=frozenset()), JobSamples({})
IDLE, BUSY, READS, SENDS = RankWork(0.01, 0, 1.0), RankWork(0.9, 0), RankWork(0.0, 1 << 20), RankWork(0.05, 0, 300.0)
WORLD = {0: IDLE, 1: IDLE, 2: IDLE}


def verdict(conclusion: HangConclusion, method: HangMethod = HangMethod.WAIT_FOR) -> HangVerdict:
    machines = (0,) if conclusion in {HangConclusion.NAMES, HangConclusion.OVER_EVICTS} else ()
    return HangVerdict(conclusion, method, "why", (1,), machines)


@pytest.mark.parametrize(
    ("of", "evidence", "work", "expected"),
    [
        (verdict(HangConclusion.NAMES), UNMOVED, WORLD, HangSign.QUIET),
        (verdict(HangConclusion.OVER_EVICTS), UNMOVED, WORLD, HangSign.QUIET),
        (verdict(HangConclusion.NAMES), UNMOVED, WORLD | {1: BUSY}, HangSign.BUSY),
        (verdict(HangConclusion.NAMES), UNMOVED, WORLD | {1: READS}, HangSign.BUSY),
        (verdict(HangConclusion.NAMES), UNMOVED, WORLD | {1: SENDS}, HangSign.BUSY),
        (verdict(HangConclusion.NAMES), UNMOVED, WORLD | {0: BUSY}, HangSign.QUIET),  # another rank
        (verdict(HangConclusion.NAMES), UNMOVED, {0: IDLE}, HangSign.UNKNOWN),  # nothing is known of the suspect
        (verdict(HangConclusion.NAMES), ONE_SAMPLE, WORLD, HangSign.UNKNOWN),
        (verdict(HangConclusion.NAMES, HangMethod.STATE), ONE_SAMPLE, {}, HangSign.NEVER),
        (verdict(HangConclusion.NOT_A_MACHINE), UNMOVED, WORLD, HangSign.NEVER),
        (verdict(HangConclusion.NOT_A_MACHINE), UNMOVED, WORLD | {2: BUSY}, HangSign.BUSY),
        (verdict(HangConclusion.NOT_HUNG), JobSamples({}, moved=frozenset({1})), WORLD, HangSign.COMPUTES),
        (verdict(HangConclusion.UNKNOWN), JobSamples({}, moved=frozenset({2})), WORLD, HangSign.COMPUTES),
        (verdict(HangConclusion.UNKNOWN), UNMOVED, WORLD, HangSign.UNKNOWN),
    ],
)
def test_the_sign_of_a_hang(
    of: HangVerdict, evidence: JobSamples, work: dict[int, RankWork], expected: HangSign
) -> None:
    assert check_hang(of, evidence, work).sign is expected


def of_processes(processes: Mapping[int, Sequence[ProcessSample]]) -> JobSamples:
    return JobSamples({rank: RankSample(processes=tuple(some)) for rank, some in processes.items()})


def test_the_work_of_a_rank_is_that_of_all_its_processes() -> None:
    first = of_processes(
        {0: [ProcessSample(10, 5.0, 1.0, 100, 7), ProcessSample(11, 1.0, 0.0, -1)], 1: [ProcessSample(12, 3.0, 0.0, 0)]}
    )
    last = of_processes(
        {
            0: [ProcessSample(10, 5.2, 1.2, 100, 57), ProcessSample(11, 1.4, 0.0, -1)],
            1: [ProcessSample(12, 3.0, 0.0, 70_000)],
            2: [ProcessSample(13, 9.0, 0.0, 0)],
        }
    )

    found = work_of(first, last, 2.0)

    assert set(found) == {0, 1}, "nothing is known of a process that is only in one sample"
    assert (round(found[0].share, 3), found[0].works) == (0.4, True)
    assert found[0].switches == 25.0
    assert (found[1].share, found[1].works) == (0.0, True)
    assert work_of(first, last, 0.0) == {}


@pytest.mark.parametrize(
    ("before", "after", "works"),
    [("D", "D", True), ("t", "t", True), ("S", "D", False), ("D", "S", False), ("T", "T", False)],
)
def test_a_rank_that_the_kernel_or_a_debugger_holds_up_works(before: str, after: str, works: bool) -> None:
    """During an ``fsync`` of several seconds, a process uses no CPU, and neither reads nor writes."""
    first, last = (of_processes({0: [ProcessSample(10, 5.0, 0.0, 100, 7, state)]}) for state in (before, after))
    assert work_of(first, last, 2.0)[0].works is works
